"""A served fleet of two real vLLM engines: moved, drained and killed under its clients."""

import asyncio
import os
import re
import select
import signal
import statistics
import time

import psutil
import pytest
from raw_stream import session, stream

from harness.served import begun
from tokenfleet.cli.main import main
from tokenfleet.profiles.library import read_profile

STREAMS, TOKENS = 50, 400
STANDSTILL_S = 35.0  # a core that has not run for 30 s is killed, a worker not heard for 10 s given up


def body(i, tokens):
    return {"prompt": [(7 * i + k) % 2000 + 5 for k in range(20 + i)], "max_tokens": tokens}


def workers(fleet, state="serving"):
    return [w for w in fleet.ask("GET", "/v1/fleet")["workers"] if w["state"] == state]


async def run(fleet, streams, tokens, disturb=None):
    """What these streams got, with `disturb` called once they run."""
    async with session() as http:
        running = [
            asyncio.create_task(stream(http, fleet.gateway, **body(i, tokens))) for i in range(streams)
        ]
        if disturb is not None:
            await begun(fleet, streams, running)
            await asyncio.to_thread(disturb)
        return await asyncio.gather(*running)


@pytest.fixture(scope="module")
def undisturbed(vllm_fleet):
    """What each of STREAMS streams of TOKENS tokens is when nothing happens; none changes another in fp32."""
    return asyncio.run(run(vllm_fleet, STREAMS, TOKENS))


def test_without_a_profile_it_was_measured_before_it_served_and_places_by_targets(vllm_fleet):
    view = vllm_fleet.ask("GET", "/v1/fleet")
    assert (view["placement"]["by"], view["placement"]["unmeasured"]) == ("targets", {})
    kinds = [decision["kind"] for decision in view["decisions"]]
    assert "serving" not in kinds[: kinds.index("learned")]
    (times,) = view["step_times"]
    assert "learned from" in times["source"]
    assert times["step"]["base_s"] > 0
    assert times["step"]["per_prefill_token_s"] > 0


def test_its_metrics_calibrate_a_profile_of_another_machine(vllm_fleet, tmp_path, capsys):
    per_token_s = []

    async def timed(http, i):
        start_s = time.monotonic()
        got = await stream(http, vllm_fleet.gateway, **body(i, 100 + 10 * i))
        per_token_s.append((time.monotonic() - start_s) / got.tokens)

    async def traffic():
        calibrate = [
            "calibrate",
            "--metrics",
            vllm_fleet.control,
            "--profile",
            "llama-3.1-8b",
            "--gpu",
            "h100",
        ]
        calibrate += ["--tp", "1", "--minutes", "0.17", "--output", str(tmp_path / "made.yaml")]
        watch = asyncio.create_task(asyncio.to_thread(main, calibrate))
        async with session() as http:
            while not watch.done():
                await asyncio.gather(*(timed(http, i) for i in range(8)))
        return await watch

    assert asyncio.run(traffic()) == 0, capsys.readouterr().err
    made = read_profile(tmp_path / "made.yaml")
    assert "calibrated by /metrics" in made.source.what
    # Its clients' clocks are another judge of the same minutes; what the fleet learned before is of others.
    assert 0.5 < float(made.step.step_s(0, 4, 400)) / statistics.median(per_token_s) < 2.0


def test_text_is_the_same_moved_or_not_and_a_stop_string_ends_it_across_moves(vllm_fleet):
    def moved():
        open_move = vllm_fleet.ask("POST", "/v1/migrations", {"request_id": "moves"})["id"]
        done = vllm_fleet.until(
            lambda: (m := vllm_fleet.ask("GET", f"/v1/migrations/{open_move}")) and not m["open"] and m
        )
        assert done["outcome"] == "done", done

    async def story(headers, **more):
        async with session() as http:
            running = asyncio.create_task(stream(http, vllm_fleet.gateway, headers, **body(1, 1000), **more))
            if headers:
                await begun(vllm_fleet, 1, [running])
                for _ in range(3):
                    await asyncio.to_thread(moved)
            return await running

    expected = asyncio.run(story(None))
    assert asyncio.run(story({"x-request-id": "moves"})) == expected
    stop = expected.text[-40:-34]
    stopped = asyncio.run(story({"x-request-id": "moves"}, stop=[stop]))
    assert (stopped.text, stopped.finish) == (expected.text[: expected.text.index(stop)], "stop")


