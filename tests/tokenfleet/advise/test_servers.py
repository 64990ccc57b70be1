"""The servers asked for, what they answer, and what `tokenfleet advise` refuses at the start."""

import asyncio
import json
from contextlib import ExitStack

import pytest
from counted_servers import CountedServer, answering, busy

from controlplane.errors import BadInput
from tokenfleet.advise.bearer import VARIABLE, Bearer
from tokenfleet.advise.look import NoCounts
from tokenfleet.advise.servers import SEVERAL, Servers
from tokenfleet.cli.main import main
from tokenfleet.profiles.engine_metrics import EngineCounts

SLO = ("--slo", "ttft=1s,tpot=50ms")
OTHERS = {
    "SGLang": "sglang:num_running_reqs 3\n",
    "TGI": "tgi_request_count 3\n",
}


def pages(*addresses, file=None, times=1, bearer=None):
    async def asked():
        async with Servers(addresses, file, bearer=bearer) as servers:
            return [await servers.pages(float(n)) for n in range(times)]

    return asyncio.run(asked())


def refused(capsys, *words):
    code = main(["advise", *words, *SLO])
    return code, capsys.readouterr().err.strip()


def test_servers_by_address_file_and_name_are_asked_once_each(tmp_path):
    with answering(CountedServer().text()) as one, answering(CountedServer("other").text()) as two:
        port = two.rpartition(":")[2]
        (tmp_path / "servers.txt").write_text(f"# ours\n{one}\n\n{two} # the second\n")
        (found,) = pages(one, f"dns:localhost:{port}", file=tmp_path / "servers.txt")
    assert list(found) == [one, two]
    assert [page.model for page in found.values()] == ["m", "other"]
    assert all(isinstance(page, EngineCounts) for page in found.values())


def test_a_file_is_read_anew_and_stands_where_it_cannot_be(tmp_path):
    path = tmp_path / "servers.txt"

    async def asked():
        async with Servers((), path) as servers:
            path.write_text("a:1\n")
            first = await servers.listed()
            path.write_text("a:1\nb:2\n")
            second = await servers.listed()
            path.write_text("no address here\n")
            faulty = await servers.listed()
            path.unlink()
            return first, second, faulty, await servers.listed()

    assert asyncio.run(asked()) == (["a:1"], ["a:1", "b:2"], ["a:1", "b:2"], ["a:1", "b:2"])


@pytest.mark.parametrize("engine", OTHERS)
def test_another_engine_is_refused_by_name(engine, capsys):
    with answering(OTHERS[engine]) as address:
        assert pages(address) == [{address: NoCounts(f"metrics of {engine}, expected vLLM's", answers=True)}]
        assert refused(capsys, address) == (2, f"error: {address}: metrics of {engine}, expected vLLM's")


def test_what_a_server_answers_instead_of_metrics_is_said(capsys):
    two = CountedServer().text().replace('engine="0"', 'engine="1"') + CountedServer().text()
    with ExitStack() as stack:
        busy = stack.enter_context(answering("", status=503))
        other = stack.enter_context(answering("", status=404))
        page = stack.enter_context(answering("<html>hello</html>"))
        ranks = stack.enter_context(answering(two))
        (found,) = pages(busy, other, page, ranks, "127.0.0.1:9")
    assert list(found.values()) == [
        NoCounts("/metrics answers with status 503"),
        NoCounts("/metrics answers with status 404", answers=True),
        NoCounts("not Prometheus metrics", answers=True),
        NoCounts(SEVERAL.format(2), answers=True),
        NoCounts("does not answer: connection refused", refuses=True),
    ]


def test_each_worker_behind_the_control_address_of_a_fleet_is_a_replica():
    text = "".join(
        CountedServer().text().replace('engine="0"', f'worker="{name}"') for name in ("w-1", "w-2")
    )
    with answering(text, token="control-key") as address:
        (found,) = pages(address, bearer=Bearer(None, {VARIABLE: "control-key"}))
    assert list(found) == [f"{address} w-1", f"{address} w-2"]
    assert all(isinstance(page, EngineCounts) for page in found.values())


def test_servers_of_two_models_are_refused(capsys):
    with answering(CountedServer("a").text()) as one, answering(CountedServer("b").text()) as two:
        code, said = refused(capsys, one, two)
    assert (code, said) == (2, f"error: advise: one model at a time; {one} serves a, {two} serves b")


def test_a_gpu_is_asked_for_where_the_library_has_several_and_a_model_where_it_has_none(capsys):
    with answering(CountedServer("meta-llama/Llama-3.1-8B-Instruct").text()) as address:
        code, said = refused(capsys, address)
        assert code == 2
        assert "error: --gpu: the metrics do not tell; for meta-llama/Llama-3.1-8B-Instruct there are" in said
    with answering(CountedServer("my-chat").text()) as address:
        code, said = refused(capsys, address, "--gpu", "h100")
        assert code == 2
        assert "--model names another, --profile gives step times" in said


