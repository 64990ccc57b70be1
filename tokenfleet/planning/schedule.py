"""The schedule: windows of the trace, each with the fewest workers that do, and its cost.

Windows begin at the change points of the rate (`traces.shape`). A trace of one phase has equal windows.

A window begins with a lead-in, so that it does not start on an idle fleet, and is judged by the requests
that arrive in it. Every window must meet the target where the fleet sized on the trace can. Then workers are
added where they save most misses, until the whole trace meets the target too. The full fleet has more
than the trace's own need, as its margin for uncertainty; every window gets that margin in proportion.

**Work that can wait** is counted where least else is to be done. That is each request of a class that may
wait longer than LONGEST_WAIT_S. It is put into the window before its deadline that has the least work so far
for its length, and is due there as others are. A replay shows whether it really waits so long and no longer:
all requests at their own times, on workers that come and go as the schedule says. Where that falls short of a
target, every window gets one worker more, a few times, and then there is no schedule.

**A week** repeats. In a trace of seven days and more, the windows are cells of `CELL_S` by the clock (UTC;
the trace's own start where it has none). Cells of the same hours of the same weekday get the same workers,
the fewest that meet the target over all of them. So a month is four weeks of one pattern.

With a cold start L, a worker wanted from t on is ordered, and paid, at t - L. One that would be given back
and wanted again within L is kept. So at t as many are paid as the schedule wants at most within [t, t + L].
The workers of the first stretch are taken as running already; the time of draining is not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from operator import itemgetter

import numpy as np
from numpy.typing import NDArray

from controlplane.perfmodel.profile import Profile
from controlplane.scaler.bounds import DAY_S, WEEK_S, ScheduleInterval
from controlplane.workload import INSTANT_S, Workload
from dataplane.simulated.simulate import WorkerSpec, simulate
from tokenfleet.planning.fleet import Fleet, apportioned
from tokenfleet.planning.search import LONGEST_WAIT_S, Search
from tokenfleet.planning.sizing import Sizing, smallest
from tokenfleet.planning.traffic.replicates import AS_IT_IS
from tokenfleet.planning.traffic.sample import Sample

WINDOW_S = 600.0
CELL_S = 10_800.0
NEARLY = 0.98  # of a week is one: the last request comes before its end
MOST_WINDOWS = 48
LEAD_IN_S = 30.0
SHORTEST_S = 1.0
OF_WINDOW = 10_000  # requests of a window's sample, where the trace is long
EVEN = (np.sqrt(5.0) - 1.0) / 2.0  # fractions of its multiples are spread evenly
TRIES = 4


@dataclass(frozen=True, slots=True)
class TraceClock:
    """The place of the workload's zero in the week, and how fast its time passes compared to the clock's."""

    since_monday_s: float  # of the workload's time
    faster: float = 1.0

    @property
    def week_s(self) -> float:
        return WEEK_S / self.faster

    @property
    def cell_s(self) -> float:
        return CELL_S / self.faster

    @property
    def cells(self) -> int:
        return round(WEEK_S / CELL_S)

    @classmethod
    def of(cls, clock_start_s: float | None, faster: float) -> TraceClock:
        """By the Unix time of the workload's zero, where that is known; 1970 began on a Thursday."""
        since_s = 0.0 if clock_start_s is None else (clock_start_s + 3 * DAY_S) % WEEK_S
        return cls(since_s / faster, faster)


NO_CLOCK = TraceClock(0.0)


@dataclass(frozen=True, slots=True)
class Schedule:
    """Stretches that cover the trace, the attainment they reach together, and the worker-hours saved."""

    stretches: tuple[ScheduleInterval, ...]
    attainment: float
    saved_share: float  # of the worker-hours of the constant fleet
    low: float | None = None  # where samples say so: of the whole trace at least, at the plan's confidence
    week: tuple[int, ...] = ()  # workers by cell from Monday on, where the trace shows a week


