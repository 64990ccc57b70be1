"""The KV connector that vLLM loads: calls `Holds` and `KvLoads` from its hooks, and counts step loads.

It is loaded through vLLM's public out-of-tree hook (`kv_connector_module_path`), once in the scheduler's
process and once in each rank's. Only what NIXL's and LMCache's connectors use is used.

An engine that uses it needs `kv_load_failure_policy="fail"`. Blocks are moved where the KV cache is one group
of layers that keep every token's KV (`why_fixed`); in any other engine the connector only counts.

A continued request whose output follows a grammar comes with its tokens so far. The grammar is advanced over
them when its compilation ends, which the scheduler waits for in any case.

vLLM's own iteration details count requests and tokens but not the context they hold, and a decode step's time
grows with context. The connector sees every scheduled step, and its stats travel with the step's outputs; so
they carry the exact regressors of the step model.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from controlplane.errors import BadInput
from dataplane.live.engine_api import vllm_surface as vllm
from dataplane.live.engine_api.kv_messages import Control, Transfer, message_from
from dataplane.live.engine_api.link import PRIOR_TOKENS
from dataplane.live.engine_api.processes import cpu_s, descendants
from dataplane.live.engine_api.step_trace import no_load
from dataplane.live.kv.holds import Holds, StepOrders, inline_blocks
from dataplane.live.kv.loads import KvLoads
from dataplane.live.kv.memory import kv_memory
from dataplane.live.kv.nixl import bypasses
from dataplane.live.kv.transport import SocketTransport


@dataclass
class StepMetadata(vllm.KVConnectorMetadata):  # type: ignore[misc]
    """A step's orders, from the scheduler's connector to the ranks'."""

    orders: StepOrders = field(default_factory=StepOrders)
    host: Any = None  # those of vLLM's offloading (host_memory.py)


class StepStats(vllm.KVConnectorStats):  # type: ignore[misc]
    """The message of the scheduler's connector to the worker about a step, in vLLM's channel for it."""

    def reset(self) -> None:
        self.data.clear()

    def aggregate(self, other: Any) -> Any:
        """Both, for ranks and then for the scheduler, whose only share are bytes fetched."""
        fetched = Counter(self.data.get("fetched", {})) + Counter(other.data.get("fetched", {}))
        return StepStats(data=self.data | other.data | {"fetched": dict(fetched)})

    def reduce(self) -> dict[str, int | float]:
        return dict(self.data)

    def is_empty(self) -> bool:
        return not self.data

    def to_dict(self) -> dict[str, Any]:
        marks = self.data.pop("marks", None)
        return {**self.data, **(gpu_times(*marks) if marks else {})}


class StepMarks:
    """Marks on a GPU's stream at the begin and end of each step that a rank launches.

    The engine launches a step before it waits for the last one's end. Where launching takes longer, it sees
    that end late. The GPU does not.
    """

    def __init__(self, make_event: Callable[[], Any]) -> None:
        self._make_event = make_event
        self._ended = self.mark()
        self._begun = self._ended

    def mark(self) -> Any:
        """An event that happens once the GPU has done all that is launched."""
        event = self._make_event()
        event.record()
        return event

    def begin(self) -> None:
        self._begun = self.mark()

    def end(self) -> tuple[Any, Any, Any]:
        """The last step's end, and this step's begin and end."""
        last, self._ended = self._ended, self.mark()
        return last, self._begun, self._ended


def gpu_times(last: Any, begun: Any, ended: Any) -> dict[str, float]:
    """Seconds by the GPU's clock from the last step's end, and from this one's begin, to its end.

    Empty where that end has not come yet. Drafts are made after a step's outputs are read.
    """
    if not ended.query():
        return {}
    return {"since_last_s": last.elapsed_time(ended) / 1e3, "gpu_s": begun.elapsed_time(ended) / 1e3}


