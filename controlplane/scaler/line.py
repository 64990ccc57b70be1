"""Eq 7's line without a simulation: drawn from a worker's profile and the lengths that arrive.

Of requests with L prompt and D output tokens a worker with b of them in its batch does, in the mean,

    t(b) = step(b·L/D prefill tokens, b sequences, b·(L + D/2) tokens of context)      chunked
    t(b) = step(0, b, b·(L + D/2)) + b/D · prefill(L)                                  prefill in steps apart
    x    = b / (D · t(b))                                                              requests a second

at the largest b with t(b) <= TPOT that memory and seats allow: a fleet without noise. The slope of the line
is `HEADROOM` · Σ share / x over the SLO classes, its intercept `SPARE`. Where one request alone is slower
than its target, b = 1: more workers cannot mend that, so no more are asked for.

A line that was drawn by simulation holds for the lengths and the step times it was drawn at. The lengths that
arrive, or the step times that a refit found, may differ. Then slope and intercept are multiplied by x there
over x here. The allowance for noise, in N = slope · (rate + intercept / slope), is a rate as well, and stays
the same.

The load of a decode worker is x above, of steps without prefill. A prefill worker takes s seconds a prompt
and may let it wait W = TTFT - s. Its load is that of a queue with fixed service times whose waits exceed W
once in a hundred (P(wait > W) ≈ exp(-2(1-ρ)W / (ρs))):

    x = ρ / s,   ρ = W / (W + s·ln(100)/2)

Where there is no profile, one is fitted to the steps of the workers that serve.

**Weights** are what a worker of each type is worth in reference workers. The reference is the type that
carries least of this traffic. Demand is counted in tenths of its workers: rounded to whole ones it would ask
for half a worker too many, in the mean. At the lengths seen, x_v(c) being what a worker of type v carries of
class c and s_c the class's share of the requests,

    capacity_v = 1 / Σ_c s_c / x_v(c)        weight_v = capacity_v / capacity_reference

Lengths drift all the time, a little. The weights do not change until one of them is off by more than `DRIFT`,
so that the fleet is not rearranged for nothing.

A spot worker is reclaimed r times an hour, independently of the others, and stands again after the cold start
T. So at any time it is missing with probability q = r·T / (1 + r·T). Of n bought, Binomial(n, q) are missing.
An event that takes many workers at once, such as a zone that is cleared, is not covered.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.step import STEP_TERMS
from controlplane.scaler.traffic import Traffic
from controlplane.types import ClassArrivals, EngineMode, Role
from controlplane.worker_type import WorkerType

HEADROOM = 1.2  # traffic is not even: the planner's own first guess is as much above the noiseless fleet
SPARE = 0.5
LATE = 4.6  # -ln of the share of prompts that may come too late to a prefill worker: 1 %
GAMMA = 0.95  # of KV memory: the share that placement promises
MOST = 3.0  # what refit and correction together may make of the workers that the line asks for
LEAST_REQUESTS = 5.0  # before lengths are believed
DRIFT = 0.1
PARTS = 10  # of a reference worker: what demand is rounded up to
HAIR = 1e-6  # weights are rounded numbers: 3 · 0.33 carries 0.99


@dataclass(frozen=True, slots=True)
class Line:
    """N = workers_per_rps · rate + intercept."""

    workers_per_rps: float
    intercept: float

    def times(self, factor: float) -> Line:
        """The line if a worker carried 1 / factor of the requests."""
        return Line(self.workers_per_rps * factor, self.intercept * factor)


def bounded(line: Line | None, given: Line | None) -> Line | None:
    """The line, its slope at most `MOST` times the given one's.

    Where a lone request is about as slow as its target, a tiny change of step times is worth any number of
    workers.
    """
    if line is None or given is None:
        return line
    most = MOST * given.workers_per_rps
    return line.times(most / line.workers_per_rps) if line.workers_per_rps > most else line


def line_of(profile: Profile, traffic: Traffic, role: Role = "any") -> Line | None:
    """The line for this traffic; None before enough of it has been seen."""
    if traffic.requests < LEAST_REQUESTS:
        return None
    of_role = {"any": capacity_rps, "prefill": prefill_rps, "decode": decode_rps}[role]
    workers = sum(c.requests / of_role(profile, c) for c in traffic.classes) / traffic.requests
    return Line(HEADROOM * workers, SPARE)


def carried_over(
    line: Line, learned: ClassArrivals | None, before: Profile, now: Profile, traffic: Traffic
) -> Line:
    """A line that was drawn with the profile `before`, for the profile `now` at the traffic's lengths.

    `learned`: the lengths it was drawn at; None: the traffic's own. It is unchanged before enough was seen.
    """
    if traffic.requests < LEAST_REQUESTS or (learned is not None and learned.requests <= 0):
        return line
    heavier = sum(
        c.requests
        * capacity_rps(before, c if learned is None else replace(learned, slo=c.slo))
        / capacity_rps(now, c)
        for c in traffic.classes
    )
    return line.times(heavier / traffic.requests)


def capacity_rps(profile: Profile, arrivals: ClassArrivals) -> float:
    """Requests a second that one worker carries of a class within its TPOT target."""
    prompt = max(arrivals.mean_prompt_tokens, 1.0)
    output = max(arrivals.mean_output_tokens, 1.0)
    context = prompt + output / 2.0
    room = GAMMA * profile.kv.capacity_tokens / float(profile.kv.held(context))
    seats = max(min(float(profile.engine.max_seqs), room), 1.0)
    tpot_s = arrivals.slo.tpot_s
    batch = seats
    if _step_s(profile, seats, prompt, output) > tpot_s:
        batch, breaks = 1.0, seats
        for _ in range(18):  # a thousandth of a request is close enough
            middle = (batch + breaks) / 2.0
            is_short = _step_s(profile, middle, prompt, output) <= tpot_s
            batch, breaks = (middle, breaks) if is_short else (batch, middle)
    return batch / (output * max(_step_s(profile, batch, prompt, output), 1e-9))


def prefill_rps(profile: Profile, arrivals: ClassArrivals) -> float:
    """Requests a second that one prefill worker carries of a class within its TTFT target."""
    prompt = max(round(arrivals.mean_prompt_tokens), 1)
    service_s = max(float(profile.prefill_alone_s(prompt)), 1e-9)
    spare_s = max(arrivals.slo.ttft_s - profile.alone_ttft_s(prompt), 0.0)
    return spare_s / (spare_s + LATE * service_s / 2.0) / service_s if spare_s > 0 else 1.0 / service_s


def decode_rps(profile: Profile, arrivals: ClassArrivals) -> float:
    """Requests a second that one decode worker carries of a class within its TPOT target."""
    engine = replace(profile.engine, mode=EngineMode.CHUNKED)
    none: dict[str, Any] = {term.name: 0.0 for term in STEP_TERMS if term.phase == "prefill"}
    step = replace(profile.step, **none)
    hinges = tuple(h for h in step.hinges if h.of != "prefill_tokens")
    return capacity_rps(replace(profile, step=replace(step, hinges=hinges), engine=engine), arrivals)


def _step_s(profile: Profile, batch: float, prompt: float, output: float) -> float:
    context = batch * (prompt + output / 2.0)
    step, prefill = profile.step, profile.prefill
    if prefill is None or profile.engine.mode == EngineMode.CHUNKED:
        prompts = batch / output
        rare_s = step.prefilling_s(batch) * max(1.0 - prompts, 0.0)  # not every step prefills
        return float(step.step_s(prompts * prompt, batch, context)) - rare_s
    return float(step.step_s(0.0, batch, context)) + batch / output * float(prefill.prefill_s(prompt))


@dataclass(frozen=True, slots=True)
class Weights:
    """What a worker of each type, by name, carries in workers of the `reference` type.

    Not `known`: all are taken as even.
    """

    reference: str
    of: Mapping[str, float]
    known: bool = True

    def scaled(self, line: Line, name: str) -> Line:
        """A line in workers of one type, in reference workers."""
        return line.times(self.of[name])


def weigh(
    worker_types: Sequence[WorkerType], there: Mapping[str, int], traffic: Traffic, before: Weights | None
) -> Weights | None:
    """The weights at the lengths of `traffic`; `before` while they still hold.

    None before enough was seen, or while a type without a profile is wanted (`there`, or its `low`). Such
    types are left out where there is no worker of them.
    """
    if any(t.low or there.get(t.name) for t in worker_types if t.known_profile is None):
        return None
    profiles = {t.name: t.known_profile for t in worker_types if t.known_profile is not None}
    same = before if before is not None and before.of.keys() == profiles.keys() else None
    if traffic.requests < LEAST_REQUESTS or not profiles:
        return same
    capacity = {name: _capacity_rps(profile, traffic) for name, profile in profiles.items()}
    if same is not None and _hold(same, capacity):
        return same
    reference = min(capacity, key=lambda name: (capacity[name], name))
    return Weights(reference, {name: round(c / capacity[reference], 3) for name, c in capacity.items()})


def _hold(weights: Weights, capacity: Mapping[str, float]) -> bool:
    """Whether weights are still what these capacities say, within DRIFT."""
    unit = capacity[weights.reference]
    return all(abs(capacity[name] / unit / weight - 1.0) <= DRIFT for name, weight in weights.of.items())


def even(worker_types: Sequence[WorkerType]) -> Weights:
    """Every worker as good as any other: all that can be said where `weigh` knows nothing.

    Of the types with a profile, where there are any.
    """
    profiled = [t.name for t in worker_types if t.known_profile is not None]
    names = profiled or [t.name for t in worker_types]
    return Weights(names[0], dict.fromkeys(names, 1.0), known=False)


def _capacity_rps(profile: Profile, traffic: Traffic) -> float:
    return traffic.requests / sum(c.requests / capacity_rps(profile, c) for c in traffic.classes)


def in_parts(workers: float) -> int:
    """Reference workers in whole `PARTS`, no more than there are."""
    return math.floor(workers * PARTS + HAIR)


def missing_share(reclaims_per_h: float, cold_start_s: float) -> float:
    """Probability that a worker is missing at a given time: gone for T after every 1/r hours on average."""
    gone = reclaims_per_h * cold_start_s / 3600.0
    return gone / (1.0 + gone)


def enough_stand(needed: int, spares: int, missing: float) -> float:
    """P(at least `needed` of `needed + spares` workers stand)."""
    from scipy.special import bdtr  # 14 MB, for fleets that scale

    return float(bdtr(spares, needed + spares, missing))


@lru_cache(4096)
def most_missing(workers: int, missing: float, survive: float) -> int:
    """The fewest k with P(at most k of `workers` are missing) >= survive."""
    k = 0
    while k < workers and enough_stand(workers - k, k, missing) < survive:
        k += 1
    return k