@pytest.mark.parametrize(
    ("words", "line"),
    [
        ((), "advise: no server is named, expected addresses, --servers FILE or --selector"),
        (("127.0.0.1:9",), "127.0.0.1:9: does not answer: connection refused"),
        (("ftp://h:1",), "advise: 'ftp://h:1': expected HOST:PORT, http://HOST:PORT or dns:NAME:PORT"),
        (("dns:name",), "advise: 'dns:name': expected HOST:PORT, http://HOST:PORT or dns:NAME:PORT"),
        (("a:1", "--replicas", "0..3"), "--replicas: expected MIN..MAX such as 1..8, from 1 on, got '0..3'"),
        (("a:1", "--every", "1h"), "--every: expected 1s to 30s, got '1h'"),
        (("a:1", "--listen", "9105"), "--listen: expected HOST:PORT, got '9105'"),
        (("a:1", "--picker", "b:2"), "--picker: tells --scaler of requests; give --scaler HOST:PORT"),
        (("--servers", "no-such-file"), "no-such-file: cannot be read: No such file or directory"),
        (("a:1", "--profile", "x.yaml", "--gpu", "h100"), "--profile: says model, GPU and TP; leave out"),
    ],
)
def test_what_cannot_be_watched_is_told_in_a_line(capsys, words, line):
    code, said = refused(capsys, *words)
    assert code == 2
    assert said.startswith(f"error: {line}")
    assert "\n" not in said


def test_no_name_and_no_server_are_refused(tmp_path):
    (tmp_path / "servers.txt").write_text("# none yet\n")
    with pytest.raises(BadInput, match=r"dns:no\.such\.invalid:1: the name cannot be resolved"):
        pages("dns:no.such.invalid:1")
    assert pages(file=tmp_path / "servers.txt") == [{}]


def test_a_watch_ends_in_a_plan_for_the_traffic_seen(tmp_path, capsys):
    words = ["--gpu", "h100", "--every", "1s", "--plan", "10s", "--output-dir", str(tmp_path / "out")]
    with busy() as address:
        assert main(["advise", address, *words, *SLO]) == 0
    told = capsys.readouterr().out
    plan = json.loads((tmp_path / "out/plan.json").read_text())
    rows = {name: (value, where) for name, value, where in plan["inputs"]["assumed"]}
    assert rows["Rate"][0].startswith("40 req/s for 10 s")
    assert rows["Arrivals"] == ("Poisson within each 1 s", "assumed; metrics have no single arrivals")
    assert plan["inputs"]["clock_start_unix_s"] > 1.7e9
    assert plan["feasible"]
    assert "Assumed" in told
    assert "Recommended fleet" in told


def test_a_watch_for_a_plan_is_refused_at_its_start_where_no_metric_has_lengths(capsys):
    server = CountedServer()
    server.arrive(9)
    server.end(9)
    lines = [line for line in server.text().splitlines() if "request_prompt_tokens" not in line]
    with answering("\n".join(lines) + "\n") as address:
        code, said = refused(capsys, address, "--plan", "1h", "--model", "llama-3.1-8b")
    missing = "vllm:request_prompt_tokens_bucket is missing; --plan needs lengths"
    assert (code, said) == (2, f"error: {address}: {missing}")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--plan", "soon"], "--plan: "),
        (["--plan", "1s"], "--plan: expected 10s to 86400s, got '1s'"),
        (["--plan", "1m", "--once"], "--once: contradicts --plan"),
        (["--output-dir", "out"], "--output-dir: of --plan; say for how long to watch"),
    ],
)
def test_a_watch_that_cannot_be_is_refused_in_a_line(words, says, capsys):
    code, said = refused(capsys, "a:1", *words)
    assert code == 2
    assert says in said
    assert "\n" not in said


def test_metrics_are_asked_with_the_token_of_the_file_as_it_is_now_or_of_the_environment(tmp_path):
    path = tmp_path / "token"
    path.write_text("first\n")
    bearer = Bearer(path, {VARIABLE: "not this one"})
    assert bearer.headers() == {"Authorization": "Bearer first"}
    path.write_text("s3cret\n")
    with answering(CountedServer().text(), token="s3cret") as address:
        for one in (bearer, Bearer(None, {VARIABLE: "s3cret"})):
            (found,) = pages(address, bearer=one)
            assert isinstance(found[address], EngineCounts)
        (found,) = pages(address, bearer=Bearer(None, {}))
        assert found[address] == NoCounts("/metrics answers with status 401", answers=True)
    path.unlink()
    assert bearer.headers() == {"Authorization": "Bearer s3cret"}  # the last one stands


@pytest.mark.parametrize("text", ["", "two words", "t\u00f6ken"])
def test_a_file_that_has_no_token_is_refused_in_a_line(tmp_path, text):
    (tmp_path / "token").write_text(text)
    with pytest.raises(BadInput) as refused:
        Bearer(tmp_path / "token")
    assert str(refused.value) == f"{tmp_path}/token: expected one bearer token"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--selector", '{app="vllm"}'], "--selector: braces are of --prometheus"),
        (["--selector", "app=vllm", "--pool", "p"], "--pool: has a selector; leave out --selector"),
        (["a:1", "--port", "8000"], "--port: of --selector or --pool"),
        (["a:1", "--yes"], "--yes: of --apply; say what to scale"),
        (["a:1", "--apply", "deployment/vllm"], "--apply: needs a floor and a ceiling"),
        (["a:1", "--apply", "vllm", "--replicas", "1..4"], "--apply: expected deployment/NAME"),
        (["--prometheus", "http://p:1", "--pool", "p"], "--pool: contradicts --prometheus"),
        (["--selector", "app=vllm"], "/nowhere/config: no kubeconfig"),
    ],
)
def test_pods_and_targets_that_cannot_be_are_refused_in_a_line(words, says, capsys, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", "/nowhere/config")
    code, said = refused(capsys, *words, "--gpu", "h100")
    assert code == 2
    assert says in said
    assert "\n" not in said
