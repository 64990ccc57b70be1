"""Should arrivals be drawn within the traffic phases of a trace? Plans both ways, judged on traffic held out.

    python experiments/planning/phases.py [--quick] [--resume FOLDER] [--seed N] [--format table|json]

A resampled trace puts for each minute of the trace one that begins nearby (`planning/traffic/draws.py`), also
across a change point. *within*: blocks begin anew at change points, and what is put for one is of its phase.

phased   half an hour of 3 to 5 rates that differ by up to 2.5 either way, gaps with a CV of 1.5
peak     half an hour with a peak of four minutes at 2.5 times the rate, gaps likewise
days     an hour of a day of ServeGen's m-mid, Poisson; judged by the same hour of the next day

Phases of the two former are the same in the window that judges. Each plan is for Llama-2-70B on four H100s,
95 % in 1600/75 ms at confidence 0.9; the fleet is judged with coefficients drawn as they may be wrong.
`held`: plans that met the target there. `above`: attainment above the plan's own lower bound. `workers` and
`fewest`, with hindsight, are means.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import polars as pl

from controlplane.perfmodel.profile import draw_profile
from controlplane.placement.lengths import LengthTable
from controlplane.types import Slo
from controlplane.worker_type import WorkerType
from controlplane.workload import Workload
from experiments.lib.held_out_windows import Pair, arrivals, made, sharegpt
from experiments.lib.public_data import SERVEGEN, SHAREGPT
from experiments.lib.results import bar, flags, show
from experiments.planning.calibration import TARGET, attained
from tokenfleet.planning.inputs import described
from tokenfleet.planning.planner import make_plan
from tokenfleet.planning.request import PlanRequest
from tokenfleet.planning.search import Replayer
from tokenfleet.planning.threads import Threads, open_threads
from tokenfleet.planning.traffic import draws
from tokenfleet.planning.traffic.draws import Draw, Units
from tokenfleet.profiles.library import find_profiles
from tokenfleet.traces.phases import phases_of

RATE_RPS, HALF_S = 4.0, 1800.0
SLO = Slo(1.6, 0.075)
Floats = np.ndarray[Any, np.dtype[np.float64]]


def drawn_within(units: Units, draw: Draw, rng: np.random.Generator) -> Draw:
    """As `draws.drawn_anew` for requests that share nothing, each block within its phase."""
    span_s = float(draw.start_s[-1] - draw.start_s[0])
    block_s = max(min(draws.BLOCK_S, span_s / draws.FEWEST_BLOCKS), span_s / draws.MOST_BLOCKS)
    reach_s = max(min(draws.NEARBY * span_s, draws.NEARBY_S), block_s)
    changes_s = [p.start_s - float(units.workload.arrival_s[0]) for p in phases_of(units.workload)[1:]]
    edges_s = np.array([0.0, *(s for s in changes_s if 0.0 < s < span_s), span_s])
    spans = pairwise(edges_s)
    places = np.concatenate([a + np.arange(int(np.ceil((b - a) / block_s))) * block_s for a, b in spans])
    inner_s = edges_s[1:-1]
    phase = np.searchsorted(inner_s, places, side="right")
    since_s = places - np.append(-np.inf, inner_s)[phase]
    until_s = np.append(inner_s, np.inf)[phase] - places
    long_s = np.minimum(block_s, until_s)
    aside_s = rng.uniform(np.maximum(-reach_s, -since_s), np.minimum(reach_s, until_s - long_s))
    starts_s = np.clip(places + aside_s, 0.0, span_s - long_s)
    start_s, ends_s = draw.start_s - float(draw.start_s[0]), starts_s + long_s
    low = np.searchsorted(start_s, starts_s)
    counts = np.where(ends_s >= span_s, len(start_s), np.searchsorted(start_s, ends_s)) - low
    first = np.concatenate(([0], np.cumsum(counts)[:-1]))
    which = np.repeat(low - first, counts) + np.arange(counts.sum())
    moved_s = start_s[which] - np.repeat(starts_s, counts) + np.repeat(places, counts)
    order = np.argsort(moved_s, kind="stable")
    return Draw(draw.unit[which[order]], np.maximum(moved_s[order], 0.0))


def twice(data: Path, edges_s: Floats, rates: Floats, seed: int) -> Pair:
    """Two windows of these rates."""
    lengths, windows = sharegpt(data), []
    for number in (1, 2):
        rng = np.random.default_rng([seed, number])
        parts = [a + arrivals(q, 1.5, b - a, rng) for (a, b), q in zip(pairwise(edges_s), rates, strict=True)]
        windows.append(made(np.concatenate(parts), lengths, rng))
    return windows[0], windows[1]


def phased(data: Path, seed: int) -> Pair:
    rng = np.random.default_rng([seed, 501])
    count = int(rng.integers(3, 6))
    cuts = np.sort(rng.uniform(0.1, 0.9, count - 1))
    rates = RATE_RPS * np.exp(rng.uniform(-1, 1, count) * np.log(2.5))
    return twice(data, np.concatenate([[0], cuts, [1]]) * HALF_S, rates, seed)


def peak(data: Path, seed: int) -> Pair:
    at_s = np.random.default_rng([seed, 502]).uniform(300, 1200)
    return twice(data, np.array([0, at_s, at_s + 240, HALF_S]), np.array([3.0, 7.5, 3.0]), seed)


def days(data: Path, seed: int) -> Pair:
    rates = pl.read_csv(data / SERVEGEN["m-mid"])["total_rate_rps"].to_numpy()
    rng, begin = np.random.default_rng([seed, 503]), (1 + seed) * 144 + (3 + 5 * seed) % 23 * 6
    rates = np.clip(RATE_RPS * rates / rates[rates > 0].mean(), 0.5, None)
    lengths = sharegpt(data)

    def window(first: int) -> Workload:
        parts = [j * 600 + arrivals(q, 1.0, 600, rng) for j, q in enumerate(rates[first : first + 6])]
        return made(np.concatenate(parts), lengths, rng)

    return window(begin), window(begin + 144)


SOURCES = {"phased": (phased, 12), "peak": (peak, 12), "days": (days, 12)}


def judged(pair: Pair, seed: int, threads: Threads) -> dict[str, Any]:
    """Both plans of a case."""
    known, later = pair
    (profile,) = find_profiles("llama-2-70b", ["h100-80gb"], [4])[:1]
    worker_type = WorkerType.of(replace(profile, context_limit_tokens=0), 2.0, "made")
    truth = draw_profile(profile, np.random.default_rng([seed, 77]))
    predictor = LengthTable.from_history(known.prompt_tokens, known.output_tokens)
    share = partial(attained, later, truth=truth, slo=SLO, predictor=predictor)
    request = PlanRequest(SLO, attainment=TARGET, confidence=0.9, seed=seed, policy="spread")
    told = described("window", known, ())
    row: dict[str, Any] = {"changes": len(phases_of(known)) - 1}
    for how, drawn in (("within", drawn_within), ("across", draws.drawn_anew)):
        with patch.object(draws, "drawn_anew", drawn):
            plan = make_plan(
                known, [worker_type], request, told, threads, explained=False, replayer=Replayer()
            )
        assert plan.best is not None
        workers, low = plan.best.fleet.workers, plan.best.estimate.low if plan.best.estimate else 0.0
        got = share(workers)
        row |= {f"{how} n": workers, f"{how} held": got >= TARGET, f"{how} above": got >= low}
    row["fewest"] = next(n for n in range(1, 100) if share(n) >= TARGET)
    return row


def main() -> int:
    parser = flags(__doc__, SHAREGPT, SERVEGEN["m-mid"], resumes=True)
    asked = parser.parse_args()
    rows, cases = [], []
    with open_threads(1) as threads:
        for name, (make, count) in SOURCES.items():
            numbers = range(asked.seed, asked.seed + (2 if asked.quick else count))
            work = {i: partial(judged, make(asked.data, i), i + 1000, threads) for i in numbers}
            some = [asked.resume.part(f"{name}{i}", judge) for i, judge in work.items()]
            rows.append(summary(name, some))
            cases += some
    rows.append(summary("all", cases))
    within, across = rows[-1]["workers within"], rows[-1]["workers across"]
    return show("phases", rows, {"workers within over across": bar(within / across, 1.0)}, asked)


def summary(name: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"source": name, "windows": len(cases)}
    row["with a change"] = sum(case["changes"] > 0 for case in cases)
    for how in ("within", "across"):
        for what in ("held", "above"):
            row[f"{what} {how}"] = float(np.mean([case[f"{how} {what}"] for case in cases]))
        row[f"workers {how}"] = float(np.mean([case[f"{how} n"] for case in cases]))
    return row | {"fewest": float(np.mean([case["fewest"] for case in cases]))}


if __name__ == "__main__":
    sys.exit(main())