class _Window:
    """A window, or those of the same hours of each week: misses by worker count, simulated when asked for."""

    def __init__(
        self, search: Search, sizing: Sizing, spans: Sequence[tuple[float, float]], confidence: float = 0.95
    ) -> None:
        self.spans, self.seconds = spans, sum(end_s - start_s for start_s, end_s in spans)
        self._search, self._sizing, self._confidence = search, sizing, confidence
        self._samples = [_sampled(search, *span) for span in spans]
        self._workloads = [
            _judged(search, *span) if sample is None else sample.workload
            for span, sample in zip(spans, self._samples, strict=True)
        ]
        self.requests = round(sum(workload.requests for workload in self._workloads))
        self._misses: dict[int, int] = {}
        self._reach: dict[int, float] = {}

    def misses(self, workers: int, allowed: float = math.inf) -> int:
        """Those judged that missed, or more than `allowed`: then the replay need not go on.

        Of several classes as many as their worst, at the strictest's scale.
        """
        if self.requests == 0:
            return 0
        if workers not in self._misses:
            missed, variance, fleet = 0.0, 0.0, self._sizing.fleet(workers)
            for workload, sample in zip(self._workloads, self._samples, strict=True):
                if workload.requests:
                    is_whole = bool(self._search.terms.classes) or math.isinf(allowed)
                    most = None if is_whole else allowed / workload.requests
                    outcome = self._search.replay(fleet, workload=workload, most_missed=most)
                    if not (is_whole or outcome.complete):
                        return int(allowed) + 1
                    attained = self._search.terms.attained(outcome.met, workload)
                    missed += (1.0 - attained) * workload.requests
                    if sample is not None:
                        variance += (sample.reach(outcome.met, self._confidence) * workload.requests) ** 2
            self._misses[workers], self._reach[workers] = math.ceil(missed - 1e-6), math.sqrt(variance)
        return self._misses[workers]

    def reach(self, workers: int) -> float:
        """The misses beyond `misses` at this number that sampling may hide."""
        return self._reach.get(workers, 0.0)

    def fewest(self, target: float, low: int, guess: int, most: int) -> int:
        """The fewest workers that meet the target here; `most` where none of fewer do."""
        if self.requests == 0:
            return low
        allowed = (1.0 - target) * self.requests
        count = smallest(lambda n: self.misses(n, allowed) <= allowed, low, guess, most - 1)
        return most if count is None else count


def _judged(search: Search, start_s: float, end_s: float) -> Workload:
    """The requests of a window that are replayed, with a weight for each that is judged."""
    lead_s = min(LEAD_IN_S, start_s)
    part = search.workload.window(start_s - lead_s, end_s)
    return replace(part, weight=(part.arrival_s >= lead_s).astype(np.float64))


def _sampled(search: Search, start_s: float, end_s: float) -> Sample | None:
    """A sample of a long trace's window; None where the window is replayed whole, or holds nothing."""
    first, end = np.searchsorted(search.workload.arrival_s, (start_s, end_s))
    if search.traffic.sampler is None or first == end:
        return None
    return search.traffic.sampler.sample(AS_IT_IS, start_s, end_s)


def make_schedule(
    search: Search, sizing: Sizing, full: Fleet, clock: TraceClock = NO_CLOCK
) -> Schedule | None:
    """The schedule under `full`, a fleet of `sizing`'s worker type that meets the target all through.

    Work that waits, and sessions, outlast windows. Then the schedule is replayed as a whole, and has more
    workers where that falls short. None where that finds none.
    """
    changes_s = [phase.start_s for phase in search.traffic.phases[1:]]
    if not waits(search) and search.terms.session_s is None:
        return _by_windows(search, sizing, full, changes_s, clock)
    level = levelled(search, sizing.worker_type.profile, changes_s) if waits(search) else search
    schedule = _by_windows(level, sizing, full, changes_s)
    for _ in range(TRIES):
        attained = followed(search, sizing, schedule.stretches)
        if attained >= search.request.attainment:
            return replace(schedule, attainment=attained)
        more = [min(s.workers + 1, full.workers) for s in schedule.stretches]
        schedule = _scheduled([(s.start_s, s.end_s) for s in schedule.stretches], more, full, 0.0)
    return None


