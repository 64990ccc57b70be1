"""A fleet over two hosts: two Linux network namespaces, each with a Ray node and a real vLLM worker."""

import asyncio
import json
import os
import subprocess
import sys
import time

import pytest

PROMPTS = [f"Host {n}, tell a long story." for n in range(4)]
TOKENS = 600


@pytest.fixture(scope="module")
def fleet(hosts, model_folder):
    with hosts.fleet(model_folder, "--workers", "2", "--max-workers", "3", "--policy", "jsq") as server:
        yield server


@pytest.fixture(scope="module")
def play(hosts, fleet):
    """Runs a story on the first host, where the gateway is."""
    from harness.served import session

    def run(story):
        async def scene():
            async with session() as http:
                return await asyncio.wait_for(story(http), 200)

        return hosts[0].call(lambda: asyncio.run(scene()))

    return run


@pytest.fixture(scope="module")
def plain(play, fleet):
    """What each prompt's stream is when nothing happens."""
    return [got.content for got in play(lambda http: asyncio.gather(*streams(http, fleet)))]


async def stream_of(http, fleet, prompt, tokens):
    from harness.served import stream

    return await stream(http, fleet.gateway, {"prompt": prompt, "max_tokens": tokens})


def streams(http, fleet):
    return [asyncio.ensure_future(stream_of(http, fleet, prompt, TOKENS)) for prompt in PROMPTS]


async def replacements(fleet):
    return [d for d in await decided(fleet, "launch") if d["reason"].startswith("replaces")]


async def ask(fleet, method, path, body=None):
    return await asyncio.to_thread(fleet.ask, method, path, body)


async def until(holds):
    async with asyncio.timeout(60):
        while not (found := await holds()):
            await asyncio.sleep(0.02)
    return found


async def spread(fleet):
    """The running requests, once all have begun and each worker has some."""
    running = (await ask(fleet, "GET", "/v1/requests"))["requests"]
    begun = [r for r in running if r["output_tokens"] > 0]
    return begun if len(begun) == len(PROMPTS) and len({r["worker"] for r in begun}) == 2 else None


async def under_way(http, fleet):
    """Streams that both workers serve, and their running requests."""
    while True:
        running = streams(http, fleet)
        while not all(task.done() for task in running):
            if there := await spread(fleet):
                return running, there
            await asyncio.sleep(0.02)
        await asyncio.gather(*running)  # raises what ended them


async def decided(fleet, *kinds):
    """Decisions of these kinds, the newest last."""
    return [d for d in (await ask(fleet, "GET", "/v1/fleet"))["decisions"] if d["kind"] in kinds]


async def hosts_of(fleet):
    """Each serving worker's host."""
    workers = (await ask(fleet, "GET", "/v1/fleet"))["workers"]
    return {w["worker"]: w["host"] for w in workers if w["state"] == "serving"}


def test_the_doctor_looks_at_every_host(hosts, model_folder):
    words = [sys.executable, "-m", "tokenfleet", "doctor", "--model", str(model_folder), "--nic", "eth0"]
    environment = os.environ | hosts.environment
    done = subprocess.run(
        hosts[0].command(*words, "--format", "json"), env=environment, capture_output=True, text=True
    )
    found = json.loads(done.stdout)
    assert done.returncode == 0, [f for f in found if f["state"] == "stops"]
    by_check = {check: [f for f in found if f["check"] == check] for check in ("NIC", "reach", "model")}
    assert {f["host"] for f in by_check["NIC"]} == {host.name for host in hosts}
    assert {f["says"].split(",")[0] for f in by_check["NIC"]} == {f"{host.ip} at eth0" for host in hosts}
    assert [f["says"] for f in by_check["reach"]] == ["1 other nodes answer"] * 2
    assert len({f["same"] for f in by_check["model"]}) == 1


def test_each_host_has_a_worker_and_serves(play, fleet, hosts):
    async def story(http):
        assert set((await hosts_of(fleet)).values()) == {host.ip for host in hosts}
        running, _ = await under_way(http, fleet)
        for task in running:
            task.cancel()

    play(story)


def test_a_stream_that_is_moved_between_hosts_is_the_stream_that_is_not(play, fleet, plain):
    async def story(http):
        running, _ = await under_way(http, fleet)
        (first, *_), workers = (await ask(fleet, "GET", "/v1/requests"))["requests"], await hosts_of(fleet)
        moves = []
        for _ in range(6):
            now = await ask(fleet, "GET", f"/v1/requests/{first['request_id']}")
            target = next(w for w in workers if w != now["request"]["worker"])
            order = {"request_id": first["request_id"], "target": target}
            begun = await ask(fleet, "POST", "/v1/migrations", order)

            async def ended(number=begun["id"]):
                move = await ask(fleet, "GET", f"/v1/migrations/{number}")
                return None if move["open"] else move

            moves.append(await until(ended))
        assert [m["outcome"] for m in moves] == ["done"] * 6
        assert min(m["bytes"] for m in moves) > 0
        assert [(await task).content for task in running] == plain

    play(story)


def test_a_link_that_is_down_for_five_seconds_loses_nobody(play, fleet, hosts, plain):
    async def story(http):
        running, _ = await under_way(http, fleet)
        hosts[1].link(False)
        down_s = time.monotonic()
        (far,) = [w for w, host in (await hosts_of(fleet)).items() if host == hosts[1].ip]
        silent = await until(lambda: decided(fleet, "silent"))
        late = await stream_of(http, fleet, "And one more.", 20)
        assert late.finish == "length"  # the other host took it
        while time.monotonic() < down_s + 5:
            await asyncio.sleep(0.02)
        hosts[1].link(True)
        heard = await until(lambda: decided(fleet, "heard"))
        assert [(await task).content for task in running] == plain
        assert (silent[-1]["worker"], heard[-1]["worker"]) == (far, far)
        assert await decided(fleet, "lost", "replay", "failed") == []

    play(story)


def test_streams_of_a_host_that_is_not_heard_go_on_elsewhere_and_its_late_words_change_nothing(
    play, fleet, hosts, plain
):
    async def story(http):
        running, there = await under_way(http, fleet)
        (far,) = [w for w, host in (await hosts_of(fleet)).items() if host == hosts[1].ip]
        stranded = sum(r["worker"] == far for r in there)
        hosts[1].reaches(hosts[0], False)  # the other way is open: it hears, and computes on
        await until(lambda: decided(fleet, "lost"))
        hosts[1].reaches(hosts[0], True)
        assert [(await task).content for task in running] == plain
        assert len(await decided(fleet, "replay")) == stranded
        (new,) = await until(lambda: replacements(fleet))
        assert new["reason"] == f"replaces {far}"

    play(story)
