"""A profile composed without a GPU, from aiconfigurator-core's measured operation tables.

The package (optional: `pip install 'tokenfleet[predict]'`) adds up the kernels of a model's layers on a GPU
from tables of single operations. Its step times are fitted like any measurement. Two things that tables
cannot show are added and stated: the host's time a step (`Source.host_s`, which a running fleet's refit
corrects), and an error of UNSEEN beside the fit's own, joined with how far its mixed steps are from the
fitted ones.

The package predicts any batch, also far beyond its tables. So it is asked only for batches that the model's
context and the worker's KV allow, and a model or GPU without tables is refused.

Weights have the precision of the model's configuration, or the one that is asked for, KV 16 bits; experts are
split over a worker's GPUs like other weights, unless they are to stay whole. A mixture's steps are fitted
with the experts that they touch. KV of latent attention is counted once. Where layers attend to a window or
keep a state, a token is what it takes in the others, and the window or state is a request's own (`KvModel`),
as vLLM's groups of layers have it; their step times are in the fit's terms of sequences and context, from
contexts on that fill the window.
"""

from __future__ import annotations

import importlib.util
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from controlplane.errors import BadInput, ProfileMissing
from controlplane.perfmodel.fit import fit_prefill, fit_step
from controlplane.perfmodel.profile import EngineLimits, KvModel, Profile, Source
from controlplane.perfmodel.samples import StepSamples
from controlplane.types import EngineMode
from tokenfleet.field_errors import nearest
from tokenfleet.profiles.library import FRONTEND, canonical_gpus, canonical_model

GIB = 1024**3
VERSION = "0.12.0"
INSTALL = "pip install 'tokenfleet[predict]'"
UNSEEN = 0.10  # standard deviation: drift between releases, graphs, clocks, what a host adds
UTILIZATION = 0.9  # vLLM's default share of GPU memory
BLOCK_TOKENS = 16
MAX_SEQS = 256
FAR = 32768  # tokens past which every window is full
# The tables' names of a precision, of matrices and of experts.
PRECISIONS = {
    "bf16": ("bfloat16", "bfloat16"),
    "fp8": (
        "fp8",
        "fp8_block",
    ),  # the tables' other kernels for 8-bit experts are slower than those of 16 bits
    "int4": ("int4_wo", "int4_wo"),
    "nvfp4": ("nvfp4", "nvfp4"),
}
KV_PRECISIONS = {"bf16": "bfloat16", "fp8": "fp8"}
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
TAKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk")
SMALLEST_KV = 8192  # a worker with less KV than this serves no useful batch
# What the driver reports of a card; the tables count whole GiB, which no driver gives.
VISIBLE_GIB = {
    "a100_sxm": 79.15,
    "h100_sxm": 79.10,
    "h200_sxm": 139.8,
    "b200_sxm": 179.06,
    "gb200": 185.03,
    "l40s": 44.99,
}
# vLLM's default step budget of its server: 8192 on cards of 70 GiB and more except the A100.
SMALL_BUDGET = frozenset({"a100_sxm", "a100_pcie", "a30", "l4", "l40s"})


@dataclass(frozen=True, slots=True)
class PredictedWorker:
    """A worker whose profile is to be composed.

    `model` is a bundled name or a folder with a config.json, `gpu` any alias.
    """

    model: str
    gpu: str
    tp_degree: int
    host_s: float
    max_batched_tokens: int | None = None
    max_seqs: int = MAX_SEQS
    precision: str | None = None  # of the weights; None: as the configuration has it
    kv_precision: str | None = None
    expert_parallel: bool = False  # each GPU holds whole experts, rather than a part of each


