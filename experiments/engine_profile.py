"""A real vLLM engine measured, a step model fitted to some of it and judged on the rest.

    python experiments/engine_profile.py [--quick] [--measurements M.csv] [--clock cpu|wall]

Runs `tokenfleet profile` on the tiny Llama (CPU engine), or takes measurements that are there. Grid points
are split into five parts; each part is judged by a model fitted to the other four. A batch is one kind of
step of one point (its prefill, its decode steps at their mean context), its time the median over repeats.

The machine's own noise stands beside the errors: how far a single step, and the median of a batch, would be
from themselves if they were measured again, some minutes apart. No model can be closer than that.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from results import bar, flags, show
from served import ROOT, tiny_model

from controlplane.perfmodel.fit import fit_step
from controlplane.perfmodel.samples import StepSamples
from tokenfleet.linear_breaks import form_of
from tokenfleet.measurements import by_point

PARTS = 5
MEAN_BAR, P95_BAR = 0.05, 0.15
ENGINE = ("--dtype", "float32", "--max-model-len", "4096", "--max-num-seqs", "64")
WORK = ("prefill_tokens", "sequences", "prefill_sum_sq")


def measured(out: Path, quick: bool, clock: str) -> None:
    """Run `tokenfleet profile` on the tiny model."""
    run = [sys.executable, "-c", "import sys; from tokenfleet.cli import main; sys.exit(main())", "profile"]
    with tiny_model() as model:
        command = [*run, "--model", str(model), "--out", str(out), "--clock", clock, "--cores", "0"]
        command += [
            "--budget",
            "30m",
            *(["--points", "18", "--repeats", "2"] if quick else ["--repeats", "5"]),
        ]
        command += ["--", *ENGINE, "--kv-cache-memory-bytes", str(256 << 20)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)


def samples_of(table: pl.DataFrame) -> StepSamples:
    """The table's batches."""
    columns = [table[c].to_numpy().astype(float) for c in ("prefill_tokens", "sequences", "context_tokens")]
    sum_sq = table["prefill_sum_sq"].to_numpy().astype(float)
    steps = StepSamples(*columns, table["step_s"].to_numpy(), sum_sq)
    return by_point(steps, table["point"].to_list(), [str(r) for r in table["repeat"].to_list()])


def noise(table: pl.DataFrame) -> tuple[float, float]:
    """Mean relative distance of two measurements of one step, and of two medians of one batch."""
    batch = table.group_by("point", *WORK).agg(
        pl.col("step_s"), pl.len().alias("n"), pl.col("repeat").n_unique().alias("repeats")
    )
    single, middle = [], []
    for times, n, repeats in (
        batch.filter(pl.col("repeats") >= 2).select("step_s", "n", "repeats").iter_rows()
    ):
        values = np.array(times)
        # Half the mean distance of pairs is E|x - centre| / 1.41 for any bell; a median of n is about
        # 1.25 / sqrt(n) as wide as one value.
        pairs = np.abs(values[:, None] - values[None, :])
        distance = float(pairs.sum() / (n * (n - 1))) / float(np.median(values)) / np.sqrt(2)
        single.append(distance)
        middle.append(distance * 1.25 / np.sqrt(n if repeats > 1 else 1))
    return float(np.mean(single)), float(np.mean(middle))


def held_out(table: pl.DataFrame, seed: int, extra_terms: bool) -> tuple[NDArray[np.float64], list[str]]:
    """Absolute relative errors of batches whose points the fit has not seen, and the forms it took."""
    points = sorted(table["point"].unique().to_list())
    part = np.random.default_rng(seed).permutation(len(points)) % PARTS
    errors, forms = [], []
    for k in range(PARTS):
        judged = [name for name, p in zip(points, part, strict=True) if p == k]
        learn, judge = (samples_of(table.filter(mask)) for mask in (
            ~pl.col("point").is_in(judged), pl.col("point").is_in(judged)
        ))  # fmt: skip
        fit = fit_step(learn, robust=True, extra_terms=extra_terms).model
        assert judge.prefill_sum_sq is not None
        columns = (judge.prefill_tokens, judge.sequences, judge.context_tokens, judge.prefill_sum_sq)
        errors.append(np.abs(fit.step_s(*columns) / judge.step_s - 1))
        forms.append(" ".join(form_of(fit)) or "linear")
    return np.concatenate(errors), forms


def main() -> int:
    parser = flags("A step model fitted to a real vLLM engine on this machine")
    parser.add_argument("--measurements", type=Path, help="of `tokenfleet profile`, instead of a run")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tokenfleet-") as folder:
        path = asked.measurements or Path(folder) / "steps.csv"
        if asked.measurements is None:
            measured(path, asked.quick, asked.clock)
        table = pl.read_csv(path)
    single, middle = noise(table)
    rows: list[dict[str, Any]] = []
    for name, extra in (("linear", False), ("chosen by cross-validation", True)):
        errors, forms = held_out(table, asked.seed, extra)
        rows.append(
            {
                "form": name,
                "held-out batches": len(errors),
                "mean": float(errors.mean()),
                "p95": float(np.quantile(errors, 0.95)),
                "max": float(errors.max()),
                "terms taken": "; ".join(sorted(set(forms))),
            }
        )
    rows.append({"form": "noise of a single step", "mean": single})
    rows.append({"form": "noise of a batch's median", "mean": middle})
    bars = {
        "mean error of held-out batches": bar(rows[1]["mean"], MEAN_BAR),
        "p95 error of held-out batches": bar(rows[1]["p95"], P95_BAR),
    }
    return show("engine_profile", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
