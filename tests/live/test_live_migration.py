"""Moves between two real vLLM engines: what the client gets is what it would have got without them."""

import asyncio
import os
import signal
from dataclasses import replace

import numpy as np
import pytest
import quiet_vllm  # noqa: F401  # first

from controlplane.perfmodel.engine import KvModel
from controlplane.perfmodel.samples import StepSamples
from controlplane.types import WorkerId
from dataplane.live.engine_api.vllm_surface import FinishReason
from dataplane.live.kv.nixl import NIXL, installed
from tokenfleet.profiles.kv_memory import fit_kv

pytestmark = pytest.mark.live
A, B = WorkerId("a"), WorkerId("b")


def prompt(length, seed=0):
    return np.random.default_rng(seed).integers(5, 2000, length).tolist()


async def unmoved(fleet, tokens, **params):
    stream = await fleet.start(A, tokens, params)
    await stream.ended()
    return stream


async def moved(fleet, tokens, after=20, mode="live", **params):
    stream = await fleet.start(A, tokens, params)
    await stream.until(after)
    move = await fleet.move(stream, B, mode)
    await stream.ended()
    return stream, move


async def clean(fleet, *workers):
    """Return once these workers report that no KV block is in use; a timeout of the story means a leak."""
    while any(w not in fleet.telemetry or fleet.telemetry[w].kv_used_blocks for w in workers):
        await asyncio.sleep(0.05)


@pytest.mark.always
@pytest.mark.parametrize("length", [40, 300, 1500])
def test_a_moved_greedy_stream_equals_the_unmoved_one_token_for_token(two_workers, length):
    async def story(fleet):
        expected = await unmoved(fleet, prompt(length, length), max_tokens=100)
        stream, move = await moved(fleet, prompt(length, length), max_tokens=100)
        assert (move.outcome, move.reason) == ("done", "")
        assert stream.tokens == expected.tokens
        # Everything but the one token of the next step was found on the target: nothing is recomputed.
        copied = sum(move.stages) + move.tail_tokens
        assert stream.cached_tokens[-1] == copied
        await clean(fleet, A, B)

    two_workers.play(story)


@pytest.mark.parametrize(("length", "after"), [(300, 1), (3500, 0)])
def test_a_stream_handed_over_after_its_prefill_or_during_it_equals_the_unmoved_one(
    two_workers, length, after
):
    async def story(fleet):
        # First, or the prompt would be found in the cache and not be prefilled at all.
        stream, move = await moved(fleet, prompt(length, 77), after, "hand-over", max_tokens=60)
        expected = await unmoved(fleet, prompt(length, 77), max_tokens=60)
        assert (move.outcome, move.reason) == ("done", "")
        assert stream.tokens == expected.tokens
        assert stream.worker == B
        if not after:  # it began before the first token, which no token's KV is part of
            assert move.stages[0] == (length - 1) // 32 * 32
        await clean(fleet, A, B)

    two_workers.play(story)


def test_what_is_copied_is_not_computed_on_the_target(two_workers):
    async def story(fleet):
        actor = two_workers.workers[1].actor
        stream = await fleet.start(A, prompt(1400, 21), {"max_tokens": 80})
        await stream.until(10)
        before, _ = await actor.steps.remote()
        move = await fleet.move(stream, B)
        await stream.ended()
        await clean(fleet, A, B)
        assert (move.outcome, len(move.stages) > 0) == ("done", True)
        _, steps = await actor.steps.remote(before)
        # The continuation's own first token and nothing else: a loader's would keep everybody waiting.
        assert sum(step.prefill_tokens for step in steps) == 1

    two_workers.play(story)


