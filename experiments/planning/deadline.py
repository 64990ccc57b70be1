"""What is it worth that batch work may wait six hours, over whole days?

    python experiments/planning/deadline.py [--quick] [--days N] [--rate-rps 6] [--tp 2] [--tp 4]
        [--resume FOLDER] [--seed 0] [--format table|json]

Days of 24 hours at ServeGen's rates (each ten minutes at its own, in proportion), --rate-rps in the mean,
with lengths of Azure's hour. Half of the requests, dealt at random, are chat (1.6 s and 75 ms, 99 %), the
other half batch work (95 %) that comes with it and is due within 6 h, or is served on arrival (30 s, 200 ms).
Llama-3.1-70B on two and on four A100s. The days, by their place: the first of each of the two series, then
the first of their second weeks.

`due` and `on arrival` are the fewest workers, the same all day, on which both classes have what is asked of
them, on the trace as it is; `chat alone` those for chat without the rest. `mean / peak`: of the day's rates
by ten minutes, which a fleet with work for every minute would come to. `one fewer`: what chat and batch work
that is due attain with one worker less, where not more than eight times as many as may be are late. What is
left at the day's end is done after it.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from controlplane.workload import Workload
from experiments.lib.public_data import AZURE_HOUR, SERVEGEN, azure_hour
from experiments.lib.results import bar, flags, show
from experiments.planning.classes import BATCH, dealt, slos, with_lengths
from tokenfleet.planning.inputs import gather
from tokenfleet.planning.request import PlanRequest, read_targets
from tokenfleet.planning.search import Search
from tokenfleet.planning.sizing import size_on_trace
from tokenfleet.planning.threads import threads
from tokenfleet.traces import Trace

MODEL, GPU, TPS = "llama-3.1-70b", ("a100",), (2, 4)
DAYS = (("m-mid", 0), ("m-small", 0), ("m-mid", 7), ("m-small", 7))
DAY, WINDOW_S = 144, 600.0  # windows
RATE_RPS, QUICK_RPS = 6.0, 1.0
WAITS = {"due": "batch:deadline=6h,tpot=200ms,attainment=0.95", "on arrival": BATCH, "chat alone": ""}
ATTAINMENT = 0.99  # the strictest class's, at whose scale all are judged
MOST = 0.65


def rates_of(data: Path, series: str, day: int, rate_rps: float) -> np.ndarray:
    """The day's rates, requests a second in each window, for a mean of `rate_rps`."""
    rates = pl.read_csv(data / SERVEGEN[series])["total_rate_rps"].to_numpy()[DAY * day : DAY * (day + 1)]
    rates = np.maximum(rates, 0.1)
    return np.asarray(rates / rates.mean() * rate_rps)


def load_of(data: Path, rates_rps: np.ndarray, rng: np.random.Generator) -> Workload:
    """Requests of such a day."""
    parts = [
        WINDOW_S * i + np.sort(rng.uniform(0, WINDOW_S, rng.poisson(WINDOW_S * r)))
        for i, r in enumerate(rates_rps)
    ]
    return with_lengths(np.concatenate(parts), azure_hour(data), rng)


def fewest(load: Workload, batch: str, tp: int, seed: int) -> dict[str, Any]:
    """The fewest workers on the trace, and what each class attains with one less, where that was replayed.

    Without targets for batch work those for chat alone.
    """
    targets = [slos(MODEL, "two")[0], batch or BATCH]
    classed = dealt(load, (0.5, 0.5), targets, np.random.default_rng(seed))
    if not batch:
        targets, classed = targets[:1], classed.take(classed.slo_class == 0)
        classed = replace(classed, slo_classes=classed.slo_classes[:1])
    asked = read_targets(targets) | {"attainment": ATTAINMENT}
    request = PlanRequest(**asked, model=MODEL, gpu=GPU, tp=(tp,), seed=seed, drop_too_long=True)
    gathered = gather(Trace("day", "plain", classed), request)
    workload, classes, (kind,) = gathered.workload, gathered.inputs.classes, gathered.worker_types
    several = classes if batch else ()
    with threads(1) as pool:
        made = Search.of(request, workload, (), pool, classes=several).on(slo=classes[0].slo)
    sizing = size_on_trace(made, kind)
    assert sizing.workers is not None, sizing.reason
    less = None
    if sizing.workers > 1:
        most = 8.0 * made.may_miss
        less = made.replay(sizing.fleet(sizing.workers - 1), most_missed=most)
    return {
        "workers": sizing.workers,
        "usd": sizing.fleet(sizing.workers).usd_per_hour,
        "one fewer": less.class_attainments.round(4).tolist() if less and less.complete else None,
    }


def judged(asked: Any, series: str, day: int, rate_rps: float, tp: int) -> dict[str, Any]:
    """A day with its batch work due in hours, and served on arrival."""
    rates = rates_of(asked.data, series, day, rate_rps)
    load = load_of(asked.data, rates, np.random.default_rng(asked.seed))
    about = f"{series} {day} TP{tp} {rate_rps} {asked.seed}"
    due, arrival, chat = (
        asked.resume.part(f"{about} {name}", partial(fewest, load, batch, tp, asked.seed))
        for name, batch in WAITS.items()
    )
    less = due["one fewer"]
    return {
        "series": series,
        "day": day,
        "tp": tp,
        "requests": len(load),
        "due": due["workers"],
        "on arrival": arrival["workers"],
        "chat alone": chat["workers"],
        "usd/h due": due["usd"],
        "usd/h on arrival": arrival["usd"],
        "due / arrival": round(due["usd"] / arrival["usd"], 3),
        "mean / peak": round(float(rates.mean() / rates.max()), 3),
        "one fewer": "-" if less is None else f"{less[0]}, {less[1]}",
    }


def main() -> int:
    parser = flags(__doc__, AZURE_HOUR, SERVEGEN["m-mid"], SERVEGEN["m-small"], resumes=True)
    parser.add_argument("--days", type=int, default=len(DAYS), choices=range(1, len(DAYS) + 1))
    parser.add_argument("--rate-rps", type=float, default=RATE_RPS)
    parser.add_argument("--tp", type=int, action="append", choices=TPS)
    asked = parser.parse_args()
    rate_rps = QUICK_RPS if asked.quick else asked.rate_rps
    days, tps = DAYS[: asked.days], asked.tp or TPS
    rows = [judged(asked, series, day, rate_rps, tp) for series, day in days for tp in tps]
    ratio = float(np.mean([row["due / arrival"] for row in rows]))
    bars = {"dollars with a deadline over those on arrival, mean": bar(round(ratio, 3), MOST)}
    return show("deadline", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
