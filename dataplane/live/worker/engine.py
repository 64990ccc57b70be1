"""The vLLM engine inside a worker: its settings, its start, and its warm-up.

Only vLLM's EngineCore runs here. Tokenizing, detokenizing, stop strings and metrics are done once, above the
fleet, so that a move does not cut through them. The warm-up leaves nothing that a client could see.
"""

from __future__ import annotations

import asyncio
import os
import platform
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from controlplane.errors import BadInput
from controlplane.perfmodel.offload import no_offload
from controlplane.types import WorkerId
from dataplane.live.engine_api import vllm_surface as vllm
from dataplane.live.engine_api.link import WorkerInfo
from dataplane.live.engine_api.penalties import penalties_of
from dataplane.live.engine_api.processes import EndsWithParent
from dataplane.live.engine_api.segment import plain_request
from dataplane.live.engine_api.wire import Door
from dataplane.live.kv.nixl import Asked, check_installed
from dataplane.live.worker.host_checks import check_shared_room, files_digest, model_files

CPU_KV_BYTES = 1 << 30
CPU_BLOCK_TOKENS = 32
WARM_UP_S = 300.0
DEGREES = ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size")


@dataclass(frozen=True, slots=True)
class KvDoor:
    """Where this engine's ranks serve their KV, and the secret that a reader must know.

    `cpu_clock`: steps also tell the processor time of the engine so far (profiling.py). `transport`: how
    ranks fetch (nixl.py).
    """

    addresses: tuple[str, ...]
    secret: str = field(repr=False)
    lease_s: float = 60.0
    hold_s: float = 30.0
    cpu_clock: bool = False
    transport: Asked = "auto"


def engine_args(engine_settings: Mapping[str, Any], door: KvDoor) -> vllm.AsyncEngineArgs:
    """vLLM's arguments for a worker: what was asked, this platform's defaults, and what moves need.

    Raises BadInput for a setting that the live plane keeps for itself.
    """
    for name in ("kv_transfer_config", "logits_processors"):
        if engine_settings.get(name):
            raise BadInput(
                f"engine argument {name}: the live plane sets it itself, got {engine_settings[name]!r}"
            )
    if engine_settings.get("distributed_executor_backend") == "ray":
        raise BadInput(
            "engine argument distributed_executor_backend: ranks share one host, so it cannot be ray"
        )
    check_installed(door.transport)
    names = {field.name for field in fields(vllm.AsyncEngineArgs)}
    unknown = sorted(set(engine_settings) - names)
    if unknown:
        raise BadInput(f"engine argument {unknown[0]}: vllm {vllm.vllm_version} has none of that name")
    # One KV cache group for all layers, also where some look back over a window only: such KV can be moved.
    settings: dict[str, Any] = {"scheduling_policy": "priority", "disable_hybrid_kv_cache_manager": True}
    if vllm.current_platform.is_cpu():
        settings |= {"enforce_eager": True, "block_size": CPU_BLOCK_TOKENS}
        settings |= {"kv_cache_memory_bytes": CPU_KV_BYTES}
        if not any((engine_settings.get(degree) or 1) > 1 for degree in DEGREES):
            # A queue between two processes costs more here than the step of a small model.
            settings |= {"distributed_executor_backend": vllm.ONE_PROCESS_EXECUTOR}
    elif (engine_settings.get("tensor_parallel_size") or 1) > 1:
        # In a placement group vLLM would take Ray, which refuses one bundle with all GPUs of a worker. Child
        # processes of the engine also share memory with the KV doors, and a step has no hop through Ray.
        settings |= {"distributed_executor_backend": "mp"}
    # Read by our connector, so that nothing needs to be published.
    tells = engine_settings.get("enable_prefix_caching") is not False
    settings |= {"kv_events_config": vllm.KVEventsConfig(enable_kv_cache_events=tells, publisher="null")}
    settings |= {name: value for name, value in engine_settings.items() if value is not None}
    host_bytes = _take_host_bytes(settings)
    settings |= {
        # What enters an engine's cache of images, a gateway would have to know of each engine.
        "mm_processor_cache_gb": 0,
        "disable_log_stats": False,
        "kv_transfer_config": _connector(door, host_bytes),
    }
    return vllm.AsyncEngineArgs(**settings)


