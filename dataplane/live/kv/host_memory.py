"""KV offload to CPU memory, together with moves: vLLM's own offloading, called by our connector.

vLLM's `OffloadingConnector` decides in the scheduler what is stored, evicted and loaded (LRU, chunks of one
block, prompts alone): docs/engine.md has it step by step. `TieredConnector` owns one and passes every hook
on. vLLM's `MultiConnector` would do that too, but it nests statistics one level deeper than the worker reads
them, and rebuilds them by names that only registered connectors have. It also lets a move's loader wait while
the other child looks its blocks up. Here a segment with KV to load from another worker is never looked up.

The offloading connector cannot see two things, so this module passes them to it:

1. Blocks that a load between steps will write belong to no step's requests. A block that its last owner's
   copy to host memory still reads must not be among them, or one request's KV would be stored as another's.
   So they count as allocated in this step (`fence_blocks`), and vLLM ends such copies first.
2. Blocks of a load inside a step that failed were to be stored as any others of a prompt. All that is in host
   memory is forgotten then: the copies that have begun are void, and moves whose tail fails are rare.

On a CPU vLLM's half in the ranks refuses to work (`CPUOffloadingSpec.get_worker`). `CpuMemorySpec` is that
spec with ranks' copies of our own (`CpuCopies`); on a GPU vLLM's is used unchanged. One thread of each rank
copies, in the order asked, and reports a job as finished when its bytes are there. A copy that fails ends the
engine: vLLM has no word for a job that failed.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any

import numpy as np

from controlplane.perfmodel.offload import no_offload
from dataplane.live.engine_api import vllm_surface as vllm
from dataplane.live.engine_api.processes import free_memory_bytes
from dataplane.live.kv.connector import MigrationConnector, StepMetadata, StepStats


class TieredConnector(MigrationConnector):
    """Moves, and KV offload. It adds vLLM's settings, such as `cpu_bytes_to_use`, to its base's."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if self._why_fixed:
            raise no_offload(f"not for this engine: {self._why_fixed}")
        if role == vllm.KVConnectorRole.SCHEDULER:
            has, ranks = self._settings["cpu_bytes_to_use"], vllm_config.parallel_config.world_size
            needs = max(self._cache["block_bytes"] * ranks, 1)
            if has < needs:
                raise no_offload(f"{has:,} bytes hold no block of KV, which takes {needs:,}")
        self._host = vllm.OffloadingConnector(vllm_config, role, kv_cache_config)
        if role == vllm.KVConnectorRole.SCHEDULER:
            self._cache["host_blocks"] = vllm.host_chunks(self._host)
        self._told: list[Any] = []  # events of host memory
        self._from_host: set[str] = set()  # requests whose external tokens are in host memory

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        layout: str | None = vllm.OffloadingConnector.get_required_kvcache_layout(vllm_config)
        return layout

    # In the scheduler

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        super().bind_kv_cache_manager(kv_cache_manager)
        self._host.bind_kv_cache_manager(kv_cache_manager)

    def on_new_request(self, request: Any) -> None:
        super().on_new_request(request)
        self._host.on_new_request(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        """What another worker has of it, else what host memory has; None while that cannot be said."""
        self._from_host.discard(request.request_id)
        tokens, between_steps = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if tokens:
            return tokens, between_steps
        found: tuple[int | None, bool] = self._host.get_num_new_matched_tokens(request, num_computed_tokens)
        if found[0]:
            self._from_host.add(request.request_id)
        return found

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if request.request_id in self._from_host:
            super().update_state_after_alloc(request, blocks, 0)
            if num_external_tokens:
                self._holds.loads(request.request_id)
            self._host.update_state_after_alloc(request, blocks, num_external_tokens)
            return
        super().update_state_after_alloc(request, blocks, num_external_tokens)
        if num_external_tokens:
            vllm.fence_blocks(self._host, blocks.get_block_ids()[0])

    def get_external_cache_hit_sources(self, request: Any, num_external_tokens: int) -> Any:
        if request.request_id in self._from_host:
            return self._host.get_external_cache_hit_sources(request, num_external_tokens)
        return super().get_external_cache_hit_sources(request, num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        metadata = super().build_connector_meta(scheduler_output)
        metadata.host = self._host.build_connector_meta(scheduler_output)
        return metadata

    def update_connector_output(self, connector_output: Any) -> None:
        super().update_connector_output(connector_output)
        self._host.update_connector_output(connector_output)
        if connector_output.invalid_block_ids:
            self.reset_cache()

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._from_host.discard(request.request_id)
        self._host.request_finished(request, block_ids)  # it lets blocks go, and ends copies before reuse
        return super().request_finished(request, block_ids)

    def has_pending_push_work(self) -> bool:
        return bool(self._host.has_pending_push_work())

    def reset_cache(self) -> bool | None:
        """Forget what is in host memory; vLLM tells no event of it."""
        deque(self._host.take_events(), maxlen=0)
        self._told = [{"type": "AllBlocksCleared"}]
        return bool(self._host.reset_cache())

    # In a rank

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        super().register_kv_caches(kv_caches)
        self._host.register_kv_caches(kv_caches)

    def handle_preemptions(self, kv_connector_metadata: Any) -> None:
        self._host.handle_preemptions(kv_connector_metadata.host)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._host.bind_connector_metadata(connector_metadata.host)

    def clear_connector_metadata(self) -> None:
        super().clear_connector_metadata()
        self._host.clear_connector_metadata()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        super().start_load_kv(forward_context, **kwargs)
        self._host.start_load_kv(forward_context, **kwargs)

    def wait_for_save(self) -> None:
        self._host.wait_for_save()

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        results = super().get_transfer_results(finished_req_ids)
        _, loaded = self._host.get_finished(finished_req_ids)
        results.finished_recving |= loaded
        return results

    def build_connector_worker_meta(self) -> Any:
        return self._host.build_connector_worker_meta()

    # In both

    def get_kv_connector_stats(self) -> StepStats | None:
        """As without host memory, and what has come there, gone, and been loaded since the last step."""
        stats = super().get_kv_connector_stats()
        if self._role != vllm.KVConnectorRole.SCHEDULER:
            return stats
        told, self._told = [*self._told, *self._host.take_events()], []
        news: dict[str, Any] = {"host_events": told} if told else {}
        loaded, took_s = vllm.loads_of(self._host.get_kv_connector_stats())
        if loaded:
            news["host_loads"] = {"bytes": loaded, "seconds": took_s}
        if not news:
            return stats
        return StepStats(data=news if stats is None else stats.data | news)

    def shutdown(self) -> None:
        super().shutdown()
        self._host.shutdown()


class CpuMemorySpec(vllm.CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's tier in host memory for an engine whose KV is in host memory itself."""

    _worker: CpuCopies | None

    def get_worker(self, kv_caches: Any) -> vllm.OffloadingWorker:
        if self._worker is None:
            asked, free = self.num_chunks * self.cpu_page_size_per_worker, free_memory_bytes()
            if asked > free:
                has = f"{free / 2**30:.1f} GiB are free"
                raise no_offload(f"a rank is to keep {asked / 2**30:.1f} GiB, {has} on its host")
            self._worker = CpuCopies(kv_caches, self.num_chunks)
        return self._worker


class CpuCopies(vllm.OffloadingWorker):  # type: ignore[misc]
    """A rank's copies between its KV caches, as vLLM describes them, and a pool of `chunks` of one block."""

    def __init__(self, kv_caches: Any, chunks: int) -> None:
        self._caches = [cache.tensor.numpy() for cache in kv_caches.tensors]
        # Memory that nothing was written to is not taken from the host yet.
        self._pool = [np.empty((chunks, cache.shape[1]), cache.dtype) for cache in self._caches]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="host-memory")
        self._jobs: dict[int, Future[tuple[int, float]]] = {}

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._jobs[job_id] = self._thread.submit(
            _copy, self._caches, src_spec.block_ids, self._pool, dst_spec.block_ids
        )
        return True

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        self._jobs[job_id] = self._thread.submit(
            _copy, self._pool, src_spec.block_ids, self._caches, dst_spec.block_ids
        )
        return True

    def get_finished(self) -> list[vllm.TransferResult]:
        done = {job: self._jobs.pop(job) for job in [job for job, copy in self._jobs.items() if copy.done()]}
        return [vllm.TransferResult(job, True, *copy.result()) for job, copy in done.items()]

    def wait(self, job_ids: set[int]) -> None:
        wait([self._jobs[job] for job in job_ids if job in self._jobs])

    def shutdown(self) -> None:
        self._thread.shutdown(wait=True, cancel_futures=True)


def _copy(source: list[Any], taken: Any, target: list[Any], put: Any) -> tuple[int, float]:
    """Copy rows of every layer; the bytes, and the seconds that it took."""
    began_s = time.perf_counter()
    for layer, to in zip(source, target, strict=True):
        to[put] = layer[taken]
    return len(taken) * sum(layer.shape[1] for layer in source), time.perf_counter() - began_s
