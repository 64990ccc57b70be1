"""A real vLLM engine measured, a step model fitted to some of it and judged on the rest.

    python experiments/profiling/engine_profile.py [--quick] [--measurements M.csv] [--budget 30m]
        [--clock cpu|wall]

Runs `tokenfleet profile` on the tiny Llama (CPU engine) with 12 visits to each grid point, or goes on with
the measurements that are there for `--budget` (0s: only judges them; the whole takes some ten minutes of a
quiet machine). Grid points are split into five parts; each part is judged by a model fitted to the other
four. A batch is one kind of step of one point (its prefill, its decode steps at their mean context), its time
the median over visits.

The machine's own noise stands beside the errors: how far a visit's steps, and the median of a batch, are from
what they would be in the mean of many. Of a batch's median it is half the distance of the medians of two
random halves of its visits (so it does not take the steps of a visit, which share what the machine does just
then, for independent). No model can be closer than that.

The machine is faster and slower for a while, all batches together, and `tokenfleet fit` takes that out of the
times of the batches that are fitted as of those that are judged (`perfmodel.host_speed`; a batch's time is
then that at the run's mean speed). The rows `as measured` are without.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from controlplane.perfmodel.fit import fit_step
from controlplane.perfmodel.samples import StepSamples, by_point
from experiments.lib.command import tokenfleet
from experiments.lib.results import bar, flags, show
from harness.served import tiny_model
from tokenfleet.profiles.diagnostics import form_of
from tokenfleet.profiles.measurements import speed_of

PARTS, VISITS, SPLITS = 5, 12, 20
MEAN_BAR, P95_BAR = 0.05, 0.15
ENGINE = ("--dtype", "float32", "--max-model-len", "4096", "--max-num-seqs", "64")
WORK = ("prefill_tokens", "sequences", "prefill_sum_sq")


def measured(out: Path, budget: str, quick: bool, clock: str) -> None:
    """Run `tokenfleet profile` on the tiny model, or go on with what is there."""
    with tiny_model() as model:
        command = ["profile", "--model", str(model), "--output", str(out), "--clock", clock, "--cores", "0"]
        command += ["--budget", budget]
        command += ["--points", "18", "--repeats", "2"] if quick else ["--repeats", str(VISITS)]
        command += ["--", *ENGINE, "--kv-cache-memory-bytes", str(256 << 20)]
        tokenfleet(*command)


def columns_of(table: pl.DataFrame) -> tuple[StepSamples, list[str], list[str]]:
    """The table's steps, their points and their visits."""
    named = ("prefill_tokens", "sequences", "context_tokens", "step_s", "prefill_sum_sq")
    steps = StepSamples(**{name: table[name].to_numpy().astype(float) for name in named})
    return steps, table["point"].to_list(), [str(r) for r in table["repeat"].to_list()]


def noise(table: pl.DataFrame, seed: int) -> tuple[float, float]:
    """Mean relative distance of a visit's median from its batch's, and of a batch's median from the truth."""
    rng = np.random.default_rng(seed)
    single, middle = [], []
    for _, batch in table.group_by("point", *WORK, maintain_order=True):
        visits = np.log([v["step_s"].median() for _, v in batch.group_by("repeat", maintain_order=True)])
        if len(visits) < 2:
            continue
        # Of k visits their middle is off by as much as one is, which k/(k - 1) of the variance makes up for.
        spread = np.abs(visits - np.median(visits)).mean() * np.sqrt(len(visits) / (len(visits) - 1))
        single.append(float(spread))
        half = len(visits) // 2
        for _ in range(SPLITS):
            drawn = rng.permutation(visits)
            middle.append(float(abs(np.median(drawn[:half]) - np.median(drawn[half : 2 * half]))) / 2)
    return float(np.mean(single)), float(np.mean(middle))


def held_out(table: pl.DataFrame, seed: int, extra_terms: bool) -> tuple[NDArray[np.float64], list[str]]:
    """Absolute relative errors of batches whose points the fit has not seen, and the forms it took."""
    points = sorted(table["point"].unique().to_list())
    part = np.random.default_rng(seed).permutation(len(points)) % PARTS
    errors, forms = [], []
    for k in range(PARTS):
        judged = [name for name, p in zip(points, part, strict=True) if p == k]
        learn, judge = (by_point(*columns_of(table.filter(mask))) for mask in (
            ~pl.col("point").is_in(judged), pl.col("point").is_in(judged)
        ))  # fmt: skip
        fit = fit_step(learn, robust=True, extra_terms=extra_terms).model
        assert judge.prefill_sum_sq is not None
        columns = (judge.prefill_tokens, judge.sequences, judge.context_tokens, judge.prefill_sum_sq)
        errors.append(np.abs(fit.step_s(*columns) / judge.step_s - 1))
        forms.append(" ".join(form_of(fit)) or "linear")
    return np.concatenate(errors), forms


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--measurements", type=Path, help="of `tokenfleet profile`: go on with them")
    parser.add_argument("--budget", default="30m", help="measure for so long at most; 0s: not at all")
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tokenfleet-") as folder:
        path = asked.measurements or Path(folder) / "steps.csv"
        if asked.budget != "0s":
            measured(path, asked.budget, asked.quick, asked.clock)
        table = pl.read_csv(path)
    speed = speed_of(*columns_of(table), table["at_s"].to_numpy())
    steady = table.with_columns(step_s=table["step_s"].to_numpy() / speed.slowness)  # at the mean speed
    rows: list[dict[str, Any]] = []
    for name, extra, of in (
        ("linear", False, steady),
        ("chosen by cross-validation", True, steady),
        ("linear, as measured", False, table),
        ("chosen, as measured", True, table),
    ):
        errors, forms = held_out(of, asked.seed, extra)
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
    for name, of in (("", steady), (", as measured", table)):
        single, middle = noise(of, asked.seed)
        rows.append({"form": f"noise of a single visit{name}", "mean": single})
        rows.append({"form": f"noise of a batch's median{name}", "mean": middle})
    low, high = speed.range
    rows.append({"form": "the machine's slowness, 5th and 95th percentile", "mean": low, "p95": high})
    visits = table.group_by("point").agg(pl.col("repeat").n_unique())["repeat"]
    rows.append({"form": "visits to a point", "mean": float(visits.mean() or 0.0)})  # type: ignore[arg-type]
    bars = {
        "mean error of held-out batches": bar(rows[1]["mean"], MEAN_BAR),
        "p95 error of held-out batches": bar(rows[1]["p95"], P95_BAR),
    }
    return show("engine_profile", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
