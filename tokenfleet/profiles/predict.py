"""A profile composed without a GPU, from aiconfigurator-core's measured operation tables.

The package (optional: `pip install 'tokenfleet[predict]'`) adds up the kernels of a model's layers on a GPU
from tables of single operations. Its step times are fitted like any measurement. Two things that tables
cannot show are added and stated. One is the host's time a step (`Source.host_s`), which a running fleet's
refit corrects. Engines that plan a step ahead hide most of it in steps of decode alone. The other is an error
next to the fit's own: UNSEEN, or UNSEEN_MIXTURE, joined with how far the tables' mixed steps are from the
fitted ones.

The package predicts any batch, also far beyond its tables. So it is asked only for batches that the model's
context and the worker's KV allow, and a model or GPU without tables is refused.

Weights have the precision of the model's configuration, or the one that is asked for. KV has 16 bits unless
asked otherwise. Experts are split over a worker's GPUs like other weights, unless they are to stay whole. A
mixture's steps are fitted with the experts that they touch. KV of latent attention is counted once. Where
layers attend to a window or keep a state, a token takes KV in the other layers only. The window or state is a
request's own (`KvModel`), as in vLLM's groups of layers. Step times are then in the fit's terms of sequences
and context, from contexts on that fill the window.

A worker may be ranks in lockstep (`controlplane/perfmodel/ranks.py`). With attention in data parallel, all
ranks do the same in the tables, and decode is taken to be so. Of prefill, the time in experts and on the way
to them is one rank's part, and `shared_token_s`. A pipeline's step is a batch's time through all stages and
between them, each stage as long as the one with most layers.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from controlplane.errors import BadInput, ProfileMissing
from controlplane.perfmodel.engine import EngineLimits, steps_ahead_of
from controlplane.perfmodel.fit import fit_prefill, fit_step
from controlplane.perfmodel.profile import HIDDEN_HOST_S, Profile, Source, hiding
from controlplane.perfmodel.ranks import Ranks
from controlplane.types import EngineMode
from tokenfleet.field_errors import nearest
from tokenfleet.profiles.kernels import (
    UNSEEN,
    UNSEEN_MIXTURE,
    Kernels,
    SplitHeads,
    Windows,
    beside_prompts,
    grid_samples,
    mixed_error,
    uneven_stages,
)
from tokenfleet.profiles.kv_memory import EXPERTS, TAKEN, kv_memory, whole_number
from tokenfleet.profiles.library import FRONTEND, canonical_gpus, canonical_model

VERSION = "0.12.0"
INSTALL = "pip install 'tokenfleet[predict]'"
FILLED = 0.10  # of a pipeline: its batches form otherwise
# Of windows counted from attention to all tokens: what they err by.
WINDOWED = 0.05
MAX_SEQS = 256
# The tables' names of a precision, of matrices and of experts. Their other kernels for experts of 8 bits are
# slower than those of 16 bits.
PRECISIONS = {
    "bf16": ("bfloat16", "bfloat16"),
    "fp8": ("fp8", "fp8_block"),
    "int4": ("int4_wo", "int4_wo"),
    "nvfp4": ("nvfp4", "nvfp4"),
}
KV_PRECISIONS = {"bf16": "bfloat16", "fp8": "fp8"}
GEMMA_3_TYPES = ("gemma3", "gemma3_text")
GEMMA_3: dict[str, Any] = {  # transformers' own where a configuration says nothing
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "vocab_size": 262_208,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}
# What every configuration says; the layers may be told in a pattern instead.
SIZES = ("hidden_size", "num_attention_heads", "vocab_size", "max_position_embeddings", "num_hidden_layers")
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
    data_parallel: int = 1  # ranks of attention, which share the experts
    pipeline_parallel: int = 1  # stages


def predicted_profile(target: PredictedWorker, today: date) -> Profile:
    """The composed profile. Raises BadInput or ProfileMissing saying what there are no tables for."""
    if importlib.util.find_spec("aiconfigurator_core") is None:
        raise BadInput(f"--predict: aiconfigurator-core is not installed; {INSTALL}")
    system, model = system_of(target.gpu), model_of(target.model)
    budget = target.max_batched_tokens or (2048 if system in SMALL_BUDGET else 8192)
    config = _config(model)
    longest, experts = config["max_position_embeddings"], experts_scale(config)
    data, stages = target.data_parallel, target.pipeline_parallel
    modes = _modes(target, config, experts)
    with _quiet(), _known_form(model, config) as known:
        engine, engine_version, windows = _tables(known, model, config, system, modes)
        limits = _limits(engine_version, budget, target)
        kv = kv_memory(known, system, modes, limits, config)
        capacity = kv.capacity_tokens // stages
        heads = _split_heads(model, config, system, modes)
        kernels = Kernels(engine, data, uneven_stages(config, stages), windows, heads)
        samples = grid_samples(kernels, budget, target.max_seqs, longest, capacity, target.host_s)
        samples = replace(samples, experts=experts / data)
        step, prefill = fit_step(samples), fit_prefill(samples)
        ranks = _ranks(target, kernels, min(budget, longest))
        times = beside_prompts(step.model)
        fitted, batch = (times, ranks), (budget, target.max_seqs)
        mixed = mixed_error(kernels, fitted, batch, longest, capacity, target.host_s)
    name = canonical_model(Path(model).name if Path(model).is_dir() else model)
    if target.precision and not name.endswith(f"-{target.precision}"):
        name = f"{name}-{target.precision}"
    parallel = "expert" if target.expert_parallel else None
    asked = [(target.precision, "weights"), (target.kv_precision, "KV"), (parallel, "parallel")]
    if ranks is not None:
        asked.append((str(ranks.count), f"ranks of {ranks.of}"))
    unseen = UNSEEN_MIXTURE if experts else UNSEEN
    doubts = (unseen, mixed, FILLED if stages > 1 else 0.0, 0.0 if windows is None else WINDOWED)
    precision = "".join(f", {value} {of}" for value, of in asked if value)
    if windows is not None:
        precision += f"; windows of {windows.tokens} tokens, derived from full attention (no measurements)"
    return Profile(
        model=name,
        gpu=canonical_gpus(system)[0],
        tp_degree=target.tp_degree,
        step=hiding(times, min(HIDDEN_HOST_S * bool(limits.steps_ahead), target.host_s)),
        kv=kv,
        engine=limits,
        residuals=replace(step.residuals, unseen_relative=math.hypot(*doubts)),
        source=Source(
            "composed",
            f"aiconfigurator-core {VERSION}, tables of vLLM {engine_version} on {system}{precision}: kernel"
            f" time only, {target.host_s * 1e3:g} ms a step stated for the host; mixed steps of the"
            f" tables differ by {100 * mixed:.0f} % from one base + their parts",
            "Apache-2.0",
            today.isoformat(),
            target.host_s,
        ),
        prefill=prefill.model,
        context_limit_tokens=longest,
        fitted=step.fitted,
        frontend=FRONTEND,
        ranks=ranks,
    )


def _limits(version: str, budget: int, target: PredictedWorker) -> EngineLimits:
    """The engine's limits; a pipeline is taken to plan no step ahead of its batches."""
    ahead = steps_ahead_of(version) if target.pipeline_parallel == 1 else 0.0
    return EngineLimits("vllm", version, EngineMode.CHUNKED, budget, target.max_seqs, ahead)