def _take_host_bytes(settings: dict[str, Any]) -> int:
    """Take the size of KV offload out of vLLM's arguments: its bytes, 0 for none.

    vLLM would put its connector for it in the place of the one that moves KV. Raises BadInput.
    """
    size_gib, backend = settings.pop("kv_offloading_size", None), settings.pop("kv_offloading_backend", None)
    if size_gib is None:
        return 0
    if not 0 < size_gib < float("inf"):
        raise BadInput(f"engine argument kv_offloading_size: expected GiB above 0, got {size_gib!r}")
    if backend not in (None, "native"):
        raise BadInput(f"engine argument kv_offloading_backend: a fleet has native, got {backend!r}")
    if settings.get("enable_prefix_caching") is False:
        raise no_offload("what leaves KV is found by prefixes; leave out --no-enable-prefix-caching")
    return int(size_gib * (1 << 30))


def _connector(door: KvDoor, host_bytes: int) -> dict[str, Any]:
    """vLLM's `kv_transfer_config`: our connector, which owns vLLM's offloading where there is host memory."""
    extra = asdict(door) | {"addresses": list(door.addresses)}
    name, module = "MigrationConnector", "dataplane.live.kv.connector"
    if host_bytes:
        name, module = "TieredConnector", "dataplane.live.kv.host_memory"
        extra["cpu_bytes_to_use"] = host_bytes
        if vllm.current_platform.is_cpu():  # where vLLM's own half in the ranks refuses
            extra |= {"spec_name": "CpuMemorySpec", "spec_module_path": module}
    return {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": extra,
    }


def engine_config(args: vllm.AsyncEngineArgs) -> Any:
    """vLLM's configuration, with the penalties of moved requests in the form of the model runner it chose.

    With speculative decoding the first runner takes no logits processors. Requests with penalties then do
    not continue on another engine.
    """
    # vLLM's limits of a batch depend on who asks: the core would get a quarter of a server's on a GPU.
    config = args.create_engine_config(vllm.UsageContext.OPENAI_API_SERVER)
    if config.use_v2_model_runner or config.speculative_config is None:
        config.model_config.logits_processors = [penalties_of(config.use_v2_model_runner)]
    return config


def start_engine(args: vllm.AsyncEngineArgs) -> Any:
    """Start an EngineCore in its own process and return vLLM's asynchronous client of it. Blocks."""
    config = engine_config(args)
    vllm.check_served(config)
    if not vllm.current_platform.is_cpu():
        check_shared_room(config.kv_transfer_config.kv_connector_extra_config.get("cpu_bytes_to_use", 0))
        if os.environ.get("OMP_NUM_THREADS") == "1":  # Ray's, for an actor without CPUs; weights load on them
            del os.environ["OMP_NUM_THREADS"]
    config.additional_config = EndsWithParent(config.additional_config)
    if config.model_config.is_hybrid:  # states and attention in turns cannot be one group
        config.scheduler_config.disable_hybrid_kv_cache_manager = False
    is_one_process = config.parallel_config.distributed_executor_backend == vllm.ONE_PROCESS_EXECUTOR
    # OpenMP reads its cores when a process starts. vLLM tells its rank processes, not its engine's.
    cores = vllm.OMPProcessManager(config).configure_omp_envs(0, 0) if is_one_process else nullcontext()
    with cores:
        return vllm.EngineCoreClient.make_async_mp_client(
            config, vllm.Executor.get_class(config), log_stats=True
        )


def worker_info(
    worker: WorkerId, core: Any, kv: Mapping[str, Any], door: Door, kv_door: KvDoor, pid: int
) -> WorkerInfo:
    """A started engine's description for gateways; `kv` is its connector's description of the KV cache."""
    config = core.vllm_config
    model, parallel, cache = config.model_config, config.parallel_config, config.cache_config
    # Groups share the blocks: a token takes one of each.
    blocks = cache.num_gpu_blocks if kv["groups"] == 1 else cache.kv_cache_size_tokens // cache.block_size
    return WorkerInfo(
        worker=worker,
        engine="vllm",
        model=model.served_model_name if isinstance(model.served_model_name, str) else model.model,
        endpoint=door.endpoint,
        link_key=door.key,
        kv_addresses=kv_door.addresses,
        kv_secret=kv_door.secret,
        block_tokens=cache.block_size,
        kv_blocks=blocks,
        kv_bytes_per_token=kv["block_bytes"] // cache.block_size * parallel.tensor_parallel_size,
        max_model_len=model.max_model_len,
        max_seqs=config.scheduler_config.max_num_seqs,
        max_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        tp_degree=parallel.tensor_parallel_size,
        vllm_version=vllm.vllm_version,
        dtype=str(model.dtype).removeprefix("torch."),
        pid=pid,
        why_fixed=kv["why_fixed"],
        caches_prefixes=bool(cache.enable_prefix_caching),
        has_stateless_seeds=bool(config.use_v2_model_runner),
        carries_penalties=bool(config.model_config.logits_processors),
        weights=weights_digest(model),
        kv_dtype=str(cache.cache_dtype),
        device=device_name() + _cores(parallel.tensor_parallel_size),
        host_blocks=kv.get("host_blocks", 0),
        steps_ahead=float(bool(config.scheduler_config.async_scheduling)),
    )