def predicted_profile(target: PredictedWorker, today: date) -> Profile:
    """The composed profile. Raises BadInput or ProfileMissing saying what there are no tables for."""
    if importlib.util.find_spec("aiconfigurator_core") is None:
        raise BadInput(f"--predict: aiconfigurator-core is not installed; {INSTALL}")
    system, model = system_of(target.gpu), model_of(target.model)
    budget = target.max_batched_tokens or (2048 if system in SMALL_BUDGET else 8192)
    config = _config(model)
    longest, experts = context_limit(config, model), experts_scale(config)
    modes = _modes(target, experts)
    with _quiet():
        engine, engine_version = _engine(model, system, modes)
        kv = _kv(model, system, modes, budget, target.max_seqs, config)
        capacity = kv.capacity_tokens
        samples = grid_samples(engine, budget, target.max_seqs, longest, capacity, target.host_s)
        samples = replace(samples, experts=experts)
        step, prefill = fit_step(samples), fit_prefill(samples)
        mixed = mixed_error(engine, step.model, budget, target.max_seqs, longest, capacity, target.host_s)
    name = canonical_model(Path(model).name if Path(model).is_dir() else model)
    if target.precision and not name.endswith(f"-{target.precision}"):
        name = f"{name}-{target.precision}"
    parallel = "expert" if target.expert_parallel else None
    asked = ((target.precision, "weights"), (target.kv_precision, "KV"), (parallel, "parallel"))
    precision = "".join(f", {value} {of}" for value, of in asked if value)
    return Profile(
        model=name,
        gpu=canonical_gpus(system)[0],
        tp_degree=target.tp_degree,
        step=step.model,
        kv=kv,
        engine=EngineLimits("vllm", engine_version, EngineMode.CHUNKED, budget, target.max_seqs),
        residuals=replace(step.residuals, unseen_relative=float(np.hypot(UNSEEN, mixed))),
        source=Source(
            "composed",
            f"aiconfigurator-core {VERSION}, tables of vLLM {engine_version} on {system}{precision}: kernel"
            f" time only, {target.host_s * 1e3:g} ms a step stated for the host; mixed steps of the"
            f" tables differ by {mixed:.0%} from one base + their parts",
            "Apache-2.0",
            today.isoformat(),
            target.host_s,
        ),
        prefill=prefill.model,
        context_limit_tokens=longest,
        fitted=step.fitted,
        frontend=FRONTEND,
    )


def system_of(gpu: str) -> str:
    """The tables' name of a GPU: `h100`, `H100-SXM-80GB` and `h100_sxm` mean the same."""
    systems = sorted(path.stem for path in (_package() / "systems").glob("*.yaml"))
    for name in canonical_gpus(gpu):
        for plain in (name.replace("-", "_"), name.replace("-", "_") + "_sxm"):
            if plain in systems:
                return plain
    raise ProfileMissing(f"--gpu: {gpu}: there are no tables of it{nearest(gpu, systems)}")


def model_of(name: str) -> str:
    """A folder with a config.json, or the bundled name that is meant; nothing is ever downloaded."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        if not (folder / "config.json").is_file():
            raise BadInput(f"--model: {name}: there is no config.json in this folder")
        return str(folder.resolve())
    bundled = [
        path.name.removesuffix("_config.json").replace("--", "/")
        for path in sorted((_package() / "model_configs").glob("*_config.json"))
        if not path.name.endswith("_quant_config.json")
    ]
    if name in bundled:
        return name
    meant = [b for b in bundled if canonical_model(b) == canonical_model(name)]
    if len(meant) != 1:
        raise ProfileMissing(
            f"--model: {name}: not bundled with aiconfigurator-core{nearest(name, bundled)};"
            " give a folder with its config.json"
        )
    return meant[0]


def _config(model: str) -> dict[str, Any]:
    """The configuration of a model's language part."""
    import json

    path = Path(model) / "config.json"
    if not path.is_file():
        path = _package() / "model_configs" / f"{model.replace('/', '--')}_config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        return dict(config.get("text_config") or config)
    except (OSError, ValueError, AttributeError) as error:
        raise BadInput(f"{path}: cannot be read: {error!r}") from None


