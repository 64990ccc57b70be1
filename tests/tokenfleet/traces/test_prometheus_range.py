"""A trace from a Prometheus range: a real server's where it is installed, and recorded answers' refusals."""

import json
import shutil
import socket
import subprocess
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import tokenfleet as tf
from controlplane.errors import BadInput
from tokenfleet.cli.main import main
from tokenfleet.traces.prometheus import FIRST_TOKENS, OUTPUTS, PROMPTS, MetricsRange

NOW_S = 1_795_600_000.0
EDGES = {"100": 0.0, "200": 0.25, "500": 0.5, "1000": 1.0, "+Inf": 1.0}  # the share of requests up to each
MEAN = 400.0


def recorded(query: str, times_s: list[float]) -> Any:
    """The answer of a server whose fleet ended 2 requests a second, then 4; silent in the middle."""
    if query.startswith("group by"):
        return [{"metric": {"model_name": "m"}, "value": [times_s[-1], "1"]}]
    if query.startswith("sum by (le)"):
        counts = {le: str(share * 10_000) for le, share in EDGES.items()}
        return [{"metric": {"le": le}, "value": [times_s[-1], n]} for le, n in counts.items()]
    if query.startswith("sum(increase"):
        return [{"metric": {}, "value": [times_s[-1], str(MEAN)]}]
    half = NOW_S - 3600.0
    values = [(t, "2" if t <= half else "4") for t in times_s if not -600.0 < t - half <= 0.0]
    return [{"metric": {}, "values": values}]


class Answers:
    """A server with Prometheus' API; `change` replaces the result of queries that begin so."""

    def __init__(self, change: dict[str, Any]) -> None:
        self.asked: list[str] = []
        answers = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"])).decode()
                form = {name: of[0] for name, of in urllib.parse.parse_qs(body).items()}
                answers.asked.append(form["query"])
                first, end = (float(form.get(name, form.get("time", "0"))) for name in ("start", "end"))
                times_s = np.arange(first, end + 1.0, float(form.get("step", 60.0))).tolist()
                told: Any = recorded(form["query"], times_s)
                told = next((new for begins, new in change.items() if form["query"].startswith(begins)), told)
                status = 400 if isinstance(told, str) else 200
                text = (
                    told
                    if isinstance(told, str)
                    else json.dumps({"status": "success", "data": {"result": told}})
                )
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *told: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"


