"""Servers by way of Prometheus: what its API answers, and what is refused. A real one is in tests/live."""

import asyncio
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs

import pytest
from counted_servers import CountedServer

from tokenfleet.advise.look import NoCounts
from tokenfleet.advise.prometheus import PrometheusServers
from tokenfleet.cli.main import main
from tokenfleet.profiles.engine_metrics import _LABEL, EngineCounts

AT_S = 1000.0


def series(text, instance):
    """The lines of a page as an instant query's result."""
    found = []
    for line in text.splitlines():
        name, _, rest = line.partition("{")
        labels, _, value = rest.rpartition("} ")
        told = dict(_LABEL.findall(labels)) | {"__name__": name, "instance": instance, "job": "vllm"}
        found.append({"metric": told, "value": [AT_S, value]})
    return found


def ages(**by_instance):
    named = {name.replace("_", ":"): str(age) for name, age in by_instance.items()}
    return [{"metric": {"instance": name}, "value": [AT_S, age]} for name, age in named.items()]


@contextmanager
def prometheus(metrics=(), age=(), down=(), raw=None, status=200):
    """The query API with these results; its address, and the queries that came."""
    queries = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = parse_qs(self.rfile.read(int(self.headers["Content-Length"])).decode())
            queries.append(query := body["query"][0])
            found = down if query.startswith("up") else age if query.startswith("time()") else metrics
            told = {"status": "success", "data": {"resultType": "vector", "result": list(found)}}
            self.send_response(status)
            self.end_headers()
            self.wfile.write((json.dumps(told) if raw is None else raw).encode())

        def log_message(self, *told):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", queries
        server.shutdown()
        thread.join()


def pages(url, selector="{}", known=()):
    async def asked():
        async with PrometheusServers(url, selector) as servers:
            servers._known = set(known)
            return await servers.pages(AT_S)

    return asyncio.run(asked())


def test_series_become_the_pages_that_the_servers_show():
    server = CountedServer()
    server.arrive(7)
    server.end(3)
    with prometheus(series(server.text(), "a:1"), ages(a_1=4.0)) as (url, queries):
        found = pages(url, '{namespace="llm"}')["a:1"]
    shown = server.page(AT_S - 4.0)
    assert isinstance(found, EngineCounts)
    assert (found.at_s, found.values, found.buckets) == (shown.at_s, shown.values, shown.buckets)
    assert (found.model, found.kv_tokens) == (shown.model, shown.kv_tokens)
    assert queries[0].endswith(',namespace="llm"}')
    assert 'num_requests_running{namespace="llm"}' in queries[1]


def test_old_samples_doubled_series_and_targets_that_are_down_give_no_counts():
    text = CountedServer().text()
    metrics = [*series(text, "old:1"), *series(text, "two:1"), *series(text, "fine:1")]
    age = ages(old_1=90.0, two_1=1.0, fine_1=1.0) + ages(two_1=2.0)
    down = [{"metric": {"instance": one}, "value": [AT_S, "0"]} for one in ("down:1", "elsewhere:1")]
    with prometheus(metrics, age, down) as (url, _):
        found = pages(url, known=("down:1", "fine:1", "left:1"))
    assert found["old:1"] == NoCounts("Prometheus' last sample of it is 90 s old")
    assert found["two:1"].answers
    assert "narrow --selector" in found["two:1"].why
    assert found["down:1"] == NoCounts("Prometheus cannot scrape it")
    assert isinstance(found["fine:1"], EngineCounts)
    assert found.keys() == {"old:1", "two:1", "down:1", "fine:1"}


@pytest.mark.parametrize(
    ("told", "why"),
    [
        ({"raw": "<html>"}, "answers with something else than Prometheus' API"),
        ({"raw": "[]"}, "answers with something else than Prometheus' API"),
        (
            {"raw": '{"status": "error", "error": "parse error at char 9"}', "status": 400},
            "refuses the query: parse error at char 9",
        ),
    ],
)
def test_what_is_no_answer_counts_nothing_and_is_refused_at_the_start(told, why, capsys):
    with prometheus(**told) as (url, _):
        assert pages(url, known=("a:1",)) == {"a:1": NoCounts(f"Prometheus {why}")}
        code = main(["advise", "--prometheus", url, "--slo", "ttft=1s,tpot=50ms"])
    assert (code, capsys.readouterr().err) == (2, f"error: --prometheus: {url}: {why}\n")


def test_a_selector_that_matches_nothing_is_refused(capsys):
    with prometheus() as (url, _):
        words = ["advise", "--prometheus", url, "--selector", '{job="x"}', "--slo", "ttft=1s,tpot=50ms"]
        assert main(words) == 2
    assert capsys.readouterr().err == f'error: --selector: no metric of vLLM matches {{job="x"}} at {url}\n'


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (("--prometheus", "ftp://p"), "--prometheus: expected an http:// or https:// address, got 'ftp://p'"),
        (
            ("--prometheus", "http://p", "a:1"),
            "--prometheus: has the servers; leave out addresses and --servers",
        ),
        (
            ("--selector", "{}", "a:1"),
            "--selector: braces are of --prometheus; give its URL, or app=vllm for pods",
        ),
        (
            ("--prometheus", "http://p", "--selector", "x=1"),
            "--selector: expected {label=\"value\"}, got 'x=1'",
        ),
    ],
)
def test_flags_that_do_not_fit_are_refused_in_a_line(words, line, capsys):
    assert main(["advise", *words, "--slo", "ttft=1s,tpot=50ms"]) == 2
    assert capsys.readouterr().err == f"error: {line}\n"
