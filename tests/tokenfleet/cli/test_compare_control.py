"""`tokenfleet compare` and the control API: it simulates the fleet's own sizes, and refuses bad answers."""

import asyncio
import json
import ssl
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from checkout import ROOT

from controlplane.errors import BadInput
from controlplane.types import Slo
from controlplane.workload import Workload
from dataplane.simulated.simulate import WorkerSpec, simulate
from tokenfleet.cli.compare import _counters, _simulated_text, as_served
from tokenfleet.profiles.library import read_profile

SMALL = {"kv_blocks": 9_536, "block_tokens": 16, "max_seqs": 128}
H100 = read_profile(ROOT / "profiles" / "h100-sxm" / "llama-3.1-8b_tp1.yaml")


class NoFleet(BaseHTTPRequestHandler):
    """Answers as `tokenfleet api` does, which only plans."""

    def do_GET(self):
        body = b'{"error": {"message": "Not Found"}}'
        self.send_response(404)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class Fleet(NoFleet):
    """Answers as a fleet of one worker that serves and one that starts."""

    worker: ClassVar = {"worker": "w0", "state": "serving", "engine": "emulated", **SMALL}
    worker |= {"telemetry": {"preemptions": 3}}

    def do_GET(self):
        fleet = {"workers": [self.worker, {"worker": "w1", "state": "starting"}]}
        body = b"" if self.path == "/metrics" else json.dumps(fleet).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def counted(answers):
    """The counters that `compare` reads from such a control API, and its address."""
    pytest.importorskip("aiohttp", reason="the live extra is not installed")
    server = HTTPServer(("127.0.0.1", 0), answers)
    threading.Thread(target=server.serve_forever, args=(0.01,)).start()
    flags = SimpleNamespace(control=f"http://127.0.0.1:{server.server_port}", control_key=None)
    try:
        return asyncio.run(_counters(flags, ssl.create_default_context())), flags.control
    except BadInput as error:
        return str(error), flags.control
    finally:
        server.shutdown()
        server.server_close()


def test_a_control_api_without_a_fleet_is_told_as_one():
    refused, url = counted(NoFleet)
    assert refused.startswith(f"--control: {url}: does not answer as a fleet does: ")


def test_the_sizes_of_workers_that_serve_are_read_and_a_wrong_one_is_refused():
    found, _ = counted(Fleet)
    counters = {"preemptions": 3, "migrations": 0}
    assert found == {"workers": 1, "engines": {"emulated"}, "sizes": [SMALL]} | counters
    for wrong in (0, "many", None, True):
        bad = type("Bad", (Fleet,), {"worker": Fleet.worker | {"kv_blocks": wrong}})
        refused, url = counted(bad)
        assert refused.startswith(f"--control: {url}: does not answer as a fleet does: ")
        assert f"worker w0: kv_blocks: must be at least 1, got {wrong!r}" in refused
        assert "\n" not in refused
    earlier = {name: value for name, value in Fleet.worker.items() if name not in SMALL}
    found, _ = counted(type("Earlier", (Fleet,), {"worker": earlier}))
    assert found["sizes"] == []


def test_a_worker_is_simulated_with_the_fleets_kv_and_seats_and_its_queue_shows():
    small = as_served(H100, SMALL)
    assert (small.kv.capacity_tokens, small.kv.block_tokens, small.engine.max_seqs) == (152_576, 16, 128)
    assert small.step == H100.step
    assert as_served(H100, {}) is H100
    rng = np.random.default_rng(3)
    load = Workload(
        np.sort(rng.uniform(0, 20, 400)), rng.integers(500, 3000, 400), rng.integers(200, 600, 400)
    )
    own, theirs = (
        simulate(load, [WorkerSpec(one)], Slo(1.6, 0.075), seed=0).ttft_s.mean() for one in (small, H100)
    )
    assert own > 2 * theirs
    assert _simulated_text([small, small], True) == (
        "Simulated workers have 152,576 KV tokens and 128 requests at once, as the fleet reports."
    )
    assert _simulated_text([H100], False).endswith("256 requests at once, as in the profile.")


def test_layers_with_a_window_keep_the_profiles_kv():
    scout = read_profile(ROOT / "profiles" / "h100-sxm" / "llama-4-scout-17b-16e-fp8_tp8.yaml")
    assert scout.kv.request_tokens
    assert as_served(scout, SMALL) == scout.with_engine(max_seqs=128)