def context_limit(config: Mapping[str, Any], model: str) -> int:
    """The model's longest prompt and output."""
    try:
        return int(config["max_position_embeddings"])
    except (KeyError, ValueError, TypeError) as error:
        raise BadInput(f"{model}: config.json: max_position_embeddings: cannot be read: {error!r}") from None


def experts_scale(config: Mapping[str, Any]) -> float:
    """Tokens that touch 1 - 1/e of a mixture's experts (`perfmodel/step.py`); 0 for a dense model."""
    experts, taken = (
        next((int(config[name]) for name in names if isinstance(config.get(name), int)), 0)
        for names in (EXPERTS, TAKEN)
    )
    return -1.0 / math.log1p(-taken / experts) if 0 < taken < experts else 0.0


def _modes(target: PredictedWorker, experts: float) -> dict[str, Any]:
    """How the package is told of the worker: degrees, and precisions that are not the configuration's."""
    modes: dict[str, Any] = {"tp_size": target.tp_degree}
    if experts:
        modes["moe_ep_size" if target.expert_parallel else "moe_tp_size"] = target.tp_degree
    for flag, value, known in (
        ("--precision", target.precision, PRECISIONS),
        ("--kv-precision", target.kv_precision, KV_PRECISIONS),
    ):
        if value is not None and value not in known:
            raise BadInput(f"{flag}: one of {', '.join(known)}, got {value!r}")
    if target.precision is not None:
        modes["gemm_quant_mode"], modes["moe_quant_mode"] = PRECISIONS[target.precision]
    # vLLM's default, also for weights of 8 bits; the package would take KV for as precise as weights are.
    modes["kvcache_quant_mode"] = KV_PRECISIONS[target.kv_precision or "bf16"]
    return modes


def grid_samples(
    engine: Any, budget: int, max_seqs: int, longest: int, capacity: int, host_s: float
) -> StepSamples:
    """Prefill alone up to a step's budget, decode alone up to the KV's size; seconds, host time added."""
    rows = []
    for length in _up_to(min(budget, longest), start=16):
        for n in (1, 2, 4, 8, 16):
            if n * length <= budget:
                step_s = engine.predict_prefill_latency(n, length, 0) / 1e3
                rows.append((n * length, 0, 0, step_s, n * length**2))
    for batch in _up_to(max_seqs, start=1):
        for context in _up_to(min(longest - 2, 32768), start=128):
            if batch * context <= capacity:
                step_s = engine.predict_decode_latency(batch, context, 2) / 1e3
                rows.append((0, batch, batch * context, step_s, 0))
    table = np.array(rows, float)
    return StepSamples(table[:, 0], table[:, 1], table[:, 2], table[:, 3] + host_s, table[:, 4])