def _ranks(target: PredictedWorker, kernels: Kernels, tokens: int) -> Ranks | None:
    """A worker's ranks, with what of a prefilled token's time they add up, as in a full step."""
    if target.pipeline_parallel > 1:
        return Ranks("pipeline", target.pipeline_parallel)
    if target.data_parallel == 1:
        return None
    return Ranks("data", target.data_parallel, kernels.experts_s(1, tokens) / tokens)


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
    path = Path(model) / "config.json"
    if not path.is_file():
        path = _package() / "model_configs" / f"{model.replace('/', '--')}_config.json"
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        config: dict[str, Any] = dict(whole.get("text_config") or whole)
    except (OSError, ValueError, AttributeError) as error:
        raise BadInput(f"{path}: cannot be read: {error!r}") from None
    if config.get("model_type") in GEMMA_3_TYPES:
        config = GEMMA_3 | config
    for name in SIZES:
        value = config.get(name)
        if (type(value) is not int or value < 1) and not (value is None and name == "num_hidden_layers"):
            raise BadInput(f"{path}: {name}: {value!r}, expected a whole number, at least 1")
    return config


def _tables(
    known: str, model: str, config: Mapping[str, Any], system: str, modes: Mapping[str, Any]
) -> tuple[Any, str, Windows | None]:
    """The engine with the model's tables, their version, and its windows where no tables have them."""
    try:
        return *_engine(known, system, modes), None
    except ProfileMissing:
        if config.get("model_type") not in GEMMA_3_TYPES:
            raise
    # Of a Gemma 3 there are tables where all layers attend to all tokens.
    kinds = _layer_kinds(config)
    windows = Windows(kinds.count("sliding_attention") / len(kinds), int(config["sliding_window"]))
    with _known_form(model, {**config, "layer_types": ["full_attention"] * len(kinds)}) as known:
        return *_engine(known, system, modes), windows


