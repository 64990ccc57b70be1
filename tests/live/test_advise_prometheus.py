"""`tokenfleet advise` by way of a real Prometheus, which scrapes pages that count as vLLM does."""

import json
import shutil
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from checkout import ROOT
from counted_servers import CountedServer

from harness.served import free_port

PROGRAM = shutil.which("prometheus")
LOOKS = 60  # in which a condition has to come
START_S = 60.0
pytestmark = pytest.mark.skipif(PROGRAM is None, reason="prometheus is not installed")


class Page:
    """A server's page, which is scraped, and changes only between scrapes."""

    def __init__(self):
        page = self
        self.counts, self.lock = CountedServer(), threading.Lock()

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self):
                with page.lock:
                    text = page.counts.text()
                self.send_response(200)
                self.send_header("Content-Type", "text/plain; version=0.0.4")
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *told):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.01,))
        self.thread.start()

    def serve(self, requests):
        """`requests` requests arrive, and all but one end."""
        with self.lock:
            self.counts.arrive(requests)
            self.counts.end(requests - 1)

    def stop(self):
        if self.thread.is_alive():
            self.server.shutdown()
            self.thread.join()
            self.server.server_close()


@pytest.fixture
def two_pages():
    both = [Page(), Page()]
    yield both
    for page in both:
        page.stop()


@contextmanager
def prometheus(folder, addresses):
    """A Prometheus that has scraped them; its process and address."""
    port = free_port()
    targets = ", ".join(f"'{address}'" for address in addresses)
    config = folder / "prometheus.yml"
    config.write_text(
        "global: {scrape_interval: 1s, scrape_timeout: 1s}\n"
        f"scrape_configs:\n- job_name: vllm\n  static_configs: [{{targets: [{targets}]}}]\n"
    )
    command = [PROGRAM, f"--config.file={config}", f"--storage.tsdb.path={folder}/data"]
    command += [f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"]
    process = subprocess.Popen(command)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline_s = time.monotonic() + START_S
        while not has_scraped(url, len(addresses)):
            assert process.poll() is None
            assert time.monotonic() < deadline_s
            time.sleep(0.2)
        yield process, url
    finally:
        process.kill()
        process.wait()


def has_scraped(url, servers):
    try:
        query = f"{url}/api/v1/query?query=count(vllm:num_requests_running)"
        with urllib.request.urlopen(query, timeout=5) as reply:
            result = json.load(reply)["data"]["result"]
    except OSError:
        return False
    return bool(result) and int(result[0]["value"][1]) == servers


def asked(scaler, verb):
    """The bytes that KEDA's external scaler answers."""
    with pytest.importorskip("grpc").insecure_channel(scaler) as channel:
        return channel.unary_unary(f"/externalscaler.ExternalScaler/{verb}")(b"", timeout=30)


def until(documents, holds):
    """The first of the coming documents that `holds` is true for."""
    one = "no document came"
    for _, line in zip(range(LOOKS), documents, strict=False):
        if holds(one := json.loads(line)):
            return one
    raise AssertionError(f"not within {LOOKS} looks: {one}")


def test_a_real_prometheus_is_counted_exactly_and_held_when_a_target_or_it_is_down(tmp_path, two_pages):
    addresses = [page.address for page in two_pages]
    scaler = f"127.0.0.1:{free_port()}"
    with prometheus(tmp_path, addresses) as (server, url):
        command = [sys.executable, "-m", "tokenfleet", "advise", "--prometheus", url, "--every", "1s"]
        command += ["--selector", '{job="vllm"}', "--model", "llama-3.1-8b", "--gpu", "h100"]
        command += ["--slo", "ttft=1s,tpot=50ms", "--format", "json", "--scaler", scaler]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            documents = process.stdout
            first = until(documents, lambda one: True)
            assert (first["replicas"], first["wanted_replicas"], first["arrivals"]) == (2, None, 0)
            for page in two_pages:
                page.serve(20)
            counted = until(documents, lambda one: one["arrivals"] >= 40 and one["wanted_replicas"])
            assert (counted["arrivals"], counted["running"]) == (40, 2)
            assert (counted["mean_prompt_tokens"], counted["mean_output_tokens"]) == (600.0, 200.0)

            assert asked(scaler, "IsActive") == b"\x08\x01"
            assert b"tokenfleet-wanted-replicas" in asked(scaler, "GetMetrics")

            two_pages[1].stop()
            held = until(documents, lambda one: one["held"])
            assert held["held"] == f"{addresses[1]}: Prometheus cannot scrape it"
            assert held["wanted_replicas"] == counted["wanted_replicas"]

            server.kill()
            held = until(documents, lambda one: "Prometheus does not answer" in (one["held"] or ""))
            assert held["wanted_replicas"] == counted["wanted_replicas"]
            assert held["arrivals"] == 40
            process.terminate()
            process.communicate(timeout=60)  # and close the pipe
            assert process.returncode == 0
        finally:
            process.kill()
            process.wait()