def test_a_move_sends_what_the_target_has_not_cached_and_all_of_it_once_that_is_evicted(two_workers):
    async def story(fleet):
        expected = await unmoved(fleet, prompt(1500, 31), max_tokens=80)
        size, block = fleet.links[A].info.kv_bytes_per_token, fleet.links[A].info.block_tokens
        full = 1500 // block * block

        async def took(evicted):
            there = await fleet.start(B, prompt(1500, 31), {"max_tokens": 1})
            await there.ended()
            await clean(fleet, B)
            before = sum(fleet.telemetry[B].kv_fetched.values())
            for seed in range(evicted):
                other = await fleet.start(B, prompt(3000, 90 + seed), {"max_tokens": 1})
                await other.ended()
            stream, move = await moved(fleet, prompt(1500, 31), max_tokens=80)
            assert (move.outcome, move.reason) == ("done", "")
            assert stream.tokens == expected.tokens
            assert move.copied_bytes == (sum(move.stages) - move.cached_tokens) * size
            await clean(fleet, A, B)
            while sum(fleet.telemetry[B].kv_fetched.values()) - before < move.bytes:
                await asyncio.sleep(0.05)
            assert sum(fleet.telemetry[B].kv_fetched.values()) - before == move.bytes
            assert set(fleet.telemetry[B].kv_fetched) == {NIXL if installed() else "process memory"}
            return move

        assert (await took(evicted=3)).cached_tokens == 0  # 9,000 tokens since, in memory for 8,192
        assert (await took(evicted=0)).cached_tokens >= full  # and what the first move has left there

    two_workers.play(story)


def test_a_text_brought_to_another_workers_cache_is_hit_there_and_a_lost_one_is_computed_again(two_workers):
    from dataplane.live.migration.move import CopyFailed
    from harness.bare_fleet import token_request

    async def story(fleet):
        said = prompt(700, 61)
        first = await unmoved(fleet, said, max_tokens=40)
        turn = [*said, *first.tokens, *prompt(30, 62)]
        expected = await unmoved(fleet, turn, max_tokens=40)
        block = fleet.links[A].info.block_tokens
        full = (len(said) + 39) // block * block
        text = token_request("text", [*said, *first.tokens], {})
        assert await fleet.migrations.bring(text, full, A, B) == full
        assert await fleet.migrations.bring(text, full, A, B) == 0  # it is there
        await clean(fleet, A, B)
        there = await fleet.start(B, turn, {"max_tokens": 40})
        await there.ended()
        assert there.cached_tokens == [full]
        assert there.tokens == expected.tokens
        unknown = token_request("unknown", prompt(330, 63), {})  # evicted, say: the source computes it
        assert await fleet.migrations.bring(unknown, 320, A, B) == 320
        await clean(fleet, A, B)
        with pytest.raises(CopyFailed, match="nowhere is gone"):
            await fleet.migrations.bring(text, full, A, WorkerId("nowhere"))
        await clean(fleet, A, B)

    two_workers.play(story)


def test_a_move_given_up_between_two_copies_leaves_no_block_behind(two_workers):
    async def story(fleet):
        stream = await fleet.start(A, prompt(1000, 22), {"max_tokens": 3000})
        await stream.until(5)
        moving = asyncio.ensure_future(fleet.move(stream, B))
        while not any(m.stages for m in fleet.migrations.open.values()):
            await asyncio.sleep(0)
        await fleet.abort(stream)
        assert (await moving).outcome == "aborted"
        await clean(fleet, A, B)

    two_workers.play(story, bytes_per_s=5e5)  # slow, so that a second copy takes more than a second


@pytest.mark.parametrize("mode", ["stop-and-copy", "recompute"])
def test_the_modes_that_live_moves_are_measured_against_are_exact_too(two_workers, mode):
    async def story(fleet):
        expected = await unmoved(fleet, prompt(500, 7), max_tokens=80)
        stream, move = await moved(fleet, prompt(500, 7), mode=mode, max_tokens=80)
        assert (move.outcome, move.reason) == ("done", "")
        assert stream.tokens == expected.tokens

    two_workers.play(story)


