"""How far off are the performance models on points they did not see?

    python experiments/profiling/perf_models.py [--quick] [--format table|json]

Four kinds of points:

  2023  Splitwise's measured prompt and token times, one set per (model, GPU, TP): each interior point
        is predicted by a fit without it, the choice of terms included; points alone at the end of the
        range are always learned from. `sweeps_apart`: how far one of its sweeps was from the others, at
        the batch they share, before it was put at their level (measured_profiles.py)
  grid  aiconfigurator's grids over measured operations: every other point is held out
  log   the real vLLM 0.19 log: fitted on even requests, judged on odd ones
  Eq 5  the library's profiles: each TP degree from the two nearest ones

The bar is on the mean of each measured set (2023 and log); grids are predictions of another model and are
shown beside. Maxima are stated.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controlplane.perfmodel.degrees import at_degree
from controlplane.perfmodel.fit import fit_phases, fit_step, pooled
from controlplane.perfmodel.profile import Profile
from experiments.lib.measured_profiles import (
    SPLITWISE,
    SPLITWISE_GPUS,
    rtx_profile,
    splitwise_rows,
    splitwise_samples,
    sweeps_apart,
)
from experiments.lib.public_data import REQUEST_LOG, SPLITWISE_TABLE
from experiments.lib.published_models import (
    GRID_ENGINE,
    GRID_NAMES,
    SMALLEST_KV,
    TP_DEGREES,
    capacity_tokens,
    grid_samples,
)
from experiments.lib.results import bar, flags, show
from tokenfleet.profiles.library import library

MEAN_BAR = 0.04


def measured_2023(data: Any) -> list[dict[str, Any]]:
    rows = []
    for model, (_, degrees) in SPLITWISE.items():
        for gpu in SPLITWISE_GPUS:
            for tp_degree in degrees:
                decode, prefill = fit_phases(splitwise_samples(data, model, gpu, tp_degree))
                both = pooled(decode.residuals, prefill.residuals)
                rows.append(
                    _row("2023", f"{model} {gpu} TP{tp_degree}", both.samples)
                    | {
                        "seen_mean": both.mean_relative,
                        "held_out_mean": both.held_out_mean,
                        "held_out_max": both.held_out_max,
                        "decode_mean": decode.residuals.held_out_mean,
                        "prefill_mean": prefill.residuals.held_out_mean,
                        "sweeps_apart": sweeps_apart(splitwise_rows(data, model, gpu, tp_degree)),
                    }
                )
    return rows


def grids(data: Any, quick: bool) -> list[dict[str, Any]]:
    rows = []
    models = ["llama-3.1-8b"] if quick else list(GRID_NAMES)
    for gpu in GRID_ENGINE:
        for model in models:
            for tp_degree in TP_DEGREES:
                capacity = capacity_tokens(model, gpu, tp_degree)
                if capacity < SMALLEST_KV:
                    continue
                samples = grid_samples(data, model, gpu, tp_degree, capacity)
                held = np.arange(len(samples)) % 2 == 1
                fit = fit_step(samples.take(~held))
                judged = samples.take(held)
                assert judged.prefill_sum_sq is not None
                t = fit.model.step_s(
                    judged.prefill_tokens, judged.sequences, judged.context_tokens, judged.prefill_sum_sq
                )
                error = np.abs(t / judged.step_s - 1)
                decodes = judged.sequences > 0
                rows.append(
                    _row("grid", f"{model} {gpu} TP{tp_degree}", int(held.sum()))
                    | {
                        "seen_mean": fit.residuals.mean_relative,
                        "held_out_mean": float(error.mean()),
                        "held_out_max": float(error.max()),
                        "decode_mean": float(error[decodes].mean()),
                        "prefill_mean": float(error[~decodes].mean()),
                    }
                )
    return rows


def log(data: Any) -> list[dict[str, Any]]:
    residuals = rtx_profile(data, learn_even=True).residuals
    return [
        _row("log", "llama-3.1-8b rtx-pro-6000 TP1 (TPOT a request)", residuals.samples)
        | {
            "seen_mean": residuals.mean_relative,
            "held_out_mean": residuals.held_out_mean,
            "held_out_max": residuals.held_out_max,
        }
    ]


def degrees_left_out() -> list[dict[str, Any]]:
    """Eq 5 (`perfmodel.degrees`) on the library: each TP degree from the two nearest, where that is asked.

    `held_out_mean` is of decode and `prefill_mean` of prefill steps; `ideal_mean`: decode of the nearest
    degree times the ratio of degrees.
    """
    found: dict[str, list[tuple[float, float, float, float]]] = {"between": [], "above": []}
    workers: dict[tuple[str, str], dict[int, Profile]] = {}
    for profile in library():
        if profile.ranks is None:
            workers.setdefault((profile.gpu, profile.model), {})[profile.tp_degree] = profile
    for degrees in workers.values():
        for degree, real in degrees.items():
            near = sorted(degrees.keys() - {degree}, key=lambda other: abs(np.log2(other / degree)))[:2]
            if len(near) < 2 or degree < min(near):
                continue
            made = at_degree((degrees[near[0]], degrees[near[1]]), degree)
            (decode, _), (nearest, _) = _times(real), _times(degrees[near[0]])
            errors = [np.abs(one / other - 1) for one, other in zip(_times(made), _times(real), strict=True)]
            kv = abs(made.kv.capacity_tokens / real.kv.capacity_tokens - 1)
            ideal = np.abs(nearest * near[0] / degree / decode - 1)
            found["between" if degree < max(near) else "above"].append(
                (float(errors[0].mean()), float(errors[1].mean()), float(ideal.mean()), kv)
            )
    names = ("held_out_mean", "prefill_mean", "ideal_mean", "kv_mean")
    return [
        _row("Eq 5", f"TP degrees {where} two known ones", len(errors))
        | dict(zip(names, np.mean(errors, 0).tolist(), strict=True))
        for where, errors in found.items()
    ]


def _times(profile: Profile) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds of decode steps of 1 to 128 sequences of 512 and 2,048 tokens, and of prefills to 2,048."""
    sequences, tokens = np.array([1, 8, 32, 128]), np.array([128, 512, 1024, 2048])
    context = np.outer([512, 2048], sequences)
    return profile.step.step_s(0, sequences, context).ravel(), profile.step.step_s(tokens, 0, 0, tokens**2)


def _row(kind: str, what: str, points: int) -> dict[str, Any]:
    return {"kind": kind, "set": what, "points": points}


def main() -> int:
    asked = flags(__doc__, SPLITWISE_TABLE, "aic_grid", REQUEST_LOG).parse_args()
    rows = [
        *measured_2023(asked.data),
        *([] if asked.quick else log(asked.data)),
        *grids(asked.data, asked.quick),
        *degrees_left_out(),
    ]
    measured = [row for row in rows if row["kind"] in ("2023", "log")]
    bars = {f"{row['set']}: held-out mean": bar(row["held_out_mean"], MEAN_BAR) for row in measured}
    return show("perf_models", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
