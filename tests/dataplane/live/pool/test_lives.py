"""A worker's life: each pair of the table, and pools that are given orders and losses at random."""

import asyncio
import gc
import random
from contextlib import suppress
from itertools import pairwise, product

import pytest
from front import Front, FrontHost, profile
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import BadInput, IllegalStep
from dataplane.live.pool.member import NEXT, SHOWN, Life, LifeEvent, Member, step

PAIRS = list(product(Life, LifeEvent))
LATER = {life: set(NEXT[life].values()) for life in Life}
MOST, SHARE, KIND = 5, 4, "TP1"


def member(life=Life.STARTING):
    return Member("w0", "TP1", life, 0.0, "a test", 1)


def reached_from(life):
    reached, ahead = set(), [life]
    while ahead:
        for later in LATER[ahead.pop()] - reached:
            reached.add(later)
            ahead.append(later)
    return reached


@pytest.mark.parametrize(("life", "event"), PAIRS)
def test_each_pair_of_state_and_event_is_a_step_or_raises(life, event):
    if event in NEXT[life]:
        assert step(life, event) is NEXT[life][event]
        return
    one = member(life)
    with pytest.raises(IllegalStep, match=f"^a worker: {event} while {life}$"):
        one.happens(event)
    assert one.life is life


@pytest.mark.parametrize("life", [life for life in Life if life is not Life.GONE])
def test_every_state_is_reached_and_leads_to_the_end(life):
    assert life in (Life.STARTING, Life.TRIED) or life in reached_from(Life.STARTING)
    assert Life.GONE in reached_from(life)


@given(st.sampled_from([Life.STARTING, Life.TRIED]), st.lists(st.sampled_from(LifeEvent), max_size=60))
def test_a_life_of_any_events_never_goes_back(first, events):
    one, seen = member(first), [first]
    for event in events:
        try:
            one.happens(event)
        except IllegalStep:
            assert event not in NEXT[seen[-1]]
        seen.append(one.life)
    shown = [SHOWN.get(life, "draining") for life in seen]
    assert "starting" not in shown[len([s for s in shown if s == "starting"]) :], "it starts once"
    for before, after in pairwise(seen):
        assert after is before or after in LATER[before]
        if before in (Life.DRAINED, Life.RETIRED, Life.EVACUATED, Life.ENDING, Life.GONE):
            assert after in (before, Life.ENDING, Life.GONE), "it has nothing left to serve with"


def orders(pool, front, host, rng):
    """What may befall a pool, one of it at random."""
    there = [m.worker for m in pool.members()]
    worker = rng.choice(there) if there else "w0"
    serving = [m.worker for m in pool.members() if m.state == "serving"]
    return rng.choice(
        [
            lambda: pool.scale({"TP1": rng.randint(1, MOST)}, "a test"),
            lambda: pool.drain(worker, "a test"),
            lambda: pool.cancel_drain(worker, "a test"),
            lambda: pool.evacuate([worker], rng.choice([0.05, 1.0]), "a test"),
            lambda: pool.allow({KIND: rng.randint(1, SHARE)}),
            lambda: front.engines[rng.choice(serving)].kill("kill -9") if serving else None,
            lambda: setattr(host, "failures", 1),
            lambda: (host.may_stop.clear, host.may_stop.set)[rng.random() < 0.7](),
        ]
    )


@pytest.mark.parametrize("seed", range(12))
def test_a_pool_comes_to_the_wanted_number_whatever_befalls_it(monkeypatch, seed):
    from controlplane.placement.queue import QueueSettings
    from controlplane.worker_type import WorkerGroup, WorkerType
    from dataplane.live.pool.fleet_types import FleetTypes
    from dataplane.live.pool.pool import WorkerPool
    from dataplane.processes import keeper

    monkeypatch.setattr(keeper, "PAUSES", keeper.Pauses(longest_s=0.01))
    rng, faults = random.Random(seed), []

    async def story():
        asyncio.get_running_loop().set_exception_handler(lambda _, fault: faults.append(fault))
        front = Front((), profile(), QueueSettings())
        host = FrontHost(front)
        types = FleetTypes([WorkerGroup(WorkerType(None), 3)])
        pool = WorkerPool(host, front.core, MOST, types, share={KIND: SHARE}, health_every_s=0.01)
        await pool.start()
        for i in range(4):
            await front.send(f"r{i}", [i + 1] * 30, max_tokens=600)
        for _ in range(25):
            with_room = pool.held[KIND] <= SHARE
            with suppress(BadInput):
                orders(pool, front, host, rng)()
            assert not with_room or pool.held[KIND] <= SHARE
            await asyncio.sleep(rng.choice([0.0, 0.0, 0.01]))
        host.may_stop.set()
        host.failures = 0
        pool.scale({"TP1": 3}, "a test")
        pool.allow({KIND: 3})
        async with asyncio.timeout(120):
            while not pool.serving == pool.held[KIND] == 3:
                await asyncio.sleep(0.005)
        await front.ended(*(f"r{i}" for i in range(4)))
        await pool.close()
        await front.close()
        assert all(engine.is_lost for engine in front.engines.values())

    asyncio.run(asyncio.wait_for(story(), 300))  # the first compiles what places, on a new machine
    gc.collect()
    assert not [fault for fault in faults if isinstance(fault.get("exception"), IllegalStep)], faults
