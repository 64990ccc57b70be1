"""The explanation of a plan: the constraint that binds one worker short of the answer, and when.

The trace is replayed one worker short, each time with one constraint eased. The TTFT target, the TPOT target,
the target of sessions or the KV memory is a quarter larger, or prefill is a fifth cheaper. Each easing is
worth the attainment that it adds, and the binding constraint is the one whose easing adds most. So the answer
needs no theory of queues, and says what to buy.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from controlplane.perfmodel.profile import Profile
from dataplane.simulated.simulate import Outcome
from tokenfleet.planning.estimate import may_fail, replicates_for, screened
from tokenfleet.planning.fleet import Fleet, parts_of
from tokenfleet.planning.mixes.bounds import alone_tpot_s, alone_ttft_s
from tokenfleet.planning.plan_file import AloneNeeds, AloneShares, BindingDetail, Headroom, Plateau
from tokenfleet.planning.search import Hardest, Search
from tokenfleet.planning.traffic.draws import time_scale
from tokenfleet.planning.traffic.replicates import AS_IT_IS

RELIEF = 1.25
WINDOW_S = 60.0
FLAT = 0.1  # of the allowed misses: a curve that falls by less over three counts is flat
CONSTRAINTS = ("ttft", "tpot", "kv", "prefill")
OF_SESSIONS = (*CONSTRAINTS, "session")


@dataclass(frozen=True, slots=True)
class Binding:
    """The constraint that binds, the worst window, and the trial that shows it.

    The trial's rate scale is 1, or how much more traffic there had to be before its fleet failed.
    """

    constraint: str
    window_s: tuple[float, float]
    detail: BindingDetail


def binding(search: Search, fleet: Fleet, rate_scale: float = 1.0, failing: Outcome | None = None) -> Binding:
    """The constraint that stops `fleet`, which fails the trace at `rate_scale`: so does it in `failing`."""
    constraints = CONSTRAINTS if search.terms.session_s is None else OF_SESSIONS
    failing = failing or search.replay(fleet, growth=rate_scale)
    trials = [_relieved(search, fleet, constraint) for constraint in constraints]
    outcomes = search.threads.map(lambda trial: trial[0].replay(trial[1], growth=rate_scale), trials)
    relief = {
        name: outcome.attainment - failing.attainment
        for name, outcome in zip(constraints, outcomes, strict=True)
    }
    most = max(relief.values())
    # Where no relaxed constraint helps (a gain can be noise below one request), what was missed decides.
    constraint = max(constraints, key=lambda c: relief[c]) if most > 0 else _missed_most(failing)
    start_s, end_s, attained = worst_window(failing)
    faster = time_scale(search.workload, rate_scale)
    slo_class = None
    if search.terms.classes:
        used = (1.0 - failing.class_attainments) / (1.0 - np.array(search.terms.asked))
        slo_class = search.terms.classes[int(used.argmax())].name
    detail = BindingDetail(
        workers=fleet.workers,
        fleet=parts_of(fleet),
        rate_scale=rate_scale,
        **({} if slo_class is None else {"slo_class": slo_class}),
        attainment=failing.attainment,
        window_attainment=attained,
        relief=relief,
        prefix_hit_rate=failing.prefix_hit_rate,
        prefix_hit_rate_more_kv=outcomes[CONSTRAINTS.index("kv")].prefix_hit_rate,
    )
    # In the trace's own time, and not past its end: the last window is seldom full.
    window_s = start_s * faster, min(end_s * faster, float(search.workload.arrival_s[-1]))
    return Binding(constraint, window_s, detail)


def worst_window(outcome: Outcome) -> tuple[float, float, float]:
    """(start, end, attainment) of the window of arrivals that met the targets least.

    Windows with less than half the median number of requests are left out: one miss of two is no finding.
    """
    counts = slice(None) if outcome.workload.weight is None else outcome.workload.weight > 0
    arrival_s, met = outcome.arrival_s[counts], outcome.met[counts]
    # Only windows that hold something, so that long silences cost no memory.
    windows, which, count = np.unique(arrival_s // WINDOW_S, return_inverse=True, return_counts=True)
    share = np.bincount(which, weights=met) / count
    share[count < 0.5 * np.median(count)] = np.inf
    # Of equally bad windows, the busier one.
    worst = int(np.lexsort((-count, share))[0])
    start_s = float(windows[worst]) * WINDOW_S
    return start_s, start_s + WINDOW_S, float(share[worst])


def plateau(search: Search, profile: Profile, on_trace: Mapping[int, float], workers: int) -> Plateau | None:
    """The flat part of the curve `on_trace` around the answer; None where another worker counts.

    Flat: three counts or more in a row within a tenth of the misses that the target allows. At least half of
    the allowed misses remain at the largest count, so it is not that nearly all requests are served.
    """
    allowed = 1.0 - search.request.attainment
    near = [workers]
    for step in (-1, 1):
        n = workers + step
        while n in on_trace and _span(on_trace, [*near, n]) <= FLAT * allowed:
            near.append(n)
            n += step
    missed = 1.0 - on_trace.get(max(near), 1.0)
    if len(near) < 3 or missed < allowed / 2:
        return None
    workload = search.outline
    ttft_s, tpot_s = alone_ttft_s(profile, workload), alone_tpot_s(profile, workload)
    ttft_target_s, tpot_target_s = search.terms.targets_s(workload)
    late, slow = ttft_s[ttft_s > ttft_target_s], tpot_s[tpot_s > tpot_target_s]
    requests = len(workload)
    return Plateau(
        workers=sorted(near),
        span=_span(on_trace, near),
        missed=missed,
        alone=AloneShares(ttft=len(late) / requests, tpot=len(slow) / requests),
        alone_needs_s=AloneNeeds(
            ttft=float(late.max()) if len(late) else None, tpot=float(slow.max()) if len(slow) else None
        ),
    )


def _span(on_trace: Mapping[int, float], counts: Sequence[int]) -> float:
    values = [on_trace[n] for n in counts if n in on_trace]
    return max(values) - min(values) if values else 0.0


def _missed_most(outcome: Outcome) -> str:
    if (sessions := outcome.session_attainment) is not None and sessions < float(outcome.met.mean()):
        return "session"
    late = int((~(outcome.ttft_s <= outcome.ttft_target_s)).sum())
    slow = int((outcome.tpot_s > outcome.tpot_target_s).sum())
    return "ttft" if late >= slow else "tpot"


def _relieved(search: Search, fleet: Fleet, constraint: str) -> tuple[Search, Fleet]:
    """The same trial with one constraint eased."""
    if constraint == "session":
        assert search.terms.session_s is not None
        return search.on(session_s=search.terms.session_s * RELIEF), fleet
    if constraint == "ttft":
        return search.eased(RELIEF, 1.0), fleet
    if constraint == "tpot":
        return search.eased(1.0, RELIEF), fleet
    ease = more_kv if constraint == "kv" else cheaper_prefill
    groups = tuple(
        replace(group, worker_type=replace(group.worker_type, known_profile=ease(group.worker_type.profile)))
        for group in fleet.groups
    )
    return search, Fleet(groups)


def more_kv(profile: Profile) -> Profile:
    """The profile with a quarter more KV memory."""
    return replace(profile, kv=replace(profile.kv, capacity_tokens=int(profile.kv.capacity_tokens * RELIEF)))


def cheaper_prefill(profile: Profile) -> Profile:
    """The profile with a fifth less time for each prefill token (steps keep their base)."""
    step = profile.step
    eased = replace(
        step,
        per_prefill_token_s=step.per_prefill_token_s / RELIEF,
        per_prefill_sum_sq_s=step.per_prefill_sum_sq_s / RELIEF,
        hinges=tuple(
            replace(h, per_unit_s=h.per_unit_s / RELIEF) if h.of == "prefill_tokens" else h
            for h in step.hinges
        ),
    )
    prefill = profile.prefill and replace(
        profile.prefill,
        per_token_s=profile.prefill.per_token_s / RELIEF,
        per_sum_sq_s=profile.prefill.per_sum_sq_s / RELIEF,
        hinges=tuple(replace(h, per_unit_s=h.per_unit_s / RELIEF) for h in profile.prefill.hinges),
    )
    return replace(profile, step=eased, prefill=prefill)


def failing_rate(search: Search, fleet: Fleet) -> tuple[float, Outcome]:
    """A rate scale at which a fleet of one worker, which has no smaller one, fails the target, and how."""
    scale = 1.25
    while search.meets(outcome := search.replay(fleet, growth=scale)) and scale < 64.0:
        scale *= 1.25
    return scale, outcome


GROWTHS = (1.05, 1.1, 1.15, 1.2, 1.25, 1.3, 1.4, 1.5, 1.6, 1.8, 2.0, 2.5, 3.0, 4.0, 6.0, 8.0)


def headroom(search: Search, fleet: Fleet, missed: Mapping[int, float]) -> Headroom | None:
    """How much more traffic `fleet` bears, to a step of `GROWTHS`; it `missed` so much in resampled traces.

    None where prefixes are cached: there the search for more sessions tells it. As many of the hardest as are
    too many to miss come first; how far they let it go is then tried in the others and the recorded trace.
    """
    if search.workload.prefixes is not None:
        return None
    numbers, may = hardest(search, missed), may_fail(search.request.confidence)

    def fails(step: int, among: Sequence[int]) -> bool:
        return not holds_in(search, fleet, among, GROWTHS[step])

    steps = range(len(GROWTHS))
    miss = bisect_left(steps, True, key=lambda step: fails(step, numbers[: may + 1]))
    rest = numbers if may else numbers[1:]
    while miss and (fails(miss - 1, rest) or not _meets(search, fleet, AS_IT_IS, GROWTHS[miss - 1])):
        miss -= 1
    meets = GROWTHS[miss - 1] if miss else 1.0
    return Headroom(meets=meets, misses=GROWTHS[miss] if miss < len(GROWTHS) else None)


def hardest(search: Search, missed: Mapping[int, float]) -> list[int]:
    """The resampled traces that judge a neighbour of a fleet, which `missed` so much in each: its hardest."""
    confidence = search.request.confidence
    return Hardest(missed).first(range(1, replicates_for(confidence) + 1))[: screened(confidence)]


def holds_in(search: Search, fleet: Fleet, replicates: Sequence[int], growth: float = 1.0) -> bool:
    """Whether a fleet misses its target in no more of these than may; one after the other, until it does."""
    left = may_fail(search.request.confidence)
    for replicate in replicates:
        left -= not _meets(search, fleet, replicate, growth)
        if left < 0:
            return False
    return True


def _meets(search: Search, fleet: Fleet, replicate: int, growth: float) -> bool:
    return search.meets(search.replay(fleet, replicate, growth=growth, most_missed=search.may_miss))
