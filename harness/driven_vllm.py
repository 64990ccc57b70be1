"""vLLM's scheduler run step by step in this process, without a model, against the simulated prefix cache."""

from __future__ import annotations

import itertools
import json
import sys
import tempfile
from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from controlplane.perfmodel.engine import KvModel
from controlplane.perfmodel.profile import Profile
from controlplane.placement.caches import chain
from controlplane.placement.ledger import DECODING
from controlplane.placement.lengths import LengthTable
from controlplane.types import Slo, WorkerId
from controlplane.workload import Workload
from dataplane.live.engine_api.cache_events import CachedBlocks, tree
from dataplane.live.engine_api.link import WorkerInfo
from dataplane.live.ledger.mirrors import Found
from dataplane.live.ledger.placement import Placement
from dataplane.live.ledger.request import Ticket, Tracked
from dataplane.simulated.cluster import advance
from dataplane.simulated.records import DECODE_RUN, MIXED_STEP
from dataplane.simulated.sending import next_send
from dataplane.simulated.simulate import RunState, WorkerSpec, prepare
from harness import ROOT

sys.path.insert(0, str(ROOT / "tests" / "builders"))

from random_cases import NEVER_MET, random_sharing, tight_profile, without_own

SIZES = {"tight": 1.0, "middle": 2.0, "roomy": 6.0}
BLOCK = 16
LONGEST = 60 * BLOCK
Steps = list[dict[int, int]]


@dataclass
class Seen:
    """What an engine did; `states` by step: free blocks, blocks evicted so far, ids of those asleep."""

    steps: Steps = field(default_factory=list)
    states: dict[int, tuple[int, int, list[Hashable]]] = field(default_factory=dict)
    cached: list[int] = field(default_factory=list)
    preemptions: list[int] = field(default_factory=list)


def compiled_run(profile: Profile, workload: Workload) -> Seen:
    """The compiled engine's steps: each activity is written down as it begins."""
    state, seen = prepare(workload, [WorkerSpec(profile)], NEVER_MET, "jsq"), Seen()
    led, eng = state.ledger, state.engines
    began_s, run, run_began = -1.0, {}, 0
    more = True
    while more:
        next_s = min(float(eng.workers["next_s"][0]), next_send(led, state.cluster.sending)[0])
        more = advance(led, eng, state.cluster, state.rules, next_s)
        if led.runs["start_s"][0] == began_s:
            continue
        began_s = float(led.runs["start_s"][0])
        seen.steps += [run] * (int(led.workers["step"][0]) - run_began if run else 0)
        run, activity = {}, eng.workers["activity"][0]
        if activity not in (MIXED_STEP, DECODE_RUN):
            continue
        cache = led.caches.workers[0]
        seen.states[len(seen.steps)] = (
            int(cache["empty"] + cache["asleep"] * (1 + profile.kv.window_groups)),
            int(cache["evicted"]),
            list(asleep(state)),
        )
        planned = {}
        for r in led.running[0, : led.workers["running_n"][0]].tolist():
            decodes = led.requests["phase"][r] == DECODING
            planned[r] = 1 if decodes else int(eng.requests["chunk"][r])
        planned = {r: tokens for r, tokens in planned.items() if tokens}
        if activity == DECODE_RUN:
            run, run_began = planned, int(led.workers["step"][0])
        else:
            seen.steps.append(planned)
    outcome = state.outcome()
    assert outcome.complete
    assert outcome.cached_tokens is not None
    seen.cached, seen.preemptions = outcome.cached_tokens.tolist(), outcome.preemptions.tolist()
    return seen


def asleep(state: RunState) -> list[int]:
    """The ids of the copies asleep, the next to be evicted first; one's own id is below -1."""
    caches, ids = state.ledger.caches, []
    copy = caches.workers["first"][0]
    while copy != -1:
        ids.append(int(caches.copies["id"][0, copy]))
        copy = caches.copies["later"][0, copy]
    return ids


WORKER = WorkerId("driven")