def waits(search: Search) -> bool:
    """Whether a class may wait so long that windows cannot be judged one by one."""
    return bool(search.terms.classes) and any(slo.ttft_s > LONGEST_WAIT_S for slo in search.terms.slos)


def levelled(search: Search, profile: Profile, changes_s: Sequence[float] = ()) -> Search:
    """The same requests; those that may wait are sent when they are best served, to be served then."""
    workload, step = search.workload, profile.step
    edges = window_edges(workload, changes_s)
    widths = np.diff(edges)
    prompt, output = workload.prompt_tokens, workload.output_tokens
    work_s = step.per_prefill_token_s * prompt + step.sequence_s(prompt + output / 2.0) * output
    due_s = workload.arrival_s + search.terms.targets_s(workload)[0]
    first = np.searchsorted(edges, workload.arrival_s, side="right") - 1
    last = np.maximum(np.searchsorted(edges, due_s, side="right") - 2, first)  # whole before it is due
    may_wait = search.terms.targets_s(workload)[0] > LONGEST_WAIT_S
    busy = np.bincount(first[~may_wait], work_s[~may_wait], minlength=len(widths)) / widths
    sent_s = workload.arrival_s.copy()
    for turn, r in enumerate(np.flatnonzero(may_wait).tolist()):
        at = first[r] + int(busy[first[r] : last[r] + 1].argmin())
        busy[at] += work_s[r] / widths[at]
        sent_s[r] = max(sent_s[r], edges[at] + (turn * EVEN) % 1.0 * widths[at])
    order = np.argsort(sent_s, kind="stable")
    columns = ("prompt_tokens", "output_tokens", "priority", "slo_class")
    moved = replace(
        workload, arrival_s=sent_s[order], **{name: getattr(workload, name)[order] for name in columns}
    )
    classes = tuple(
        replace(c, slo=replace(c.slo, ttft_s=min(c.slo.ttft_s, LONGEST_WAIT_S))) for c in search.terms.classes
    )
    return replace(search.on(classes=classes), traffic=replace(search.traffic, workload=moved))


def followed(search: Search, sizing: Sizing, stretches: Sequence[ScheduleInterval]) -> float:
    """The attainment of the requests at their own times, on workers that come and go with the stretches."""
    counts = [{(g.worker_type, g.role): g.workers for g in sizing.fleet(s.workers).groups} for s in stretches]
    specs = [
        WorkerSpec(kind.profile, role, start_s, drain_s=end_s, link=kind.kv_link)
        for kind, role in dict.fromkeys(of for count in counts for of in count)
        for start_s, end_s in _stays([count.get((kind, role), 0) for count in counts], stretches)
    ]
    outcome = simulate(
        search.workload,
        specs,
        search.terms.slos,
        search.terms.policy,
        settings=search.terms.settings,
        predictor=search.predictor,
        seed=search.traffic.seed,
    )
    return replace(outcome, session_target_s=search.terms.session_s, asked=search.terms.asked).attainment


def _stays(
    counts: Sequence[int], stretches: Sequence[ScheduleInterval]
) -> Iterator[tuple[float, float | None]]:
    """The times at which each worker comes and goes; None: it stays to the end."""
    for level in range(max(counts)):
        above = [count > level for count in counts]
        for is_there, run in groupby(zip(above, stretches, strict=True), itemgetter(0)):
            there = [stretch for _, stretch in run]
            if is_there:
                yield there[0].start_s, None if there[-1] is stretches[-1] else there[-1].end_s


