"""Write the shipped profile library anew from the public data (docs/data.md).

    python experiments/profiling/compose_profiles.py [--data DIR] [--out profiles]

Four origins, each said in the file it makes:

  <gpu>           composed from measured per-operation tables (aiconfigurator-core's grids): kernel time,
                  plus HOST_S a step for the engine's own work, plus memory arithmetic for KV
  rtx-pro-6000    fitted to the request log of a real vLLM 0.19 run
  measured-2023   fitted to Splitwise's measurements of vLLM on DGX machines in 2023
  aladdin         the coefficients behind the tables that reproduce Aladdin's
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from controlplane.perfmodel.fit import fit_prefill, fit_step
from controlplane.perfmodel.profile import EngineLimits, KvModel, Profile, Residuals, Source
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
from tokenfleet.profiles.library import FRONTEND, write_profile

# Standard deviation of what no grid shows: host time, mixed steps, the drift between engine releases.
UNSEEN = 0.10

# vLLM's defaults for its OpenAI server: 2048 tokens a step on the A100, 8192 on H100 and H200. Its default
# of sequences is 256 on the A100 and 1024 on the others; the grids end at 256, so 256 is kept for all.
BATCHED_TOKENS = {"a100-sxm": 2048, "h100-sxm": 8192, "h200-sxm": 8192}
MAX_SEQS = 256

# When the operation tables were public: ai-dynamo/aiconfigurator pull requests 560 and 1343.
GRID_DATE = {"a100-sxm": "2026-03-10", "h100-sxm": "2026-07-10", "h200-sxm": "2026-07-10"}


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
        step=step.model,
        kv=KvModel(
            capacity, 16, shape.kv_bytes_per_token(tp_degree), int(GPU_BYTES[gpu]), MEMORY_UTILIZATION
        ),
        engine=EngineLimits("vllm", GRID_ENGINE[gpu], EngineMode.CHUNKED, BATCHED_TOKENS[gpu], MAX_SEQS),
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
        whole.residuals,
        held_out_mean=half.residuals.held_out_mean,
        held_out_max=half.residuals.held_out_max,
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
    asked = parser.parse_args()
    for place, profile in library(asked.data):
        write_profile(rounded(profile), asked.out / place)
        print(f"{place}: {profile.residuals.mean_relative:.1%} mean error")
    return 0


if __name__ == "__main__":
    sys.exit(main())