class Mirror:
    """A gateway's mirror of the driven engine's cache: told by its events, or predicted."""

    def __init__(self, profile: Profile, is_told: bool) -> None:
        block, engine = profile.kv.block_tokens, profile.engine
        info = WorkerInfo(
            WORKER,
            "vllm",
            "any",
            "",
            (),
            block_tokens=block,
            kv_blocks=profile.kv.capacity_tokens // block,
            kv_bytes_per_token=1,
            max_model_len=2 * LONGEST,
            max_seqs=engine.max_seqs,
            max_batched_tokens=engine.max_batched_tokens,
            tp_degree=1,
            vllm_version="",
            dtype="none",
            pid=0,
        )
        self.placement = Placement({}, 1, LengthTable.constant(20), np.random.default_rng(0))
        self.placement.attach(info, "")
        self._engine, self._block = CachedBlocks(block), block
        self._sent: dict[str, Tracked] = {}
        self._names: dict[bytes, int] = {}
        if is_told:
            self.placement.take_cached(WORKER, self._engine.all())

    def send(self, request: Any) -> None:
        """A request is placed on the engine."""
        tracked = Tracked(request, Ticket("", "", Slo(10.0, 1.0), 0), 0.0, 20)
        self._sent[request.request_id] = tracked
        self.placement.put(tracked, WORKER, has_kv=False, now_s=0.0)

    def step(self, events: list[Any], sampled: dict[str, list[int]], found: dict[int, int]) -> None:
        """A step has ended: what it stored and removed, then its tokens."""
        if self.placement.tells_cached(WORKER):
            change = self._engine.take(msgspec.msgpack.decode(msgspec.msgpack.encode(events)))
            assert change is None or self.placement.take_cached(WORKER, change) == ""
        got = [(self._sent[name], len(tokens)) for name, tokens in sampled.items() if tokens]
        self.placement.advance(WORKER, got, 0.0, {t.id: Found(found[int(t.id)]) for t, _ in got})
        for tracked, _ in got:
            tracked.output_token_ids.extend(sampled[tracked.id])

    def end(self, request: Any) -> None:
        """A request has ended."""
        self.placement.forget(self._sent.pop(request.request_id))

    def is_right(self, pool: Any, requests: list[Any]) -> bool:
        """Whether it holds the blocks that the engine has cached."""
        for request in requests:
            if any(bytes(name) not in self._names for name in request.block_hashes):
                ids = np.zeros(len(request.block_hashes), np.int64)
                chain(np.array(request.all_token_ids, np.int64), self._block, tree(None, None), ids)
                self._names |= dict(zip(map(bytes, request.block_hashes), ids.tolist(), strict=True))
        hashes = {bytes(block.block_hash[:-4]) for block in pool.blocks if block.block_hash is not None}
        copies = self.placement.ledger.caches.copies["id"][0]
        return set(copies[copies > 0].tolist()) == {self._names[name] for name in hashes}

    @property
    def off(self) -> tuple[int, int]:
        """Tokens by which it was off, and those of prompts."""
        hits = self.placement.prefix_hits(WORKER)
        return hits.off, hits.queried


