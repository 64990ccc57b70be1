"""Do 90 % intervals of predicted latencies hold what was measured? With each stack left out; and their table.

    python experiments/profiling/intervals.py [--write] [--resume FOLDER] [--data DIR] [--format table|json]

A stack is a source, an engine and a GPU. Its runs are `accuracy.py`'s sweeps, at most RATES rates of each,
and the first requests of `vllm_logs`, before its queue grows. Each rate has three errors: of decode, of first
tokens, and the steps that chance adds to one. They bring TPOT, mean TTFT and its p99 to those measured, by
the slopes of simulated runs. `uncertainty.DENSE` has their quantiles, each stack counted once. They are
widened, since the median of a few stacks is uncertain itself. LEFT_OUT is judged but not learned from: its
prompts are not answered by the engine alone.

Library profiles of dense models are drawn by the errors of the other stacks, and by their residuals, as plans
did before. Calibrated ones and a mixture's are drawn by their residuals. An interval is from the 5th to the
95th percentile of DRAWS draws, its width relative to the prediction. Rates past the measured saturation
point, those calibrated on, and calibrations that are refused are not judged. `--write` writes both tables.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from dataclasses import replace
from datetime import date
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import lsq_linear

from controlplane.perfmodel import uncertainty
from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.uncertainty import AT, ErrorsElsewhere, draw_profile, with_errors
from experiments.lib.ladders import LMBENCH, ladder
from experiments.lib.public_data import REQUEST_LOG, ROOT
from experiments.lib.results import bar, flags, show
from experiments.profiling.accuracy import DEVELOPMENT, JUDGED, MIXTURES, between, markdown
from tokenfleet.profiles.accuracy import CALIBRATED_ON, Ladder, Run, RunsFile, figures_of, steady
from tokenfleet.profiles.fit_log import calibrated, joined, replay
from tokenfleet.profiles.measurements import read_request_log
from tokenfleet.profiles.predict import PredictedWorker, predicted_profile

RTX, UNQUEUED = "rtx-pro-6000", 120
LLMD = ("l70-ocp-llmd", "l70-a100-llmd", "l8-ocp-llmd")
STACKS = ("l70-k8s", "l70-h100", "l8-ocp-vllm", "apr29-llmd", "apr29", RTX)  # beginnings of sweeps' names
DENSE, LEFT_OUT = (*DEVELOPMENT, *JUDGED, RTX), ("l8-ocp-llmd-long-low",)
RATES, DRAWS, STEP, MOST = 7, 59, 0.1, 1.6
FIGURES = ("TTFT mean", "TTFT p99", "TPOT", "whole time")
BEGIN, END = "<!-- table: experiments/profiling/intervals.py --write -->\n", "<!-- end of intervals -->\n"
Rows = list[dict[str, Any]]


def stack_of(name: str) -> str:
    return "llm-d" if name.startswith(LLMD) else next(one for one in STACKS if name.startswith(one))


@cache
def judged(name: str, data: Path, calibrates: bool) -> tuple[Ladder, Profile, tuple[Run, ...]]:
    """A sweep, its profile, and the runs that judge it."""
    if name == RTX:
        log = read_request_log(data / REQUEST_LOG / "requests.jsonl")
        run = Run(3.4, log, np.arange(len(log.workload)) < UNQUEUED)
        model = {"model": "llama-3.1-8b", "gpu": "rtx_pro_6000_server", "requests": "requests.jsonl"}
        sweep = Ladder(name, RunsFile(schema="tokenfleet.runs/1", **model), (run,))
        target = PredictedWorker(model["model"], model["gpu"], 1, 0.001, 2048, 128)
        return sweep, predicted_profile(target, date.today()), () if calibrates else sweep.runs
    sweep = ladder(data, name)
    profile, learn = sweep.worker(), sweep.runs[:CALIBRATED_ON]
    runs = sweep.runs[CALIBRATED_ON * calibrates : steady(sweep)]
    runs = runs[:: max(-(-len(runs) // RATES), 1)]
    if calibrates:
        known, log = np.concatenate([run.measured for run in learn]), joined([run.log for run in learn])
        profile, _, fit = calibrated(log, profile, known, sweep.settings.workers)
        runs = () if fit.is_refused else runs
    return sweep, profile, runs


def figures(of: Any, run: Run) -> list[float]:
    said = figures_of(of, run.measured)
    return [said["ttft"]["mean"], said["ttft"]["p99"], said["tpot"]["mean"], said["e2e"]["mean"]]


def errors(name: str, data: Path) -> list[list[float]]:
    """Of each rate the logarithms of the factors on decode and on first tokens, and the steps of chance."""
    sweep, profile, runs = judged(name, data, False)
    more, least = float(np.exp(STEP)), [-MOST, -MOST, 0.0]
    moves = ((1.0, 1.0, 0.0), (more, 1.0, 0.0), (1.0, more, 0.0), (1.0, 1.0, STEP))
    moved, found = [with_errors(profile, *by) for by in moves], []
    for run in runs:
        said = np.log([figures(replay(run.log, one, sweep.settings.workers), run)[:3] for one in moved])
        off, slopes = np.log(figures(run.log, run))[:3] - said[0], (said[1:] - said[0]).T / STEP
        found.append(lsq_linear(slopes, off, (least, MOST)).x.tolist())
    return found


def learned(seen: Rows, without: str | None = None) -> ErrorsElsewhere:
    """The errors of all stacks but one, each counted once."""
    rows = [one for one in seen if one["stack"] != without and one["name"] not in LEFT_OUT]
    stacks = [one["stack"] for one in rows]
    shares = [1.0 / stacks.count(one["stack"]) / len(one["errors"]) for one in rows]
    weights = np.repeat(shares, [len(one["errors"]) for one in rows])
    table = np.concatenate([one["errors"] for one in rows]).T
    decode, first, late = (quantiles(of, weights, len(set(stacks))) for of in table)
    unseen = float(np.median([one["unseen"] for one in rows]))
    return ErrorsElsewhere(decode, first, tuple(max(steps, 0.0) for steps in late), round(unseen, 3))


def quantiles(values: Any, weights: Any, stacks: int) -> tuple[float, ...]:
    """At AT; the outermost two on the lines that lead there."""
    order = np.argsort(values)
    place = np.cumsum(weights[order]) - 0.5 * weights[order]
    found = np.interp(AT[1:-1], place / weights.sum(), values[order])
    found = found[2] + np.sqrt(1.0 + 1.0 / stacks) * (found - found[2])
    low, high = ((found[i] - found[j]) * 0.25 + found[i] for i, j in ((0, 1), (-1, -2)))
    return tuple(np.round([low, *found, high], 3).tolist())


def intervals(name: str, data: Path, calibrates: bool, known: ErrorsElsewhere | None) -> list[Any]:
    """Of each rate and figure: whether the interval holds it, and how wide it is."""
    sweep, profile, runs = judged(name, data, calibrates)
    if known is None:  # by its residuals, as a measured one is
        profile, known = replace(profile, source=replace(profile.source, kind="measured")), uncertainty.DENSE
    drawn = [draw_profile(profile, np.random.default_rng(k), known) for k in range(DRAWS)]
    rows = []
    for run in runs:
        measured = np.array(figures(run.log, run))
        said = [figures(replay(run.log, one, sweep.settings.workers), run) for one in (profile, *drawn)]
        low, high = np.quantile(said[1:], (0.05, 0.95), axis=0)
        held = (low <= measured) & (measured <= high)
        rows.append(list(zip(held.tolist(), ((high - low) / said[0]).tolist(), strict=True)))
    return rows


def main() -> int:
    parser = flags(__doc__, LMBENCH, REQUEST_LOG, resumes=True)
    parser.add_argument("--write", action="store_true", help="put the tables where they are read")
    asked = parser.parse_args()
    seen, found, rows, bars = [], defaultdict(list), [], {}
    for name in DENSE:
        own = judged(name, asked.data, False)[1].residuals.unseen_relative
        part = asked.resume.part(f"errors {name}", partial(errors, name, asked.data))
        seen.append({"name": name, "stack": stack_of(name), "unseen": own, "errors": part})
    for calibrates, name in [(how, name) for how in (False, True) for name in (*DENSE, *MIXTURES)]:
        whose = f"{'calibrated' if calibrates else 'composed'}, {'Scout' if name in MIXTURES else 'dense'}"
        ways = {"residuals": None}
        if whose == "composed, dense":
            ways["other stacks' errors"] = learned(seen, stack_of(name))
        for how, known in ways.items():
            part = partial(intervals, name, asked.data, calibrates, known)
            found[whose, how] += asked.resume.part(f"{whose} {name} {how}", part)
    for (whose, how), rates in found.items():
        held, widths = np.array(rates).transpose(2, 1, 0)
        line = {"profile": whose, "drawn by": how, "rates": str(len(rates))}
        for figure, share, width in zip(
            FIGURES, 100 * held.mean(axis=1), np.median(widths, axis=1), strict=True
        ):
            line[figure] = f"{share:.0f} %, {width:.2f}"
            bars[f"{whose}, {how}: {figure}, points from 90 % held"] = bar(abs(round(share) - 90.0), 4.0)
            bars[f"{whose}, {how}: {figure}, width"] = bar(round(width, 2), 0.3)
        rows.append(line)
    if asked.write:
        text = "".join(f"    {name}={of},\n" for name, of in learned(seen)._asdict().items())
        between(Path(uncertainty.__file__), "DENSE = ErrorsElsewhere(\n", text, ")\n\n\ndef draw_profile")
        between(ROOT / "docs" / "figures" / "calibration.md", BEGIN, markdown(rows), END)
    return show("intervals", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