def _layer_kinds(config: Mapping[str, Any]) -> list[str]:
    """What each layer of a Gemma 3 attends to."""
    if kinds := config.get("layer_types"):
        return list(kinds)
    every = int(config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6)
    layers = range(1, int(config["num_hidden_layers"]) + 1)
    return ["sliding_attention" if layer % every else "full_attention" for layer in layers]


@contextmanager
def _known_form(model: str, config: Mapping[str, Any]) -> Iterator[str]:
    """The model as the package knows it: Gemma 3 as a dense Gemma 4, which has layers of the same kinds."""
    if config.get("model_type") not in GEMMA_3_TYPES:
        yield model
        return
    dense = {"num_experts": None, "enable_moe_block": False, "model_type": "gemma4_text"}
    text = dict(config) | dense | {"layer_types": _layer_kinds(config)}
    form = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": text}
    with _folder(Path(model).name, form) as place:
        yield place


@contextmanager
def _folder(name: str, form: Mapping[str, Any]) -> Iterator[str]:
    """A folder of that name with a configuration, while it is needed."""
    with TemporaryDirectory() as folder:
        place = Path(folder) / name
        place.mkdir()
        (place / "config.json").write_text(json.dumps(form), encoding="utf-8")
        yield str(place)


def _split_heads(
    model: str, config: Mapping[str, Any], system: str, modes: Mapping[str, Any]
) -> SplitHeads | None:
    """Tables of a part of a GPU's KV heads, where no tables have as many; None where they do."""
    asked, kv = config["num_attention_heads"], config.get("num_key_value_heads")
    heads = -(-(kv or asked) // modes["tp_size"])
    parts = heads // math.gcd(heads, 8)
    is_other = config.get("model_type") in GEMMA_3_TYPES or "kv_lora_rank" in config
    if parts == 1 or is_other or "architectures" not in config:
        return None
    head_dim = config.get("head_dim") or config["hidden_size"] // asked
    fewer = {"num_attention_heads": asked // parts, "num_key_value_heads": (kv or asked) // parts}
    with _folder(Path(model).name, {**config, **fewer, "head_dim": head_dim}) as place:
        return SplitHeads(_engine(place, system, modes)[0], parts)


def experts_scale(config: Mapping[str, Any]) -> float:
    """Tokens that touch 1 - 1/e of a mixture's experts (`perfmodel/step.py`); 0 for a dense model."""
    experts, taken = whole_number(config, EXPERTS), whole_number(config, TAKEN)
    return -1.0 / math.log1p(-taken / experts) if 0 < taken < experts else 0.0


def _modes(target: PredictedWorker, config: Mapping[str, Any], experts: float) -> dict[str, Any]:
    """The package's options for the worker: degrees, and precisions that are not the configuration's."""
    if target.data_parallel > 1 and target.pipeline_parallel > 1:
        raise BadInput("--data-parallel: not together with --pipeline-parallel, which is not modelled")
    if target.data_parallel > 1 and not experts:
        raise BadInput("--data-parallel: ranks of a dense model are engines of their own: plan more workers")
    modes: dict[str, Any] = {"tp_size": target.tp_degree}
    if experts or config.get("model_type") in GEMMA_3_TYPES:  # as a Gemma 4, it might have some
        over = target.tp_degree * target.data_parallel
        modes["moe_ep_size" if target.expert_parallel else "moe_tp_size"] = over
    if target.data_parallel > 1:
        modes["attention_dp_size"] = target.data_parallel
    if target.pipeline_parallel > 1:
        modes["pp_size"] = target.pipeline_parallel
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


def _engine(model: str, system: str, modes: Mapping[str, Any]) -> tuple[Any, str]:
    import yaml
    from aiconfigurator_core.sdk.common import DefaultHFModels
    from aiconfigurator_core.sdk.engine import EngineHandle

    if not Path(model).is_dir():
        DefaultHFModels.add(model)  # it would download the configuration of some that it brings
    try:
        engine = EngineHandle.compile(model, system, "vllm", backend_version="current", **modes)
        engine.predict_decode_latency(1, 128, 2)
    except AssertionError as error:
        raise BadInput(f"--tp: {modes['tp_size']}: {error}") from None
    except Exception as error:  # the package raises many kinds, some of them private
        first = str(error).strip().splitlines()[0][:200] if str(error).strip() else repr(error)
        name = Path(model).name  # the folder may be one of ours, which is gone by then
        raise ProfileMissing(f"{name} on {system} TP {modes['tp_size']}: no tables: {first}") from None
    versions = yaml.safe_load((_package() / "systems" / "query_versions.yaml").read_text())
    own = versions.get("overrides", {}).get(system, {}).get("vllm") or versions["defaults"]["vllm"]
    return engine, str(own["current"])


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
