"""FleetCore over emulated engines in one process: what is lost, moved, refused or aborted, and what is not.

An emulated engine's next token is a hash of all before it, so one lost, repeated or swapped token would
change everything after it.
"""

import asyncio
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from front import SLO, A, B, C, Front, alone, emptied, profile, unprofiled, until

from controlplane.migration.move import Stage
from controlplane.placement.lengths import LengthTable
from controlplane.placement.policies import Policy
from controlplane.types import Slo, WorkerId


def by_ledger(profile, policy=Policy.SPREAD):
    from dataplane.live.ledger.placement import Placement

    return Placement({"": profile}, 8, LengthTable.constant(200), np.random.default_rng(0), policy)


def is_empty(placement):
    """Whether the ledger holds nothing, and its running sums have come back to zero."""
    counts = ("decoding", "context", "queued", "queued_tokens", "queued_context", "running_n")
    return not placement.request_rows and all((placement.ledger.workers[name] == 0).all() for name in counts)


def play(story, workers=(A, B), waiting=None, ledger=False, policy=Policy.SPREAD, slos=(), **sizes):
    """Run a story on a fresh fleet; after it, no request and no KV block may be left anywhere."""
    from controlplane.placement.queue import QueueSettings

    async def run():
        placement = by_ledger(profile(**sizes), policy) if ledger else unprofiled()
        placement.slos = slos
        front = Front(workers, profile(**sizes), waiting or QueueSettings(), placement)
        try:
            await asyncio.wait_for(story(front), 60)
            await emptied(front)
            assert not ledger or is_empty(placement)
        finally:
            await front.close()

    asyncio.run(run())


def test_requests_are_spread_and_every_stream_is_whole():
    async def story(front):
        names = [f"r{i}" for i in range(20)]
        for i, name in enumerate(names):
            await front.send(name, [i + 1] * 10)
        assert {len(front.core.requests.on_worker(w)) for w in (A, B)} == {10}
        await front.ended(*names)
        for i, name in enumerate(names):
            assert front.tokens[name] == alone([i + 1] * 10, 100)
            assert front.finish[name] == "LENGTH"

    play(story)


def test_time_on_the_way_to_an_engine_is_told_from_time_in_its_queue_and_steps():
    async def story(front):
        engine, late_s = front.engines[A], 0.2
        add = engine.add

        async def add_late(request):
            await asyncio.sleep(late_s)
            await add(request)

        engine.add = add_late
        await front.send("r")
        await front.ended("r")
        (way,) = front.core.metrics.engine_way_s.collect()
        found = {sample.name: sample.value for sample in way.samples}
        assert found["tokenfleet_engine_way_seconds_count"] == 1
        took_s = front.core.metrics.ttft_s.labels("normal")._sum.get()
        assert late_s <= found["tokenfleet_engine_way_seconds_sum"] < took_s

    play(story, workers=(A,))


def test_the_requests_of_a_killed_worker_go_on_elsewhere_without_a_gap_or_a_repeat():
    async def story(front):
        names = [f"r{i}" for i in range(12)]
        for i, name in enumerate(names):
            await front.send(name, [i + 1] * 10)
        await front.until("r0", 30)
        front.engines[A].kill("kill -9")
        await front.ended(*names)
        assert [front.tokens[name] for name in names] == [alone([i + 1] * 10, 100) for i in range(12)]
        assert sum(event.kind == "replay" for event in front.events) == 6

    play(story)


def test_requests_outlive_the_loss_of_every_worker_if_another_comes_in_time():
    async def story(front):
        await front.send("r", [5, 6])
        await front.until("r", 20)
        for engine in front.engines.values():
            engine.kill("kill -9")
        await asyncio.sleep(0.05)
        front.engines[C] = front.launch(C)
        front.core.attach(front.engines[C])
        await front.ended("r")
        assert front.tokens["r"] == alone([5, 6], 100)

    play(story)


