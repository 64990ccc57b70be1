"""Prefill and decode workers apart, on emulated engines: what is handed over, what stays, and no loss."""

import asyncio
import time

import pytest
from front import A, B, C, Front, alone, emptied, pool_on, profile, until

from controlplane.errors import BadInput
from controlplane.types import WorkerId

D = WorkerId("d")
LONG = [1 + i % 250 for i in range(6001)]  # three chunks


@pytest.fixture
def play():
    from controlplane.placement.queue import QueueSettings

    def run(story, prefill=(A,), decode=(B, C), sizes=None):
        async def scene():
            roles = dict.fromkeys(prefill, "prefill") | dict.fromkeys(decode, "decode")
            front = Front((), profile(), QueueSettings())
            for worker, role in roles.items():
                engine = front.engines[worker] = front.launch(worker, (sizes or {}).get(worker))
                front.core.attach(engine, role=role)
            try:
                await asyncio.wait_for(story(front), 15)
                await emptied(front)
            finally:
                await front.close()

        asyncio.run(scene())

    return run


def handovers(front, outcome):
    return front.core.metrics.handovers.labels(outcome)._value.get()


def on(front, worker):
    return len(front.core.requests.on_worker(worker))


def test_every_request_decodes_on_a_decode_worker_and_its_stream_is_whole(play):
    async def story(front):
        names = [f"r{i}" for i in range(12)]
        for i, name in enumerate(names):
            await front.send(name, [i + 1] * 40)
        assert on(front, A) == 12
        await until(lambda: on(front, B) == on(front, C) == 6)
        await front.ended(*names)
        assert [front.tokens[name] for name in names] == [alone([i + 1] * 40, 100) for i in range(12)]
        assert handovers(front, "done") == 12
        assert handovers(front, "stayed") == 0

    play(story)


def test_the_kv_of_a_long_prompt_travels_while_its_later_chunks_are_computed(play):
    async def story(front):
        # All of it at once would take longer than all 100 tokens.
        front.fabric.bytes_per_s = 6001 * 1000 / 0.05
        await front.send("r", LONG)
        tracked, epoch_s = front.core.requests.get("r"), time.time() - time.monotonic()
        await front.ended("r")
        (move,) = front.core.migrations.closed
        assert (move.mode, move.outcome, move.stages[0]) == ("hand-over", "done", 6000)
        assert move.started_s - epoch_s < tracked.first_token_s
        assert front.tokens["r"] == alone(LONG, 100)

    play(story)


def test_a_prefill_worker_that_dies_before_the_first_token_loses_nothing(play):
    async def story(front):
        await front.send("r", LONG)
        await until(lambda: front.core.migrations.open)
        source = front.core.requests.get("r").worker
        front.engines[source].kill("kill -9")
        await front.ended("r")
        assert front.tokens["r"] == alone(LONG, 100)
        assert front.core.migrations.closed[0].outcome == "aborted"
        assert handovers(front, "done") == 1  # off the other one

    play(story, prefill=(A, D))


def test_a_prefill_worker_that_dies_in_a_hand_over_loses_nothing(play):
    async def story(front):
        front.fabric.bytes_per_s = 40 * 1000 / 0.2
        await front.send("r", [3] * 40)
        await front.until("r", 3)
        source = front.core.requests.get("r").worker
        assert front.core.migrations.open
        front.engines[source].kill("kill -9")
        await front.ended("r")
        assert front.tokens["r"] == alone([3] * 40, 100)

    play(story, prefill=(A, D))


def test_a_request_whose_decode_worker_dies_is_handed_over_to_another(play):
    async def story(front):
        front.fabric.bytes_per_s = 40 * 1000 / 0.2
        await front.send("before", [3] * 40, max_tokens=900)
        await until(lambda: front.core.migrations.open)
        target = next(iter(front.core.migrations.open.values())).target
        front.engines[target].kill("kill -9")
        await front.ended("before")
        assert front.tokens["before"] == alone([3] * 40, 900)
        assert handovers(front, "failed") == 1
        front.fabric.bytes_per_s = 2e9
        other = C if target == B else B
        await front.send("after", [4] * 40, max_tokens=300)
        await until(lambda: on(front, other) == 1)
        await front.until("after", 30)
        front.engines[D] = front.launch(D)
        front.core.attach(front.engines[D], role="decode")
        front.engines[other].kill("kill -9")
        await front.ended("after")
        assert front.tokens["after"] == alone([4] * 40, 300)

    play(story)


def test_a_request_that_no_decode_worker_has_room_for_decodes_where_it_is(play):
    async def story(front):
        await front.send("r", [5] * 200)
        await front.ended("r")
        assert front.tokens["r"] == alone([5] * 200, 100)
        assert (handovers(front, "done"), handovers(front, "stayed")) == (0, 1)

    play(story, decode=(B,), sizes={B: profile(blocks=8)})


def test_a_request_that_may_not_move_decodes_where_it_is(play):
    async def story(front):
        await front.send("r", [5] * 40, temperature=1.0, seed=1)
        await front.ended("r")
        assert len(front.tokens["r"]) == 100
        assert not front.core.migrations.closed
        assert handovers(front, "stayed") == 1

    play(story)


def test_requests_wait_for_no_decode_worker_and_leave_once_there_is_one(play):
    async def story(front):
        await front.send("r", [5] * 40, max_tokens=2000)
        await front.until("r", 10)
        front.engines[B] = front.launch(B)
        front.core.attach(front.engines[B], role="decode")
        await until(lambda: on(front, B) == 1)
        await front.ended("r")
        assert front.tokens["r"] == alone([5] * 40, 2000)

    play(story, decode=())