class DrivenVllm:
    """vLLM's scheduler of the installed version, without a model, on a clock that a profile moves."""

    def __init__(self, profile: Profile, folder: Path, connector: dict[str, Any] | None = None) -> None:
        """`connector`: the fields of vLLM's KVTransferConfig, for a scheduler with a connector."""
        import torch
        from vllm.config import (
            CacheConfig,
            KVEventsConfig,
            KVTransferConfig,
            ModelConfig,
            SchedulerConfig,
            VllmConfig,
        )
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.scheduler import Scheduler
        from vllm.v1.kv_cache_interface import (
            ChunkedLocalAttentionSpec,
            FullAttentionSpec,
            KVCacheConfig,
            KVCacheGroupSpec,
            SlidingWindowSpec,
        )
        from vllm.v1.structured_output import StructuredOutputManager

        self.profile = profile
        blocks = profile.kv.capacity_tokens // profile.kv.block_tokens + 1  # vLLM's first one is no one's
        longest = max(LONGEST * 2, profile.engine.max_batched_tokens)
        model = ModelConfig(
            model=str(model_folder(folder, longest)), skip_tokenizer_init=True, dtype="float32"
        )
        scheduling = SchedulerConfig(
            max_num_seqs=profile.engine.max_seqs,
            max_num_batched_tokens=profile.engine.max_batched_tokens,
            max_model_len=longest,
            enable_chunked_prefill=True,
            is_encoder_decoder=False,
            async_scheduling=False,
        )
        cache = CacheConfig(block_size=profile.kv.block_tokens, enable_prefix_caching=True)
        transfer = None if connector is None else KVTransferConfig(**connector)
        config = VllmConfig(
            model_config=model, scheduler_config=scheduling, cache_config=cache, kv_transfer_config=transfer
        )
        config.cache_config.num_gpu_blocks = blocks
        config.kv_events_config = KVEventsConfig(enable_kv_cache_events=True, publisher="null")
        kv = profile.kv
        sizes = {"block_size": kv.block_tokens, "num_kv_heads": 1, "head_size": 1, "dtype": torch.float32}
        specs = [FullAttentionSpec(**sizes)]
        if kv.window_is_chunk:
            part = ChunkedLocalAttentionSpec(**sizes, attention_chunk_size=kv.window_tokens)
        elif kv.window_groups:
            part = SlidingWindowSpec(**sizes, sliding_window=kv.window_tokens)
        specs += [part] * kv.window_groups if kv.window_groups else []
        groups = [KVCacheGroupSpec([f"layer{i}"], spec) for i, spec in enumerate(specs)]
        self.scheduler = Scheduler(
            vllm_config=config,
            kv_cache_config=KVCacheConfig(blocks, [], groups),
            structured_output_manager=StructuredOutputManager(config),
            block_size=profile.kv.block_tokens,
            log_stats=True,
        )
        init_none_hash(sha256)
        self.hasher = get_request_block_hasher(profile.kv.block_tokens, sha256)
        self.cached: dict[int, int] = {}  # tokens, by request
        self.prefill: dict[str, int] = {}  # a request's tokens when it was last admitted
        # What engines with several groups have cached, gateways only predict.
        self.told, self.predicted = Mirror(profile, True), Mirror(profile, False)
        self.is_mirrored = not kv.window_groups
        self.wrong_mirrors = 0  # steps after which the events and the cache differ

    def run(self, workload: Workload, texts: list[np.ndarray]) -> Seen:
        """Serve every request; request i is to generate what follows its prompt in `texts[i]`."""
        from vllm.v1.outputs import ModelRunnerOutput

        seen, now_s, coming, evicted = Seen(), 0.0, 0, 0
        requests: list[Any] = []
        pool = self.scheduler.kv_cache_manager.block_pool
        while coming < len(workload) or self.scheduler.has_unfinished_requests():
            if not self.scheduler.has_unfinished_requests():
                now_s = max(now_s, float(workload.arrival_s[coming]))
            while coming < len(workload) and workload.arrival_s[coming] <= now_s:
                requests.append(self._request(coming, workload, texts[coming]))
                self.scheduler.add_request(requests[-1])
                for mirror in (self.told, self.predicted) if self.is_mirrored else ():
                    mirror.send(requests[-1])
                coming += 1
            planned = self.scheduler.schedule()
            scheduled = {int(name): tokens for name, tokens in planned.num_scheduled_tokens.items()}
            lasts_s, sampled = self._step(planned, [requests[r] for r in scheduled], texts)
            events = self.scheduler.kv_cache_manager.take_events()
            evicted += sum(type(event).__name__ == "BlockRemoved" for event in events)
            hashes = [b.block_hash for b in pool.free_block_queue.get_all_free_blocks()]
            seen.states[len(seen.steps)] = (
                pool.get_num_free_blocks(),
                evicted,
                [bytes(key[:-4]) for key in hashes if key is not None],
            )
            seen.steps.append(scheduled)
            now_s += lasts_s
            names = list(planned.num_scheduled_tokens)
            self.scheduler.update_from_output(
                planned, ModelRunnerOutput(names, {name: i for i, name in enumerate(names)}, sampled)
            )
            if self.is_mirrored:
                self._mirror(events, dict(zip(names, sampled, strict=True)), [requests[r] for r in scheduled])
        ids = named(workload, requests)
        told = {
            i: (free, gone, [ids.get(h, 0) for h in line]) for i, (free, gone, line) in seen.states.items()
        }
        seen.states = told
        seen.cached = [self.cached[r] for r in range(len(workload))]
        seen.preemptions = [request.num_preemptions for request in requests]
        return seen

    def _mirror(self, events: list[Any], sampled: dict[str, list[int]], requests: list[Any]) -> None:
        for mirror in (self.told, self.predicted):
            mirror.step(events, sampled, self.cached)
        self.wrong_mirrors += not self.told.is_right(self.scheduler.kv_cache_manager.block_pool, requests)
        for request in requests:
            if request.is_finished():
                self.told.end(request)
                self.predicted.end(request)

    def _request(self, r: int, workload: Workload, text: np.ndarray) -> Any:
        from vllm import SamplingParams
        from vllm.v1.request import Request

        prompt, output = int(workload.prompt_tokens[r]), int(workload.output_tokens[r])
        return Request(
            request_id=str(r),
            prompt_token_ids=text[:prompt].tolist(),
            sampling_params=SamplingParams(max_tokens=output, ignore_eos=True),
            pooling_params=None,
            arrival_time=float(workload.arrival_s[r]),
            block_hasher=self.hasher,
        )

    def _step(
        self, planned: Any, requests: list[Any], texts: list[np.ndarray]
    ) -> tuple[float, list[list[int]]]:
        """How long the step lasts, and the token it gives to each request that has all before it computed."""
        for new in planned.scheduled_new_reqs:
            self.cached[int(new.req_id)] = new.num_computed_tokens
        admitted = {new.req_id for new in planned.scheduled_new_reqs}
        admitted |= planned.scheduled_cached_reqs.resumed_req_ids
        prefill, squares, decoding, context = 0, 0, 0, 0
        sampled: list[list[int]] = []
        for request in requests:
            name = request.request_id
            if name in admitted:
                self.prefill[name] = request.num_tokens
            end = request.num_computed_tokens  # with what this step adds
            start = end - planned.num_scheduled_tokens[name]
            if start >= self.prefill[name]:
                decoding += 1
                context += request.num_tokens
            else:
                prefill += end - start
                squares += end**2 - start**2
            sampled.append([int(texts[int(name)][end])] if end == request.num_tokens else [])
        return float(self.profile.step.step_s(prefill, decoding, context, squares)), sampled


