"""`tokenfleet advise` with two stock vLLM servers: from the command to the advice, and what holds it."""

import asyncio
import json
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import psutil
import pytest
from checkout import ROOT

from harness.served import Stream, free_port, plain_server, session, stream

REQUESTS = 40
LOOKS = 40  # in which a condition has to come


@pytest.fixture(scope="module")
def servers(model_folder):
    with ExitStack() as stack, ThreadPoolExecutor(2) as pool:
        starts = [pool.submit(stack.enter_context, plain_server(model_folder, core)) for core in (0, 1)]
        yield [start.result() for start in starts]


async def send(servers, count):
    """Send `count` requests, round-robin; all are answered when this returns."""
    async with session() as http:
        bodies = ({"prompt": [7, i + 5, 9], "max_tokens": 8} for i in range(count))
        each = [stream(http, servers[i % 2].gateway, body) for i, body in enumerate(bodies)]
        assert all(answer.is_done for answer in await asyncio.gather(*each))


async def leave(servers, count):
    """As many requests, whose clients go after the first token."""

    async def one(http, i):
        got = Stream()
        body = {"prompt": [7, i + 5, 9], "max_tokens": 2000}
        task = asyncio.ensure_future(stream(http, servers[i % 2].gateway, body, into=got))
        while not got.chunks_s and not task.done():
            await asyncio.sleep(0.01)
        assert task.cancel(), got.error

    async with session() as http:
        await asyncio.gather(*(one(http, i) for i in range(count)))


def until(documents, holds):
    """The first of the coming documents that `holds` is true for."""
    one = "no document came"
    for _, line in zip(range(LOOKS), documents, strict=False):
        if holds(one := json.loads(line)):
            return one
    raise AssertionError(f"not within {LOOKS} looks: {one}")


def sent_and_counted(servers, documents, tries=3, act=send):
    """The advice that counted every request; they are sent again where a look came to nothing meanwhile."""
    for _ in range(tries):
        all_of_them = until(documents, lambda one: not one["held"])["arrivals"] + REQUESTS

        def is_over(one, enough=all_of_them):
            return one["held"] or (one["arrivals"] >= enough and one["wanted_replicas"])

        asyncio.run(act(servers, REQUESTS))
        seen = until(documents, is_over)
        if not seen["held"]:
            assert seen["arrivals"] == all_of_them
            return seen
    raise AssertionError(seen["held"])


def test_two_worker_types_are_one_fleet_with_an_advice_for_each(servers):
    """The same two servers, named as of two types: the metrics do not tell the GPU."""
    port = free_port()
    command = [sys.executable, "-m", "tokenfleet", "advise", "--model", "llama-3.1-8b"]
    for gpu, server in zip(("h100", "a100"), servers, strict=True):
        command += ["--kind", f"gpu={gpu},min=1,max=4,servers={server.gateway}"]
    command += ["--slo", "ttft=1s,tpot=50ms", "--format", "json", "--listen", f"127.0.0.1:{port}"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        first = until(process.stdout, lambda one: True)
        assert [one["replicas"] for one in first["worker_types"]] == [1, 1]
        before = [one["arrivals"] for one in first["worker_types"]]
        counted = sent_and_counted(servers, process.stdout)
        rose = [one["arrivals"] - n for one, n in zip(counted["worker_types"], before, strict=True)]
        assert sum(rose) == counted["arrivals"] - first["arrivals"]
        assert rose[0] == rose[1] >= REQUESTS / 2
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
            page = reply.read().decode()
        for one in counted["worker_types"]:
            labels = f'model="tiny-llama",worker_type="{one["worker_type"]}"'
            assert f"tokenfleet_wanted_replicas{{{labels}}} {one['published_replicas']:.1f}" in page
        process.terminate()
        process.communicate(timeout=60)
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()


def test_two_stock_servers_are_counted_exactly_advised_and_held_when_one_dies(servers):
    port = free_port()
    command = [sys.executable, "-m", "tokenfleet", "advise", *(one.gateway for one in servers)]
    command += ["--model", "llama-3.1-8b", "--gpu", "h100", "--slo", "ttft=1s,tpot=50ms"]
    command += ["--format", "json", "--listen", f"127.0.0.1:{port}"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        documents = process.stdout
        first = until(documents, lambda one: True)
        assert (first["replicas"], first["wanted_replicas"], first["arrivals"]) == (2, None, 0)
        counted = sent_and_counted(servers, documents)
        assert (counted["mean_prompt_tokens"], counted["mean_output_tokens"]) == (3.0, 8.0)
        sent_and_counted(servers, documents, act=leave)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as reply:
            page = reply.read().decode()
        labels = f'model="tiny-llama",worker_type="{counted["worker_type"]}"'
        assert f"tokenfleet_wanted_replicas{{{labels}}} {counted['published_replicas']:.1f}" in page

        dies = psutil.Process(servers[1].process.pid)
        for one in (*dies.children(recursive=True), dies):  # vLLM's engine outlives a server that is killed
            one.kill()
        held = until(documents, lambda one: one["held"])
        assert servers[1].gateway in held["held"]
        assert held["wanted_replicas"] is not None
        again = until(documents, lambda one: True)
        assert (again["held_since"], again["wanted_replicas"]) == (
            held["held_since"],
            held["wanted_replicas"],
        )
        process.terminate()
        process.communicate(timeout=60)  # and close the pipe
        assert process.returncode == 0
    finally:
        process.kill()
        process.wait()