def test_a_stream_moved_to_and_fro_is_unchanged(two_workers):
    async def story(fleet):
        expected = await unmoved(fleet, prompt(200, 3), max_tokens=160)
        stream = await fleet.start(A, prompt(200, 3), {"max_tokens": 160})
        for turn in range(5):
            await stream.until(10 + 25 * turn)
            move = await fleet.move(stream, B if turn % 2 == 0 else A)
            assert (move.outcome, move.reason) == ("done", "")
        await stream.ended()
        assert stream.tokens == expected.tokens
        await clean(fleet, A, B)

    two_workers.play(story)


def test_several_requests_moved_at_once_among_others_are_all_unchanged(two_workers):
    async def story(fleet):
        expected = [await unmoved(fleet, prompt(100 + 40 * i, i), max_tokens=90) for i in range(6)]
        streams = [await fleet.start(A, prompt(100 + 40 * i, i), {"max_tokens": 90}) for i in range(6)]
        await asyncio.gather(*(s.until(15) for s in streams))
        moves = await asyncio.gather(*(fleet.move(s, B) for s in streams[:4]))
        await asyncio.gather(*(s.ended() for s in streams))
        assert [m.outcome for m in moves] == ["done"] * 4
        assert [s.tokens for s in streams] == [s.tokens for s in expected]
        await clean(fleet, A, B)

    two_workers.play(story)


def test_penalties_go_on_counting_the_tokens_made_before_the_move(two_workers):
    async def story(fleet):
        kinds = [
            {"frequency_penalty": 0.6},
            {"presence_penalty": 1.2},
            {"presence_penalty": 0.7, "frequency_penalty": 0.4, "repetition_penalty": 1.2},
        ]
        for seed, kind in enumerate(kinds):
            expected = await unmoved(fleet, prompt(150, seed), max_tokens=120, **kind)
            stream, move = await moved(fleet, prompt(150, seed), after=50, max_tokens=120, **kind)
            assert move.moved
            assert stream.tokens == expected.tokens, kind

    two_workers.play(story)


def test_logprobs_go_on_over_a_move(two_workers):
    async def story(fleet):
        expected = await unmoved(fleet, prompt(120, 5), max_tokens=60, logprobs=3)
        stream, move = await moved(fleet, prompt(120, 5), max_tokens=60, logprobs=3)
        assert move.moved
        assert stream.tokens == expected.tokens
        assert stream.logprobs == pytest.approx(expected.logprobs, abs=1e-4)

    two_workers.play(story)


def test_seeded_sampling_is_refused_and_goes_on_where_it_is(two_workers):
    async def story(fleet):
        params = {"temperature": 0.8, "seed": 11, "max_tokens": 60}
        expected = await unmoved(fleet, prompt(60, 1), **params)
        stream, move = await moved(fleet, prompt(60, 1), **params)
        assert move.outcome == "aborted"
        assert "seeded sampling" in move.reason
        assert stream.tokens == expected.tokens

    two_workers.play(story)


def test_a_client_that_leaves_while_its_kv_is_copied_leaves_no_block_behind(two_workers):
    async def story(fleet):
        stream = await fleet.start(A, prompt(1500, 2), {"max_tokens": 2000})
        await stream.until(5)
        moving = asyncio.ensure_future(fleet.move(stream, B))
        while not any(m.stage.name == "COPYING" for m in fleet.migrations.open.values()):
            await asyncio.sleep(0)
        await fleet.abort(stream)
        move = await moving
        assert move.outcome == "aborted"
        await clean(fleet, A, B)

    two_workers.play(story, bytes_per_s=2e6)


def test_a_request_that_ends_by_itself_while_it_is_copied_ends_once_and_whole(two_workers):
    async def story(fleet):
        stream = await fleet.start(A, prompt(1000, 2), {"max_tokens": 12})
        await stream.until(10)
        move = await fleet.move(stream, B)
        assert await stream.ended() == FinishReason.LENGTH
        assert len(stream.tokens) == 12
        assert move.outcome == "aborted"
        await clean(fleet, A, B)

    two_workers.play(story, bytes_per_s=1e6)


