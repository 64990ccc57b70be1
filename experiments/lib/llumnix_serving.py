"""Llumnix' serving experiments (OSDI '24, Figures 11 and 13) and instances at equal P99, simulated.

The runs behind llumnix_figures.py, which says what is compared and how it is judged.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import numpy as np

from controlplane.perfmodel.capacity import worker_seconds
from controlplane.placement.policies import PlacementSettings
from controlplane.workload import Workload
from experiments.lib.llumnix import (
    HEADROOM,
    INFAAS,
    OURS,
    REQUESTS,
    ROUND_ROBIN,
    SLO,
    WORKERS,
    AsReported,
    Curves,
    System,
    a10,
    llumnix,
    metrics,
    our_moves,
    published_moves,
    workload,
)
from experiments.lib.llumnix_scaling import averaged
from experiments.lib.resume import Parts

RATES = {
    "S-S": (32.0, 33.0, 34.0, 35.0, 36.0),
    "M-M": (7.4, 7.5, 7.6, 7.7, 7.8),
    "L-L": (2.6, 2.7, 2.8, 2.9, 3.0),
    "S-L": (4.1, 4.15, 4.2, 4.25, 4.3),
    "L-S": (10.0, 12.0, 14.0, 16.0, 18.0),
}
CVS = (2.0, 4.0, 6.0, 8.0)
PRIORITY_RATE, HIGH_SHARE = 26.0, 0.1
GAP, WITHIN = 1.2, 0.3
FEWEST, MOST = 11, 40  # below the one every generated trace overloads the fleet; the other is enough for all
PAIR = ("INFaaS++", "Llumnix")
Points = dict[tuple[str, str, float, str], float]


def figure_11(names: Iterable[str], rates: Any, seeds: range, parts: Parts) -> Points:
    """Every system on every trace and rate; the first seed is the published stream."""
    points: Points = {}
    for name in names:
        for rate in rates(name):
            for system in (ROUND_ROBIN, INFAAS, llumnix(name), OURS):
                seen = averaged([served(system, name, rate, seed, parts) for seed in seeds])
                points |= {(name, metric, rate, system.name): y for metric, y in seen.items()}
            print(f"{name} at {rate:g}/s done", file=sys.stderr)
    return points


def served(
    system: System, name: str, rate: float, seed: int, parts: Parts, workers: int = WORKERS
) -> dict[str, float]:
    """The metrics of one run of Figure 11, or of one like it with another number of instances."""
    part = f"11 {name} {rate:g} seed {seed} {system.name} {workers}"
    found: dict[str, float] = parts.part(
        part, lambda: metrics(system.run(workload(name, rate, seed), workers))
    )
    return found


def by_stream(names: Iterable[str], seeds: range, parts: Parts, paper: Curves) -> list[dict[str, Any]]:
    """Figure 11's largest ratio, judged for each stream of arrivals alone: how much of it is the stream's."""
    rows = []
    for name in names:
        pair = (INFAAS, llumnix(name))
        seen = {
            (seed, rate): [served(system, name, rate, seed, parts) for system in pair]
            for seed in seeds
            for rate in RATES[name]
        }
        for metric in next(iter(seen.values()))[0]:
            theirs = max(
                paper[name, metric, x, PAIR[0]] / paper[name, metric, x, PAIR[1]] for x in RATES[name]
            )
            if theirs <= GAP:
                continue
            each = [
                max(seen[seed, x][0][metric] / seen[seed, x][1][metric] for x in RATES[name])
                for seed in seeds
            ]
            rows.append(
                {
                    "trace": name,
                    "metric": metric,
                    "paper ratio": theirs,
                    "published stream": each[0],
                    "others": ", ".join(f"{one:.2f}" for one in sorted(each[1:])),
                    "within": f"{sum(abs(one / theirs - 1) <= WITHIN for one in each)}/{len(each)}",
                    "most / least": max(each) / min(each),
                }
            )
        print(f"{name}: {len(seeds)} streams done", file=sys.stderr)
    return rows


def figure_13(cvs: Iterable[float], seeds: range, parts: Parts) -> Points:
    """High and normal requests apart, with and without priorities."""
    headroom = PlacementSettings(headroom=HEADROOM)
    heard = AsReported(headroom=HEADROOM)
    base = llumnix("S-S")
    systems = (
        System("Llumnix-base", base.policy, base.control, base.settings),
        System("Llumnix", base.policy, published_moves(3, True), heard),
        System("ours", base.policy, our_moves(True), headroom),
    )
    points: Points = {}

    def apart(system: System, cv: float, seed: int) -> list[dict[str, float]]:
        plain = workload("S-S", PRIORITY_RATE, seed, cv)
        high = np.random.default_rng([seed, 13]).random(REQUESTS) < HIGH_SHARE
        outcome = system.run(plain if system.name == "Llumnix-base" else with_priority(plain, high))
        return [metrics(outcome, high), metrics(outcome, ~high)]

    for cv in cvs:
        for system in systems:
            runs = [
                parts.part(f"13 CV {cv:g} seed {seed} {system.name}", partial(apart, system, cv, seed))
                for seed in seeds
            ]
            for row, mine in zip(("High", "Normal"), zip(*runs, strict=True), strict=True):
                points |= {(row, m, cv, system.name): y for m, y in averaged(list(mine)).items()}
        print(f"S-S at CV {cv:g} done", file=sys.stderr)
    return points


def with_priority(trace: Workload, high: np.ndarray) -> Workload:
    """The same requests, some of high priority."""
    return Workload(trace.arrival_s, trace.prompt_tokens, trace.output_tokens, high.astype(np.int64))


def fewest(p99_with: Callable[[int], float], p99_s: float, low: int, high: int) -> int:
    """The fewest workers from `low` to `high` with a P99 prefill latency of at most `p99_s`; by bisection."""
    while low < high:
        middle = (low + high) // 2
        if p99_with(middle) <= p99_s:
            high = middle
        else:
            low = middle + 1
    return low


def savings(names: Iterable[str], parts: Parts) -> list[dict[str, Any]]:
    """Workers at equal P99 prefill latency, each trace at its highest rate, published stream."""
    rows = []
    for name in names:
        rate = RATES[name][-1]
        trace = workload(name, rate, 0)
        bound = trace.rate_rps * worker_seconds(trace.prompt_tokens, trace.output_tokens, a10(), SLO)

        def p99(system: System, name: str, rate: float, workers: int) -> float:
            return served(system, name, rate, 0, parts, workers)["Prefill P99 s"]

        target_s, own_s = (p99(system, name, rate, WORKERS) for system in (INFAAS, OURS))
        row: dict[str, Any] = {"figure": "iso-P99", "trace": name, "at": rate, "bound": round(bound, 2)}
        row["P99 INFaaS++ 16"] = target_s
        for system in (llumnix(name), OURS):
            count = fewest(partial(p99, system, name, rate), target_s, FEWEST, WORKERS)
            row |= {f"workers {system.name}": count, f"saving {system.name}": 1 - count / WORKERS}
        count = fewest(partial(p99, INFAAS, name, rate), own_s, WORKERS, MOST)
        row |= {"P99 ours 16": own_s, "workers INFaaS++": count, "saving at it": 1 - WORKERS / count}
        rows.append(row)
        print(f"{name}: workers at equal P99 done", file=sys.stderr)
    return rows
