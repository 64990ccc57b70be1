"""Host memory below KV on real engines: blocks that have left KV are loaded while moves go on."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import quiet_vllm  # noqa: F401  # first
from conftest import pair_of_workers

from controlplane.types import WorkerId
from dataplane.live.engine_api.kv_messages import KvLoad, Transfer

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


class Planned:
    """vLLM's scheduler with our connector, in this process and without a model; what ranks say is made up."""

    def __init__(self, folder, kv_blocks, room_blocks=64):
        from harness.driven_vllm import BLOCK as SMALL
        from harness.driven_vllm import DrivenVllm, case

        profile, _, _ = case(0, "tight", 0)
        profile = replace(
            profile,
            kv=replace(profile.kv, capacity_tokens=kv_blocks * SMALL),
            engine=replace(profile.engine, max_batched_tokens=8192, max_seqs=8),
        )
        module = "dataplane.live.kv.host_memory"
        extra = {"addresses": ["none"], "secret": "s", "cpu_bytes_to_use": room_blocks * 4096}
        self.vllm = DrivenVllm(
            profile,
            folder,
            {
                "kv_connector": "TieredConnector",
                "kv_connector_module_path": module,
                "kv_role": "kv_both",
                "kv_load_failure_policy": "fail",
                "kv_connector_extra_config": extra
                | {"spec_name": "CpuMemorySpec", "spec_module_path": module},
            },
        )
        self.block, self.scheduler = SMALL, self.vllm.scheduler

    def add(self, name, tokens, transfer=None):
        from vllm import SamplingParams
        from vllm.v1.request import Request

        from dataplane.live.engine_api.kv_messages import VLLM_KEY, params_from

        extra = None if transfer is None else {VLLM_KEY: params_from(transfer)}
        asked = SamplingParams(max_tokens=1, ignore_eos=True, extra_args=extra)
        self.scheduler.add_request(
            Request(name, tokens, asked, None, arrival_time=0.0, block_hasher=self.vllm.hasher)
        )

    def step(self, done=(), invalid=()):
        """Plan a step; end it and the copies in `done`; return the orders to vLLM's offloading."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        planned, copied = self.scheduler.schedule(), OffloadingWorkerMetadata()
        for job in done:
            copied.mark_completed(job)
        names = list(planned.num_scheduled_tokens)
        said = KVConnectorOutput(kv_connector_worker_meta=copied, invalid_block_ids=set(invalid))
        rows = {name: i for i, name in enumerate(names)}
        output = ModelRunnerOutput(names, rows, [[7]] * len(names), kv_connector_output=said)
        self.scheduler.update_from_output(planned, output)
        return planned.kv_connector_metadata.host


def test_a_copy_that_still_reads_blocks_ends_before_a_load_between_steps_writes_them(tmp_path):
    engine = Planned(tmp_path, kv_blocks=8)
    text = prompt(1, 4 * engine.block)
    engine.add("first", text)
    (job,) = engine.step().store_jobs  # it is stored, and has ended; the copy goes on
    load = KvLoad(("far",), "far", 6 * engine.block)
    engine.add("loader", prompt(2, 6 * engine.block + 1), Transfer(load, hold=True))
    told = engine.step()
    assert engine.scheduler.requests["loader"].num_computed_tokens == 6 * engine.block  # it has its blocks
    assert told.jobs_to_flush == {job}


def test_what_a_failed_load_inside_a_step_would_have_stored_is_never_found(tmp_path):
    engine = Planned(tmp_path, kv_blocks=16)
    text = prompt(3, 4 * engine.block + 1)
    load = KvLoad(("far",), "far", 4 * engine.block, inline=True)
    engine.add("moved", text, Transfer(load))
    asked = engine.step(invalid=[1, 2, 3, 4])
    (job,) = asked.store_jobs
    engine.step(done=[job])
    engine.add("again", text)
    told = engine.step()
    assert (told.load_jobs, engine.vllm.scheduler.requests.get("again")) == ({}, None)  # it was computed
    assert len(told.store_jobs) == 1
