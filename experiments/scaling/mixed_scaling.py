"""Dollars of a fleet of two kinds of worker that follows demand, against either kind alone.

    python experiments/scaling/mixed_scaling.py [--quick] [--days D ...] [--resume FOLDER] [--jobs N]

Llama-3.1 8B, 1 s / 50 ms, on one H100 or one A100 a worker: the profiles and on-demand prices that ship. Half
an hour of each of ServeGen's days, as in autoscaling.py (from (6 + 5 (d - 1)) mod 24 of day d, Poisson at its
rates scaled to `--mean-rps`, ShareGPT lengths, what came before it as the forecast's history), cold starts of
60 s, `spread`. All fleets are scaled by the same `control.tick`, the line from the profiles' speeds; none of
its settings was chosen on this traffic, nor were rate, target and the number of H100s to be had. They start
with what the rate at the beginning asks for.

    both             as many of either as it likes
    h100, a100       one kind alone
    both, 2 h100     two H100s can be had and no more: the rest must be A100s
    h100, 2 h100     the same with H100s alone

A mix is judged by its dollars over those of the cheapest single kind that can be had and reaches the target,
all hours together; the interval is 95 % of a bootstrap over hours.
"""

from __future__ import annotations

import argparse
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from controlplane.control import Settings
from controlplane.perfmodel.profile import Profile
from controlplane.placement.policies import Policy
from controlplane.scaler.forecast import NEAR
from controlplane.scaler.line import line_of
from controlplane.scaler.mix import MixQuestion, choose
from controlplane.scaler.state import ScalingSettings
from controlplane.scaler.target import StabilizationWindow, TargetSettings
from controlplane.scaler.traffic import Traffic
from controlplane.scaler.weights import PARTS, weigh
from controlplane.types import ClassArrivals, Slo
from controlplane.worker_type import WorkerType
from dataplane.simulated.elastic import ElasticSettings
from dataplane.simulated.elastic_run import simulate_elastic
from dataplane.simulated.simulate import ControlSettings, WorkerSpec
from experiments.lib.autoscaling import AHEAD, BEAT_S, COLD_S, TARGET, remembered, servegen
from experiments.lib.fewest_workers import Lengths, sharegpt
from experiments.lib.public_data import SERVEGEN, SHAREGPT
from experiments.lib.results import bar, flags, show
from experiments.lib.resume import Parts
from tokenfleet.profiles.library import find_profiles
from tokenfleet.profiles.prices import read_prices

MODEL, SLO = "llama-3.1-8b", Slo(1.0, 0.05)
H100S = 2
SLOTS = 32
FLEETS: dict[str, dict[str, int | None]] = {
    "both": {"h100": None, "a100": None},
    "h100": {"h100": None},
    "a100": {"a100": None},
    f"both, {H100S} h100": {"h100": H100S, "a100": None},
    f"h100, {H100S} h100": {"h100": H100S},
}
SERIES = "m-mid"


@dataclass(frozen=True)
class Run:
    """What one fleet did in one hour."""

    fleet: str
    day: int
    requests: int
    misses: int
    usd: float
    gpu_s: float
    launches: int
    h100_share: float  # of worker-seconds


@dataclass(frozen=True)
class Hour:
    """All that a process needs to know of one."""

    data: Path
    day: int
    hours: float
    mean_rps: float
    seed: int
    parts: Parts


def profile_of(gpu: str) -> Profile:
    (found,) = find_profiles(MODEL, [gpu], [1])
    return found


def fleet(
    gpus: dict[str, int | None], lengths: Lengths, rate_rps: float
) -> tuple[list[WorkerSpec], ElasticSettings, ControlSettings]:
    """Slots, what there is at the beginning (enough for `rate_rps`), and what tick is told."""
    profiles = {gpu: profile_of(gpu) for gpu in gpus}
    types = tuple(replace(WorkerType.of(p, usd_per_h(p)), limit=gpus[gpu]) for gpu, p in profiles.items())
    requests = float(len(lengths.prompt))
    arrivals = ClassArrivals(SLO, requests, float(lengths.prompt.sum()), float(lengths.output.sum()))
    traffic = Traffic((arrivals,), 0.0)
    weights = weigh(types, {}, traffic, None)
    assert weights is not None
    line = line_of(next(t.profile for t in types if t.name == weights.reference), traffic)
    assert line is not None
    units = int(np.ceil((line.workers_per_rps * rate_rps + line.intercept) * PARTS))
    start = choose(MixQuestion(types, weights, units / PARTS))
    target = TargetSettings(None, None, low=1, high=SLOTS)
    scaling = ScalingSettings(target, StabilizationWindow(), ahead=AHEAD, near=NEAR, worker_types=types)
    slots = [WorkerSpec(p) for gpu, p in profiles.items() for _ in range(gpus[gpu] or SLOTS)]
    return (
        slots,
        ElasticSettings(
            cold_start_s=COLD_S, start_kinds=start, usd_per_h={t.name: t.usd_per_h or 0.0 for t in types}
        ),
        ControlSettings(Settings(moves=None, shed=None, scaling=scaling), beat_s=BEAT_S),
    )