def test_with_no_worker_in_time_the_client_is_told_in_an_error():
    from controlplane.placement.queue import QueueSettings

    async def story(front):
        ticket = await front.send("begun", [5, 6])
        await front.until("begun", 20)
        for engine in front.engines.values():
            engine.kill("kill -9")
        other = await front.send("fresh")
        await front.ended("begun", "fresh")
        assert front.finish["begun"] == front.finish["fresh"] == "ERROR"
        assert "the fleet has no worker, and got none within 0.3 s" in ticket.failure
        assert other.rejection is not None
        assert other.rejection.retry_after_s >= 1

    play(story, waiting=QueueSettings(max_wait_s=0.3))


def test_who_has_waited_for_the_first_worker_is_placed_on_it_and_not_turned_away():
    from controlplane.placement.queue import QueueSettings

    async def story(front):
        front.core.await_workers(lambda: True)
        names = [f"r{i}" for i in range(6)]
        for name in names:
            await front.send(name, max_tokens=20)
        admission = front.core.admission
        admission._clock = lambda: time.monotonic() + 40.0  # which it takes
        admission.look()
        await until(lambda: not admission._wake.is_set())
        front.engines[A] = front.launch(A)
        front.core.attach(front.engines[A])
        await front.ended(*names)  # two at a time
        assert set(front.finish.values()) == {"LENGTH"}

    play(story, workers=(), max_seqs=2, waiting=QueueSettings(max_wait_s=30.0))


def test_what_cannot_be_replayed_ends_in_an_error_and_never_wrongly():
    async def story(front):
        ticket = await front.send("g", thinking_token_budget=50)
        await front.until("g", 5)
        front.engines[front.core.requests.get("g").worker].kill("kill -9")
        await front.ended("g")
        assert front.finish["g"] == "ERROR"
        assert "thinking" in ticket.failure

    play(story)


