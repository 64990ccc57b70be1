"""The private surface of vLLM: every name that Tokenfleet touches, in one place, for one version.

vLLM's engine messages, their codec, the engine client and the connector base class may change with any
release. The rest of the package imports them from here only, so that a new version is one file to read
and tests/live/test_vllm_surface.py to run. Public vLLM names are imported here too, for the one version
check. Importing this module without that vLLM raises BadInput.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import msgspec

from controlplane.errors import BadInput
from dataplane.live.engine_api import VLLM_VERSION
from dataplane.live.engine_api.messages import SegmentOutput, StepOutputs
from dataplane.startup import loading

SUPPORTED_VERSION = VLLM_VERSION

try:
    with loading():
        from vllm import __version__ as vllm_version
except ImportError as error:
    why = "not installed" if error.name == "vllm" else f"cannot be loaded ({error})"
    raise BadInput(
        f"vllm: {why}; the live plane needs vllm {SUPPORTED_VERSION}"
        " (requirements/live-cpu.txt, or the live-gpu extra)"
    ) from error

if vllm_version.split("+")[0] != SUPPORTED_VERSION:
    raise BadInput(
        f"vllm: version {vllm_version} is installed, the live plane is built on {SUPPORTED_VERSION}"
    )

with loading():
    from vllm.config import KVEventsConfig
    from vllm.distributed import utils as _utils
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        SupportsHMA,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorStats
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
        _TransferMetricName as _Offloaded,
    )
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.lora.request import LoRARequest
    from vllm.platforms import current_platform
    from vllm.sampling_params import RequestOutputKind, SamplingParams
    from vllm.usage.usage_lib import UsageContext
    from vllm.utils.ompmultiprocessing import OMPProcessManager
    from vllm.v1.engine import (
        EngineCoreEvent,
        EngineCoreEventType,
        EngineCoreOutput,
        EngineCoreOutputs,
        EngineCoreRequest,
        FinishReason,
    )
    from vllm.v1.engine.core_client import EngineCoreClient
    from vllm.v1.engine.exceptions import EngineDeadError
    from vllm.v1.executor import Executor
    from vllm.v1.kv_cache_interface import group_kernel_blocks
    from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec
    from vllm.v1.metrics.stats import PrefillStats, SchedulerStats
    from vllm.v1.outputs import LogprobsLists
    from vllm.v1.sample.logits_processor import AdapterLogitsProcessor
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as SlotLogitsProcessor


class VllmCodec:
    """vLLM's encoding of messages, tensors among them. Not for several threads."""

    version = vllm_version

    def __init__(self) -> None:
        self.encode = MsgpackEncoder().encode
        self.request = MsgpackDecoder(EngineCoreRequest).decode
        self.outputs = MsgpackDecoder(EngineCoreOutputs).decode

    def adapter(self, fields: Sequence[Any]) -> Any:
        return msgspec.convert(fields, LoRARequest)


class EngineClient(EngineCoreClient):  # type: ignore[misc]  # vLLM is not typed here
    """A core (`gateway.connections.FrontEndClient`) as the engine that AsyncLLM reads and calls."""

    def __init__(self, core: Any) -> None:
        self._core = core
        # The indices that AsyncLLM lays its metrics out for, and whether to give up.
        self.engine_ranks_managed = list(range(core.slots))
        self.resources = SimpleNamespace(engine_dead=False)

    async def add_lora_async(self, lora_request: LoRARequest) -> bool:
        await self._core.add_adapter(lora_request)
        return True

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        await self._core.add_request_async(request)

    async def abort_requests_async(self, request_ids: Sequence[str]) -> None:
        await self._core.abort_requests_async(request_ids)

    def shutdown(self, timeout: float | None = None) -> None:
        self._core.shutdown(timeout)

    async def get_output_async(self) -> EngineCoreOutputs:
        """Return the next batch of outputs; what a worker has sent is vLLM's already."""
        batch = await self._core.get_output_async()
        return as_vllm(batch) if isinstance(batch, StepOutputs) else batch

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def reset_mm_cache_async(self) -> None:
        """Nothing to do: the cache is the workers', and starts empty."""


