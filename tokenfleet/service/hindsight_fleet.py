"""The hindsight optimum of a served day: the cheapest fleet of one worker type, known in advance.

Each window of five minutes gets the fewest workers that keep every class in time in the exact simulator
(advise.hindsight), by the step times measured by the day's end. No run of the whole day mends them, since
fleets of several classes and types are compared over many days. A worker that would idle for less than a
cold start is kept, and one that comes pays for its cold start (planning.schedule). Beyond MOST_REQUESTS every
n-th window is simulated, and the others get workers by their rates.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from itertools import groupby
from operator import itemgetter

import numpy as np
import polars as pl
from numpy.typing import NDArray

from controlplane.placement.lengths import LengthTable
from controlplane.placement.policies import Policy, read_policy
from controlplane.scaler.bounds import ScheduleInterval
from controlplane.types import PLAIN_CLASS, Slo
from controlplane.worker_type import WorkerType
from controlplane.workload import Workload
from dataplane.history.fleet_log import FleetSpec, LogWindows
from dataplane.simulated.simulate import WorkerSpec, simulate
from tokenfleet.advise.hindsight import fewest_alone
from tokenfleet.planning.schedule import paid
from tokenfleet.planning.search import LONGEST_WAIT_S

LEAD_S = 30.0, 300.0  # least and most of what a window begins with, so that it does not begin idle
MOST_REQUESTS, MOST_TARGETS = 60_000, 16
Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


@dataclass(frozen=True)
class Requests:
    """The requests of a day that had tokens, with their classes, and when all that came arrived (Unix s)."""

    workload: Workload
    begin_s: float  # of the workload's time
    slos: tuple[Slo, ...]
    attainments: Floats
    arrived_s: Floats
    lead_s: float

    @classmethod
    def of(cls, rows: pl.DataFrame, fleet: FleetSpec, begin_s: float) -> Requests:
        """Of rows of history (history.files.SCHEMA). Those with rare targets count for the most frequent;
        a window shows what waits for LONGEST_WAIT_S at most."""
        told = pl.col("ttft_target_s", "tpot_target_s").is_not_null()
        served = rows.filter(pl.col("output_tokens") > 0, pl.col("prompt_tokens") > 0, told)
        lasted_s = served["ttft_s"].fill_null(0.0) + served["tpot_s"].fill_null(0.0) * served["output_tokens"]
        known = {one.name: one.attainment for one in fleet.classes}
        keys = [
            (name if name in known else PLAIN_CLASS, ttft_s, tpot_s)
            for name, ttft_s, tpot_s in served.select("slo_class", "ttft_target_s", "tpot_target_s").rows()
        ]
        often = [key for key, _ in Counter(keys).most_common(MOST_TARGETS)]
        place = {key: i for i, key in enumerate(often)}
        workload = Workload(
            (served["arrival_s"] - begin_s).to_numpy(),
            served["prompt_tokens"].to_numpy(),
            served["output_tokens"].to_numpy(),
            (served["priority"] == "high").cast(pl.Int64).to_numpy(),
            np.array([place.get(key, 0) for key in keys], np.int64),
            tuple(f"{name} {i}" for i, (name, _, _) in enumerate(often)) or (PLAIN_CLASS,),
        )
        longest_s = float(lasted_s.quantile(0.95) or 0.0) if len(served) else 0.0
        return cls(
            workload,
            begin_s,
            tuple(Slo(min(ttft_s, LONGEST_WAIT_S), tpot_s) for _, ttft_s, tpot_s in often),
            np.array([known.get(name, fleet.attainment) for name, _, _ in often]),
            rows["arrival_s"].to_numpy(),
            min(max(longest_s, LEAD_S[0]), LEAD_S[1]),
        )

    def rate_rps(self, begin_s: float, end_s: float) -> float:
        """What came in a stretch of time, also of what was turned away."""
        first, last = np.searchsorted(self.arrived_s, [begin_s, end_s])
        return float(last - first) / (end_s - begin_s)

    def window(self, begin_s: float, end_s: float) -> tuple[Workload, NDArray[np.bool_]]:
        """The requests of a stretch of time with those before it, and which of them are judged."""
        from_s = max(begin_s - self.begin_s - self.lead_s, 0.0)
        part = self.workload.window(from_s, end_s - self.begin_s)
        return part, part.arrival_s >= begin_s - self.begin_s - from_s

    def kept_by(self, worker_type: WorkerType) -> Requests:
        """Those whose KV a worker of a type holds."""
        profile, load = worker_type.profile, self.workload
        fits = profile.kv.held(load.prompt_tokens + load.output_tokens) <= profile.kv.capacity_tokens
        return replace(self, workload=load.take(fits))


@dataclass(frozen=True)
class HindsightFleet:
    """The fewest workers of one type in each window, and what they are paid with their cold starts.

    `late`: windows that no number of workers would have kept in time. `looked`: those that were simulated.
    """

    worker_type: WorkerType
    counts: Counts
    paid_s: float
    late: int
    looked: int


def hindsight_fleet(
    requests: Requests, timeline: LogWindows, worker_type: WorkerType, fleet: FleetSpec, cold_start_s: float,
    most: int, most_requests: int = MOST_REQUESTS,
) -> HindsightFleet:  # fmt: skip
    """The cheapest workers of a type for these requests, known beforehand."""
    held = requests.kept_by(worker_type)
    lengths = held.workload.prompt_tokens, held.workload.output_tokens
    predictor = LengthTable.from_history(*lengths) if len(held.workload) else None
    placement, _ = read_policy(fleet.policy)  # without moves: the fewest workers that need none
    policy = Policy.SPREAD if placement == Policy.EXACT else placement
    every = max(math.ceil(len(held.workload) / most_requests), 1)
    windows = timeline.windows.tolist()
    rates = np.array([held.rate_rps(*window) for window in windows])
    need, late, guess = np.zeros(len(windows), np.int64), 0, 1
    looked = range(0, len(windows), every)
    for w in looked:
        part, judged = held.window(*windows[w])
        if not judged.any():
            continue

        def in_time(workers: int, part: Workload = part) -> NDArray[np.bool_]:
            specs = [WorkerSpec(worker_type.profile)] * workers
            return simulate(part, specs, held.slos, policy, predictor=predictor).met

        alone = fewest_alone(in_time, judged, part.slo_class, held.attainments, guess, most)
        need[w] = guess = alone.workers
        late += alone.is_late
    if every > 1:
        order = np.argsort(rates[looked.start :: every], kind="stable")
        known = rates[::every][order], np.maximum.accumulate(need[::every][order])
        others = np.ceil(np.interp(rates, *known) - 1e-9).astype(np.int64)
        others[::every] = need[::every]
        need = np.where(rates > 0, others, 0)
    spans = [ScheduleInterval(begin, end, int(n)) for (begin, end), n in zip(windows, need, strict=True)]
    paid_s = 0.0
    for _, stretch in groupby(zip(timeline.stretch.tolist(), spans, strict=True), key=itemgetter(0)):
        told = paid([span for _, span in stretch], cold_start_s)
        paid_s += sum((part.end_s - part.start_s) * part.workers for part in told.stretches)
    return HindsightFleet(worker_type, need, paid_s, late, len(looked))


def cheapest(
    requests: Requests, timeline: LogWindows, fleet: FleetSpec, most_requests: int
) -> HindsightFleet:
    """The cheapest of one type, of those that keep most windows in time; by GPUs without prices."""
    looks = [look for _, look, _ in timeline.pieces]
    cold_start_s = max(look.cold_start_s for look in looks)
    peak = max(sum(sum(states) for states in look.workers.values()) for look in looks)
    priced = all(t.usd_per_h is not None for t in fleet.types)
    found = [
        hindsight_fleet(
            requests, timeline, t, fleet, cold_start_s, min(3 * peak + 8, t.limit or 1 << 20), most_requests
        )
        for t in fleet.types
    ]

    def cost(one: HindsightFleet) -> tuple[int, float]:
        t = one.worker_type
        return one.late, one.paid_s * (float(t.usd_per_h or 0.0) if priced else t.reserved_gpus)

    return min(found, key=cost)