def named(workload: Workload, requests: list[Any]) -> dict[bytes, int]:
    """The compiled engine's id of every block that vLLM may have cached, by vLLM's hash."""
    assert workload.prefixes is not None
    ids: dict[bytes, int] = {}
    for r, request in enumerate(requests):
        listed = workload.prefixes.of(r).tolist()
        for number, block_hash in enumerate(request.block_hashes):
            own = -2 - ((r << 24) | number)
            ids.setdefault(bytes(block_hash), listed[number] if number < len(listed) else own)
    return ids


def model_folder(folder: Path, longest: int) -> Path:
    """A model that is never loaded: the scheduler wants to know its longest context."""
    shape = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "vocab_size": 1000}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    what = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "max_position_embeddings": longest}
    (folder / "config.json").write_text(json.dumps(what | shape | heads))
    return folder


@dataclass(frozen=True)
class Windows:
    """Groups of layers that attend to a window, next to one that keeps all."""

    groups: int
    tokens: int
    is_chunk: bool = False

    def of(self, kv: KvModel) -> KvModel:
        """The memory of a model with such groups: a block of tokens takes one in each."""
        return replace(
            kv,
            capacity_tokens=kv.capacity_tokens * (1 + self.groups),
            request_tokens=self.groups * self.tokens,
            window_tokens=self.tokens,
            window_is_chunk=self.is_chunk,
        )


# As Llama 4, Gemma 3 and gpt-oss have them; some windows are shorter than the requests driven here.
WINDOWS = (Windows(3, 8192, True), Windows(3, 128, True), Windows(1, 64), Windows(1, 128), Windows(5, 512))


