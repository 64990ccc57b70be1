"""Does a plan at confidence 0.9 hold in nine windows of ten?

    python experiments/calibration.py [--quick] [--seed 0] [--format table|json]

Each case plans on one window of traffic and is judged on the window that follows it, which the planner has
not seen, with coefficients drawn as `perfmodel.interval` says they may be wrong. One kind of worker
(Llama-3.1-8B, one A100, 1600/50 ms), 95 % of requests within both targets, windows of a minute at about 11
requests a second:

  azure      minutes of the conversation hour, at twice its rate
  servegen   two weeks of ServeGen's rates, a minute for each ten, Poisson arrivals, ShareGPT lengths
  regimes    gamma arrivals (CV 2) at a rate that changes by up to 1.6 times at unknown moments
  steady     Poisson arrivals at one rate: the control, where the next window differs by chance alone

`held` is the share of plans that met the target on their held-out window. `in reach` is the share of plans at
0.9 within one worker of the fewest that meet the target there, known with hindsight.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray
from results import bar, flags, show

from controlplane.perfmodel.interval import draw_profile
from controlplane.perfmodel.profile import Profile
from controlplane.placement.lengths import LengthTable
from controlplane.types import Slo
from controlplane.workload import Workload
from dataplane.simulated.cluster import WorkerSpec, simulate
from tokenfleet.plan import make_plan
from tokenfleet.plan_inputs import described
from tokenfleet.planning.question import Offer, Question
from tokenfleet.planning.threads import Threads, threads
from tokenfleet.profile_files import find_profiles
from tokenfleet.traces import read_trace

SLO, TARGET = Slo(1.6, 0.05), 0.95
CONFIDENCES = (0.8, 0.9, 0.95)
WINDOW_S, RATE_RPS, AZURE_SCALE = 60.0, 11.0, 2.0
WINDOWS, QUICK_WINDOWS = 20, 3
MOST_WORKERS = 64
POINTS, IN_REACH = 0.04, 0.90

Pair = tuple[Workload, Workload]  # what is known, and what comes


def made(arrival_s: NDArray[np.float64], lengths: NDArray[np.int64], rng: np.random.Generator) -> Workload:
    """Arrivals with lengths drawn from `lengths`, shape [kinds, 2]."""
    drawn = lengths[rng.integers(0, len(lengths), len(arrival_s))]
    return Workload(arrival_s - arrival_s[0], drawn[:, 0].copy(), drawn[:, 1].copy())


def arrivals(rate_rps: float, cv: float, rng: np.random.Generator) -> NDArray[np.float64]:
    """A window's arrivals with gamma gaps of this coefficient of variation."""
    shape = 1.0 / cv**2
    gaps = rng.gamma(shape, 1.0 / (rate_rps * shape), int(3 * rate_rps * WINDOW_S) + 50)
    when = np.cumsum(gaps)
    return when[when < WINDOW_S]