def usd_per_h(profile: Profile) -> float:
    price = read_prices().usd_per_gpu_h(profile.gpu)
    assert price is not None
    return price.usd * profile.tp_degree


def runs(hour: Hour) -> list[Run]:
    """Every fleet in one hour, none where nothing arrived."""
    name = f"day{hour.day}_{hour.hours:g}h_{hour.mean_rps:g}rps_{hour.seed}"
    return [Run(**one) for one in hour.parts.part(name, lambda: [asdict(r) for r in replayed(hour)])]


def replayed(hour: Hour) -> list[Run]:
    lengths = sharegpt(hour.data)
    from_h = (6.0 + 5.0 * (hour.day - 1)) % 24.0
    traffic = servegen(hour.data, SERIES, lengths, hour.mean_rps, hour.hours, hour.seed, hour.day, from_h)
    workload = traffic.workload
    if not len(workload):
        return []
    rate_rps = float((workload.arrival_s < 60.0).sum()) / 60.0
    found = []
    for name, gpus in FLEETS.items():
        slots, elastic, control = fleet(gpus, lengths, rate_rps)
        outcome, record = simulate_elastic(
            workload,
            slots,
            SLO,
            elastic,
            control,
            Policy.SPREAD,
            state=remembered(traffic.past),
            predictor=lengths.table(),
        )
        assert record.usd is not None
        found.append(
            Run(
                name,
                hour.day,
                len(workload),
                int((~outcome.met).sum()),
                record.usd,
                record.gpu_s,
                record.launches,
                sum(s for kind, s in record.kind_s.items() if kind.startswith("h100")) / record.worker_s,
            )
        )
        print(f"day {hour.day}: {found[-1]}", file=sys.stderr)
    return found


def row(name: str, of: list[Run]) -> dict[str, Any]:
    requests = sum(r.requests for r in of)
    return {
        "fleet": name,
        "hours": len(of),
        "requests": requests,
        "attainment": round(1.0 - sum(r.misses for r in of) / requests, 5),
        "worst hour": round(min(1.0 - r.misses / r.requests for r in of), 5),
        "usd": round(sum(r.usd for r in of), 2),
        "GPU-hours": round(sum(r.gpu_s for r in of) / 3600.0, 2),
        "h100 share": round(float(np.mean([r.h100_share for r in of])), 3),
        "launches": sum(r.launches for r in of),
    }


def saved(mix: list[Run], other: list[Run], seed: int) -> dict[str, float]:
    """The mix's dollars over another fleet's, over all hours, and 95 % of a bootstrap over hours."""
    ours, theirs = (np.array([r.usd for r in of]) for of in (mix, other))
    drawn = np.random.default_rng(seed).integers(0, len(ours), (4000, len(ours)))
    low, high = np.quantile(ours[drawn].sum(1) / theirs[drawn].sum(1), (0.025, 0.975))
    return {
        "ratio": round(float(ours.sum() / theirs.sum()), 4),
        "low": round(float(low), 4),
        "high": round(float(high), 4),
    }


def run(asked: argparse.Namespace) -> int:
    days = [4] if asked.quick else asked.days
    hours = [
        Hour(asked.data, d, 0.25 if asked.quick else asked.hours, asked.mean_rps, asked.seed, asked.resume)
        for d in days
    ]
    with ProcessPoolExecutor(min(asked.jobs, len(hours)), get_context("spawn")) as processes:
        found = [one for one in processes.map(runs, hours) if one]
    fleets = {name: [hour[i] for hour in found] for i, name in enumerate(FLEETS)}
    table = [row(name, of) for name, of in fleets.items()]
    bars: dict[str, dict[str, Any]] = {}
    reach = {r["fleet"]: r["usd"] for r in table if r["attainment"] >= TARGET}
    limited = f"both, {H100S} h100"
    for name, singles in (("both", ("h100", "a100")), (limited, ("a100", f"h100, {H100S} h100"))):
        least = min((s for s in singles if s in reach), key=lambda s: reach[s], default=None)
        attained = next(r["attainment"] for r in table if r["fleet"] == name)
        bars[f"{name}: attainment"] = bar(attained, TARGET, at_least=True)
        if least is not None:
            ratio = saved(fleets[name], fleets[least], asked.seed)
            table.append({"fleet": f"{name} over {least}", "usd": ratio["ratio"], **ratio})
            bars[f"{name}: dollars over {least} alone"] = bar(ratio["high"], 1.0)
    return show("mixed_scaling", table, bars, asked)


if __name__ == "__main__":
    parser = flags(__doc__, SHAREGPT, *SERVEGEN.values(), resumes=True)
    parser.add_argument("--days", type=int, nargs="+", default=list(range(1, 15)))
    parser.add_argument("--mean-rps", type=float, default=60.0)
    parser.add_argument("--hours", type=float, default=0.5, help="of each day")
    parser.add_argument("--jobs", type=int, default=1, help="hours simulated at a time")
    sys.exit(run(parser.parse_args()))