def test_a_full_target_leaves_the_request_where_it_is(two_workers):
    async def story(fleet):
        expected = await unmoved(fleet, prompt(2500, 4), max_tokens=400)
        filler = [await fleet.start(B, prompt(2900, i), {"max_tokens": 1000}) for i in range(2)]
        await asyncio.gather(*(f.until(2) for f in filler))
        stream = await fleet.start(A, prompt(2500, 4), {"max_tokens": 400})
        await stream.until(5)
        move = await fleet.move(stream, B)
        assert move.outcome == "aborted"
        assert "no room" in move.reason
        for each in filler:
            await fleet.abort(each)
        await stream.ended()
        assert stream.tokens == expected.tokens
        await clean(fleet, A, B)

    two_workers.play(story, stage_s=0.5)


def test_a_load_from_a_request_that_is_gone_fails_alone(two_workers):
    async def story(fleet):
        from dataplane.live.engine_api.kv_messages import KvLoad, Transfer
        from dataplane.live.engine_api.segment import segment_request

        for inline in (False, True):
            stream = await fleet.start(B, prompt(20, 8), {"max_tokens": 200})
            await stream.until(1)
            await fleet.abort(stream)
            segment = f"{stream.id}#lost"
            fleet._listening[segment], stream.finish = stream, None
            source = fleet.links[A].info
            load = KvLoad(source.kv_addresses, "nobody", 128, inline, secret=source.kv_secret)
            await fleet.links[B].add(segment_request(stream.request, prompt(140, 8), segment, Transfer(load)))
            assert await stream.ended() == FinishReason.ERROR
        healthy = await fleet.start(B, prompt(50, 8), {"max_tokens": 10})
        assert await healthy.ended() == FinishReason.LENGTH
        await clean(fleet, B)

    two_workers.play(story)


def test_a_gateway_that_says_good_bye_leaves_no_request_behind(two_workers):
    async def leave(fleet):
        stream = await fleet.start(A, prompt(300, 6), {"max_tokens": 3000})
        await stream.until(3)

    async def look(fleet):
        await clean(fleet, A)

    two_workers.play(leave)
    two_workers.play(look)


def test_a_request_that_cannot_be_read_is_refused_by_name(two_workers):
    async def story(fleet):
        stream = await fleet.start(A, prompt(20, 8), {"max_tokens": 200})
        await stream.until(1)
        stream.request.sampling_params.max_tokens = -1
        await fleet.links[A].add(stream.request)
        while not fleet.refused:
            await asyncio.sleep(0.01)
        assert fleet.refused[stream.segment].startswith("it cannot be read")
        await fleet.abort(stream)
        await clean(fleet, A)

    two_workers.play(story)


def test_a_worker_answers_only_the_gateways_it_was_launched_for_and_is_told_from_others(two_workers):
    import zmq.asyncio

    from controlplane.errors import BadInput
    from dataplane.live.engine_api.vllm_surface import VllmCodec
    from dataplane.live.engine_api.wire import new_key, public_key
    from dataplane.live.worker.link import WorkerLink

    info = two_workers.workers[0].info
    impostor = replace(info, link_key=public_key(new_key()))

    async def knock(worker, key):
        context = zmq.asyncio.Context()
        try:
            await WorkerLink.connect(worker, key, context, VllmCodec(), timeout_s=0.5)
        finally:
            context.destroy(linger=0)

    assert info.kv_secret == ""  # it came through Ray
    for worker, key in ((info, new_key()), (impostor, two_workers.key)):
        with pytest.raises(BadInput, match="no answer"):
            asyncio.run(knock(worker, key))