def azure(data: Path, windows: int, longest: int) -> list[Pair]:
    """Consecutive minutes of the sped-up hour."""
    whole = read_trace(data / "azure" / "AzureLLMInferenceTrace_conv_2023.csv").workload
    arrival = whole.arrival_s / AZURE_SCALE
    fits = whole.prompt_tokens + whole.output_tokens <= longest

    def window(i: int) -> Workload:
        rows = fits & (arrival >= i * WINDOW_S) & (arrival < (i + 1) * WINDOW_S)
        start = arrival[rows][0]
        return Workload(arrival[rows] - start, whole.prompt_tokens[rows], whole.output_tokens[rows])

    count = int(arrival[-1] // WINDOW_S)
    starts = np.linspace(0, count - 2, min(windows, count - 1)).round().astype(int)
    return [(window(i), window(i + 1)) for i in starts]


def sharegpt(data: Path) -> NDArray[np.int64]:
    path = data / "lengths" / "sharegpt_8k_filtered_stats_llama2_tokenizer.csv"
    table = pl.read_csv(path).select("num_prefill_tokens", "num_decode_tokens").to_numpy()
    return np.asarray(table[(table > 0).all(axis=1)], np.int64)


def servegen(data: Path, windows: int, rng: np.random.Generator) -> list[Pair]:
    """Neighbouring rates of the series, spread over its two weeks."""
    series = pl.read_csv(data / "servegen" / "language_m-mid_rate_600s.csv")["total_rate_rps"].to_numpy()
    rates = series[series > 0]
    rates = np.clip(RATE_RPS * rates / rates.mean(), 1.0, None)
    lengths = sharegpt(data)
    starts = np.linspace(0, len(rates) - 2, windows).round().astype(int)
    return [
        (
            made(arrivals(rates[i], 1.0, rng), lengths, rng),
            made(arrivals(rates[i + 1], 1.0, rng), lengths, rng),
        )
        for i in starts
    ]


def regimes(data: Path, windows: int, rng: np.random.Generator) -> list[Pair]:
    """Every fourth window on average the rate becomes another one; bursts within."""
    lengths, rate, rates = sharegpt(data), RATE_RPS, []
    for _ in range(windows + 1):
        rates.append(rate)
        if rng.random() < 0.25:
            rate = RATE_RPS * float(np.exp(rng.uniform(-np.log(1.6), np.log(1.6))))
    drawn = [made(arrivals(r, 2.0, rng), lengths, rng) for r in rates]
    return list(pairwise(drawn))


def steady(data: Path, windows: int, rng: np.random.Generator) -> list[Pair]:
    lengths = sharegpt(data)
    drawn = [made(arrivals(RATE_RPS, 1.0, rng), lengths, rng) for _ in range(windows + 1)]
    return list(pairwise(drawn))


def attained(later: Workload, workers: int, truth: Profile, predictor: LengthTable) -> float:
    """What so many workers make of the window that came."""
    specs = [WorkerSpec(truth)] * workers
    return float(simulate(later, specs, SLO, "spread", predictor=predictor).attainment)


def judged(pair: Pair, offer: Offer, seed: int, pool: Threads) -> dict[str, Any]:
    """One case: planned workers and whether they held, by confidence; the fewest with hindsight."""
    known, later = pair
    truth = draw_profile(offer.profile, np.random.default_rng([seed, 77]))
    predictor = LengthTable.from_history(known.prompt_tokens, known.output_tokens)
    seen: dict[int, float] = {}

    def share(workers: int) -> float:
        if workers not in seen:
            seen[workers] = attained(later, workers, truth, predictor)
        return seen[workers]

    row: dict[str, Any] = {}
    for confidence in CONFIDENCES:
        question = Question(SLO, TARGET, confidence, seed=seed)
        plan = make_plan(known, [offer], question, described("window", known, ()), pool, explained=False)
        workers = plan.best.fleet.workers if plan.best is not None else None
        row[f"workers {confidence:g}"] = workers
        row[f"held {confidence:g}"] = workers is not None and share(workers) >= TARGET
    fewest = 1
    while fewest < MOST_WORKERS and share(fewest) < TARGET:
        fewest += 1
    row["fewest"] = fewest
    return row


def main() -> int:
    parser = flags("Plans on held-out windows: do they hold as often as they say?")
    parser.add_argument("--source", action="append", help="only this one; may be given more than once")
    asked = parser.parse_args()
    if not (asked.data / "azure").is_dir():
        print(f"{asked.data}: no azure folder; give the public data with --data", file=sys.stderr)
        return 2
    windows = QUICK_WINDOWS if asked.quick else WINDOWS
    profile = find_profiles("llama-3.1-8b", ["a100"], [1])[0]
    offer = Offer(replace(profile, context_limit_tokens=0), 2.0, "made")
    rngs = [np.random.default_rng([asked.seed, k]) for k in range(3)]
    sources: dict[str, Callable[[], list[Pair]]] = {
        "azure": lambda: azure(asked.data, windows, 16_000),
        "servegen": lambda: servegen(asked.data, windows, rngs[0]),
        "regimes": lambda: regimes(asked.data, windows, rngs[1]),
        "steady": lambda: steady(asked.data, windows, rngs[2]),
    }
    sources = {name: pairs for name, pairs in sources.items() if name in (asked.source or sources)}
    if not sources:
        parser.error("--source: azure, servegen, regimes or steady")
    cases: list[dict[str, Any]] = []
    with threads(1) as pool:
        for name, pairs in sources.items():
            for i, pair in enumerate(pairs()):
                cases.append({"source": name} | judged(pair, offer, asked.seed * 1000 + i, pool))
                print(cases[-1], file=sys.stderr, flush=True)
    rows = [summary(name, [c for c in cases if c["source"] == name]) for name in sources]
    judged_by = [c for c in cases if c["source"] != "steady"] or cases
    together = summary("held-out sources together", judged_by)
    rows.append(together)
    bars = {
        f"held at {c:g}": {
            "value": together[f"held {c:g}"],
            "bar": c,
            "ok": bool(abs(together[f"held {c:g}"] - c) <= POINTS),
        }
        for c in CONFIDENCES
    }
    bars["within one worker of the fewest"] = bar(together["in reach"], IN_REACH, at_least=True)
    bars["windows"] = bar(together["windows"], 3 * windows if asked.quick else 60, at_least=True)
    return show("calibration", rows, bars, asked)


def summary(name: str, cases: list[dict[str, Any]]) -> dict[str, Any]:
    row: dict[str, Any] = {"source": name, "windows": len(cases)}
    for c in CONFIDENCES:
        row[f"held {c:g}"] = float(np.mean([case[f"held {c:g}"] for case in cases]))
    middle = [(case["workers 0.9"] or 0) - case["fewest"] for case in cases]
    row["in reach"] = float(np.mean([abs(gap) <= 1 for gap in middle]))
    row["mean gap"] = float(np.mean(middle))
    row["fewest, mean"] = float(np.mean([case["fewest"] for case in cases]))
    return row


if __name__ == "__main__":
    sys.exit(main())
