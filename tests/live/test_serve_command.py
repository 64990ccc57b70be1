"""`tokenfleet serve` as a process: how it begins, what it refuses, how it ends."""

import json
import os
import re
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import urllib.error
from pathlib import Path

import httpx
import psutil
import pytest
import typer
from checkout import ROOT
from made_certificates import made_certificate
from served_fleet import serve

from dataplane.http.tls import client_context
from tokenfleet.cli.main import main
from tokenfleet.cli.serve.processes import core_job

MODEL = "tiny-llama"


@pytest.fixture
def unforked(monkeypatch, tmp_path):
    """`serve` runs its core in this process, whose threads a fork would leave behind."""

    def run(settings, doors, tell):
        core, _ = core_job(settings, doors, tell)
        raise typer.Exit(core(json.dumps({"number": 1, "folder": str(tmp_path), "again": False}).encode()))

    monkeypatch.setattr("tokenfleet.cli.serve.command.prepare_process", lambda verbose: None)
    monkeypatch.setattr("tokenfleet.cli.serve.command.supervise", run)


def refused(capfd, *words):
    """The one line that `tokenfleet serve` refuses these flags with."""
    assert main(["serve", *words]) == 2
    (line,) = [line for line in capfd.readouterr().err.splitlines() if line.startswith("error: ")]
    return line


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model", "/nowhere/model"], "no such folder"),
        (["--engine", "imaginary"], "--engine"),
        (["--slo", "ttft=0s,tpot=75ms"], "slo"),
        (["--slo", "ttft=100"], "--slo"),
        (["--autoscale", "4..2"], "--autoscale"),
        (["--autoscale", "3..4"], "--workers"),
        (["--workers", "0"], "--workers"),
        (["--host", "0.0.0.0"], "--api-key"),
        (["--control-host", "0.0.0.0"], "--control-key"),
        (["--control-host", "0.0.0.0", "--control-key", "k"], "--insecure"),
        (["--tls-cert", "/nowhere/tls.crt", "--tls-key", "/nowhere/tls.key"], "--tls-cert"),
        (["--port", "8001"], "--control-port"),
        (["--plan", "/nowhere/plan.json"], "plan.json"),
        (["--queue-wait", "soon"], "--queue-wait"),
        (["--policy", "fastest"], "--policy"),
        (["--kv-transport", "pigeons"], "--kv-transport"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line_before_anything_starts(model_folder, capfd, flags, says):
    model = [] if "--model" in flags else ["--model", str(model_folder)]
    assert says in refused(capfd, *model, *flags)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--no-such-flag"], "no-such-flag"),
        (["--max-model-len", "999999"], "max_model_len"),
        (["--ssl-certfile", "tls.crt"], "--tls-cert"),
    ],
)
def test_vllms_own_refusals_are_one_line_too(model_folder, capfd, unforked, flags, says):
    assert says in refused(capfd, "--model", str(model_folder), "--engine", "emulated", "--", *flags)


def test_the_exact_policy_is_refused_where_its_program_does_not_cover_the_fleet(
    model_folder, capfd, unforked
):
    two = ["--kind", "gpu=h100-sxm,workers=1", "--kind", "gpu=a100-sxm,workers=1"]
    words = ["--model", str(model_folder), "--engine", "emulated", "--policy", "exact", *two]
    assert "--policy: exact: needs one kind" in refused(capfd, *words)