def mixed_error(
    engine: Any, step: Any, budget: int, max_seqs: int, longest: int, capacity: int, host_s: float
) -> float:
    """Mean relative distance of the tables' mixed steps from the fitted model's."""
    errors = []
    length = min(512, longest // 4)
    context = 2 * length  # the tables take decoding requests at half their output: length + 2·length / 2
    for prompts in _up_to(max(budget // length // 2, 1), start=1):
        for batch in _up_to(min(max_seqs, 128), start=8):
            prefill = prompts * length
            if batch * context + prefill <= capacity:
                seen_s = engine.mixed_step_latency(prefill, batch, length, 2 * length) / 1e3 + host_s
                fitted_s = float(step.step_s(prefill, batch, batch * context, prompts * length**2))
                errors.append(abs(fitted_s / seen_s - 1))
    return float(np.mean(errors)) if errors else UNSEEN


def _engine(model: str, system: str, modes: Mapping[str, Any]) -> tuple[Any, str]:
    import yaml
    from aiconfigurator_core.sdk.engine import EngineHandle

    try:
        engine = EngineHandle.compile(model, system, "vllm", backend_version="current", **modes)
        engine.predict_decode_latency(1, 128, 2)
    except AssertionError as error:
        raise BadInput(f"--tp: {modes['tp_size']}: {error}") from None
    except Exception as error:  # the package raises many kinds, some of them private
        first = str(error).strip().splitlines()[0][:200] if str(error).strip() else repr(error)
        raise ProfileMissing(f"{model} on {system} TP {modes['tp_size']}: no tables: {first}") from None
    versions = yaml.safe_load((_package() / "systems" / "query_versions.yaml").read_text())
    own = versions.get("overrides", {}).get(system, {}).get("vllm") or versions["defaults"]["vllm"]
    return engine, str(own["current"])


def _kv(
    model: str,
    system: str,
    modes: Mapping[str, Any],
    budget: int,
    max_seqs: int,
    config: Mapping[str, Any],
) -> KvModel:
    """The KV memory of a worker at vLLM's default share of its GPUs."""
    from aiconfigurator_core.sdk.memory import KVCacheEstimator

    visible, gpus = int(VISIBLE_GIB.get(system, 0) * GIB), int(modes["tp_size"])
    worker = f"{model} on {system} TP {gpus}"
    try:
        memory = KVCacheEstimator.from_request(
            model, system, "vllm", "current", max_num_tokens=budget, max_batch_size=max_seqs, **modes
        )
        estimate = memory.estimate(
            is_of_free=False,
            fraction=UTILIZATION,
            gpu_memory_capacity_bytes_override=visible or None,
        )
        token_bytes, own_bytes, window = _kv_bytes(memory.breakdown, config)
    except Exception as error:
        raise BadInput(f"{worker}: KV: {str(error)[:200]}") from None
    tokens = int(estimate["total_kv_size_bytes"] / token_bytes)
    if tokens < SMALLEST_KV:
        raise ProfileMissing(f"{worker}: its weights leave room for {max(tokens, 0)} KV tokens")
    share = UTILIZATION if visible else 0.0
    own = round(own_bytes / token_bytes)
    per_token = round(token_bytes * gpus)
    return KvModel(tokens, BLOCK_TOKENS, per_token, visible, share, own, window if own else 0)


def _kv_bytes(memory: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[float, float, int]:
    """KV bytes of a GPU for each token of a long request, those of its windows and states, and the window.

    The package tells of one request how many tokens fit in so many bytes. Of Llama 4, whose layers attend to
    a chunk but for every fourth, it takes all for whole ones.
    """
    tokens_in = memory["tokens_from_kv_bytes"]

    def bytes_of(tokens: int) -> float:
        low, high = 0.0, float(memory["kv_size_per_token_bytes"]) * tokens * 2
        for _ in range(60):  # the least bytes that hold a request of so many tokens
            middle = (low + high) / 2
            low, high = (low, middle) if tokens_in(middle) >= tokens else (middle, high)
        return high

    token_bytes = (bytes_of(2 * FAR) - bytes_of(FAR)) / FAR
    own_bytes = max(bytes_of(FAR) - token_bytes * FAR, 0.0)
    window = int(config.get("sliding_window") or config.get("sliding_window_size") or 0)
    if (chunk := config.get("attention_chunk_size")) and own_bytes < token_bytes:
        whole = 1.0 / int(config.get("no_rope_layer_interval") or 4)
        return token_bytes * whole, token_bytes * (1.0 - whole) * int(chunk), int(chunk)
    return token_bytes, own_bytes, window


def _up_to(most: int, start: int) -> Iterator[int]:
    value = start
    while value < most:
        yield value
        value *= 2
    yield most


def _package() -> Path:
    spec = importlib.util.find_spec("aiconfigurator_core")
    if spec is None or spec.origin is None:
        raise BadInput(f"--predict: aiconfigurator-core is not installed; {INSTALL}")
    return Path(spec.origin).parent


@contextmanager
def _quiet() -> Iterator[None]:
    """The package warns of every table it reads, also of those that are not asked for."""
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(before)