class MigrationConnector(vllm.KVConnectorBase_V1, vllm.SupportsHMA):  # type: ignore[misc]
    """Live migration of running requests. Settings in `kv_connector_extra_config`:

    `addresses`: where each TP rank serves its blocks; `secret`: asked of readers; `lease_s`, `hold_s`;
    `transport`: `auto`, `nixl` or `sockets` (nixl.py).
    """

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        if vllm.current_platform.is_cpu():
            vllm.sleep_while_spinning()
        self._why_fixed = why_fixed(kv_cache_config, vllm_config.speculative_config)
        self._settings = vllm_config.kv_transfer_config.kv_connector_extra_config
        if role == vllm.KVConnectorRole.SCHEDULER:
            groups, pool = kv_cache_config.kv_cache_groups, kv_cache_config.kv_cache_tensors
            self._cache: dict[str, Any] = {
                "groups": len(groups),
                "block_bytes": sum(t.size for t in pool) // max(1, kv_cache_config.num_blocks),
                "why_fixed": self._why_fixed,
            }
            self._running: dict[str, Any] = {}  # requests
            self._ranks: list[int] | None = None
            # Under asynchronous scheduling a step is planned before the last one's outputs are read.
            self._begun: deque[tuple[dict[str, int], float, set[int]]] = deque()
            self._doubtful: dict[str, list[int]] = {}  # blocks of requests that ended while they were unsure
            self._answers: dict[str, tuple[str, int]] = {}  # and the tokens that were loaded
            self._loaders: dict[str, tuple[Any, int]] = {}  # requests that hold what they load, and how much
            self._block_tokens = vllm_config.cache_config.block_size
            self._holds = Holds(
                self._block_tokens,
                self._settings.get("lease_s", 60.0),
                self._settings.get("hold_s", 30.0),
            )
        else:
            self._rank = vllm_config.parallel_config.rank
            self._block_errors: set[int] = set()
            self._loads: KvLoads | None = None
            self._is_alone = vllm_config.parallel_config.world_size == 1
            self._marks: StepMarks | None = None

    # In the scheduler

    def on_new_request(self, request: Any) -> None:
        self._running[request.request_id] = request
        if request.structured_output_request is not None:
            prior = (request.sampling_params.extra_args or {}).get(PRIOR_TOKENS)
            if prior:
                advance_grammar(request, prior)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        message = asked_of(request)
        if isinstance(message, Control):
            return 0, False
        tokens = self._holds.tokens_to_load(request.request_id, message, num_computed_tokens)
        between_steps = message.load is not None and not message.load.inline
        return tokens, tokens > 0 and between_steps

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        message = asked_of(request)
        if isinstance(message, Transfer):
            self._holds.admitted(request.request_id, message, blocks.get_block_ids()[0], num_external_tokens)
            if message.hold:
                self._loaders[request.request_id] = request, num_external_tokens

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, block_ids[0] if block_ids else [])

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        self._running.pop(request.request_id, None)
        self._loaders.pop(request.request_id, None)
        message = message_from(request.kv_transfer_params)
        now_s = time.monotonic()
        if isinstance(message, Control):
            if message.verb == "release":
                self._holds.release(message.segment)
            else:
                is_running = message.segment in self._running and not self._why_fixed
                leased = self._holds.begin(message.segment, is_running, now_s)
                self._answers[request.request_id] = "leased" if leased else "gone", 0
            return False, None
        status = request.status.name
        if not self._unsure().isdisjoint(block_ids):
            self._doubtful[request.request_id] = block_ids
        block_ids = block_ids[: self._readable_blocks(request)]
        keep_blocks = self._holds.ended(
            request.request_id,
            message,
            block_ids,
            aborted=status == "FINISHED_ABORTED",
            failed=status == "FINISHED_ERROR",
            now_s=now_s,
        )
        return keep_blocks, None

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        now_s = time.monotonic()
        tables, manager = {}, self._kv_cache_manager
        cached = scheduler_output.scheduled_cached_reqs
        # What a request that was just admitted finds in the prefix cache, this very step may compute.
        known = set(cached.req_ids) - cached.resumed_req_ids
        leased = [s for s in self._holds.leased() if s in known]
        for segment in leased if manager is not None else ():
            # What this step writes may be read once the next has begun.
            blocks = self._readable_blocks(self._running[segment])
            tables[segment] = manager.get_block_ids(segment)[0][:blocks]
        preempted = scheduler_output.preempted_req_ids or ()
        orders = self._holds.orders(tables, preempted, now_s, self._unsure())
        load = step_load(scheduler_output)
        if manager is not None:  # now: the next step may be planned before this one's outputs are read
            pool = manager.block_pool
            used = pool.num_gpu_blocks - 1 - pool.get_num_free_blocks()  # one stands for no block
            load["kv_blocks"] = round(used / self._cache["groups"])
        self._begun.append((load, now_s, inline_blocks(orders.jobs)))
        return StepMetadata(orders)

    def _readable_blocks(self, request: Any) -> int:
        """The number of a request's blocks that can be read once the last step has run.

        While a prompt is computed its last block may be filled in part, and a reader takes whole ones.
        """
        computed, known = request.num_computed_tokens, request.num_tokens + request.num_output_placeholders
        full, part = divmod(computed, self._block_tokens)
        return int(full + (part > 0 and computed >= known - 1))

    def _unsure(self) -> set[int]:
        """Blocks of loads inside steps whose outputs have not been read: they may turn out to have failed."""
        return set[int]().union(*(blocks for _, _, blocks in self._begun))

    def update_connector_output(self, connector_output: Any) -> None:
        """Loads that are complete in every rank.

        A loader is not handed on to the scheduler, which would compute a token of it. Its blocks go into the
        prefix cache, where the next request finds them. It waits, owning them, until it is dropped.

        Where a load inside a step has failed, the scheduler ends the requests that run with its blocks. Those
        that have ended in the meantime have left wrong blocks in the prefix cache, or to be read.
        """
        invalid = connector_output.invalid_block_ids
        for segment, blocks in self._doubtful.items() if invalid else ():
            wrong = next((at for at, block in enumerate(blocks) if block in invalid), len(blocks))
            self._kv_cache_manager.evict_blocks(set(blocks[wrong:]))
            if wrong < len(blocks):
                self._holds.release(segment)
        for segment in tuple(connector_output.finished_recving or ()):
            if self._holds.arrived(segment, time.monotonic()):
                connector_output.finished_recving.discard(segment)
                loader, tokens = self._loaders.pop(segment)
                self._kv_cache_manager.cache_blocks(loader, loader.num_computed_tokens)
                self._answers[segment] = "loaded", tokens

    # In a rank

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        if vllm.current_platform.is_cpu() and torch.cpu._is_amx_tile_supported():
            # A rank whose first step decodes one token would use the CPU's tiles before asking the kernel
            # for them, and die of SIGILL.
            torch.cpu._init_amx()
        is_on_gpu = any(tensor.is_cuda for tensor in kv_caches.values())
        if is_on_gpu and self._is_alone:  # ranks in processes of their own tell of an end when it comes
            self._marks = StepMarks(partial(torch.cuda.Event, enable_timing=True))
        if self._why_fixed:
            return
        blocks = self._kv_cache_config.num_blocks
        for name, tensor in kv_caches.items():
            if tensor.shape[0] % blocks:
                raise BadInput(
                    f"{name}: KV cache of shape {tuple(tensor.shape)}, expected {blocks} blocks first"
                )
        # A kernel may split the blocks that the scheduler counts in.
        layers = [vllm.group_kernel_blocks(tensor, blocks) for tensor in kv_caches.values()]
        address = self._settings["addresses"][self._rank]
        memory = kv_memory(layers)
        around = bypasses(self._settings.get("transport", "auto"), address, memory)
        transport = SocketTransport(self._settings["secret"], around)
        self._loads = KvLoads(memory, transport, address, self._rank)

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        if self._marks is not None:
            self._marks.begin()
        # Here and not in start_load_kv, which vLLM may call after the step's writes.
        if self._loads is not None:
            self._loads.take_orders(connector_metadata.orders)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._loads is not None:
            self._loads.start()

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads inside a step are done before its first layer."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Nothing is saved: readers pull from the cache itself."""

    def wait_for_save(self) -> None:
        """Nothing is saved."""

    def get_transfer_results(self, finished_req_ids: set[str]) -> Any:
        if self._loads is None:
            return vllm.KVConnectorTransferResults()
        freed, received, failed, self._block_errors = self._loads.results()
        return vllm.KVConnectorTransferResults(
            finished_sending=freed, finished_recving=received, failed_recving=failed
        )

    def get_block_ids_with_load_errors(self) -> set[int]:
        blocks, self._block_errors = self._block_errors, set()
        return blocks

    # In both

    def get_kv_connector_stats(self) -> StepStats | None:
        """The step's contents and start, and the answers to moves; of a rank, the bytes that it fetched.

        vLLM's own figure of a step's time is only the wait for its result: nothing, where the rank computes
        inside this process.
        """
        if self._role != vllm.KVConnectorRole.SCHEDULER:
            fetched = self._loads.fetched() if self._loads is not None else {}
            told: dict[str, Any] = {"fetched": fetched} if fetched else {}
            if self._marks is not None:
                told["marks"] = self._marks.end()
            return StepStats(data=told) if told else None
        # What the pool has told since the last step: vLLM publishes and forgets it right after this.
        events = [] if self._kv_cache_manager is None else self._kv_cache_manager.block_pool.kv_event_queue
        if not self._begun:
            return StepStats(data={"events": list(events)}) if events else None
        answers, self._answers = self._answers, {}
        load, began_s, _ = self._begun.popleft()
        if not self._unsure():
            self._doubtful.clear()
        stats: dict[str, Any] = {"load": load, "began_s": began_s, "answers": answers}
        stats |= {"loaders": self._holds.loaders, "cache": self._cache}
        if events:
            stats["events"] = list(events)
        if self._settings.get("cpu_clock"):
            if self._ranks is None:  # looked for once: it takes longer than a step
                self._ranks = descendants()
            stats["cpu_s"] = time.process_time() + sum(cpu_s(self._ranks).values())
        return StepStats(data=stats)

    def shutdown(self) -> None:
        if self._role == vllm.KVConnectorRole.WORKER and self._loads is not None:
            self._loads.close()


