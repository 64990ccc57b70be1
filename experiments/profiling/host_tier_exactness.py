"""The simulated tier in host memory against vLLM's own scheduler with its OffloadingConnector, step by step.

    python experiments/profiling/host_tier_exactness.py [--quick] [--seed N] [--format table|json]

The scheduler of the installed vLLM runs here in this process with the scheduler's half of its
OffloadingConnector and the manager of its blocks in host memory (`CPUOffloadingManager`, LRU, chunks of one
block). There is no model and no GPU: the worker's half, which copies, is played. A store is done when the
step that asked for it ends; loads follow each other over a link, each block taking as long, and are told at
the end of the first step by which they are done, as a worker tells them. Made-up conversations as in
`prefix_exactness.py`, at three sizes of KV memory and several of host memory.

Compared with the compiled engine:

* of every request the tokens cached at its first admission, those of them that were loaded, and how often it
  was preempted;
* of every step the requests in it and the tokens each gets, in order;
* at the end the blocks in host memory in the order of their last use, and how many were evicted from it.

A set of the scheduler's (requests that have ended since the last step) has no order of its own; it is given
that of the batch, which is the compiled engine's.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from controlplane.perfmodel.offload import HostKv
from controlplane.perfmodel.profile import Profile
from controlplane.types import Slo
from controlplane.workload import Workload
from dataplane.simulated.cluster import advance
from dataplane.simulated.simulate import WorkerSpec, prepare
from experiments.lib.results import bar, flags, show
from harness.driven_vllm import BLOCK, SIZES, DrivenVllm, Steps, case, compiled_run, named

NEVER_MET = Slo(1e-6, 1e-6)
CASES, QUICK = 80, 8  # of each size
PAGE = 4096  # vLLM keeps host memory in such pieces: bytes that a block takes there
ROOMS = (0.2, 0.6, 1.0, 3.0, 20.0)  # host memory by KV memory
BLOCK_S = (1e-7, 1e-4, 1e-3, 2e-2)  # what a block takes to be loaded


@dataclass
class Told:
    """What an engine did, and what it has in host memory at the end."""

    steps: Steps = field(default_factory=list)
    cached: list[int] = field(default_factory=list)
    loaded: list[int] = field(default_factory=list)
    preemptions: list[int] = field(default_factory=list)
    in_host: list[int] = field(default_factory=list)
    evicted: int = 0


def ours(profile: Profile, workload: Workload) -> Told:
    """The compiled engine."""
    state = prepare(workload, [WorkerSpec(profile)], NEVER_MET, "jsq")
    advance(state.ledger, state.engines, state.cluster, state.rules, np.inf)
    outcome, chunks = state.outcome(), state.engines.host.chunks
    assert outcome.cached_tokens is not None
    assert outcome.loaded_tokens is not None
    told = Told(cached=outcome.cached_tokens.tolist(), loaded=outcome.loaded_tokens.tolist())
    told.preemptions, told.evicted = outcome.preemptions.tolist(), int(chunks.workers["evicted"][0])
    copy = chunks.workers["first"][0]
    while copy != -1:
        told.in_host.append(int(chunks.copies["id"][0, copy]))
        copy = chunks.copies["later"][0, copy]
    told.steps = compiled_run(profile, workload).steps
    return told


class OffloadingVllm(DrivenVllm):
    """vLLM's scheduler with its OffloadingConnector, whose copies are played."""

    def __init__(self, profile: Profile, folder: Path, room: int, block_s: float) -> None:
        super().__init__(
            profile,
            folder,
            {
                "kv_connector": "OffloadingConnector",
                "kv_role": "kv_both",
                "kv_connector_extra_config": {"cpu_bytes_to_use": room * PAGE},
            },
        )
        self.block_s, self.free_s = block_s, 0.0
        self.loads: dict[int, tuple[str, float]] = {}  # request and end, by job
        self.loaded: dict[int, int] = {}

    def serve(self, workload: Workload, texts: list[np.ndarray]) -> Told:
        """Serve every request; request i is to generate what follows its prompt in `texts[i]`."""
        from vllm.v1.outputs import ModelRunnerOutput

        told, now_s, coming, idle = Told(), 0.0, 0, 0
        requests: list[Any] = []
        connector = self.scheduler.connector.connector_scheduler
        manager = connector.manager
        count_evictions(manager, told)
        while coming < len(workload) or self.scheduler.has_requests() or idle < 2:
            if not self.scheduler.has_requests():
                idle += coming == len(workload)
                if coming < len(workload):
                    now_s = max(now_s, float(workload.arrival_s[coming]))
            while coming < len(workload) and workload.arrival_s[coming] <= now_s:
                requests.append(self._request(coming, workload, texts[coming]))
                self.scheduler.add_request(requests[-1])
                coming += 1
            planned = self.scheduler.schedule()
            scheduled = {int(name): tokens for name, tokens in planned.num_scheduled_tokens.items()}
            stores = self._begin_copies(planned.kv_connector_metadata, now_s)
            names = list(planned.num_scheduled_tokens)
            lasts_s, sampled = self._step(planned, [requests[r] for r in scheduled], texts)
            if names:
                told.steps.append(scheduled)
                now_s += lasts_s
            elif not planned.preempted_req_ids:
                now_s = self._next_s(now_s, workload, coming)
            output = ModelRunnerOutput(
                names,
                {name: i for i, name in enumerate(names)},
                sampled,
                kv_connector_output=self._copied(stores, now_s),
            )
            self.scheduler.update_from_output(planned, output)
            ended = [name for name in names if name in self.scheduler.finished_req_ids]
            assert len(ended) == len(self.scheduler.finished_req_ids)
            self.scheduler.finished_req_ids = InOrder(ended)
        ids = named(workload, requests)
        policy = manager._policy
        order = sorted(policy.chunks, key=policy._ranks.__getitem__)
        told.in_host = [ids[bytes(key)[: len(next(iter(ids)))]] for key in order]
        told.cached = [self.cached[r] for r in range(len(workload))]
        told.loaded = [self.loaded[r] for r in range(len(workload))]
        told.preemptions = [request.num_preemptions for request in requests]
        return told

    def _next_s(self, now_s: float, workload: Workload, coming: int) -> float:
        """When something can change next on an engine that has nothing to compute."""
        times = [end_s for _, end_s in self.loads.values() if end_s > now_s]
        times += workload.arrival_s[coming : coming + 1].tolist() if self.loads else []
        return min(times) if times else now_s

    def _begin_copies(self, asked: Any, now_s: float) -> list[int]:
        """Begin the loads that a step asks for; its stores."""
        for job, load in asked.load_jobs.items():
            self.free_s = max(now_s, self.free_s) + len(load.dst_spec.block_ids) * self.block_s
            self.loads[job] = (load.req_id, self.free_s)
            request = self.scheduler.requests[load.req_id]
            tokens = min(request.num_computed_tokens, request.num_tokens - 1)
            if int(load.req_id) not in self.cached:
                self.cached[int(load.req_id)] = tokens
                hit = request.num_computed_tokens - len(load.dst_spec.block_ids) * BLOCK
                self.loaded[int(load.req_id)] = tokens - hit
        return list(asked.store_jobs)

    def _copied(self, stores: list[int], now_s: float) -> Any:
        """What the worker tells of copies at the end of a step."""
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import OffloadingWorkerMetadata
        from vllm.v1.outputs import KVConnectorOutput

        done = [job for job, (_, end_s) in self.loads.items() if end_s <= now_s]
        meta = OffloadingWorkerMetadata()
        for job in [*stores, *done]:
            meta.mark_completed(job)
        return KVConnectorOutput(
            finished_recving={self.loads.pop(job)[0] for job in done}, kv_connector_worker_meta=meta
        )

    def _step(self, planned: Any, requests: list[Any], texts: list[np.ndarray]) -> Any:
        for new in planned.scheduled_new_reqs:
            self.loaded.setdefault(int(new.req_id), 0)
            if int(new.req_id) in self.cached:  # it has loaded, and was admitted then
                self.prefill[new.req_id] = self.scheduler.requests[new.req_id].num_tokens
        known = dict(self.cached)
        lasts_s, sampled = super()._step(planned, requests, texts)
        self.cached |= known
        return lasts_s, sampled