def test_requests_hold_whole_blocks_by_the_steps_of_an_engine(two_workers):
    async def story(fleet):
        actor, block = two_workers.workers[0].actor, fleet.links[A].info.block_tokens
        before, _ = await actor.steps.remote()
        lengths = np.random.default_rng(17).integers(20, 700, 24).tolist()
        for many in (lengths[:1], lengths[1:3], lengths[3:7], lengths[7:13], lengths[13:]):
            streams = [
                await fleet.start(A, prompt(n, 500 + n), {"max_tokens": 40, "ignore_eos": True}) for n in many
            ]
            for stream in streams:
                await stream.ended()
        await clean(fleet, A)
        _, steps = await actor.steps.remote(before)
        names = ("prefill_tokens", "sequences", "context_tokens", "step_s", "kv_blocks")
        columns = {name: np.array([getattr(step, name) for step in steps], float) for name in names}
        use = fit_kv(StepSamples(**columns), KvModel(8192, block))
        print(f"blocks of {block}:", *use.texts(0))
        assert use.per_token == pytest.approx(1.0, abs=0.1)
        assert abs(use.per_request - (block - 1) / 2) < block
        assert abs(use.off) < 0.05
        assert use.short == 0  # every request has blocks for each of its tokens, and shares none

    two_workers.play(story)


def test_steps_are_recorded_as_measurements(two_workers):
    async def story(fleet):
        actor = two_workers.workers[0].actor
        before, _ = await actor.steps.remote()
        stream = await fleet.start(A, prompt(64, 12), {"max_tokens": 20})
        await stream.ended()
        await clean(fleet, A)
        _, steps = await actor.steps.remote(before)
        assert (steps[0].prefill_tokens, steps[0].sequences, steps[0].prefill_sum_sq) == (64, 0, 64**2)
        decode = [s for s in steps if s.sequences]
        assert [s.context_tokens for s in decode] == list(range(64, 64 + 19))
        assert all(s.prefill_tokens == 0 and s.step_s > 0 for s in decode)
        # The first step of an idle engine has no step before it to be timed from.
        assert steps[0].step_s > min(s.step_s for s in decode) / 2

    two_workers.play(story)


# The last one: it ends the workers of the module.
def test_a_killed_worker_aborts_its_moves_leaves_the_other_clean_and_nothing_behind(two_workers):
    import psutil

    from dataplane.live.engine_api.processes import shared_memory

    async def story(fleet):
        processes = psutil.Process(fleet.links[A].info.pid).children(recursive=True)
        processes += psutil.Process(fleet.links[B].info.pid).children(recursive=True)
        shared = shared_memory(process.pid for process in processes)
        stream = await fleet.start(A, prompt(1500, 2), {"max_tokens": 2000})
        await stream.until(5)
        moving = asyncio.ensure_future(fleet.move(stream, B))
        while not any(m.stage.name == "COPYING" for m in fleet.migrations.open.values()):
            await asyncio.sleep(0)
        # First the engine's processes under a living actor ...
        for child in psutil.Process(fleet.links[A].info.pid).children(recursive=True):
            if "resource_tracker" not in " ".join(child.cmdline()):  # it unlinks their shared memory
                os.kill(child.pid, signal.SIGKILL)
        move = await moving
        assert move.outcome == "aborted"
        assert await stream.ended() == FinishReason.ERROR
        assert A in fleet.lost
        healthy = await fleet.start(B, prompt(50, 8), {"max_tokens": 10})
        assert await healthy.ended() == FinishReason.LENGTH
        await clean(fleet, B)
        assert not await two_workers.workers[0].is_healthy()

        # ... then the actor itself, which can tell its engine nothing any more.
        actor = psutil.Process(fleet.links[B].info.pid)
        children = actor.children(recursive=True)
        assert len(children) >= 2
        actor.kill()
        _, alive = await asyncio.to_thread(psutil.wait_procs, children, 30)
        assert alive == []
        assert B in fleet.lost
        assert [segment for segment in shared if segment.exists()] == []

    two_workers.play(story, bytes_per_s=2e6)