def _by_windows(
    search: Search, sizing: Sizing, full: Fleet, changes_s: Sequence[float], clock: TraceClock = NO_CLOCK
) -> Schedule:
    most = sizing.workers or full.workers
    if search.traffic.sampler is not None:
        sampler = replace(search.traffic.sampler, requests=OF_WINDOW)
        search = replace(search, traffic=replace(search.traffic, sampler=sampler))
    edges = window_edges(search.workload, changes_s, clock)
    cells = _cells(edges, clock)
    spans = list(pairwise(edges.tolist()))
    windows = search.threads.map(
        lambda cell: _Window(
            search, sizing, [spans[i] for i in np.flatnonzero(cells == cell)], search.request.confidence
        ),
        np.unique(cells).tolist(),
    )
    low = sizing.fewest
    busiest = max(w.requests / w.seconds for w in windows)

    def fewest(window: _Window) -> int:
        share = window.requests / window.seconds / busiest
        return window.fewest(search.request.attainment, low, max(round(most * share), low), most)

    workers = search.threads.map(fewest, windows)
    misses = search.threads.map(
        lambda pair: pair[0].misses(pair[1]), list(zip(windows, workers, strict=True))
    )
    _give_back(windows, workers, misses, most, (1.0 - search.request.attainment) * len(search.workload))
    margin = full.workers / most
    workers = [min(math.ceil(n * margin - 1e-9), full.workers) for n in workers]
    misses = search.threads.map(
        lambda pair: pair[0].misses(pair[1]), list(zip(windows, workers, strict=True))
    )
    attained = 1.0 - sum(misses) / max(len(search.workload), 1)
    of_cell = dict(zip(np.unique(cells).tolist(), workers, strict=True))
    schedule = _scheduled(spans, [of_cell[cell] for cell in cells.tolist()], full, attained)
    if search.traffic.sampler is not None:
        reach = math.hypot(*(window.reach(n) for window, n in zip(windows, workers, strict=True)))
        schedule = replace(schedule, low=max(attained - reach / len(search.workload), 0.0))
    if len(of_cell) < clock.cells:
        return schedule
    return replace(schedule, week=tuple(of_cell[cell] for cell in range(clock.cells)))


def _scheduled(
    spans: Sequence[tuple[float, float]], workers: Sequence[int], full: Fleet, attained: float
) -> Schedule:
    lengths = np.array([end_s - start_s for start_s, end_s in spans])
    saved = 1.0 - float((lengths * workers).sum() / (lengths.sum() * full.workers))
    return Schedule(_merged(spans, workers), attained, saved)