@pytest.fixture
def pool():
    from controlplane.placement.queue import QueueSettings
    from controlplane.worker_type import WorkerGroup, WorkerType

    def run(story, prefill=1, decode=2):
        async def scene():
            front = Front((), profile(), QueueSettings())
            counts = (("prefill", prefill), ("decode", decode))
            groups = [WorkerGroup(WorkerType(None, role=role), n) for role, n in counts]
            async with pool_on(front, groups, 6) as fleet:
                await asyncio.wait_for(story(front, fleet), 30)

        asyncio.run(scene())

    return run


def of(fleet, role):
    return [m.worker for m in fleet.members() if m.kind == f"TP1 {role}" and m.state == "serving"]


def test_a_worker_takes_another_role_while_it_serves_and_keeps_no_request_of_the_old_one(pool):
    async def story(front, fleet):
        names = [f"r{i}" for i in range(8)]
        for i, name in enumerate(names):
            await front.send(name, [i + 1] * 40, max_tokens=1500)
        first, second = of(fleet, "decode")
        await until(lambda: on(front, first) == on(front, second) == 4)
        fleet.set_role(first, "prefill", "a test")
        assert fleet.wanted_kinds == {"TP1 prefill": 2, "TP1 decode": 1}
        await until(lambda: on(front, second) == 8)
        await front.send("new", [9] * 40)
        await front.ended(*names, "new")
        assert [front.tokens[name] for name in names] == [alone([i + 1] * 40, 1500) for i in range(8)]
        assert fleet.serving == 3
        assert [event.as_json()["worker"] for event in front.events if event.kind == "role"] == [first]

    pool(story)


def test_a_prefill_worker_that_becomes_a_decode_worker_hands_nothing_over(pool):
    async def story(front, fleet):
        first, _ = of(fleet, "prefill")
        fleet.set_role(first, "decode", "a test")
        for i in range(8):
            await front.send(f"r{i}", [i + 1] * 40)
        await front.ended(*(f"r{i}" for i in range(8)))
        moved = {(move.source, move.target) for move in front.core.migrations.closed}
        assert {source for source, _ in moved} == set(of(fleet, "prefill"))
        assert first in {target for _, target in moved}

    pool(story, prefill=2, decode=1)


def test_a_scale_that_trades_roles_starts_and_drains_nobody(pool):
    async def story(front, fleet):
        names, there = [f"r{i}" for i in range(8)], {m.worker for m in fleet.members()}
        for i, name in enumerate(names):
            await front.send(name, [i + 1] * 40, max_tokens=1500)
        first, second = of(fleet, "decode")
        await until(lambda: on(front, first) == on(front, second) == 4)
        facts = {"seen": {"rate_rps": 1.0}, "compared": {}, "cost": {}}
        fleet.scale({"TP1 prefill": 2, "TP1 decode": 1}, "long prompts", facts)
        await front.ended(*names)
        assert [front.tokens[name] for name in names] == [alone([i + 1] * 40, 1500) for i in range(8)]
        assert {m.worker for m in fleet.members() if m.state == "serving"} == there
        assert [event.kind for event in front.events if event.kind in ("launch", "draining")] == [
            "launch"
        ] * 3
        (told,) = (event.as_json() for event in front.events if event.kind == "scale")
        assert "becomes a prefill worker: long prompts" in told["reason"]
        assert told["seen"] == {"rate_rps": 1.0}

    pool(story)


def test_a_role_takes_no_more_workers_than_its_share_and_a_new_share_trades_them(pool):
    async def story(front, fleet):
        there = {m.worker for m in fleet.members()}
        fleet.allow({"TP1 prefill": 1, "TP1 decode": 2})
        with pytest.raises(BadInput, match="share of the portfolio has no further TP1 prefill"):
            fleet.set_role(of(fleet, "decode")[0], "prefill", "a test")
        fleet.scale({"TP1 prefill": 2}, "long prompts")
        assert (len(of(fleet, "prefill")), len(of(fleet, "decode"))) == (1, 2)
        fleet.allow({"TP1 prefill": 2, "TP1 decode": 1})
        assert (len(of(fleet, "prefill")), len(of(fleet, "decode"))) == (2, 1)
        assert {m.worker for m in fleet.members() if m.state == "serving"} == there

    pool(story)


def test_no_phase_is_left_to_no_worker(pool):
    async def story(front, fleet):
        (only,), decoders = of(fleet, "prefill"), of(fleet, "decode")
        with pytest.raises(BadInput, match="decode workers need a prefill worker"):
            fleet.set_role(only, "decode", "a test")
        with pytest.raises(BadInput, match="role: expected one of this fleet's: prefill, decode; got"):
            fleet.set_role(only, "any", "a test")
        with pytest.raises(BadInput, match="has the role decode already"):
            fleet.set_role(decoders[0], "decode", "a test")
        with pytest.raises(BadInput, match="no such worker"):
            fleet.set_role(WorkerId("w9"), "decode", "a test")
        with pytest.raises(BadInput, match="decode workers need a prefill worker"):
            fleet.drain(only, "a test")
        with pytest.raises(BadInput, match="need a decode worker to hand"):
            fleet.scale({"TP1 decode": 0}, "a test")
        fleet.set_role(decoders[0], "prefill", "a test")
        with pytest.raises(BadInput, match="need a decode worker to hand"):
            fleet.set_role(decoders[1], "prefill", "a test")
        assert fleet.wanted_kinds == {"TP1 prefill": 2, "TP1 decode": 1}

    pool(story)