def as_vllm(batch: StepOutputs) -> EngineCoreOutputs:
    """Our outputs of a step as vLLM's: an emulated engine's, or the end of a request that has failed."""
    load = batch.scheduler_stats
    return EngineCoreOutputs(
        batch.engine_index,
        [_output_as_vllm(output) for output in batch.outputs],
        None
        if load is None
        else SchedulerStats(
            num_running_reqs=load.num_running_reqs,
            num_waiting_reqs=load.num_waiting_reqs,
            kv_cache_usage=load.kv_cache_usage,
        ),
        batch.timestamp,
    )


def _output_as_vllm(output: SegmentOutput) -> EngineCoreOutput:
    finish, found, logprobs = output.finish_reason, output.prefill_stats, output.new_logprobs
    made = EngineCoreOutput(output.request_id, output.new_token_ids, stop_reason=output.stop_reason)
    if finish is not None:
        made.finish_reason = FinishReason(finish)
    if logprobs is not None:
        made.new_logprobs = LogprobsLists(*logprobs)
    if output.events is not None:
        made.events = [EngineCoreEvent(EngineCoreEventType(e.type), e.timestamp) for e in output.events]
    if found is not None:
        made.prefill_stats = PrefillStats()
        made.prefill_stats.set(
            found.num_prompt_tokens, found.num_local_cached_tokens, found.num_external_cached_tokens
        )
    return made


# vLLM runs a lone rank inside its engine's process on a GPU; on a CPU it does when the executor is named so.
ONE_PROCESS_EXECUTOR = "vllm.v1.executor.uniproc_executor.UniProcExecutor"


def check_served(config: Any) -> None:
    """Raise BadInput where an engine of this configuration is out of the live plane's reach."""
    model, parallel = config.model_config, config.parallel_config
    if parallel.pipeline_parallel_size > 1:
        raise BadInput(
            f"--pipeline-parallel-size {parallel.pipeline_parallel_size}: a worker is one stage;"
            " let it span GPUs by --tp"
        )
    if parallel.data_parallel_size > 1:
        raise BadInput(
            f"--data-parallel-size {parallel.data_parallel_size}: replicas are workers; use --workers"
        )
    for name in ("decode_context_parallel_size", "prefill_context_parallel_size"):
        if (degree := getattr(parallel, name)) > 1:  # a block then holds tokens of several ranks
            raise BadInput(f"--{name.replace('_', '-')} {degree}: KV blocks cannot be moved; leave it at 1")
    if model.runner_type != "generate":
        what = f"it is served for {model.runner_type} (embeddings, scores, rewards)"
        raise BadInput(f"model {model.model}: {what}; a fleet serves models that generate text")
    if model.is_encoder_decoder:
        raise BadInput(f"model {model.model}: it has an encoder and a decoder; a fleet serves decoders")


def has_prompt_logprobs(config: Any) -> bool:
    """Whether an engine computes log-probabilities of prompts: vLLM's CPU kernels for LoRA die of them."""
    return config.lora_config is None or not current_platform.is_cpu()


def fence_blocks(offloading: OffloadingConnector, blocks: list[int]) -> None:
    """Have copies of these blocks to host memory end before this step writes, as if it had allocated them."""
    offloading.scheduler._current_batch_allocated_block_ids.update(blocks)


def host_chunks(offloading: OffloadingConnector) -> int:
    """How many blocks its host memory holds: on a GPU they are whole pages, and MLA's are kept once."""
    return int(offloading.connector_scheduler.manager._num_chunks)


def loads_of(stats: Any) -> tuple[int, float]:
    """Loads from host memory by statistics of vLLM's offloading: bytes, and seconds; 0 of both for None."""
    counted = {} if stats is None else stats.reduce()
    return int(counted.get(_Offloaded.LOAD_BYTES, 0)), float(counted.get(_Offloaded.LOAD_TIME, 0.0))


def sleep_while_spinning() -> None:
    """Make this process give its core away while it waits for vLLM's shared-memory queues.

    They spin on `sched_yield`. On a host whose cores are the engine's accelerator, the spinning takes a core
    from other processes. Since Linux 6.18 a yielding task forfeits its virtual runtime. So two processes that
    yield on one core keep the kernel's own threads waiting: loopback connections stalled for seconds. vLLM's
    other way, for old Pythons, is `sleep(0)`, which sleeps some 50 us.
    """
    _utils.USE_SCHED_YIELD = False
