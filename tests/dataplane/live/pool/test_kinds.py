"""A fleet of two kinds of worker: counted, replaced, drained and placed on by kind."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from front import Front, pool_on, profile, until

from controlplane.errors import BadInput
from controlplane.placement.lengths import LengthTable
from controlplane.types import WorkerId

FAST, SLOW = "h100-sxm TP2", "a100-sxm TP1"


@pytest.fixture
def play(monkeypatch):
    from controlplane.placement.queue import QueueSettings
    from controlplane.worker_type import WorkerGroup, WorkerType
    from dataplane.live.ledger.placement import Placement
    from dataplane.processes import keeper

    monkeypatch.setattr(keeper, "PAUSES", keeper.Pauses(longest_s=0.01))
    slow = profile()
    profiles = {FAST: replace(slow, gpu="h100-sxm", tp_degree=2), SLOW: replace(slow, gpu="a100-sxm")}

    def run(story, fast=1, slow=1, by_profile=False):
        async def scene():
            lengths = LengthTable.constant(200)
            placement = Placement(profiles, 8, lengths, np.random.default_rng(0))
            front = Front((), profiles[SLOW], QueueSettings(), placement if by_profile else None)
            fast_group = WorkerGroup(WorkerType("h100-sxm", 2), fast)
            slow_group = WorkerGroup(WorkerType("a100-sxm", limit=2), slow)
            async with pool_on(front, [fast_group, slow_group], 4, profiles) as fleet:
                await asyncio.wait_for(story(front, fleet, fleet.host), 30)

        asyncio.run(scene())

    return run


def kinds_serving(fleet):
    return sorted(member.kind for member in fleet.members() if member.state == "serving")


def test_each_kind_has_its_own_number(play):
    async def story(front, fleet, host):
        assert (fleet.wanted, kinds_serving(fleet)) == (2, [SLOW, FAST])
        fleet.scale({SLOW: 2}, "a test")
        await until(lambda: kinds_serving(fleet) == [SLOW, SLOW, FAST])
        fleet.scale({FAST: 0, SLOW: 1}, "a test")
        await until(lambda: kinds_serving(fleet) == [SLOW] and fleet.serving == 1)
        assert fleet.wanted_kinds == {FAST: 0, SLOW: 1}
        last = [event for event in front.events if event.kind == "scale"][-1].as_json()
        assert (last["before"], last["workers"], last["kinds"]) == (3, 1, {FAST: 0, SLOW: 1})

    play(story)


def test_a_limit_counts_workers_that_leave_and_those_that_come_start_as_they_end(play):
    from controlplane.scaler.mix import MixSettings

    async def story(front, fleet, host):
        fleet.limits = MixSettings(max_gpus=4)
        gpus = []

        async def watch():
            while True:
                gpus.append(sum(n * fleet.types[kind].gpus for kind, n in fleet.held.items()))
                await asyncio.sleep(0)

        watching = asyncio.ensure_future(watch())
        for i in range(6):
            await front.send(f"r{i}", [i + 1] * 30, max_tokens=300)
        await asyncio.gather(*(front.until(f"r{i}", 5) for i in range(6)))
        fleet.scale({FAST: 2, SLOW: 0}, "a test")
        assert kinds_serving(fleet) == [FAST]
        await until(lambda: kinds_serving(fleet) == [FAST, FAST] and fleet.held == {FAST: 2})
        await front.ended(*(f"r{i}" for i in range(6)))
        watching.cancel()
        assert max(gpus) == 4

    play(story, slow=2)


def test_a_lost_worker_is_replaced_by_one_of_its_kind(play):
    async def story(front, fleet, host):
        lost = next(worker for worker, kind in host.kinds.items() if kind == FAST)
        front.engines[lost].kill("kill -9")
        await until(lambda: len(host.kinds) == 3 and kinds_serving(fleet) == [SLOW, FAST])
        assert lost not in {member.worker for member in fleet.members()}

    play(story)


def test_the_last_of_a_kind_drains_by_computing_its_requests_anew_elsewhere(play):
    async def story(front, fleet, host):
        for i in range(6):
            await front.send(f"r{i}", [i + 1] * 30, max_tokens=300)
        await asyncio.gather(*(front.until(f"r{i}", 5) for i in range(6)))
        fast = next(worker for worker, kind in host.kinds.items() if kind == FAST)
        held = [t.id for t in front.core.requests.on_worker(fast)]
        assert held
        fleet.drain(WorkerId(fast), "a test")
        await until(lambda: kinds_serving(fleet) == [SLOW] and fleet.wanted == 1)
        await front.ended(*(f"r{i}" for i in range(6)))
        assert all(len(front.tokens[f"r{i}"]) == 300 for i in range(6))
        moves = [move for move in front.core.migrations.closed if move.request in held and move.moved]
        assert moves
        assert {move.mode for move in moves} == {"recompute"}
        assert all("recomputed" in move.reason for move in moves)

    play(story)


def test_a_drain_prefers_workers_of_its_kind_and_brings_kv_there(play):
    async def story(front, fleet, host):
        for i in range(8):
            await front.send(f"r{i}", [i + 1] * 200, max_tokens=400)
        await asyncio.gather(*(front.until(f"r{i}", 5) for i in range(8)))
        source, haven = (worker for worker, kind in host.kinds.items() if kind == SLOW)
        held = {t.id for t in front.core.requests.on_worker(source)}
        fleet.drain(WorkerId(source), "a test")
        await until(lambda: fleet.state_of(WorkerId(source)) is None)
        moves = [move for move in front.core.migrations.closed if move.request in held and move.moved]
        assert moves
        assert {(move.target, move.mode) for move in moves} == {(haven, "live")}
        await front.ended(*(f"r{i}" for i in range(8)))

    play(story, slow=2)


def test_what_cannot_be_is_refused(play):
    async def story(front, fleet, host):
        with pytest.raises(BadInput, match=r"a100-sxm TP1: at most 2, got 3"):
            fleet.scale({SLOW: 3}, "a test")
        with pytest.raises(BadInput, match="from 0 to 4"):
            fleet.scale({FAST: 4}, "a test")
        with pytest.raises(BadInput, match="expected one of h100-sxm TP2, a100-sxm TP1, got 'b200'"):
            fleet.scale({"b200": 1}, "a test")
        with pytest.raises(BadInput, match="one of this fleet's types: "):
            fleet.types.only()
        assert fleet.wanted_kinds == {FAST: 1, SLOW: 1}

    play(story)


def test_placement_goes_by_the_step_times_of_each_kind(play):
    async def story(front, fleet, host):
        # A refit of one kind: its steps of 2 s would break every TPOT target.
        front.core.placement.kinds.refit(SLOW, replace(profile().step, base_s=2.0))
        for i in range(6):
            await front.send(f"r{i}", [i + 1] * 30, max_tokens=50)
        fast = next(worker for worker, kind in host.kinds.items() if kind == FAST)
        assert {t.worker for t in front.core.requests} <= {fast, None}
        await front.ended(*(f"r{i}" for i in range(6)))

    play(story, by_profile=True)