@contextmanager
def answering(change: dict[str, Any] | None = None) -> Iterator[Answers]:
    answers = Answers(change or {})
    thread = threading.Thread(target=answers.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield answers
    finally:
        answers.server.shutdown()
        thread.join()
        answers.server.server_close()


def test_rates_lengths_and_gaps_become_a_trace_with_its_uncertainty() -> None:
    with answering() as server:
        asked = MetricsRange(server.url, '{job="vllm"}', "2h")
        trace = asked.trace(NOW_S)
    load = trace.workload
    counts = np.histogram(load.arrival_s, [0, 3000, 4200, 7200])[0]
    assert counts[0] == pytest.approx(6000, abs=30)
    assert 2400 < counts[1] < 4200, "a silent step is no idle one"
    assert counts[2] == pytest.approx(12_000, abs=30)
    assert load.prompt_tokens.mean() == pytest.approx(MEAN, rel=0.03)
    assert [(load.prompt_tokens <= edge).mean() for edge in (200, 500)] == pytest.approx(
        [0.25, 0.5], abs=0.02
    )
    assert trace.assumed is not None
    assert trace.clock_start_s == pytest.approx(NOW_S - 7200.0, abs=5.0)
    assert "10 of 120 steps have no counts" in trace.warnings[0]
    assert all('{job="vllm"}' in query for query in server.asked)
    with answering() as server:
        again = MetricsRange(server.url, "{}", "2h").trace(NOW_S)
    assert again.workload.arrival_s.tobytes() == load.arrival_s.tobytes()


def test_steps_are_longer_where_samples_are_farther_apart() -> None:
    """A rate over a minute needs two samples in it."""
    with answering({f"sum(rate({FIRST_TOKENS}_count{{}}[60s]))": []}) as server:
        counted = MetricsRange(server.url, "{}", "2h").counted(NOW_S)
    assert np.diff(counted.times_s).tolist() == [300.0] * 24


TWO_MODELS = [{"metric": {"model_name": name}, "value": [0, "1"]} for name in "ab"]
IDLE = [{"metric": {}, "values": [[NOW_S - 60.0 * i, "0"] for i in range(120)]}]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"group": []}, f"--selector: no metric {PROMPTS} matches"),
        ({"group": TWO_MODELS}, r"2 models match \(a, b\)"),
        ({"sum by": [{"metric": {"le": "+Inf"}, "value": [0, "9"]}]}, f"{PROMPTS}: 1 buckets, expected"),
        ({f"sum by (le) (increase({OUTPUTS}": []}, f"{OUTPUTS}: 0 buckets, expected several"),
        ({"sum(rate": []}, "no samples in the last 2h"),
        ({"sum(rate": IDLE}, "counted no request"),
        ({"sum(rate": '{"status": "error", "error": "bad step"}'}, "refuses the query: bad step"),
        ({"group": "<html>"}, "answers with something else than Prometheus' API"),
        ({"group": [{"metric": {}, "value": [0]}]}, "answers with something else than Prometheus' API"),
    ],
)  # fmt: skip
def test_what_gives_no_trace_is_refused_in_one_line(change: dict[str, Any], said: str) -> None:
    with answering(change) as server, pytest.raises(BadInput, match=said) as refused:
        MetricsRange(server.url, "{}", "2h").trace(NOW_S)
    assert len(str(refused.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--prometheus", "prometheus:9090"], "--prometheus: expected an http"),
        (["--prometheus", "http://127.0.0.1:9", "--selector", "job=vllm"], "--selector: expected {label"),
        (["--prometheus", "http://127.0.0.1:9", "--since", "1m"], "--since: 1m: expected at least 3 min"),
        (["--prometheus", "http://127.0.0.1:9", "--users", "9"], "--prometheus: contradicts --users"),
        (["--prometheus", "http://127.0.0.1:9", "--trace", "x.csv"], "--prometheus: contradicts --trace"),
        (["--selector", "{}", "--trace", "x.csv"], "--selector: needs --prometheus too"),
        (["--prometheus", "http://127.0.0.1:9"], "--prometheus: http://127.0.0.1:9: does not answer: "),
    ],
)
def test_faulty_flags_are_one_line(
    flags: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["plan", *flags, "--model", "llama-3.1-8b", "--slo", "ttft=1s,tpot=50ms"]
    assert main([*command, "--output-dir", str(tmp_path / "out")]) == 2
    told = capsys.readouterr().err.strip().splitlines()
    assert told[-1].removeprefix("error: ").startswith(said)
    assert not (tmp_path / "out").exists()


PROGRAMS = [shutil.which(name) for name in ("prometheus", "promtool")]


@contextmanager
def prometheus(folder: Path, now_s: float) -> Iterator[str]:
    """The address of a real Prometheus with two hours of two servers, scraped every 30 s."""
    lines = []
    for metric in (FIRST_TOKENS, PROMPTS, OUTPUTS):
        lines.append(f"# TYPE {metric} histogram")
        for server in ("a", "b"):
            labels = f'instance="{server}:8000",job="vllm",model_name="m"'
            for since_s in range(0, 7201, 30):
                n = float(min(since_s, 3600) + 2 * max(since_s - 3600, 0))
                at = now_s - 7200 + since_s
                lines += [f'{metric}_bucket{{{labels},le="{le}"}} {n * EDGES[le]} {at}' for le in EDGES]
                lines += [f"{metric}_sum{{{labels}}} {n * MEAN} {at}", f"{metric}_count{{{labels}}} {n} {at}"]
    (folder / "metrics").write_text("\n".join([*lines, "# EOF\n"]))
    made = [PROGRAMS[1], "tsdb", "create-blocks-from", "openmetrics", folder / "metrics", folder / "data"]
    subprocess.run(made, check=True, capture_output=True)
    (folder / "prometheus.yml").write_text("global: {}\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    command = [PROGRAMS[0], f"--config.file={folder}/prometheus.yml", f"--storage.tsdb.path={folder}/data"]
    process = subprocess.Popen([*command, f"--web.listen-address={address}", "--log.level=error"])
    try:
        deadline_s = time.monotonic() + 60.0
        while True:
            try:
                urllib.request.urlopen(f"http://{address}/-/ready", timeout=5)
                break
            except OSError:
                assert process.poll() is None
                assert time.monotonic() < deadline_s
                time.sleep(0.1)
        yield f"http://{address}"
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(None in PROGRAMS, reason="prometheus and promtool are not installed")
def test_a_real_prometheus_is_read_as_it_counted(tmp_path: Path) -> None:
    now_s = float(int(time.time()))
    with prometheus(tmp_path, now_s) as url:
        trace = tf.Trace.from_prometheus(url, '{job="vllm"}', "2h")
        with pytest.raises(BadInput, match=f"no metric {PROMPTS} matches"):
            tf.Trace.from_prometheus(url, '{job="other"}', "2h")
    load = trace.recorded.workload
    first, second = np.histogram(load.arrival_s, [0, 3600, 7200])[0]
    assert first == pytest.approx(7200, rel=0.03)
    assert second == pytest.approx(14_400, rel=0.03)
    assert load.output_tokens.mean() == pytest.approx(MEAN, rel=0.03)
    assert trace.assumed["assumed"].to_list()[:2] == ["Rate", "Arrivals"]