def seats(size: str, cases: int, seed: int) -> dict[str, Any]:
    """Models with windows: requests that run at once, next to vLLM's, and what else differs."""
    row: dict[str, Any] = {"size": size, "cases": cases * len(WINDOWS)}
    counts = dict.fromkeys(("requests", "most at once", "preemptions"), 0)
    unlike = dict.fromkeys(("most at once otherwise", "steps planned otherwise", "preempted otherwise"), 0)
    means, hits, off = np.zeros(2), np.zeros(2), 0
    for number, windows in itertools.product(range(cases), WINDOWS):
        profile, workload, texts = case(seed, size, number)
        profile = replace(profile, kv=windows.of(profile.kv))
        with tempfile.TemporaryDirectory() as folder:
            vllm = DrivenVllm(profile, Path(folder)).run(workload, texts)
        ours = compiled_run(profile, workload)
        at_once = [[len(step) for step in run.steps] for run in (ours, vllm)]
        counts["requests"] += len(workload)
        counts["most at once"] += max(at_once[1])
        counts["preemptions"] += sum(vllm.preemptions)
        off = max(off, abs(max(at_once[0]) - max(at_once[1])))
        unlike["most at once otherwise"] += max(at_once[0]) != max(at_once[1])
        unlike["steps planned otherwise"] += ours.steps != vllm.steps
        unlike["preempted otherwise"] += ours.preemptions != vllm.preemptions
        means += [float(np.mean(run)) for run in at_once]
        hits += [sum(ours.cached), sum(vllm.cached)]
    unlike["most at once off"] = off
    shares = {"mean at once": float(means[0] / means[1]), "hits": float(hits[0] / hits[1])}
    return row | counts | unlike | shares


def case(seed: int, size: str, number: int) -> tuple[Profile, Workload, list[np.ndarray]]:
    """A worker and its requests."""
    rng = np.random.default_rng([seed, number, list(SIZES).index(size)])
    workload, texts = random_sharing(rng, BLOCK, LONGEST)
    if number % 2 and workload.prefixes is not None:
        workload = replace(workload, prefixes=without_own(workload.prefixes))
    longest = int((workload.prompt_tokens + workload.output_tokens).max())
    profile = tight_profile(rng, longest, BLOCK)
    tokens = int(longest * SIZES[size]) // BLOCK * BLOCK + BLOCK
    return replace(profile, kv=replace(profile.kv, capacity_tokens=tokens)), workload, texts


def compared(size: str, cases: int, seed: int) -> dict[str, Any]:
    """All cases of one size: what they did, and how much of it was not the same."""
    row: dict[str, Any] = {"size": size, "cases": cases}
    counts = dict.fromkeys(
        ("requests", "steps", "states", "preemptions", "evicted blocks", "cached tokens", "prompt tokens"), 0
    )
    unlike = dict.fromkeys(UNLIKE, 0)
    off = {"told off": np.zeros(2), "predicted off": np.zeros(2)}
    for number in range(cases):
        profile, workload, texts = case(seed, size, number)
        with tempfile.TemporaryDirectory() as folder:
            driven = DrivenVllm(profile, Path(folder))
            vllm = driven.run(workload, texts)
        off["told off"] += driven.told.off
        off["predicted off"] += driven.predicted.off
        unlike["mirrors otherwise"] += driven.wrong_mirrors
        ours = compiled_run(profile, workload)
        counts["requests"] += len(workload)
        counts["steps"] += len(vllm.steps)
        counts["states"] += len(ours.states)
        counts["preemptions"] += sum(vllm.preemptions)
        counts["evicted blocks"] += vllm.states[max(vllm.states)][1]
        counts["cached tokens"] += sum(vllm.cached)
        counts["prompt tokens"] += int(workload.prompt_tokens.sum())
        unlike["requests cached otherwise"] += sum(
            a != b for a, b in zip(ours.cached, vllm.cached, strict=True)
        )
        unlike["preempted otherwise"] += ours.preemptions != vllm.preemptions
        same = sum(list(a.items()) == list(b.items()) for a, b in zip(ours.steps, vllm.steps, strict=False))
        unlike["steps planned otherwise"] += max(len(ours.steps), len(vllm.steps)) - same
        unlike["states otherwise"] += sum(vllm.states.get(i) != state for i, state in ours.states.items())
    return row | counts | unlike | {name: float(wrong / all_) for name, (wrong, all_) in off.items()}


UNLIKE = (
    "requests cached otherwise",
    "preempted otherwise",
    "steps planned otherwise",
    "states otherwise",
    "mirrors otherwise",
)
