"""Do 90 % intervals of predicted latencies hold what was measured? With each stack left out; and their table.

    python experiments/profiling/intervals.py [--write] [--learn KIND] [--resume FOLDER] [--format table|json]

A stack is a source, an engine and a GPU. Its runs are `accuracy.py`'s sweeps, at most RATES rates of each,
and the first requests of `vllm_logs`, before its queue grows. Each rate has three errors: of decode, of first
tokens, and the steps that chance adds to one. They bring TPOT, mean TTFT and its p99 to those measured, by
the slopes of simulated runs. A calibrated mean counts chance already: there TPOT and mean TTFT tell the first
two, and p90 and p99 together the third, by halving. `uncertainty.DENSE` and CALIBRATED have their quantiles,
each stack counted once. They are widened, since the median of a few stacks is uncertain itself. The rates of
a sweep share its calibration, so calibrated errors are independent by stack alone: Student's t of one degree
less than stacks widens them. LEFT_OUT is judged but not learned from: its prompts are not answered by the
engine alone.

Profiles are drawn by the errors of the other stacks; a mixture's by those of all dense stacks. An interval
is from the 5th to the 95th percentile of DRAWS draws, its width relative to the prediction. Rates past the
measured saturation point, those calibrated on, and calibrations that are refused are not judged. "Composed,
later rates" are the library's on the rates of calibrated ones.

Drawn are the errors in FROZEN, as plans draw them. `--learn` learns them again, from today's library.
`--write` puts them into the tables, and what is held into FROZEN, which may not get worse
(tests/experiments/test_accuracy_ratchet.py).
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from datetime import date
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import lsq_linear
from scipy.stats import norm, t

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
DENSE = (*DEVELOPMENT, *JUDGED, RTX)
LEFT_OUT = ("l8-ocp-llmd-long-low",)
COMPOSED, LATER, CALIBRATED = "composed", "composed, later rates", "calibrated"
FROZEN = Path(__file__).with_suffix(".json")
RATES, DRAWS, STEP, MOST, LATEST, HALVINGS = 7, 59, 0.1, 1.6, 16.0, 9
FIGURES = ("TTFT mean", "TTFT p99", "TPOT", "whole time")
BEGIN, END = "<!-- table: experiments/profiling/intervals.py --write -->\n", "<!-- end of intervals -->\n"
Rows = list[dict[str, Any]]


def stack_of(name: str) -> str:
    return "llm-d" if name.startswith(LLMD) else next((one for one in STACKS if name.startswith(one)), name)


@cache
def judged(name: str, data: Path, kind: str) -> tuple[Ladder, Profile, tuple[Run, ...]]:
    """A sweep, its profile, and the runs that judge it."""
    if kind == LATER:
        return (*judged(name, data, COMPOSED)[:2], judged(name, data, CALIBRATED)[2])
    calibrates = kind == CALIBRATED
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
        policy = sweep.settings.placement
        profile, _, fit = calibrated(log, profile, known, sweep.settings.workers, policy=policy)
        runs = () if fit.is_refused else runs
    return sweep, profile, runs


def figures(of: Any, run: Run) -> list[float]:
    said = figures_of(of, run.measured)
    return [said["ttft"]["mean"], said["ttft"]["p99"], said["tpot"]["mean"], said["e2e"]["mean"]]


def errors(name: str, data: Path, kind: str) -> list[list[float]]:
    """Of each rate the logarithms of the factors on decode and on first tokens, and the steps of chance."""
    sweep, profile, runs = judged(name, data, kind)
    more, least = float(np.exp(STEP)), [-MOST, -MOST, 0.0]
    moves, found = ((1.0, 1.0, 0.0), (more, 1.0, 0.0), (1.0, more, 0.0), (1.0, 1.0, STEP)), []
    for run in runs:
        served = partial(replay, run.log, workers=sweep.settings.workers, policy=sweep.settings.placement)
        said = np.log([figures(served(with_errors(profile, *by)), run)[:3] for by in moves])
        off, slopes = np.log(figures(run.log, run))[:3] - said[0], (said[1:] - said[0]).T / STEP
        if kind == COMPOSED:
            found.append(lsq_linear(slopes, off, (least, MOST)).x.tolist())
            continue
        factors = lsq_linear(slopes[::2, :2], off[::2], (-MOST, MOST)).x.tolist()
        decode, first = np.exp(factors).tolist()
        low, high = 0.0, LATEST
        for _ in range(HALVINGS):
            steps = (low + high) / 2
            late = served(with_errors(profile, decode, first, steps))
            both = [figures_of(of, run.measured)["ttft"] for of in (late, run.log)]
            is_short = both[0]["p90"] * both[0]["p99"] < both[1]["p90"] * both[1]["p99"]
            low, high = (steps, high) if is_short else (low, steps)
        found.append([*factors, low])
    return found


def seen_in(kind: str, asked: Any) -> Rows:
    """The errors of every sweep of dense models."""
    rows = []
    for name in DENSE:
        own = judged(name, asked.data, kind)[1].residuals.unseen_relative
        part = asked.resume.part(f"errors {kind} {name}", partial(errors, name, asked.data, kind))
        rows += [{"name": name, "stack": stack_of(name), "unseen": own, "errors": part}] * bool(part)
    return rows


def learned(seen: dict[str, Rows], kind: str, without: str | None = None) -> ErrorsElsewhere:
    """The errors of all stacks but one, each counted once."""
    rows = [one for one in seen[kind] if one["stack"] != without and one["name"] not in LEFT_OUT]
    stacks = [one["stack"] for one in rows]
    shares = [1.0 / stacks.count(one["stack"]) / len(one["errors"]) for one in rows]
    weights = np.repeat(shares, [len(one["errors"]) for one in rows])
    table = np.concatenate([one["errors"] for one in rows]).T
    both = np.cov(table[:2], aweights=weights)
    traded = round(float(both[0, 1] / both[1, 1]), 3) if kind == CALIBRATED else 0.0
    table[0] -= traded * table[1]
    freedom = len(set(stacks)) - 1 if kind == CALIBRATED else np.inf
    decode, first, late = (quantiles(of, weights, len(set(stacks)), freedom) for of in table)
    unseen = float(np.median([one["unseen"] for one in rows]))
    late = tuple(max(steps, 0.0) for steps in late)
    return ErrorsElsewhere(decode, first, late, round(unseen, 3), traded)


def quantiles(values: Any, weights: Any, stacks: int, freedom: float) -> tuple[float, ...]:
    """At AT; the outermost two on the lines that lead there."""
    order = np.argsort(values)
    place = np.cumsum(weights[order]) - 0.5 * weights[order]
    found = np.interp(AT[1:-1], place / weights.sum(), values[order])
    wider = np.sqrt(1.0 + 1.0 / stacks) * t.ppf(AT[4:6], freedom) / norm.ppf(AT[4:6])
    found = found[2] + wider[[1, 0, 0, 0, 1]] * (found - found[2])
    low, high = ((found[i] - found[j]) * 0.25 + found[i] for i, j in ((0, 1), (-1, -2)))
    return tuple(np.round([low, *found, high], 3).tolist())


def intervals(name: str, data: Path, kind: str, known: ErrorsElsewhere) -> list[Any]:
    """Of each rate and figure: whether the interval holds it, and how wide it is."""
    sweep, profile, runs = judged(name, data, kind)
    drawn = [draw_profile(profile, np.random.default_rng(k), known) for k in range(DRAWS)]
    rows = []
    for run in runs:
        served = partial(replay, run.log, workers=sweep.settings.workers, policy=sweep.settings.placement)
        measured, *said = (np.array(figures(of, run)) for of in (run.log, *map(served, (profile, *drawn))))
        low, high = np.quantile(said[1:], (0.05, 0.95), axis=0)
        held = (low <= measured) & (measured <= high)
        rows.append(list(zip(held.tolist(), ((high - low) / said[0]).tolist(), strict=True)))
    return rows


def shares(rates: list[Any]) -> dict[str, list[float]]:
    """Of each figure: the share of the rates that are held, and the median width."""
    held, widths = np.array(rates).transpose(2, 1, 0)
    both = np.round([held.mean(axis=1), np.median(widths, axis=1)], 4).T.tolist()
    return dict(zip(FIGURES, both, strict=True))


def table_of(found: dict[Any, Any]) -> tuple[list[dict[str, str]], dict[str, Any]]:
    rows, bars = [], {}
    for whose, sweeps in found.items():
        rates = [rate for sweep in sweeps.values() for rate in sweep]
        line = {"profile": whose, "rates": str(len(rates))}
        for figure, (share, width) in shares(rates).items():
            line[figure] = f"{100 * share:.0f} %, {width:.2f}"
            bars[f"{whose}: {figure}, points from 90 % held"] = bar(abs(round(100 * share) - 90.0), 4.0)
            bars[f"{whose}: {figure}, width"] = bar(round(width, 2), 0.3)
        rows.append(line)
    return rows, bars


def main() -> int:
    parser = flags(__doc__, LMBENCH, REQUEST_LOG, resumes=True)
    parser.add_argument("--write", action="store_true", help="put the tables where they are read")
    parser.add_argument("--learn", choices=(COMPOSED, CALIBRATED), help="learn these errors again")
    asked = parser.parse_args()
    found = defaultdict(dict)
    seen = json.loads(FROZEN.read_text(encoding="utf-8"))["seen"]
    if asked.learn:
        seen[asked.learn] = seen_in(asked.learn, asked)
    for kind, name in product((COMPOSED, LATER, CALIBRATED), (*DENSE, *MIXTURES)):
        known = learned(seen, CALIBRATED if kind == CALIBRATED else COMPOSED, stack_of(name))
        whose = f"{kind}, {'Scout' if name in MIXTURES else 'dense'}"
        part = partial(intervals, name, asked.data, kind, known)
        if rates := asked.resume.part(f"{whose} {name}", part):
            found[whose][name] = rates
    rows, bars = table_of(found)
    if asked.write:
        for table, kind in (("DENSE", COMPOSED), ("CALIBRATED", CALIBRATED)):
            text = "".join(f"    {name}={of},\n" for name, of in learned(seen, kind)._asdict().items())
            between(Path(uncertainty.__file__), f"{table} = ErrorsElsewhere(\n", text, ")\n")
        between(ROOT / "docs" / "figures" / "intervals.md", BEGIN, markdown(rows), END)
        held = {
            whose: {name: shares(rates) for name, rates in sweeps.items()}
            | {"all": shares([rate for rates in sweeps.values() for rate in rates])}
            for whose, sweeps in found.items()
        }
        FROZEN.write_text(json.dumps({"seen": seen, "held": held}, indent=1) + "\n", encoding="utf-8")
    return show("intervals", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
