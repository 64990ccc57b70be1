"""The reuse of prefixes on a plan's fleet: hit rate, what bounds it, and how many more sessions it bears.

The **hit rate** is tokens of prompts that were found cached, by tokens of prompts, as vLLM counts them. The
*ideal* hit rate is that of a single cache that forgets nothing. It lies in the trace; the real one is an
outcome of workers, memory, placement and traffic. The **working set** is what requests sent within ten
minutes bring to memory, with shared parts counted once. Where it outgrows the fleet's KV memory, a session's
blocks are evicted before its next turn. That turn computes them again, evicts more, and takes longer.

The **cliff** is found by replaying the fleet under more sessions, of the trace's own (draws.busier). It is
the growth at which hits fall below half of what they were, and that at which attainment falls below the
target. An overloaded fleet takes long to replay. So the next growths to be tried lie on both sides of where
the straight line through the known ones (in logarithms) would cross. Once two growths are within a tenth of
each other, the answer is where the line between them crosses. Rough replays are used where they are cheaper,
since a growth is a ratio.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from controlplane.worker_type import WorkerType
from dataplane.simulated.simulate import Outcome
from tokenfleet.planning.fleet import Fleet
from tokenfleet.planning.plan_file import Cliff, Grown, Reuse, SessionCost
from tokenfleet.planning.search import Search

WINDOW_S = 600.0
LOST = 0.5  # of the hit rate on the trace
GROWTHS = (1.25, 1.6)  # tried first
MOST_GROWTH = 3.0  # past which nothing is looked for
FARTHEST = 1.4  # times what was tried already: so far the straight line is followed
ENDS = 0.15  # of what is left to be searched: so far from its ends the next ones are tried
WITHIN = 1.1


@dataclass(frozen=True, slots=True)
class GrownSessions:
    """A fleet under `scale` times the sessions."""

    scale: float
    hit_rate: float
    attainment: float


def reuse_of(search: Search, fleet: Fleet, hit_rates: Sequence[float]) -> Reuse | None:
    """The reuse of `fleet`; None where nothing is cached. `hit_rates`: those of its resampled traces."""
    workload = search.workload
    if workload.prefixes is None:
        return None
    outcome = search.replay(fleet)
    hit_rate = outcome.prefix_hit_rate or 0.0
    seen = sorted([*hit_rates, hit_rate])
    return Reuse(
        hit_rate=hit_rate,
        low=seen[0],
        high=seen[-1],
        ideal=float(workload.ideal_hits.sum() / workload.prompt_tokens.sum()),
        working_set_tokens=working_set_tokens(outcome),
        kv_tokens=sum(g.workers * g.worker_type.profile.kv.capacity_tokens for g in fleet.groups),
        cliff=cliff_of(search.roughly(), fleet, search.request.attainment),
        sessions=session_cost(outcome, fleet, search.terms.agents),
    )


def cliff_of(search: Search, fleet: Fleet, target: float) -> Cliff:
    """The growth that `fleet` bears."""
    tried: dict[float, GrownSessions] = {}

    def one(scale: float) -> GrownSessions:
        outcome = search.replay(fleet, growth=scale)
        return GrownSessions(scale, outcome.prefix_hit_rate or 0.0, outcome.attainment)

    def try_all(scales: Sequence[float]) -> list[GrownSessions]:
        new = [scale for scale in scales if scale not in tried]
        tried.update(zip(new, search.threads.map(one, new), strict=True))
        return [tried[scale] for scale in sorted(tried)]

    kept = LOST * try_all((1.0, *GROWTHS))[0].hit_rate
    target_lost = _first(lambda g: _past(1.0 - g.attainment, 1.0 - target), try_all)
    hits_lost = _first(lambda g: _past(kept, g.hit_rate), try_all)
    grown = [Grown.like(one) for one in try_all(())]
    return Cliff(tried=grown, hits_lost=hits_lost, target_lost=target_lost)


def _past(value: float, level: float) -> float:
    """How far a value is past a level, in logarithms; above 0: it is."""
    crumb = 1e-4  # of a share, so that none is a number too
    return math.log((value + crumb) / (level + crumb))


def _first(
    past: Callable[[GrownSessions], float], try_all: Callable[[Sequence[float]], list[GrownSessions]]
) -> float | None:
    """The growth at which something is lost, known to `WITHIN`; None where nowhere."""
    while True:
        known = try_all(())
        at = next((i for i, grown in enumerate(known) if past(grown) > 0.0), len(known))
        if at == len(known):
            if known[-1].scale >= MOST_GROWTH:
                return None
            farthest = min(FARTHEST * known[-1].scale, MOST_GROWTH)
            scales = _around(past, known[-2], known[-1], known[-1].scale, farthest)
            try_all([min(scale, farthest) for scale in scales if scale > known[-1].scale])
            continue
        if at == 0:
            return known[0].scale
        low, high = known[at - 1].scale, known[at].scale
        if high <= WITHIN * low:
            share = past(known[at - 1]) / (past(known[at - 1]) - past(known[at]))
            return float(low * (high / low) ** share)
        try_all([s for s in _around(past, known[at - 1], known[at], low, high) if low < s < high])


def _around(
    past: Callable[[GrownSessions], float], one: GrownSessions, other: GrownSessions, low: float, high: float
) -> tuple[float, float]:
    """Two growths close to where the line through two known ones crosses, between `low` and `high`."""
    slope = (past(other) - past(one)) / math.log(other.scale / one.scale)
    room = math.log(high / low)
    ahead = math.log(one.scale / low) - past(one) / slope if slope > 0.0 else math.inf
    middle = low * math.exp(min(max(ahead, ENDS * room), (1.0 - ENDS) * room))
    aside = math.sqrt(WITHIN) * (1.0 - 1e-9)  # if it lies between the two, they are as close as asked
    return middle / aside, middle * aside


def by_memory(search: Search, worker_type: WorkerType) -> float:
    """Workers whose memory keeps what all sessions of ten minutes have said: a first guess, no bound."""
    workload, sessions = search.workload, search.workload.sessions
    if workload.prefixes is None or sessions is None:
        return 0.0
    tokens = workload.prompt_tokens + workload.output_tokens
    window = (workload.arrival_s // WINDOW_S).astype(np.int64)
    order = np.lexsort((tokens, sessions.session, window))
    last = np.flatnonzero(
        (np.diff(window[order], append=-1) != 0) | (np.diff(sessions.session[order], append=-2) != 0)
    )
    held = np.unique(window[order[last]], return_inverse=True)[1]
    most = float(np.bincount(held, tokens[order[last]]).max(initial=0.0))
    if search.terms.agents is not None:
        most *= min(search.terms.agents / (sessions.session.max(initial=0) + 1), 1.0)
    return most / (worker_type.profile.kv.capacity_tokens + worker_type.profile.host_tokens)


def working_set_tokens(outcome: Outcome) -> int:
    """The most that requests sent within ten minutes bring to memory."""
    workload, sent_s = outcome.workload, outcome.arrival_s
    assert workload.prefixes is not None
    prefixes, lengths = workload.prefixes, np.diff(workload.prefixes.offsets)
    window = np.nan_to_num((sent_s - np.nanmin(sent_s)) // WINDOW_S).astype(np.int64)
    tokens = workload.prompt_tokens + workload.output_tokens
    own = np.bincount(window, np.maximum(tokens - lengths * prefixes.block_tokens, 0))
    named = int(prefixes.ids.max(initial=0)) + 1
    held = np.unique(np.repeat(window, lengths) * named + prefixes.ids) // named
    shared = np.bincount(held, minlength=len(own)) * prefixes.block_tokens
    return int((own + shared).max())


def sessions_per_h(outcome: Outcome, agents: int) -> float:
    """Sessions an hour while all agents work: until the last session begins, or, where there are no more
    sessions than agents, until the end."""
    ends_s, until_s = outcome.session_ends(agents)
    return float((ends_s <= until_s).sum()) / until_s * 3600.0 if until_s > 0 else 0.0


def session_cost(outcome: Outcome, fleet: Fleet, agents: int | None = None) -> SessionCost | None:
    """The price of a session; None where none waits for its answers."""
    sessions = outcome.workload.sessions
    if sessions is None or (len(sessions.before) == 0 and outcome.session_target_s is None):
        return None
    begin_s, end_s = sessions.spans(outcome.arrival_s, outcome.finish_s, np.isfinite(outcome.finish_s))
    if len(begin_s) == 0:
        return None
    times = np.concatenate([begin_s, end_s])
    step = np.repeat([1, -1], len(begin_s))
    at_once = int(np.cumsum(step[np.lexsort((step, times))]).max())
    an_hour = len(begin_s) * 3600.0 / float(end_s.max() - begin_s.min())
    if agents is not None:
        an_hour = sessions_per_h(outcome, agents)
    mean_s = float((end_s - begin_s).mean())
    price = None if fleet.usd_per_hour is None or an_hour <= 0 else fleet.usd_per_hour / an_hour
    within = outcome.session_attainment
    return SessionCost(sessions=len(begin_s), at_once=at_once, mean_s=mean_s, usd=price, within=within)
