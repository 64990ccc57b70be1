"""A running fleet's state, as the control API sends it, shows what its gateway counts."""

import asyncio
from types import SimpleNamespace

import msgspec
from front import A, B, C, Front, profile

from controlplane.types import WorkerId
from dataplane.live.control.fleet_state import FleetState, Observer


def test_a_running_fleet_is_seen_as_it_is(live_extra):
    """Arrivals, tokens, a move, a killed worker, replays, ends: each look against the gateway's own."""
    from controlplane.placement.queue import QueueSettings
    from dataplane.live.control.fleet_state import DemandCount
    from dataplane.live.control.operations import Operations
    from dataplane.live.control.step_times import StepTimes
    from harness.bare_fleet import bare_facts

    async def story():
        front = Front((A, B, C), profile(), QueueSettings())
        members = [SimpleNamespace(worker=w, kind="", state="serving") for w in (A, B, C)]
        pool = SimpleNamespace(
            members=lambda: iter(members), wanted=3, asked_kinds={"": 3}, cold_start_s=0.0, drain_s=0.0
        )
        facts = bare_facts()
        arrived = DemandCount()
        front.core.on_arrival.append(arrived.add)
        operations = Operations(facts, front.core, pool, arrived, StepTimes({}, front.events))
        observer, states = Observer({}), set()

        def look():
            sent = msgspec.msgpack.encode(operations.state())
            seen = observer.snapshot(msgspec.msgpack.decode(sent, type=FleetState), 0.0)
            for load in seen.workers:
                here = front.core.requests.on_worker(WorkerId(load.worker))
                both = [*load.requests, *load.waiting]
                assert sorted((r.request, r.tokens) for r in both) == sorted(
                    (t.id, t.context_tokens) for t in here
                )
                states.update((t.stays, t.state) for t in here)
            return seen

        names = [f"r{i}" for i in range(30)]
        try:
            for i, name in enumerate(names):
                await front.send(name, [i + 1] * 10, max_tokens=100 + i)
                look()
            await front.until("r0", 10)
            look()
            (r0,) = (t for t in front.core.requests if t.id == "r0")
            assert not any(row.fixed for row in operations.state().requests)
            given_s, r0.last_token_s = (
                r0.last_token_s,
                r0.last_token_s - 2.0,
            )  # others of its worker get theirs
            assert [row.request for row in operations.state().requests if row.fixed] == ["r0"]
            r0.last_token_s = given_s
            moving = asyncio.ensure_future(front.core.segments.move("r0", B, "a test"))
            while not moving.done():
                look()
                await asyncio.sleep(0.001)
            front.engines[A].kill("kill -9")
            while len(front.core.requests):
                look()
                await asyncio.sleep(0.005)
            assert look().waiting_requests == 0
            assert not operations.state().requests
            assert {(1, "prefilling"), (1, "decoding"), (2, "decoding")} <= states
        finally:
            await front.close()

    asyncio.run(asyncio.wait_for(story(), 60))
