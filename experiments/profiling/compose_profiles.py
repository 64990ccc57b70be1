"""Write the shipped profile library anew from the public data (docs/data.md).

    python experiments/profiling/compose_profiles.py [--predicted] [--only TEXT] [--data DIR] [--out profiles]

Five origins, each said in the file it makes; `--predicted` makes those of the second alone, and needs
aiconfigurator-core:

  <gpu>           composed from measured per-operation tables (aiconfigurator-core's grids): kernel time,
                  plus HOST_S a step for the engine's own work, plus memory arithmetic for KV
  <gpu>           models of today, as `tokenfleet profile --predict` composes them: mixtures of experts,
                  latent and windowed attention, 8-bit and 4-bit weights
  rtx-pro-6000    fitted to the request log of a real vLLM 0.19 run
  measured-2023   fitted to Splitwise's measurements of vLLM on DGX machines in 2023
  aladdin         the coefficients behind the tables that reproduce Aladdin's
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from datetime import date
from pathlib import Path
from typing import Any

from controlplane.errors import ControlPlaneError
from controlplane.perfmodel.engine import EngineLimits, KvModel, steps_ahead_of
from controlplane.perfmodel.fit import fit_prefill, fit_step
from controlplane.perfmodel.profile import HIDDEN_HOST_S, Profile, Residuals, Source, hiding
from controlplane.perfmodel.step import PrefillModel
from controlplane.types import EngineMode
from experiments.lib.measured_profiles import (
    ALADDIN,
    SPLITWISE,
    SPLITWISE_GPUS,
    aladdin_profile,
    measured_2023_profile,
    rtx_profile,
)
from experiments.lib.public_data import REQUEST_LOG, ROOT, SPLITWISE_TABLE
from experiments.lib.published_models import (
    GIB,
    GPU_BYTES,
    GRID_ENGINE,
    GRID_NAMES,
    HOST_S,
    MEMORY_UTILIZATION,
    MODELS,
    OTHER_BYTES,
    SMALLEST_KV,
    TP_DEGREES,
    capacity_tokens,
    grid_samples,
)
from experiments.lib.results import Flags
from tokenfleet.profiles.kernels import beside_prompts
from tokenfleet.profiles.library import FRONTEND, canonical_model, write_profile
from tokenfleet.profiles.predict import PredictedWorker, predicted_profile

# Standard deviation of what no grid shows: host time, mixed steps, the drift between engine releases.
UNSEEN = 0.10

# vLLM's defaults for its OpenAI server: 2048 tokens a step on the A100, 8192 on H100 and H200. Its default
# of sequences is 256 on the A100 and 1024 on the others; the grids end at 256, so 256 is kept for all.
BATCHED_TOKENS = {"a100-sxm": 2048, "h100-sxm": 8192, "h200-sxm": 8192}
MAX_SEQS = 256

# When the operation tables were public: ai-dynamo/aiconfigurator pull requests 560 and 1343.
GRID_DATE = {"a100-sxm": "2026-03-10", "h100-sxm": "2026-07-10", "h200-sxm": "2026-07-10"}


CONFIGS = ROOT / "experiments" / "lib" / "model_configs"  # of models that the package does not bring
# Models of today and the TP degrees that they are served at; a degree without tables or room for KV is left
# out, and said. The names are the package's; a second one is a precision that the configuration does not say.
PREDICTED: dict[tuple[str, str | None], tuple[int, ...]] = {
    ("Qwen/Qwen3-30B-A3B", None): (1, 2, 4),
    ("Qwen/Qwen3-30B-A3B", "fp8"): (1, 2),
    ("Qwen/Qwen3-235B-A22B", "fp8"): (4, 8),
    ("Qwen/Qwen3-32B", "fp8"): (1, 2, 4),
    ("Qwen/Qwen3-32B", None): (1, 2, 4),
    ("Qwen/Qwen3-8B", None): (1, 2),
    (str(CONFIGS / "qwen3-14b"), None): (1, 2, 4),
    (str(CONFIGS / "llama-2-7b"), None): (1, 2, 4, 8),
    (str(CONFIGS / "llama-2-13b"), None): (1, 2, 4, 8),
    ("meta-llama/Meta-Llama-3.1-8B", None): (1, 2),
    ("meta-llama/Meta-Llama-3.1-8B", "fp8"): (1,),
    ("meta-llama/Meta-Llama-3.1-70B", None): (1, 2, 4, 8),
    ("meta-llama/Meta-Llama-3.1-70B", "fp8"): (1, 2, 4, 8),
    ("meta-llama/Meta-Llama-3.1-405B", "fp8"): (8,),
    ("mistralai/Mixtral-8x7B-v0.1", None): (1, 2, 4),
    ("mistralai/Mixtral-8x22B-v0.1", None): (2, 4, 8),
    ("google/gemma-4-26B-A4B", None): (1, 2),
    (str(CONFIGS / "gemma-3-4b"), None): (1, 2),
    (str(CONFIGS / "gemma-3-12b"), None): (2, 4),
    (str(CONFIGS / "gemma-3-27b"), None): (2, 4),
    ("openai/gpt-oss-20b", None): (1,),
    ("openai/gpt-oss-120b", None): (1, 2, 4, 8),
    ("meta-llama/Llama-4-Scout-17B-16E-Instruct", "fp8"): (2, 4, 8),
    ("meta-llama/Llama-4-Maverick-17B-128E-Instruct", "fp8"): (8,),
    ("deepseek-ai/DeepSeek-V3", None): (8,),
    ("MiniMaxAI/MiniMax-M2.5", None): (4, 8),
    ("Qwen/Qwen3.5-397B-A17B", None): (8,),
}
# Their experts' blocks do not divide by 8.
EXPERT_PARALLEL = {("MiniMaxAI/MiniMax-M2.5", 8), ("Qwen/Qwen3-235B-A22B", 8)}
# Gemma 3 27B's windows are counted from attention to all tokens: too far from tables of windows on this GPU.
LEFT_OUT = {(str(CONFIGS / "gemma-3-27b"), "l40s")}
# Llama 2 is on the GPUs of the grids alone.
LEFT_OUT |= {
    (str(CONFIGS / f"llama-2-{b}"), gpu) for b in ("7b", "13b") for gpu in ("b200-sxm", "gb200", "l40s")
}
PREDICTED_GPUS = ("a100-sxm", "h100-sxm", "h200-sxm", "b200-sxm", "gb200", "l40s")
ON_GRIDS = {canonical_model(name) for name in GRID_NAMES}  # in 16 bits, on the GPUs that have grids


def predicted(only: str) -> Iterator[tuple[Path, Profile]]:
    """Profiles from the package's tables, with the host's millisecond a step as on the grids."""
    for (model, precision), degrees in PREDICTED.items():
        for gpu in PREDICTED_GPUS:
            for tp_degree in degrees:
                if only not in f"{model} {gpu} {tp_degree}".lower():
                    continue
                is_on_grid = precision is None and gpu in GRID_ENGINE and canonical_model(model) in ON_GRIDS
                if is_on_grid or (model, gpu) in LEFT_OUT:
                    continue
                host_s = HOST_S.get(gpu, HOST_S["h100-sxm"])
                parallel = (model, tp_degree) in EXPERT_PARALLEL
                worker = PredictedWorker(
                    model, gpu, tp_degree, host_s, precision=precision, expert_parallel=parallel
                )
                try:
                    profile = predicted_profile(worker, date.fromisoformat(GRID_DATE["h100-sxm"]))
                except ControlPlaneError as error:
                    print(f"left out: {error}")
                    continue
                yield Path(profile.gpu) / f"{profile.model}_tp{tp_degree}.yaml", profile


def composed_profile(data: Path, model: str, gpu: str, tp_degree: int) -> Profile | None:
    """A variant's profile from its grid; None when the model leaves no room for KV."""
    shape = MODELS[model]
    capacity = capacity_tokens(model, gpu, tp_degree)
    if capacity < SMALLEST_KV:
        return None
    samples = grid_samples(data, model, gpu, tp_degree, capacity)
    step, prefill = fit_step(samples), fit_prefill(samples)
    return Profile(
        model=model,
        gpu=gpu,
        tp_degree=tp_degree,
        step=hiding(beside_prompts(step.model), min(HIDDEN_HOST_S, HOST_S[gpu])),
        kv=KvModel(
            capacity, 16, shape.kv_bytes_per_token(tp_degree), int(GPU_BYTES[gpu]), MEMORY_UTILIZATION
        ),
        engine=EngineLimits(
            *("vllm", GRID_ENGINE[gpu], EngineMode.CHUNKED, BATCHED_TOKENS[gpu], MAX_SEQS),
            steps_ahead=steps_ahead_of(GRID_ENGINE[gpu]),
        ),
        residuals=replace(step.residuals, unseen_relative=UNSEEN),
        source=Source(
            "composed",
            f"aiconfigurator-core 0.12.0 grids over vLLM {GRID_ENGINE[gpu]} operation tables: kernel time"
            f" only, {HOST_S[gpu] * 1e3:g} ms a step added for the host; a mixed step is one base + parts;"
            f" KV from {MEMORY_UTILIZATION:g} of {GPU_BYTES[gpu] / GIB:.2f} GiB less weights and"
            f" {OTHER_BYTES / GIB:g} GiB a GPU",
            "Apache-2.0",
            GRID_DATE[gpu],
            HOST_S[gpu],
        ),
        prefill=prefill.model,
        context_limit_tokens=shape.context_limit_tokens,
        fitted=step.fitted,
        frontend=FRONTEND,
    )