def loads_inside_steps() -> bool:
    """Whether a short tail is loaded inside the step that admits it.

    On a GPU the engine launches steps ahead. A load inside one would wait for the kernels before it, and the
    next step of every request with it.
    """
    return bool(vllm.current_platform.is_cpu())


def asked_of(request: Any) -> Transfer | Control:
    """The orders of a request to this connector, with its load between steps if none is inside them."""
    message = message_from(request.kv_transfer_params)
    if isinstance(message, Transfer) and message.load is not None and not loads_inside_steps():
        return Transfer(replace(message.load, inline=False), message.hold, message.drop)
    return message


KEEPS_ALL = {"FullAttentionSpec", "MLAAttentionSpec"}  # vLLM's kinds of layers with a block for every token


def why_fixed(cache: Any, drafts: Any) -> str:
    """Why no request of an engine with this KV cache configuration and drafts can be moved; empty if it can.

    A layer that drops what lies behind its window, or folds it into a state, does not have a block for each
    position. So what the target wants may be gone at the source. Drafts from the text so far (n-grams) need
    no KV of their own. A draft model has its own KV, with which no move was tried. A cache of several
    precisions zeroes blocks at the start of a step, before a reader of those blocks is turned away.
    """
    if drafts is not None and drafts.method != "ngram":
        return f"its engine takes drafts by {drafts.method}"
    groups = cache.kv_cache_groups
    if len(groups) != 1:
        return f"its KV cache has {len(groups)} groups of layers"
    spec = groups[0].kv_cache_spec
    specs = getattr(spec, "kv_cache_specs", {"": spec}).values()  # one type, several sizes
    others = sorted({type(s).__name__ for s in specs} - KEEPS_ALL)
    if others:
        return f"its layers do not keep every token's KV ({', '.join(others)})"
    return "its KV cache has several precisions" if cache.needs_kv_cache_zeroing else ""