def _cells(edges: NDArray[np.float64], clock: TraceClock) -> NDArray[np.int64]:
    """The cell of the week that each window is of; each its own where the trace shows no week."""
    if edges[-1] < NEARLY * clock.week_s:
        return np.arange(len(edges) - 1)
    middle_s = (edges[:-1] + edges[1:]) / 2.0 + clock.since_monday_s
    return np.asarray(middle_s // clock.cell_s % clock.cells, np.int64)


def window_edges(
    workload: Workload, changes_s: Sequence[float] = (), clock: TraceClock = NO_CLOCK
) -> NDArray[np.float64]:
    """The starts of windows, and the end of the last one, just behind the last arrival.

    `changes_s`: the change points of the rate. Where there are none, and in a week, windows are equal.
    """
    end_s = float(workload.arrival_s[-1])
    if end_s >= NEARLY * clock.week_s:
        first_s = -clock.since_monday_s % clock.cell_s
        edges = np.concatenate([[0.0], np.arange(first_s or clock.cell_s, end_s, clock.cell_s)])
        return np.append(edges, np.nextafter(end_s, np.inf))
    if end_s <= INSTANT_S:
        return np.array([0.0, SHORTEST_S])  # every request arrives as the recording begins
    if changes_s := [at_s for at_s in changes_s if 0.0 < at_s < end_s]:
        return np.array([0.0, *changes_s, np.nextafter(end_s, np.inf)])
    length_s = max(WINDOW_S * math.ceil(end_s / (WINDOW_S * MOST_WINDOWS)), 1e-9)
    if end_s < 2 * WINDOW_S:
        length_s = max(end_s / 4, 1e-9)  # a short trace is still worth cutting
    edges = np.append(np.arange(0.0, end_s, length_s), end_s)
    if len(edges) > 2 and edges[-1] - edges[-2] < length_s / 4:
        edges = np.delete(edges, -2)  # a rest too short to judge joins the window before it
    edges[-1] = np.nextafter(end_s, np.inf)  # the last request belongs to the last window
    return edges


def _give_back(
    windows: list[_Window], workers: list[int], misses: list[int], most: int, allowed: float
) -> None:
    """Add workers, the most misses saved per worker-second first, until at most `allowed` are missed."""
    while sum(misses) > allowed:
        open_ = [i for i, n in enumerate(workers) if n < most and misses[i] > 0]
        if not open_:
            return
        best = max(
            open_,
            key=lambda i: (
                (misses[i] - windows[i].misses(workers[i] + 1)) / windows[i].seconds,
                misses[i],
                -i,
            ),
        )
        workers[best] += 1
        misses[best] = windows[best].misses(workers[best])


def _merged(spans: Sequence[tuple[float, float]], workers: Sequence[int]) -> tuple[ScheduleInterval, ...]:
    """Neighbours with the same count become one stretch."""
    stretches: list[ScheduleInterval] = []
    for (start_s, end_s), count in zip(spans, workers, strict=True):
        if stretches and stretches[-1].workers == count:
            stretches[-1] = ScheduleInterval(stretches[-1].start_s, end_s, count)
        else:
            stretches.append(ScheduleInterval(start_s, end_s, count))
    return tuple(stretches)


@dataclass(frozen=True, slots=True)
class WorkerOrder:
    """Workers ordered at one time to serve from another on. Before 0: before the trace begins."""

    order_s: float
    ready_s: float
    workers: int


@dataclass(frozen=True, slots=True)
class PaidSchedule:
    """A schedule with its starts: how many workers are paid when, and what is ordered when."""

    cold_start_s: float
    stretches: tuple[ScheduleInterval, ...]
    orders: tuple[WorkerOrder, ...]

    @property
    def worker_hours(self) -> float:
        return sum(s.workers * (s.end_s - s.start_s) for s in self.stretches) / 3600.0

    def usd_per_hour(self, full: Fleet) -> float | None:
        """The mean price of an hour, fleets in the proportions of `full`; None where a price is unknown."""
        total, seconds = 0.0, 0.0
        for stretch in self.stretches:
            usd = apportioned(full, stretch.workers).usd_per_hour
            if usd is None:
                return None
            total += usd * (stretch.end_s - stretch.start_s)
            seconds += stretch.end_s - stretch.start_s
        return total / seconds if seconds > 0 else full.usd_per_hour


def paid(wanted: Sequence[ScheduleInterval], cold_start_s: float) -> PaidSchedule:
    """The cost of the stretches (in order, no gap between them) when a start takes `cold_start_s`."""
    if not wanted:
        return PaidSchedule(cold_start_s, (), ())
    first_s, end_s = wanted[0].start_s, wanted[-1].end_s
    edges = {s.start_s for s in wanted} | {max(s.start_s - cold_start_s, first_s) for s in wanted}
    spans = list(pairwise([*sorted(edges), end_s]))
    # Summed as it was subtracted, so that a stretch ordered at `begin_s` is always seen from there.
    most = [
        max(s.workers for s in wanted if s.end_s > begin_s and s.start_s - cold_start_s <= begin_s)
        for begin_s, _ in spans
    ]
    return PaidSchedule(cold_start_s, _merged(spans, most), _orders(wanted, cold_start_s))


def _orders(wanted: Sequence[ScheduleInterval], cold_start_s: float) -> tuple[WorkerOrder, ...]:
    """Each rise that no kept worker covers. Each n-th worker is considered by itself: it is wanted or not."""
    orders: dict[float, int] = {}
    for level in range(1, max(s.workers for s in wanted) + 1):
        left_s: float | None = None if wanted[0].workers < level else wanted[0].start_s
        running = wanted[0].workers >= level
        for stretch in wanted[1:]:
            wants = stretch.workers >= level
            if wants and not running and (left_s is None or stretch.start_s - cold_start_s > left_s):
                orders[stretch.start_s] = orders.get(stretch.start_s, 0) + 1
            if running and not wants:
                left_s = stretch.start_s
            running = wants
    return tuple(WorkerOrder(t - cold_start_s, t, n) for t, n in sorted(orders.items()))
