"""Emulated engines keep an engine's promises: order, blocks, moves, failures. No model, real messages."""

import asyncio
import time

import numpy as np
import pytest

from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.profile import Profile, Residuals, Source
from controlplane.perfmodel.step import StepModel
from controlplane.snapshot import Pace
from controlplane.types import WorkerId
from dataplane.live.emulated.engine import EmulatedEngine, Fabric
from dataplane.live.engine_api.link import ENDS_AT
from dataplane.live.engine_api.messages import Finish
from dataplane.live.migration.move import MoveBudget
from harness.bare_fleet import BareFleet

A, B = WorkerId("a"), WorkerId("b")


def profile(tokens=4096, max_seqs=64, max_batched=512):
    return Profile(
        model="emulated",
        gpu="none",
        tp_degree=1,
        step=StepModel(2e-3, 2e-6, 1e-5, 1e-8),
        kv=KvModel(tokens, 16, 2048),
        engine=EngineLimits(max_batched_tokens=max_batched, max_seqs=max_seqs),
        residuals=Residuals(0, 0, 0, 1),
        source=Source("published", "made up for a test", "none", "2026-01-01"),
    )


def run(story, *, tokens=4096, speed=20.0, workers=2, bytes_per_s=2e9, stage_s=10.0, **settings):
    """Run a story on a fleet of emulated engines, and check afterwards that no block was lost."""

    async def play():
        fabric = Fabric(bytes_per_s, speed)
        engines = [EmulatedEngine(WorkerId(n), profile(tokens, **settings), fabric) for n in "ab"[:workers]]
        fleet = BareFleet(engines, MoveBudget(stage_s=stage_s))
        try:
            await asyncio.wait_for(story(fleet, *engines), 20)
            for engine in engines:
                if not engine.is_lost:
                    await asyncio.wait_for(settled(engine), 20)
        finally:
            await fleet.close()
            for engine in engines:
                await engine.close()

    asyncio.run(play())


async def settled(engine):
    while len(engine.batch) or engine.batch.free_blocks < engine.batch.total_blocks:
        await asyncio.sleep(0.005)


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(3, 2000, length).tolist()


async def unmoved(fleet, tokens, **params):
    stream = await fleet.start(A, tokens, params)
    await stream.ended()
    return stream.tokens


def test_a_copy_keeps_the_pace_unless_it_would_not_end_in_time():
    budget = MoveBudget(bytes_per_s=100e6, per_worker=2, stage_s=10.0)
    assert budget.pace(1e6).fixed_bytes_per_s == 50e6
    assert budget.pace(1e9).fixed_bytes_per_s == 200e6
    assert MoveBudget().pace(1e9).fixed_bytes_per_s == 0


def test_a_stream_is_repeatable_and_ends_at_max_tokens():
    async def story(fleet, a, b):
        first = await unmoved(fleet, prompt(100), max_tokens=50)
        second = await fleet.start(B, prompt(100), {"max_tokens": 50})
        assert await second.ended() == Finish.LENGTH
        assert second.tokens == first
        assert len(first) == 50

    run(story)


@pytest.mark.parametrize("mode", ["live", "stop-and-copy", "recompute"])
def test_a_moved_stream_says_what_the_unmoved_one_says(mode):
    async def story(fleet, a, b):
        expected = await unmoved(fleet, prompt(700), max_tokens=300)
        stream = await fleet.start(A, prompt(700), {"max_tokens": 300})
        await stream.until(20)
        move = await fleet.move(stream, B, mode)
        await stream.ended()
        assert (move.outcome, move.reason) == ("done", "")
        assert stream.tokens == expected
        if mode == "live":
            assert move.tail_tokens < 700 / 4

    run(story)


@pytest.mark.parametrize("answer", [300, 1])
def test_an_answer_ends_where_its_client_has_set_the_end_moved_or_not(answer):
    async def story(fleet, a, b):
        asked = {"ignore_eos": False, "max_tokens": 2000, "extra_args": {ENDS_AT: 700 + answer}}
        expected = await unmoved(fleet, prompt(700), max_tokens=answer)
        stream = await fleet.start(A, prompt(700), asked)
        if answer > 20:
            await stream.until(20)
            assert (await fleet.move(stream, B)).outcome == "done"
        assert await stream.ended() == Finish.STOP
        assert stream.tokens == expected

    run(story)