def count_evictions(manager: Any, told: Told) -> None:
    """Count the blocks that vLLM's manager evicts, also one that comes back within the same step."""
    prepare_store = manager.prepare_store

    def counting(*args: Any) -> Any:
        output = prepare_store(*args)
        told.evicted += 0 if output is None else len(output.evicted_keys)
        return output

    manager.prepare_store = counting


class InOrder(set[str]):
    """A set that is gone through in the order that it is made in."""

    def __init__(self, names: list[str]) -> None:
        super().__init__(names)
        self.names = names

    def __iter__(self) -> Any:
        return iter(self.names)

    def add(self, name: str) -> None:
        super().add(name)
        self.names.append(name)


def compared(size: str, cases: int, seed: int) -> dict[str, Any]:
    """All cases of one size: what they did, and how much of it was not the same."""
    found: Counter[str] = Counter()
    for number in range(cases):
        profile, workload, texts = case(seed, size, number)
        rng = np.random.default_rng([seed, number, 7])
        blocks = profile.kv.capacity_tokens // BLOCK
        room, block_s = max(int(rng.choice(ROOMS) * blocks), 1), float(rng.choice(BLOCK_S))
        host = HostKv(room * BLOCK * 10, BLOCK * 10 / block_s)
        profile = replace(profile, kv=replace(profile.kv, bytes_per_token=10), host_kv=host)
        with tempfile.TemporaryDirectory() as folder:
            vllm = OffloadingVllm(profile, Path(folder), room, block_s).serve(workload, texts)
        simulated = ours(profile, workload)
        pairs = zip(simulated.steps, vllm.steps, strict=False)
        same = sum(list(a.items()) == list(b.items()) for a, b in pairs)
        found.update({
            "requests": len(workload),
            "steps": len(vllm.steps),
            "preemptions": sum(vllm.preemptions),
            "evicted from host": vllm.evicted,
            "loaded tokens": sum(vllm.loaded),
            "cached tokens": sum(vllm.cached),
            "requests cached otherwise": unlike(simulated.cached, vllm.cached),
            "requests loaded otherwise": unlike(simulated.loaded, vllm.loaded),
            "preempted otherwise": unlike(simulated.preemptions, vllm.preemptions),
            "steps planned otherwise": max(len(simulated.steps), len(vllm.steps)) - same,
            "host memory otherwise": simulated.in_host != vllm.in_host,
            "evicted otherwise": simulated.evicted != vllm.evicted,
        })  # fmt: skip
    return {"size": size, "cases": cases} | found


def unlike(ours: list[int], theirs: list[int]) -> int:
    return sum(a != b for a, b in zip(ours, theirs, strict=True))


def main() -> int:
    asked = flags(__doc__).parse_args()
    # Read when vLLM is imported.
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_LOGGING_STREAM="ext://sys.stderr")
    rows = [compared(size, QUICK if asked.quick else CASES, asked.seed) for size in SIZES]
    bars = {what: bar(sum(row[what] for row in rows), 0) for what in rows[0] if what.endswith("otherwise")}
    for what in ("preemptions", "evicted from host", "loaded tokens"):
        bars[f"{what}, or nothing is compared"] = bar(sum(row[what] for row in rows), 1, at_least=True)
    return show("host_tier_exactness", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