def advance_grammar(request: Any, prior_tokens: list[int]) -> None:
    """Let the request's grammar, once it is compiled, accept the tokens that came before this segment.

    The scheduler ends a request whose grammar is an exception in an error.
    """
    compiled, advanced = request.structured_output_request._grammar, Future[Any]()

    def advance(done: Future[Any]) -> None:
        try:
            grammar = done.result()
            if not grammar.accept_tokens(request.request_id, prior_tokens):
                raise ValueError("its grammar does not accept the tokens so far")
            advanced.set_result(grammar)
        except Exception as error:  # whatever a grammar's own code raises must reach the scheduler
            advanced.set_exception(error)

    request.structured_output_request.grammar = advanced
    compiled.add_done_callback(advance)


def step_load(scheduler_output: Any) -> dict[str, int]:
    """Counts of one step (module `perfmodel.step`): context and Σ(end² - start²) are as of the step's start.

    A request that computes one token and has produced one before decodes; all else is prefill, the
    recomputation after a preemption included.
    """
    scheduled: dict[str, int] = scheduler_output.num_scheduled_tokens
    counts = no_load()

    def prefill(start: int, tokens: int) -> None:
        counts["prefill_tokens"] += tokens
        counts["prefill_sequences"] += 1
        counts["prefill_sum_sq"] += (start + tokens) ** 2 - start**2

    for new in scheduler_output.scheduled_new_reqs:
        prefill(new.num_computed_tokens, scheduled[new.req_id])
    cached = scheduler_output.scheduled_cached_reqs
    rows = zip(cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True)
    for segment, start, produced in rows:
        if produced and scheduled[segment] == 1:
            counts["sequences"] += 1
            counts["context_tokens"] += start
        else:
            prefill(start, scheduled[segment])
    counts["preemptions"] = len(scheduler_output.preempted_req_ids or ())
    return counts