@pytest.mark.parametrize("ledger", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_streams_are_whole_whatever_moves_and_dies(seed, ledger):
    rng = np.random.default_rng(seed)

    async def story(front):
        lengths = rng.integers(3, 400, 24)
        prompts = [rng.integers(1, 2000, n).tolist() for n in lengths]
        names = [f"r{i}" for i in range(24)]
        for name, prompt in zip(names, prompts, strict=True):
            await front.send(name, prompt, max_tokens=150)
        moves = []
        for turn in range(30):
            await asyncio.sleep(float(rng.uniform(0, 0.02)))
            name = names[int(rng.integers(24))]
            target = list(front.engines)[int(rng.integers(len(front.engines)))]
            moves.append(asyncio.ensure_future(front.core.segments.move(name, target, "a test")))
            if turn in (8, 16, 24):
                alive = [w for w, e in front.engines.items() if not e.is_lost]
                front.engines[alive[int(rng.integers(len(alive)))]].kill("kill -9")
                worker = WorkerId(f"n{turn}")
                front.engines[worker] = front.launch(worker)
                front.core.attach(front.engines[worker])
        await front.ended(*names)
        done = await asyncio.gather(*moves)
        assert {move.outcome for move in done} <= {"done", "aborted", "lost"}
        for name, prompt in zip(names, prompts, strict=True):
            assert front.tokens[name] == alone(prompt, 150)
            assert front.finish[name] == "LENGTH"

    play(story, workers=(A, B, C), ledger=ledger)


def test_a_fleet_closes_in_the_middle_of_a_move():
    async def story():
        front = Front((A, B), profile(), QueueSettings())
        await front.send("r", [1] * 200, max_tokens=1000)
        await front.until("r", 3)
        moving = asyncio.ensure_future(front.core.segments.move("r", B, "a test"))
        async with asyncio.timeout(20):
            await front.close()
            moving.cancel()
            await asyncio.wait([moving])

    from controlplane.placement.queue import QueueSettings

    asyncio.run(story())


def test_a_client_that_leaves_while_its_stream_is_cut_over_leaves_no_kv_behind():
    async def story(front):
        for turn in range(20):  # whether the target has admitted it by then is a race
            name = f"r{turn}"
            await front.send(name, [turn + 1] * 200, max_tokens=1000)
            await front.until(name, 3)
            target = B if front.core.requests.get(name).worker == A else A
            moving = asyncio.ensure_future(front.core.segments.move(name, target, "a test"))
            while getattr(front.core.migrations.open.get(name), "stage", None) is not Stage.CUTTING_OVER:
                await asyncio.sleep(0)
            await front.core.abort_requests_async([name])
            await moving
        async with asyncio.timeout(10):  # well before a hold that nobody released would run out
            while any(e.batch.free_blocks < e.batch.total_blocks for e in front.engines.values()):
                await asyncio.sleep(0.01)

    play(story)


def test_an_abort_ends_a_request_in_the_engine_and_nothing_more_is_said_of_it():
    async def story(front):
        await front.send("r", max_tokens=5000)
        await front.until("r", 10)
        await front.core.abort_requests_async(["r"])
        told = len(front.tokens["r"])
        await front.send("after")
        await front.ended("after")
        assert len(front.tokens["r"]) <= told + 1  # a batch may have been on its way to the front end

    play(story)


def test_a_client_that_leaves_ends_all_requests_of_its_ticket():
    async def story(front):
        ticket = await front.send("one", max_tokens=5000)
        await front.send("two", ticket=ticket, max_tokens=5000)
        await front.send("other")
        await front.core.abandon(ticket)
        await front.ended("one", "two", "other")
        assert front.finish == {"one": "ABORT", "two": "ABORT", "other": "LENGTH"}

    play(story)


def test_a_full_fleet_lets_wait_and_a_full_queue_turns_away():
    from controlplane.placement.queue import QueueSettings

    async def story(front):
        running = [f"r{i}" for i in range(4)]
        for name in running:
            await front.send(name)
        waits = await front.send("waits")
        refused = await front.send("refused")
        assert (len(front.core.admission), waits.rejection) == (1, None)
        assert refused.rejection is not None
        await front.ended(*running, "waits", "refused")
        assert front.finish["waits"] == "LENGTH"
        assert front.finish["refused"] == "ERROR"

    play(story, max_seqs=2, waiting=QueueSettings(max_requests=1))


def test_work_that_may_wait_is_not_turned_away_from_a_full_queue():
    from controlplane.placement.queue import QueueSettings
    from controlplane.types import Slo
    from dataplane.live.ledger.request import Ticket

    tight, loose = Slo(60.0, 1.0), Ticket("key", "test", Slo(3600.0, 1.0), 0)

    async def story(front):
        running, waiting = [f"r{i}" for i in range(4)], [f"loose{i}" for i in range(6)]
        for name in running:
            await front.send(name)
        held = [await front.send(name, ticket=loose) for name in waiting]
        assert [tracked.rejection for tracked in held] == [None] * 6
        chat = await front.send("chat", ticket=Ticket("key", "test", tight, 0))
        refused = await front.send("refused", ticket=Ticket("key", "test", tight, 0))
        assert (chat.rejection, len(front.core.admission)) == (None, 7)
        assert refused.rejection is not None
        await front.ended(*running, "chat", "refused", *waiting)
        assert {front.finish[name] for name in (*running, "chat", *waiting)} == {"LENGTH"}

    play(story, max_seqs=2, waiting=QueueSettings(max_requests=1), slos=(tight, loose.slo))


def test_a_high_request_goes_ahead_of_normal_ones_that_wait():
    from dataplane.live.ledger.request import Ticket

    async def story(front):
        await front.send("runs", max_tokens=60)
        for i in range(3):
            await front.send(f"normal{i}", max_tokens=20)
        await front.send("high", ticket=Ticket("high", "test", SLO, 1), max_tokens=20)
        await front.ended("runs", "high")
        assert not any(f"normal{i}" in front.finish for i in range(3))
        await front.ended("normal0", "normal1", "normal2")

    play(story, workers=(A,), max_seqs=1)


def test_a_gateway_that_shuts_down_lets_finish_and_then_says_an_error():
    async def story(front):
        short, long = await front.send("short", max_tokens=20), await front.send("long", max_tokens=50_000)
        await asyncio.to_thread(front.core.shutdown, 0.4)
        assert front.finish["short"] == "LENGTH"
        assert front.finish["long"] == "ERROR"
        assert (short.failure, long.failure) == (None, "the fleet is shutting down")

    play(story)


def test_the_ledger_counts_the_tokens_that_passed_and_assigns_by_the_constraints():
    from dataplane.live.ledger.request import Ticket

    async def story(front):
        led = front.core.placement.ledger
        for i in range(6):
            await front.send(f"r{i}", [i + 1] * 50, max_tokens=400)
        await asyncio.gather(*(front.until(f"r{i}", 30) for i in range(6)))
        assert led.workers["decoding"][:2].tolist() == [3, 3]
        held = [sum(t.context_tokens for t in front.core.requests.on_worker(w)) for w in (A, B)]
        assert led.workers["context"][:2].tolist() == held
        # A token takes 2.01 ms alone and 2.04 ms as the fourth: constraint (b) holds this one back.
        hasty = Ticket("no", "test", Slo(10.0, 0.00202), 0)
        await front.send("no", ticket=hasty)
        assert len(front.core.admission) == 1
        await front.core.abandon(hasty)
        await front.ended(*(f"r{i}" for i in range(6)))

    play(story, ledger=True)


def test_every_request_is_accounted_for():
    async def story(front):
        for i in range(10):
            await front.send(f"r{i}", max_tokens=20 + i)
        await front.ended(*(f"r{i}" for i in range(10)))
        counted = front.core.metrics.requests.collect()[0].samples
        assert sum(s.value for s in counted if s.name.endswith("_total")) == 10
        assert "tokenfleet_output_tokens_total 245.0" in front.core.metrics.exposition().decode()

    play(story)


def heartbeats(front, placed_by):
    return front.core.metrics.heartbeats.labels(placed_by)._value.get()


def test_exact_heartbeats_put_requests_on_as_few_workers_as_keep_their_targets():
    async def story(front):
        names = [f"r{i}" for i in range(12)]
        await asyncio.gather(*(front.send(name, [i + 1] * 10) for i, name in enumerate(names)))
        await asyncio.gather(*(front.until(name, 1) for name in names))
        used = {front.core.requests.get(name).worker for name in names}
        assert len(used) == 2, "8 seats each: one worker is too few, a third is not needed"
        await front.ended(*names)
        assert [front.tokens[name] for name in names] == [alone([i + 1] * 10, 100) for i in range(12)]
        assert heartbeats(front, "exact") >= 1

    play(story, workers=(A, B, C), ledger=True, policy=Policy.EXACT, max_seqs=8)


def test_requests_outlive_a_worker_under_the_exact_policy():
    async def story(front):
        names = [f"r{i}" for i in range(6)]
        for i, name in enumerate(names):
            await front.send(name, [i + 1] * 10)
        await asyncio.gather(*(front.until(name, 20) for name in names))
        front.engines[front.core.requests.get("r0").worker].kill("kill -9")
        await front.ended(*names)
        assert [front.tokens[name] for name in names] == [alone([i + 1] * 10, 100) for i in range(6)]

    play(story, ledger=True, policy=Policy.EXACT)


def test_a_solver_that_takes_its_time_holds_up_no_tokens_and_its_best_placement_holds(monkeypatch):
    from controlplane.placement import exact

    solve, begun, may_end = exact.solve, threading.Event(), threading.Event()

    def slowly(beat, limit_s):
        begun.set()
        may_end.wait(30)
        return replace(solve(beat, limit_s), proven=False)

    async def story(front):
        await front.send("runs", max_tokens=3000)
        await front.until("runs", 1)
        monkeypatch.setattr(exact, "solve", slowly)
        await front.send("waits")
        await asyncio.to_thread(begun.wait)
        await front.until("runs", len(front.tokens["runs"]) + 50)
        assert front.core.requests.get("waits").worker is None
        may_end.set()
        await front.ended("waits", "runs")
        assert front.finish == {"waits": "LENGTH", "runs": "LENGTH"}
        assert heartbeats(front, "best found") == 1
        assert [event.kind for event in front.events] == ["fallback"]

    play(story, ledger=True, policy=Policy.EXACT)