def test_a_taken_port_is_named_by_a_process_of_its_own(model_folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        words = ("serve", "--model", str(model_folder), "--engine", "emulated", "--port", port)
        command = [sys.executable, "-m", "tokenfleet", *words]
        told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    (line,) = [line for line in told.stderr.splitlines() if line.startswith("error: ")]
    assert (told.returncode, port in line, "Traceback" in told.stderr) == (2, True, False)


def controllers(fleet):
    """The controllers that the fleet's processes have started and that run."""
    children = psutil.Process(fleet.process.pid).children(recursive=True)
    alive = [c for c in children if c.status() != psutil.STATUS_ZOMBIE]
    return [c.pid for c in alive if "dataplane.live.control.controller" in c.cmdline()]


@pytest.fixture(scope="module")
def guarded_fleet(model_folder, scratch):
    """One worker with room for three requests and no queue, two keys, an operator's, and a certificate."""
    operators = scratch / "operators.yaml"
    operators.write_text("- {name: one, key: o}\n")
    keys = scratch / "keys.yaml"
    keys.write_text(
        "- {name: gold, key: g, priority: high}\n"
        "- {name: tin, key: t, priority: normal, requests_per_minute: 1, burst: 2, min_ttft_ms: 800}\n"
    )
    profile = scratch / "small.yaml"
    library = ROOT / "profiles" / "h100-sxm" / "llama-3.1-8b_tp1.yaml"
    text = re.sub(r"max_seqs: \d+", "max_seqs: 3", library.read_text())
    assert "max_seqs: 3" in text
    profile.write_text(text)
    flags = ("--workers", "1", "--queue", "0", "--api-keys", str(keys), "--shutdown-wait", "1s")
    flags += ("--control-keys", str(operators))
    # No data folder is named, and what it might write to by itself is ours to look into.
    own = {"TOKENFLEET_DATA": "", "XDG_DATA_HOME": str(scratch / "home"), "TMPDIR": str(scratch / "tmp")}
    (scratch / "tmp").mkdir()
    certificate, key = made_certificate(scratch / "tls")
    emulated = ("--engine", "emulated", "--profile", str(profile))
    tls = ("--tls-cert", str(certificate), "--tls-key", str(key))
    trust = client_context(certificate)
    asked = {"folder": scratch, "environment": own, "trust": trust, "key": "o"}
    fleet = serve(model_folder, *emulated, *flags, *tls, **asked)
    yield fleet
    fleet.stop()


@pytest.fixture
def post(guarded_fleet):
    """A function that begins a stream and returns its response, its body not yet read."""
    body = {"model": MODEL, "prompt": "x", "max_tokens": 7000, "ignore_eos": True, "stream": True}
    with httpx.Client(base_url=guarded_fleet.gateway, timeout=30, verify=guarded_fleet.trust) as client:

        def begin(key, **headers):
            headers |= {"authorization": f"Bearer {key}"}
            request = client.build_request("POST", "/v1/completions", json=body, headers=headers)
            return client.send(request, stream=True)

        yield begin


def test_clients_are_served_over_tls_alone_and_a_new_certificate_is_taken_while_it_serves(
    guarded_fleet, post, scratch
):
    for address in (guarded_fleet.gateway, guarded_fleet.control):
        assert address.startswith("https://")
        with pytest.raises(httpx.RemoteProtocolError):
            httpx.get(f"{address.replace('https', 'http')}/health")
    stream = post("g")
    lines = stream.iter_lines()
    next(lines)
    ours, renewed = scratch / "tls", made_certificate(scratch / "renewed")
    for new in renewed:
        shutil.copy(new, ours / new.name)
    guarded_fleet.trust.load_verify_locations(renewed[0])

    def shown():
        port = int(guarded_fleet.gateway.rsplit(":", 1)[1])
        return ssl.get_server_certificate(("127.0.0.1", port))

    guarded_fleet.until(lambda: shown().split() == renewed[0].read_text().split())
    assert next(line for line in lines if line).startswith("data: {")
    stream.close()
    decided = guarded_fleet.until(lambda: guarded_fleet.ask("GET", "/v1/fleet")["decisions"])
    said = [d["reason"] for d in decided if d["kind"] == "certificate"][-1]
    assert said.endswith("from now on")
    assert f"warning: {said}\n" in guarded_fleet.log.read_text()
    guarded_fleet.until(lambda: not requests(guarded_fleet))


def requests(fleet):
    return fleet.ask("GET", "/v1/requests")["requests"]


def test_keys_have_bounds_and_limits_and_a_full_fleet_says_when_to_come_back(guarded_fleet, post):
    asked = {"x-slo-ttft-ms": "1", "x-tokenfleet-priority": "high"}
    tin = [post("t", **asked) for _ in range(3)]
    assert [reply.status_code for reply in tin] == [200, 200, 429]
    tin[2].read()
    assert "tin" in tin[2].json()["error"]["message"]
    assert 1 <= int(tin[2].headers["retry-after"]) <= 60
    seen = {(r["key"], r["priority"], r["slo"]["ttft_s"]) for r in requests(guarded_fleet)}
    assert seen == {("tin", "normal", 0.8)}
    gold = [post("g", **{"x-tokenfleet-priority": "high"}) for _ in range(2)]
    assert [reply.status_code for reply in gold] == [200, 429]
    gold[1].read()
    assert "full" in gold[1].json()["error"]["message"]
    assert int(gold[1].headers["retry-after"]) >= 1
    assert post("wrong").status_code == 401
    nobody = httpx.post(f"{guarded_fleet.gateway}/v1/completions", json={}, verify=guarded_fleet.trust)
    assert nobody.status_code == 401
    for reply in (*tin, *gold):
        reply.close()
    guarded_fleet.until(lambda: not requests(guarded_fleet))


def test_a_key_over_its_tokens_waits_and_the_file_is_read_anew_while_it_serves(guarded_fleet, post, scratch):
    keys = scratch / "keys.yaml"
    before = keys.read_text()
    keys.write_text(f"{before}- {{name: meter, key: m, tokens_per_minute: 60}}\n")

    def answer(key):
        reply = post(key)
        if reply.status_code != 200:
            reply.read()
        reply.close()
        return reply

    def over():
        """The refusal, once requests have cost more than a minute's tokens."""
        reply = answer("m")
        return reply if reply.status_code == 429 and "meter" in reply.text else None

    guarded_fleet.until(lambda: answer("m").status_code != 401)
    refused = guarded_fleet.until(over)
    assert "key meter is over its limit of 60 tokens a minute" in refused.json()["error"]["message"]
    assert int(refused.headers["retry-after"]) >= 1
    assert guarded_fleet.metric("tokenfleet_key_requests_total", key="meter", outcome="rate_limited") >= 1
    guarded_fleet.until(lambda: guarded_fleet.metric("tokenfleet_key_tokens_total", key="meter") >= 60)
    keys.write_text("- {name: meter, key: m")
    told = guarded_fleet.until(lambda: [d for d in decisions(guarded_fleet) if "not YAML" in d["reason"]])
    assert told[-1]["reason"].endswith("what was in force stays")
    keys.write_text(before)
    guarded_fleet.until(lambda: answer("m").status_code == 401)
    guarded_fleet.until(lambda: not requests(guarded_fleet))


def decisions(fleet):
    return fleet.ask("GET", "/v1/fleet")["decisions"]


def test_the_operators_keys_change_while_it_serves_and_its_own_controller_stays(guarded_fleet, scratch):
    def code(key):
        try:
            guarded_fleet.ask("GET", "/v1/fleet", headers={"authorization": f"Bearer {key}"})
        except urllib.error.HTTPError as error:
            return error.code
        return 200

    file = scratch / "operators.yaml"
    assert (code("o"), code("n"), code("")) == (200, 401, 401)
    controller = controllers(guarded_fleet)
    file.write_text("- {name: one, key: n}\n- {name: two, key: p}\n")
    guarded_fleet.until(lambda: code("n") == 200)
    guarded_fleet.key = "n"
    assert (code("o"), code("p")) == (401, 200)
    file.write_text("- {name: one, key: n, priority: normal}\n")
    guarded_fleet.until(lambda: any("key alone" in d["reason"] for d in decisions(guarded_fleet)))
    assert code("p") == 200
    assert controllers(guarded_fleet) == controller


def test_the_fork_server_has_used_no_pool_of_threads_which_a_fork_would_leave_behind(guarded_fleet):
    server = psutil.Process(guarded_fleet.ask("GET", "/v1/fleet")["core"]["pid"]).ppid()
    threads = Path(f"/proc/{server}/task").glob("*/comm")
    names = {path.read_text().strip() for path in threads}
    assert not {name for name in names if re.match(r"polars-\d|asyncio|ThreadPool|ray", name)}


def test_the_controllers_death_harms_nobody_and_it_comes_back(guarded_fleet, post):
    (controller,) = guarded_fleet.until(lambda: controllers(guarded_fleet))
    # Out of reach of the terminal's Ctrl-C, but in our session: Linux may schedule by session.
    assert os.getsid(controller) == os.getsid(guarded_fleet.process.pid)
    guarded_fleet.until(lambda: os.getpgid(controller) == controller)
    stream = post("g")
    lines = stream.iter_lines()
    next(lines)
    os.kill(controller, signal.SIGKILL)
    guarded_fleet.until(lambda: [pid for pid in controllers(guarded_fleet) if pid != controller])
    assert next(line for line in lines if line).startswith("data: {")
    stream.close()
    kinds = [decision["kind"] for decision in guarded_fleet.ask("GET", "/v1/fleet")["decisions"]]
    assert "controller-lost" in kinds


# The last one: it ends the module's fleet.
def test_it_stops_with_a_stream_open_in_an_explicit_error_and_leaves_nothing(guarded_fleet, post, scratch):
    stream = post("g")
    lines = stream.iter_lines()
    next(lines)
    started = [child.pid for child in psutil.Process(guarded_fleet.process.pid).children(recursive=True)]
    assert len(list((scratch / "tmp").glob("tokenfleet-*/history"))) == 1  # while it runs
    guarded_fleet.process.send_signal(signal.SIGTERM)
    told = [line for line in lines if line]
    assert '"error"' in told[-1]
    assert "the fleet is shutting down" in told[-1]
    assert "data: [DONE]" not in told
    assert guarded_fleet.stop() == 0
    guarded_fleet.until(lambda: not any(psutil.pid_exists(pid) for pid in started))
    for address in (guarded_fleet.gateway, guarded_fleet.control):
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{address}/health", verify=guarded_fleet.trust)
    assert not list((scratch / "tmp").glob("tokenfleet-*"))
    assert not (scratch / "home").exists()