def library(data: Path) -> Iterator[tuple[Path, Profile]]:
    """Every shipped profile and its place."""
    for gpu in GRID_ENGINE:
        for model in GRID_NAMES:
            for tp_degree in TP_DEGREES:
                composed = composed_profile(data, model, gpu, tp_degree)
                if composed is not None:
                    yield Path(gpu) / f"{model}_tp{tp_degree}.yaml", composed
    for model, (_, degrees) in SPLITWISE.items():
        for gpu in SPLITWISE_GPUS:
            for tp_degree in degrees:
                place = Path("measured-2023") / f"{model}_{gpu}_tp{tp_degree}.yaml"
                yield place, measured_2023_profile(data, model, gpu, tp_degree)
    for model, tp_degree in ALADDIN:
        place = Path("aladdin") / f"{model}_a100-80gb_tp{tp_degree}.yaml"
        yield place, aladdin_profile(data, model, tp_degree)
    # Judged on requests it did not learn from, then fitted to all of them.
    half, whole = rtx_profile(data, learn_even=True), rtx_profile(data)
    held = replace(
        whole.residuals, held_out_mean=half.residuals.held_out_mean, held_out_max=half.residuals.held_out_max
    )
    alone = PrefillModel.of_step(whole.step)
    yield Path("rtx-pro-6000") / "llama-3.1-8b_tp1.yaml", replace(whole, residuals=held, prefill=alone)