# So long that on a worker that goes some stream is far from its end, also on a fast machine: one that ends
# while it is copied is not moved.
UNEVEN = (1000, 3000, 1500, 2500, 2000, 3500)
MOST_ROUNDS = 200  # of streams, until something holds


def test_a_restart_under_streams_loses_and_repeats_nothing(vllm_fleet):
    leaves = ""

    def restart():
        vllm_fleet.ask("POST", f"/v1/workers/{leaves}/restart", {})

    def is_done():
        update = vllm_fleet.ask("GET", "/v1/fleet")["update"] or {}
        return (update.get("what"), update.get("state")) == (f"restart of {leaves}", "done")

    async def together(disturb=None, until=lambda: True):
        """What each client gets, again and again until something holds; they do not end together."""

        async def client(http, i):
            got = [await stream(http, vllm_fleet.gateway, **body(i, UNEVEN[i]))]
            while not await asyncio.to_thread(until):
                assert len(got) < MOST_ROUNDS
                got.append(await stream(http, vllm_fleet.gateway, **body(i, UNEVEN[i])))
            return got

        async with session() as http:
            running = [asyncio.create_task(client(http, i)) for i in range(len(UNEVEN))]
            if disturb is not None:
                await begun(vllm_fleet, len(UNEVEN), running)
                await asyncio.to_thread(disturb)
            return await asyncio.gather(*running)

    vllm_fleet.until(lambda: len(workers(vllm_fleet)) == 2)
    expected = asyncio.run(together())
    leaves = workers(vllm_fleet)[0]["worker"]
    # They run before the new engine starts: had they to begin while it shows that it stays healthy, a busy
    # machine would begin them too late, with nothing left to move.
    for got, (alone,) in zip(asyncio.run(together(restart, is_done)), expected, strict=True):
        assert all(one == alone for one in got)
    assert leaves not in [w["worker"] for w in workers(vllm_fleet)]
    told = [(d["kind"], d["reason"]) for d in vllm_fleet.ask("GET", "/v1/fleet")["decisions"]]
    assert ("migrate", f"{leaves} is being replaced; done") in told, told


