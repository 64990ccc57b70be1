"""Host memory below KV on real engines: what has left KV is loaded, and moves go on beside it."""

import asyncio

import numpy as np
import pytest
import quiet_vllm  # noqa: F401  # first
from conftest import pair_of_workers

from controlplane.types import WorkerId

pytestmark = pytest.mark.live
A, B = WorkerId("a"), WorkerId("b")
KV, BLOCK = 2048, 32  # tokens
TURNS = 6
GREEDY = {"max_tokens": 24}


@pytest.fixture(scope="module")
def tiered_workers(model_folder):
    """KV for 2,048 tokens each, and host memory for 8,192 below it."""
    room_gib = 8192 * 2048 / 2**30
    with pair_of_workers(model_folder, KV, max_model_len=1536, kv_offloading_size=room_gib) as workers:
        yield workers


def prompt(seed, length=600):
    return np.random.default_rng(seed).integers(5, 2000, length).tolist()


async def answers(fleet, worker, seeds):
    """One conversation after the other: six do not fit in KV, and each has left it when it comes again."""
    streams = []
    for seed in seeds:
        streams.append(await fleet.start(worker, prompt(seed), GREEDY))
        await streams[-1].ended()
    return streams


async def clean(fleet):
    while any(w not in fleet.telemetry or fleet.telemetry[w].kv_used_blocks for w in (A, B)):
        await asyncio.sleep(0.05)


def test_prompts_that_have_left_kv_are_loaded_from_host_memory_and_answered_alike(tiered_workers):
    async def story(fleet):
        computed = await answers(fleet, A, range(TURNS))
        assert [s.cached_tokens for s in computed] == [[0]] * TURNS  # as an engine without it has them
        again = await answers(fleet, A, range(TURNS))
        full = (600 - 1) // BLOCK * BLOCK
        assert [s.loaded_tokens for s in again] == [[full]] * TURNS
        assert [s.tokens for s in again] == [s.tokens for s in computed]
        await clean(fleet)

    tiered_workers.play(story)


def test_a_request_moves_between_workers_that_store_and_load_beside_it_and_nothing_changes(tiered_workers):
    async def story(fleet):
        talks = {A: range(10, 10 + TURNS), B: range(20, 20 + TURNS)}
        computed = {w: await answers(fleet, w, seeds) for w, seeds in talks.items()}
        alone = await fleet.start(A, prompt(30, 900), {"max_tokens": 200})
        await alone.ended()
        await answers(fleet, A, talks[A])  # and it has left KV
        moving = await fleet.start(A, prompt(30, 900), {"max_tokens": 200})
        await moving.until(20)
        beside = asyncio.gather(*(answers(fleet, w, seeds) for w, seeds in talks.items()))
        moves = [await fleet.move(moving, B)]
        await moving.until(len(moving.tokens) + 20)
        moves.append(await fleet.move(moving, A))
        again = await beside
        await moving.ended()
        assert [(m.outcome, m.reason) for m in moves] == [("done", "")] * 2
        assert moving.loaded_tokens[0] == (900 - 1) // BLOCK * BLOCK
        assert moving.tokens == alone.tokens
        for streams, expected in zip(again, computed.values(), strict=True):
            assert sum(s.loaded_tokens[0] for s in streams) > 0
            assert [s.tokens for s in streams] == [s.tokens for s in expected]
        await clean(fleet)

    tiered_workers.play(story)


def test_forgotten_prefixes_are_in_host_memory_no_more(tiered_workers):
    async def story(fleet):
        (before,) = await answers(fleet, B, [40])
        await clean(fleet)
        assert await tiered_workers.workers[1].actor.reset_prefix_cache.remote()
        (after,) = await answers(fleet, B, [40])
        assert (after.cached_tokens, after.tokens) == ([0], before.tokens)

    tiered_workers.play(story)
