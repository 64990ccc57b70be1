"""The sizing of one worker type: a bound from below, a search on the trace, then resampled traces.

Requests that break their target with a worker all to themselves are found first: no count serves them in
time. The same two steps, the other way round, find the most agents that one fleet carries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from controlplane.errors import Infeasible
from controlplane.worker_type import WorkerType
from controlplane.workload import Workload
from tokenfleet.planning.estimate import Estimate, Trial, look, may_fail, replicates_for, too_few, verdict_on
from tokenfleet.planning.fleet import Fleet, apportioned, of_one_kind
from tokenfleet.planning.mixes.bounds import alone_text, by_decode, ceiling, fluid_workers
from tokenfleet.planning.reuse import by_memory
from tokenfleet.planning.search import Search

HEADROOM = 1.2  # a first guess: this much above the fluid bound and Eq 6
MORE_FOR_DOUBT = 1.1  # and the uncertainty usually costs about a tenth more workers,
MORE_FOR_SESSIONS = 1.3  # where few sessions make the load, more
FIRST_KINDS = 4
PAST_HOPE = 3.0  # kinds whose floor costs more than this many times the cheapest found are not searched
PER_REQUEST = 2  # workers; policies that draw lots may choose one of them twice
STEPPED_OVER = 8  # counts, the largest of those below the first that held
FAR = 40  # without a limit of the user's, this many times the fluid bound is past hope
_STOP_AT = 8.0  # a trial is broken off at this many times the misses allowed,
_STOP_SOON = 2.0  # or at this many, where replays take long: those of overloaded fleets take longest


@dataclass
class Sizing:
    """The sizing of one worker type for one request.

    `on_trace` maps a worker count to attainment on the recorded trace; `sure` maps it to the estimate.
    `workers` is the smallest count that meets the target on the trace. `confirmed` is the smallest that does
    so at the asked confidence. None: there is none, and `reason` says why.
    """

    worker_type: WorkerType
    fluid: int = 1
    ceiling: float = 1.0
    prefill_share: float = 0.0
    workers: int | None = None
    confirmed: int | None = None
    reason: str = ""
    mix: Fleet | None = None  # a count stands for that many workers in this mix's proportions
    fleets: dict[int, Fleet] = field(default_factory=dict)
    on_trace: dict[int, float] = field(default_factory=dict)
    sure: dict[int, Estimate] = field(default_factory=dict)
    tried: dict[int, Trial] = field(default_factory=dict)  # their verdicts are not in `sure` yet
    failed: int = 0  # the largest count known to fail at the asked confidence
    missed: dict[int, float] = field(default_factory=dict)  # of the confirmed fleet, by resampled trace

    def tell_tried(self) -> None:
        """Put the verdicts of the counts that were tried too into `sure`; those that failed take replays."""
        self.sure |= {n: trial.verdict() for n, trial in self.tried.items() if trial.is_told}
        self.tried = {}

    def fleet(self, workers: int) -> Fleet:
        """The fleet of that many workers, in split mode with the roles found best so far."""
        if self.mix is not None:
            return apportioned(self.mix, workers)
        return self.fleets.get(workers) or of_one_kind(self.worker_type, workers, self.prefill_share)

    @property
    def fewest(self) -> int:
        """The smallest fleet there is."""
        return 2 if self.worker_type.is_split else 1

    @property
    def next_count(self) -> int:
        """The smallest count that may hold at the asked confidence."""
        return max(self.workers or 0, self.failed + 1)

    @property
    def answer(self) -> Fleet | None:
        """The confirmed fleet, else the smallest that may hold; where none does, the one for the trace."""
        count = self.confirmed or (self.workers if self.reason or not self.workers else self.next_count)
        return None if count is None else self.fleet(count)

    @property
    def cost(self) -> tuple[float, int, int]:
        """The cost of the answer; there must be one."""
        assert self.answer is not None
        return self.answer.cost


def smallest(passes: Callable[[int], bool], low: int, guess: int, cap: int) -> int | None:
    """The smallest n in [low, cap] with `passes(n)`, taking `passes` as monotone; None if even cap fails.

    `low` is a bound from below, so that nothing under it is tried. Near the guess it takes two trials;
    a guess wrong by d costs about 2·log2(d).
    """
    if cap < low:
        return None
    n = min(max(guess, low), cap)
    failed, passed = low - 1, cap + 1  # the bracket; both ends exclusive
    step = 1
    if passes(n):
        passed = n
        while passed - 1 > failed:
            n = max(passed - step, low)
            if not passes(n):
                failed = n
                break
            passed, step = n, step * 2
    else:
        failed = n
        while failed < cap:
            n = min(failed + step, cap)
            if passes(n):
                passed = n
                break
            failed, step = n, step * 2
    while passed - failed > 1:
        n = (passed + failed) // 2
        if passes(n):
            passed = n
        else:
            failed = n
    return passed if passed <= cap else None


def fewest(missed: Callable[[int], Any], allowed: Any, guess: int, most: int) -> int:
    """The fewest workers that miss no more than is allowed (of each class); where not even `most` keep to
    that, the fewest that miss as few as `most` do."""
    found = smallest(lambda n: bool(np.all(missed(n) <= allowed)), 1, guess, most)
    if found is None:
        least = np.maximum(allowed, missed(most))
        found = smallest(lambda n: bool(np.all(missed(n) <= least)), 1, most, most)
    return found or most


def size_on_trace(search: Search, worker_type: WorkerType) -> Sizing:
    """The smallest count that meets the target on the recorded trace, or the reason why there is none."""
    workload, profile = search.workload, worker_type.profile
    sizing = Sizing(worker_type, ceiling=ceiling(profile, search.outline, search))
    if sizing.ceiling < search.request.attainment:
        sizing.reason = alone_text(search, profile)
        return sizing
    sizing.fluid = fluid_workers(search, worker_type)
    fewest = sizing.fewest
    if worker_type.is_split:
        sizing.prefill_share = prefill_share(worker_type, search)
    limit = search.request.most_workers(worker_type)
    far = past_hope(sizing, workload)
    cap = far if limit is None else min(limit, far)
    low = max(sizing.fluid, fewest)
    decode, memory = by_decode(search, worker_type), by_memory(search, worker_type)
    guess = math.ceil(max(HEADROOM * max(sizing.fluid, decode), memory))
    count = smallest(lambda n: passes_on_trace(search, sizing, n), low, guess, cap)
    sizing.workers = count
    if count is None:
        missed = f"miss the target with over {100 * broken_off(search):.4g} % of the requests"
        found = f"reach only {max(sizing.on_trace.values()):.4f}" if sizing.on_trace else missed
        if limit is None or limit >= far:
            sizing.reason = f"even {cap} workers {found}"
        else:
            found = f", which {found}" if limit >= low else f"; the load alone needs {low}"
            sizing.reason = f"{search.request.limit_text(worker_type)} allows {limit} workers{found}"
    return sizing


def size_all(search: Search) -> list[Sizing]:
    """Every worker type sized on the trace, except those whose load alone costs far above the cheapest found.

    The types with the lowest floor (the fluid bound, in dollars or GPUs) come first.
    """
    worker_types, threads = search.types, search.threads
    floors = threads.map(lambda worker_type: floor(search, worker_type), worker_types)
    ranked = sorted(range(len(worker_types)), key=lambda i: (floors[i].cost, i))
    first, rest = ranked[:FIRST_KINDS], ranked[FIRST_KINDS:]
    sizings = threads.map(lambda i: size_on_trace(search, worker_types[i]), first)
    costs = [s.fleet(s.workers).cost for s in sizings if s.workers is not None]
    cheapest = min(costs, default=None)
    near = [i for i in rest if cheapest is None or not far_above(floors[i], cheapest)]
    sizings += threads.map(lambda i: size_on_trace(search, worker_types[i]), near)
    for i in rest:
        if i not in near:
            reason = f"the load alone needs {floors[i].label}, over {PAST_HOPE:g} times the cheapest found"
            sizings.append(Sizing(worker_types[i], reason=reason))
    return sizings


def floor(search: Search, worker_type: WorkerType) -> Fleet:
    """The smallest fleet of a worker type that the fluid bound allows."""
    reaches = ceiling(worker_type.profile, search.outline, search) >= search.request.attainment
    bound = fluid_workers(search, worker_type) if reaches else 1
    return of_one_kind(worker_type, max(bound, 2 if worker_type.is_split else 1), 0.5)


def far_above(fleet: Fleet, cheapest: tuple[float, int, int]) -> bool:
    """Whether a fleet costs more than PAST_HOPE times the cheapest, in dollars or else in GPUs."""
    usd, gpus, _ = fleet.cost
    if math.isfinite(usd) and math.isfinite(cheapest[0]):
        return usd > PAST_HOPE * cheapest[0]
    return gpus > PAST_HOPE * cheapest[1]


def broken_off(search: Search) -> float:
    """The share of misses past which a trial has failed and need not be replayed to its end."""
    return (_STOP_SOON if search.is_slow else _STOP_AT) * search.may_miss


def passes_on_trace(search: Search, sizing: Sizing, workers: int) -> bool:
    """Whether a count meets the target on the trace; notes its attainment when the trial ran to the end."""
    if workers < sizing.fewest:
        return False
    fleets = [sizing.fleet(workers)]
    if sizing.worker_type.is_split:
        fleets = [
            of_one_kind(sizing.worker_type, workers, sizing.prefill_share, shift) for shift in (0, -1, 1)
        ]
    for fleet in fleets:
        outcome = search.replay(fleet, most_missed=broken_off(search))
        if outcome.complete:
            sizing.on_trace[workers] = max(outcome.attainment, sizing.on_trace.get(workers, 0.0))
        if search.meets(outcome):
            sizing.fleets[workers] = fleet
            return True
    return False


def confirm(search: Search, sizing: Sizing, most: int | None = None) -> bool:
    """Raise the count, up to `most`, until its lower bound meets the target; True while a larger one may.

    Sets `confirmed`, or else `failed`, and `reason` where no count holds. The search begins at the count
    found on the trace, since what fails there is no answer, and goes on where an earlier one ended.
    """
    assert sizing.workers is not None
    limits = (search.request.most_workers(sizing.worker_type), past_hope(sizing, search.workload))
    last = min(limit for limit in limits if limit is not None)
    cap = last if most is None else min(most, last)
    near = 2 * sizing.workers + 2
    trials, start = sizing.tried, sizing.workers

    def passes(workers: int) -> bool:
        if workers not in trials:
            trials[workers] = Trial(search, sizing.fleet(workers))
        return trials[workers].holds(screening=search.is_slow)

    def fewest(guess: int, most: int) -> int | None:
        """The smallest count that holds, of those that pass as far as they were tried."""
        count = smallest(passes, sizing.next_count, guess, most)
        while count is not None and not trials[count].holds():
            count = smallest(passes, count + 1, count + 1, most)
        # Where the curve is flat, one worker more may miss a request more: what was stepped over is tried.
        end = 0 if search.is_slow else count or 0
        over = [n for n in range(start, end) if n not in trials][-STEPPED_OVER:]
        found = next((n for n in over if passes(n) and trials[n].holds()), count)
        if found is None:
            sizing.failed = max(sizing.failed, most)
        return found

    # Rounded to the nearest: for a few workers a tenth is none, and an answer that is the first tried takes
    # one verdict, not two.
    guess = round((MORE_FOR_DOUBT if search.traffic.units.is_plain else MORE_FOR_SESSIONS) * sizing.workers)
    found = fewest(guess, min(near, cap))
    # Past twice the count the uncertainty is seldom about capacity: first ask whether workers could end it.
    if found is None and near < cap:
        if workers_could_hold(search, sizing.worker_type):
            found = fewest(2 * near, cap)
        else:
            cap = last
    sizing.confirmed = found
    if found is not None:
        trial = trials.pop(found)
        sizing.sure[found], sizing.missed = trial.verdict(), trial.shares_missed
        return False
    if cap < last:
        return True
    tell_failed(search, sizing)
    return False


def tell_failed(search: Search, sizing: Sizing) -> None:
    """Set the reason why no count of a worker type holds, by the largest that was tried."""
    last = max(sizing.tried)
    seen = sizing.tried[last].numbers
    sizing.tell_tried()
    if not sizing.sure:
        sizing.sure[last] = verdict_on(
            look(search, sizing.fleet(last), seen), search.request, search.terms.asked
        )
    last = max(sizing.sure)
    sizing.reason = (
        f"{last} workers meet the target on average, but their lower bound is"
        f" {100 * sizing.sure[last].low:.4g} % ({100 * search.request.confidence:g} % confidence)"
    )


def fraction_needed(sizing: Sizing, search: Search) -> float:
    """Workers, with a fraction, at which a type just meets the target on the trace."""
    assert sizing.workers is not None
    passed = sizing.on_trace[sizing.workers]
    failed = sizing.on_trace.get(sizing.workers - 1)
    if failed is None:
        return float(sizing.workers)
    few, many, target = (math.log(1.0 - a + 1e-6) for a in (failed, passed, search.request.attainment))
    share = (few - target) / (few - many) if few > many else 1.0
    return sizing.workers - 1 + min(max(share, 0.05), 1.0)


@dataclass(frozen=True, slots=True)
class MostAgents:
    """The most `agents` for whom a fleet holds a `target` at a confidence, with the estimate of that.

    `on_trace`: the most for whom it does on the recorded trace. The trace has `sessions`, which bound both.
    """

    agents: int
    target: float
    estimate: Estimate
    on_trace: int
    sessions: int


def most_agents(search: Search, fleet: Fleet, tell: Callable[[str], None] = lambda _: None) -> MostAgents:
    """The most concurrent sessions `fleet` carries, each followed by the next; `tell` hears of each trial.

    Raises Infeasible where a single one is too many, or the trace is too short to show the target.
    """
    if few := too_few(search):
        raise Infeasible(few.reason)
    known = search.workload.sessions
    sessions = 0 if known is None else len(np.unique(known.session[known.session >= 0]))
    target, trials = search.request.attainment, dict[int, Trial]()

    def fails_on_trace(agents: int) -> bool:
        tell(f"{agents:,} agents on the recorded trace")
        outcome = search.on(agents=agents).replay(fleet, most_missed=broken_off(search))
        return not search.meets(outcome)

    def fails(agents: int) -> bool:
        tell(f"{agents:,} agents in resampled traces")
        trials[agents] = Trial(search.on(agents=agents), fleet)
        return not trials[agents].holds()

    def most(fails: Callable[[int], bool], guess: int, cap: int) -> int:
        few = smallest(fails, 1, guess, cap)
        return cap if few is None else few - 1

    on_trace = most(fails_on_trace, fleet.workers, sessions)
    if on_trace == 0:
        attained = search.on(agents=1).replay(fleet).attainment
        raise Infeasible(f"one agent alone attains {attained:.4f} on this fleet, below {target:g}")
    agents = most(fails, round(on_trace / MORE_FOR_SESSIONS), on_trace)
    if agents == 0:
        confidence = search.request.confidence
        raise Infeasible(
            f"one agent alone attains {target:g} on the trace, and not at confidence {confidence:g}"
        )
    return MostAgents(agents, target, trials[agents].verdict(), on_trace, sessions)


def workers_could_hold(search: Search, worker_type: WorkerType) -> bool:
    """Whether endless workers meet the target in as many resampled traces as must hold."""
    confidence = search.request.confidence

    def reaches(replicate: int) -> bool:
        requests = search.traffic.requests(replicate, search.workload)
        profile = search.traffic.profile(replicate, worker_type.profile)
        most = ceiling(profile, requests, search)
        return most >= search.request.attainment

    held = list(map(reaches, range(1, replicates_for(confidence) + 1)))
    return held.count(False) <= may_fail(confidence)


def past_hope(sizing: Sizing, workload: Workload) -> int:
    """Workers that are as good as endless: many times what the load needs, or `PER_REQUEST` a request."""
    return max(min(max(FAR * sizing.fluid, 64), PER_REQUEST * len(workload)), sizing.fluid, sizing.fewest)


def prefill_share(worker_type: WorkerType, search: Search) -> float:
    """Share of the workers that should prefill, by the work each phase brings (split mode)."""
    profile, workload = worker_type.profile, search.outline
    prefill_s = float(profile.prefill_alone_s(workload.prompt_tokens, workload.ideal_hits).sum())
    context = workload.prompt_tokens + workload.output_tokens / 2.0
    # A decode worker is shared by as many sequences as the TPOT target lets into one step.
    batch = 1
    while (
        batch < profile.engine.max_seqs
        and profile.step.context_limit(batch + 1, search.terms.slo.tpot_s) >= (batch + 1) * context.mean()
        and (batch + 1) * profile.kv.held(context.mean()) <= profile.kv.capacity_tokens
    ):
        batch += 1
    decode_s = float((profile.step.step_s(0, batch, batch * context) * workload.output_tokens).sum()) / batch
    work_s = prefill_s + decode_s
    return prefill_s / work_s if work_s > 0 else 0.5