def test_what_workers_have_cached_is_known_before_they_are_asked(vllm_fleet):
    def prefix_tokens():
        told = [w["prefix_tokens"] for w in workers(vllm_fleet)]
        return {name: sum(tokens[name] for tokens in told) for name in told[0]}

    async def conversation(n):
        shared, turns = list(range(100, 500)), []
        async with session() as http:
            for turn in range(4):
                turns += [(31 * n + 7 * turn + k) % 2000 + 5 for k in range(150)]
                await stream(http, vllm_fleet.gateway, prompt=shared + turns, max_tokens=3)

    before = prefix_tokens()
    for n in range(3):
        asyncio.run(conversation(n))
    told = {name: tokens - before[name] for name, tokens in prefix_tokens().items()}
    assert told["queried"] == 3 * (550 + 700 + 850 + 1000)
    assert told["expected"] == told["hit"] > 0.6 * told["queried"]
    assert told["off"] == 0
    # What the turns before of one's own, and the shared beginning of any other, would let a single cache hit.
    least = 2 * (400 // 32 * 32) + 3 * sum((so_far - 150) // 32 * 32 for so_far in (700, 850, 1000))
    assert least <= told["ideal"] < told["queried"]
    assert told["hit"] <= told["ideal"]
    policy = vllm_fleet.ask("GET", "/v1/fleet")["placement"]["policy"]
    exposed = vllm_fleet.metric("tokenfleet_worker_prefix_tokens", what="ideal", policy=policy)
    assert exposed == prefix_tokens()["ideal"]
    assert "an unlimited cache shared by all" in vllm_fleet.told("status", "--verbose")
    assert {w["cache_known"] for w in workers(vllm_fleet)} == {"told"}  # by the engines' own events


# `test_worker_actor` holds that a worker ends an engine that hangs; it is then lost as a killed one is.
# `test_model_families` kills the worker's own process.
@pytest.mark.always
@pytest.mark.parametrize(
    ("ends", "why"),
    [
        (signal.SIGKILL, "its engine was killed (signal 9)"),
        pytest.param(signal.SIGSTOP, "its engine made no step for 1", marks=pytest.mark.nightly),
    ],
)
def test_streams_go_on_when_a_worker_dies_or_hangs_and_another_takes_its_place(
    vllm_fleet, undisturbed, ends, why
):
    def kill():
        family = psutil.Process(workers(vllm_fleet)[0]["pid"]).children(recursive=True)
        os.kill(next(child.pid for child in family if "EngineCore" in child.name()), ends)

    vllm_fleet.ask("POST", "/v1/fleet/scale", {"workers": 2})
    vllm_fleet.until(lambda: len(workers(vllm_fleet)) == 2, 900)
    lost, told = vllm_fleet.metric("tokenfleet_workers_lost_total"), len(vllm_fleet.log.read_text())
    gone = workers(vllm_fleet)[0]["worker"]
    assert asyncio.run(run(vllm_fleet, 12, TOKENS, kill)) == undisturbed[:12]
    vllm_fleet.until(lambda: vllm_fleet.metric("tokenfleet_workers_lost_total") == lost + 1)
    vllm_fleet.until(lambda: len(workers(vllm_fleet)) == 2, 900)
    vllm_fleet.until(lambda: f"in place of {gone}\n" in vllm_fleet.log.read_text()[told:])
    (line,) = [one for one in vllm_fleet.log.read_text()[told:].splitlines() if " lost: " in one]
    assert f" s  {gone} lost: {why}" in line
    assert re.search(r"; \d+ requests? goe?s? on elsewhere; a new worker ", line)
    explained = vllm_fleet.told("explain")
    assert line.split(" lost: ")[1] in explained
    assert f"its engine is ready and warm, in place of {gone}" in explained
    assert not select.select([vllm_fleet.process.stdout], [], [], 0)[0]  # which has had its one line


def test_streams_go_on_when_the_core_is_killed_and_its_successor_adopts_the_engines(vllm_fleet, undisturbed):
    def kill():
        os.kill(vllm_fleet.ask("GET", "/v1/fleet")["core"]["pid"], signal.SIGKILL)

    before = [(w["worker"], w["pid"]) for w in workers(vllm_fleet)]
    assert asyncio.run(run(vllm_fleet, 12, TOKENS, kill)) == undisturbed[:12]
    view = vllm_fleet.ask("GET", "/v1/fleet")
    assert (view["core"]["number"], view["auto"], view["placement"]["by"]) == (2, False, "targets")
    assert [(w["worker"], w["pid"]) for w in workers(vllm_fleet)] == before
    assert not [d for d in view["decisions"] if d["kind"] == "launch"]
    assert vllm_fleet.metric("tokenfleet_requests_total", outcome="failed") == 0


def test_a_machine_that_stands_still_loses_nothing(vllm_fleet, undisturbed):
    """As a virtual machine that its host pauses: every process, for longer than any of them is waited for."""

    def stand_still():
        root = psutil.Process(vllm_fleet.process.pid)
        everyone = [root, *root.children(recursive=True)]
        for process in everyone:
            process.suspend()
        time.sleep(STANDSTILL_S)
        for process in everyone:  # those that wait for others first
            process.resume()

    def who():
        view = vllm_fleet.ask("GET", "/v1/fleet")
        return view["core"]["number"], [(w["worker"], w["pid"]) for w in view["workers"]]

    before, lost = who(), vllm_fleet.metric("tokenfleet_workers_lost_total")
    assert asyncio.run(run(vllm_fleet, 12, TOKENS, stand_still)) == undisturbed[:12]
    assert (who(), vllm_fleet.metric("tokenfleet_workers_lost_total")) == (before, lost)
    assert vllm_fleet.metric("tokenfleet_requests_total", outcome="failed") == 0


@pytest.mark.always
def test_a_drain_under_load_loses_and_repeats_nothing_and_takes_what_is_cached_along(vllm_fleet, undisturbed):
    def told(worker):
        return next(w["prefix_tokens"] for w in workers(vllm_fleet) if w["worker"] == worker)

    async def turns(more):
        async with session() as http:
            for n in range(4):
                prompt = [(37 * n + k) % 2000 + 5 for k in range(500 + more)]
                await stream(http, vllm_fleet.gateway, prompt=prompt, max_tokens=3)

    # What has ended last is copied first: a slow machine has no time for what ended before it, too.
    before = {w["worker"]: w["prefix_tokens"]["queried"] for w in workers(vllm_fleet)}
    asyncio.run(turns(0))
    stays, leaves = sorted(
        workers(vllm_fleet), key=lambda w: told(w["worker"])["queried"] - before[w["worker"]]
    )
    assert told(leaves["worker"])["queried"] - before[leaves["worker"]] >= 1000

    def drained():
        vllm_fleet.ask("POST", f"/v1/workers/{leaves['worker']}/drain")

    assert asyncio.run(run(vllm_fleet, STREAMS, TOKENS, drained)) == undisturbed
    vllm_fleet.until(lambda: [w["worker"] for w in workers(vllm_fleet)] == [stays["worker"]])
    vllm_fleet.until(lambda: not psutil.pid_exists(leaves["pid"]))
    assert vllm_fleet.metric("tokenfleet_migrations_total", outcome="done") > 3
    before = told(stays["worker"])
    asyncio.run(turns(60))
    after = told(stays["worker"])
    # Of each prompt that went along all that it had said before, in whole blocks, though some of it was never
    # computed here. How many go depends on what the machine copies in the time that a drain gives to it.
    hit, each = after["hit"] - before["hit"], 500 // 32 * 32
    assert hit == after["expected"] - before["expected"]
    assert hit in (each, 2 * each, 3 * each, 4 * each)
    decisions = vllm_fleet.ask("GET", "/v1/fleet")["decisions"]
    assert any(d["kind"] == "bring" and d["tokens"] >= 480 for d in decisions)


def used_blocks(fleet):
    loads = [w["telemetry"] for w in workers(fleet)]
    return [load["kv_used_blocks"] for load in loads if load is not None]


def test_no_kv_block_is_in_use_once_all_is_quiet(vllm_fleet):
    vllm_fleet.until(lambda: not any(used_blocks(vllm_fleet)))
    assert vllm_fleet.metric("tokenfleet_requests_total", outcome="failed") == 0


def wanted(fleet):
    return fleet.ask("GET", "/v1/fleet")["wanted_workers"]


def is_whole(got, tokens):
    return (got.error, got.is_done, got.tokens) == ("", True, tokens)


# It is the last test: one worker is left, and no test needs two.
def test_a_burst_asks_for_another_worker_and_every_stream_ends_whole(vllm_fleet):
    vllm_fleet.until(lambda: not any(used_blocks(vllm_fleet)))
    vllm_fleet.ask("POST", "/v1/fleet/scale", {"auto": True})

    async def bursts():
        got = []
        async with session() as http:
            began_s = time.monotonic()
            got.append(await stream(http, vllm_fleet.gateway, **body(0, 60)))
            alone_ms = (time.monotonic() - began_s) / 60 * 1e3
            strict = {"x-llm-d-slo-tpot-ms": f"{1.5 * alone_ms:g}"}  # a worker keeps that for few at a time
            while await asyncio.to_thread(wanted, vllm_fleet) < 2:
                streams = [stream(http, vllm_fleet.gateway, strict, **body(i, 60)) for i in range(40)]
                got += await asyncio.gather(*streams)
        return got

    got = asyncio.run(asyncio.wait_for(bursts(), 300))
    assert got
    assert all(is_whole(g, 60) for g in got)
    (why,) = vllm_fleet.ask("GET", "/v1/fleet")["scaling"][-1:]
    assert (why["kind"], why["before"], why["workers"]) == ("scale", 1, 2)
    assert max(why["compared"].values()) > 1.0
    assert why["seen"]["workers_per_rps"] > 0
    vllm_fleet.until(lambda: workers(vllm_fleet, "starting"))
    vllm_fleet.ask("POST", "/v1/fleet/scale", {"workers": 1})
    vllm_fleet.until(lambda: not workers(vllm_fleet, "starting"))
    assert vllm_fleet.metric("tokenfleet_requests_total", outcome="failed") == 0