def rounded(profile: Profile) -> Profile:
    """Coefficients and errors to as many digits as they are worth: a file should be readable."""

    def six(noun: Any) -> Any:
        values = {f.name: getattr(noun, f.name) for f in fields(noun)}
        digits = 4 if isinstance(noun, Residuals) else 6
        new = {name: float(f"{v:.{digits}g}") for name, v in values.items() if isinstance(v, float)}
        if "hinges" in values:
            new["hinges"] = tuple(six(h) for h in values["hinges"])
        return replace(noun, **new)

    return replace(
        profile,
        step=six(profile.step),
        prefill=None if profile.prefill is None else six(profile.prefill),
        residuals=six(profile.residuals),
        frontend=six(profile.frontend),
    )


def main() -> int:
    parser = Flags(__doc__, "aic_grid", SPLITWISE_TABLE, "fits.json", REQUEST_LOG)
    parser.add_argument("--out", type=Path, default=ROOT / "profiles")
    parser.add_argument("--predicted", action="store_true", help="those of operation tables alone")
    parser.add_argument("--only", default="", help="of those: whose model, GPU and TP have this")
    asked = parser.parse_args()
    for place, profile in predicted(asked.only.lower()) if asked.predicted else library(asked.data):
        write_profile(rounded(profile), asked.out / place)
        print(f"{place}: {profile.residuals.mean_relative:.1%} mean error")
    return 0


if __name__ == "__main__":
    sys.exit(main())
