"""Windows of attention counted from tables of attention to all tokens, beside the tables of such windows.

    python experiments/profiling/window_tables.py [--quick] [--format table|json]

`profile --predict` counts so where no table has a model's windows (Gemma 3 27B: heads of 128). Here it does
where one has them (4B and 12B: heads of 256), on the batches that profiles are fitted to. *Unmended* is
attention to all tokens as it is. Needs aiconfigurator-core.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controlplane.errors import ProfileMissing
from controlplane.perfmodel.samples import StepSamples
from experiments.lib.public_data import ROOT
from experiments.lib.results import bar, flags, show
from tokenfleet.profiles.kernels import Kernels, grid_samples
from tokenfleet.profiles.predict import (
    WINDOWED,
    PredictedWorker,
    _config,
    _engine,
    _known_form,
    _modes,
    _quiet,
    _whole_tables,
    system_of,
)

CONFIGS = ROOT / "experiments" / "lib" / "model_configs"
MODELS = (("gemma-3-4b", (1, 2)), ("gemma-3-12b", (2, 4)))
GPUS = ("h100-sxm", "h200-sxm", "b200-sxm", "gb200", "l40s")
BUDGET, SEQS, LONGEST, CAPACITY, HOST_S = 8192, 256, 131_072, 600_000, 0.001


def kernels_of(model: str, gpu: str, tp_degree: int) -> tuple[Kernels, Kernels, Kernels]:
    """By the tables of windows, by those of attention to all tokens, and by these as they are."""
    folder, system = str(CONFIGS / model), system_of(gpu)
    config = _config(folder)
    modes = _modes(PredictedWorker(folder, gpu, tp_degree, HOST_S), config, 0.0)
    with _quiet(), _known_form(folder, config) as known:
        own, _ = _engine(known, system, modes)
        whole, _, windows = _whole_tables(folder, config, system, modes)
    return Kernels(own, 1, 1.0), Kernels(whole, 1, 1.0, windows), Kernels(whole, 1, 1.0)


def grid(kernels: Kernels) -> StepSamples:
    return grid_samples(kernels, BUDGET, SEQS, LONGEST, CAPACITY, HOST_S)


def errors(counted: Kernels, tables: StepSamples) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Relative errors of decode and of prefill."""
    error = grid(counted).step_s / tables.step_s - 1
    decode = tables.prefill_tokens == 0
    return error[decode], error[~decode]


def main() -> int:
    asked = flags(__doc__).parse_args()
    rows: list[dict[str, Any]] = []
    for model, degrees in MODELS:
        for gpu in GPUS[:1] if asked.quick else GPUS:
            for tp_degree in degrees[:1] if asked.quick else degrees:
                try:
                    own, counted, unmended = kernels_of(model, gpu, tp_degree)
                except ProfileMissing as missing:
                    print(f"left out: {missing}", file=sys.stderr)
                    continue
                seen = grid(own)
                decode, prefill = errors(counted, seen)
                rows.append(
                    {
                        "model": model,
                        "GPU": f"{gpu} TP{tp_degree}",
                        "decode": float(np.abs(decode).mean()),
                        "decode, max": float(np.abs(decode).max()),
                        "prefill": float(np.abs(prefill).mean()),
                        "prefill, max": float(np.abs(prefill).max()),
                        "unmended": float(np.abs(np.concatenate(errors(unmended, seen))).mean()),
                    }
                )
    bars = {
        f"{gpu}: mean error": bar(
            float(np.mean([max(r["decode"], r["prefill"]) for r in rows if r["GPU"].startswith(gpu)])),
            WINDOWED,
        )
        for gpu in GPUS
        if any(r["GPU"].startswith(gpu) for r in rows)
    }
    return show("window_tables", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