def test_a_loader_rests_until_its_request_follows_and_is_never_computed():
    async def story(fleet, a, b):
        bystander = await fleet.start(B, prompt(20, 1), {"max_tokens": 4000})
        stream = await fleet.start(A, prompt(800), {"max_tokens": 1000})
        await asyncio.gather(bystander.until(5), stream.until(5))
        before, _ = b.steps()
        moving = asyncio.ensure_future(fleet.move(stream, B))
        while not any(b.batch._holds.is_pinned(s.id) for s in b.batch._segments.values()):
            await asyncio.sleep(0)
        (loader,) = (s for s in b.batch._segments.values() if b.batch._holds.is_pinned(s.id))
        assert (loader.blocks, b.batch.running, b.batch.waiting) == (800 // 16, 1, 0)
        move = await moving
        await stream.until(len(stream.tokens) + 5)
        assert (move.outcome, len(move.stages) > 1) == ("done", True)
        _, steps = b.steps(before)
        assert [s.prefill_tokens for s in steps if s.prefill_tokens] == [1]  # of the request itself
        for each in (bystander, stream):
            await fleet.abort(each)

    run(story, speed=1.0, bytes_per_s=1e7)


def test_a_resting_loader_that_is_aborted_or_forgotten_is_let_go():
    async def story(fleet, a, b):
        from dataplane.live.engine_api.kv_messages import KvLoad
        from dataplane.live.engine_api.segment import loader_request

        stream = await fleet.start(A, prompt(100), {"max_tokens": 3000})
        await stream.until(5)
        assert a.batch._holds.begin(stream.segment, True, time.monotonic())
        load = KvLoad(a.info.kv_addresses, stream.segment, 96)
        for ended_by in ("abort", "deadline"):
            await b.add(loader_request(stream.request, stream.tokens, f"move-{ended_by}", load, ()))
            while not b.batch._holds.is_pinned(f"move-{ended_by}"):
                await asyncio.sleep(0)
            assert b.batch.free_blocks == b.batch.total_blocks - 6
            if ended_by == "abort":
                await b.abort(["move-abort"])
            else:
                b.batch.plan(time.monotonic() + 1000)
            assert (b.batch.free_blocks, len(b.batch)) == (b.batch.total_blocks, 0)
        await fleet.abort(stream)
        a.batch._holds.release(stream.segment)

    run(story)


def test_moves_that_went_through_teach_their_pairs_pace_and_others_do_not():
    async def story(fleet, a, b):
        stream = await fleet.start(A, prompt(800), {"max_tokens": 1000})
        await stream.until(5)
        refused = await fleet.move(stream, WorkerId("nobody"))
        assert (refused.moved, fleet.migrations.paces.usual) == (False, Pace())
        move = await fleet.move(stream, B)
        learned = fleet.migrations.paces.pairs[A, B]
        assert learned.moves == fleet.migrations.paces.usual.moves == 1
        assert learned.bytes_per_s == pytest.approx(move.copied_bytes / move.copy_s)
        assert learned.pause_s == pytest.approx(move.downtime_s)
        fleet.migrations.paces.forget(B)
        assert (fleet.migrations.paces.pairs, fleet.migrations.paces.usual.moves) == ({}, 1)
        await fleet.abort(stream)

    run(story, speed=1.0, bytes_per_s=1e7)


def test_a_stream_can_be_moved_to_and_fro():
    async def story(fleet, a, b):
        expected = await unmoved(fleet, prompt(300), max_tokens=400)
        stream = await fleet.start(A, prompt(300), {"max_tokens": 400})
        for turn in range(5):
            await stream.until(20 + 60 * turn)
            assert (await fleet.move(stream, B if turn % 2 == 0 else A)).moved
        await stream.ended()
        assert stream.tokens == expected

    run(story)


def test_a_waiting_request_moves_without_kv():
    async def story(fleet, a, b):
        running = [await fleet.start(A, prompt(400, i), {"max_tokens": 200}) for i in range(2)]
        await running[1].until(5)
        waiting = await fleet.start(A, prompt(500, 9), {"max_tokens": 20})
        move = await fleet.move(waiting, B)
        assert move.moved
        assert move.bytes == 0
        assert await waiting.ended() == Finish.LENGTH
        assert not running[0].finish
        await asyncio.gather(*(s.ended() for s in running))

    run(story, tokens=1280)


def test_a_full_target_leaves_the_request_at_the_source():
    async def story(fleet, a, b):
        filler = [await fleet.start(B, prompt(600, i), {"max_tokens": 100}) for i in range(2)]
        await filler[1].until(2)
        stream = await fleet.start(A, prompt(900), {"max_tokens": 400})
        await stream.until(10)
        move = await fleet.move(stream, B)
        assert move.outcome == "aborted"
        assert "no room" in move.reason
        assert stream.worker == A
        seen = len(stream.tokens)
        await stream.until(seen + 5)
        assert stream.finish is None
        for each in (*filler, stream):
            await fleet.abort(each)

    run(story, tokens=1408, speed=1.0, stage_s=0.05)


def test_a_request_that_ends_while_it_is_copied_ends_once():
    async def story(fleet, a, b):
        stream = await fleet.start(A, prompt(600), {"max_tokens": 12})
        await stream.until(11)
        move = await fleet.move(stream, B)
        assert await stream.ended() == Finish.LENGTH
        assert len(stream.tokens) == 12
        assert move.outcome in ("aborted", "done")

    run(story)


def test_a_client_that_leaves_during_a_move_leaves_nothing_behind():
    async def story(fleet, a, b):
        stream = await fleet.start(A, prompt(800), {"max_tokens": 2000})
        await stream.until(5)
        moving = asyncio.ensure_future(fleet.move(stream, B))
        await stream.until(7)
        await fleet.abort(stream)
        move = await moving
        assert move.outcome == "aborted"
        assert move.reason.startswith("it ended")

    run(story, speed=1.0, bytes_per_s=1e6)


@pytest.mark.parametrize("victim", ["a", "b"])
def test_when_a_side_dies_in_the_copy_the_move_is_aborted_and_the_other_side_is_clean(victim):
    async def story(fleet, a, b):
        stream = await fleet.start(A, prompt(800), {"max_tokens": 100})
        await stream.until(5)
        moving = asyncio.ensure_future(fleet.move(stream, B))
        await stream.until(8)
        (a if victim == "a" else b).kill()
        move = await moving
        assert move.outcome == "aborted"
        assert await stream.ended() == (Finish.ERROR if victim == "a" else Finish.LENGTH)

    run(story, speed=1.0, bytes_per_s=1e6)  # a copy of over a second, of which a few steps pass


def test_a_load_from_a_segment_that_is_gone_ends_in_an_error():
    async def story(fleet, a, b):
        from dataplane.live.engine_api.kv_messages import KvLoad, Transfer
        from dataplane.live.engine_api.segment import segment_request

        stream = await fleet.start(B, prompt(10), {"max_tokens": 1})
        await stream.ended()
        load = KvLoad(a.info.kv_addresses, "nobody", 64, inline=True)
        fleet._listening["orphan"] = stream
        stream.finish = None
        await b.add(segment_request(stream.request, prompt(80), "orphan", Transfer(load)))
        assert await stream.ended() == Finish.ERROR

    run(story)


def test_preempted_requests_finish_with_the_same_tokens():
    async def story(fleet, a):
        alone = [await unmoved(fleet, prompt(200, i), max_tokens=150) for i in range(4)]
        together = [await fleet.start(A, prompt(200, i), {"max_tokens": 150}) for i in range(4)]
        await asyncio.gather(*(s.ended() for s in together))
        assert [s.tokens for s in together] == alone
        assert fleet.telemetry[A].preemptions > 0

    run(story, tokens=1120, workers=1)


def test_sixty_four_workers_run_in_one_process():
    async def play():
        fabric = Fabric(speed=1.0)
        engines = [EmulatedEngine(WorkerId(f"w{n}"), profile(), fabric) for n in range(64)]
        fleet = BareFleet(engines)
        streams = [
            await fleet.start(e.info.worker, prompt(20, n), {"max_tokens": 10})
            for n, e in enumerate(engines * 2)
        ]
        await asyncio.gather(*(s.ended() for s in streams))
        assert all(len(s.tokens) == 10 for s in streams)
        await fleet.close()
        for engine in engines:
            await engine.close()

    asyncio.run(play())