def tells_cached(core: Any) -> bool:
    """Whether a started engine tells of the blocks that it caches."""
    config = core.vllm_config
    events = config.kv_events_config
    is_on = events is not None and events.enable_kv_cache_events
    return bool(is_on and config.cache_config.enable_prefix_caching)


def weights_digest(model: Any) -> str:
    """A digest of a model's weights, the same on every machine: of its files, or of their commit."""
    said = [
        str(model.quantization),
        str(model.hf_overrides),
        str(getattr(model.hf_config, "_commit_hash", None)),
    ]
    files = model_files(Path(model.model))
    return files_digest([*said, *([] if files else [str(model.model)])], files)


async def warm_up(core: Any) -> Mapping[str, Any]:
    """Run every kind of step a client could be the first to ask for, then forget what it left in the cache.

    Return the KV cache's description by the engine's connector.

    A first logprobs request compiles for seconds. A first prompt of a new size is slower than the next.
    Raises BadInput when the engine does not get through it.
    """
    longest = min(core.vllm_config.model_config.max_model_len // 2, 512)
    lengths = sorted({min(longest, n) for n in (4, 40, 200, 512)})
    plain: dict[str, Any] = {"temperature": 0.0, "max_tokens": 4, "ignore_eos": True}
    kinds: list[dict[str, Any]] = [
        plain,
        plain | {"logprobs": 5},
        plain | {"presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.1},
        plain | {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "seed": 1},
    ]
    if vllm.has_prompt_logprobs(core.vllm_config):
        kinds.append(plain | {"prompt_logprobs": 1})
    try:
        for turn, kind in enumerate(kinds):
            waves = lengths if turn == 0 else lengths[:2]
            kv = await asyncio.wait_for(_run(core, f"warm-{turn}", waves, kind), WARM_UP_S)
        await core.reset_prefix_cache_async(reset_connector=True)
    except TimeoutError:
        raise BadInput(f"engine: did not get through its warm-up within {WARM_UP_S:g} s") from None
    return kv


async def _run(core: Any, name: str, lengths: list[int], params: dict[str, Any]) -> dict[str, Any]:
    """Run one request per length together, to their ends; return the connector's KV cache statistics."""
    kv: dict[str, Any] = {}
    unfinished = set()
    for at, length in enumerate(lengths):
        segment = f"{name}-{at}"
        unfinished.add(segment)
        prompt = [(at + i) % 100 + 3 for i in range(length)]
        asked = vllm.SamplingParams(detokenize=False, **params)
        await core.add_request_async(plain_request(segment, prompt, asked, time.time()))
    while unfinished:
        batch = await core.get_output_async()
        stats = batch.scheduler_stats
        if stats is not None:
            kv = (stats.kv_connector_stats or {}).get("cache", kv)
        unfinished -= {output.request_id for output in batch.outputs if output.finish_reason is not None}
    return kv


def device_name() -> str:
    """The GPU's or the processor's name."""
    if not vllm.current_platform.is_cpu():
        return str(vllm.current_platform.get_device_name())
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    return ", ".join(sorted(names)) or platform.processor() or platform.machine()


def _cores(ranks: int) -> str:
    """How many of a host's cores a CPU engine computes on, in words; nothing elsewhere."""
    if not vllm.current_platform.is_cpu():
        return ""
    bound = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "")
    shares = [share.count(",") + 1 for share in bound.split("|") if share[:1].isdigit()]
    cores = sum(shares) or len(os.sched_getaffinity(0)) * ranks
    return f", {cores} core" + "s" * (cores > 1)
