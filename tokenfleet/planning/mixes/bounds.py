"""Bounds on what workers can carry, without a replay: no count of workers and no placement beats them.

A request alone on an idle worker is served as fast as that type can. The fluid bound is the fewest workers
that the work of all requests keeps busy. Two bounds rule out mixes:

**Reach.** A request that breaks its targets alone on a worker of every type in a mix breaks them on the mix.
So the share of requests that some type meets must be at least the target.

**Work.** Let u_v(r) be the least seconds that request r takes of a worker of type v, infinite where v alone
breaks its targets (`controlplane.perfmodel.capacity.least_seconds`). With weights w_v = 1 / mean u_v, what
arrives in a window of length H, to the last deadline, needs

    Σ n_v · w_v · H  >=  Σ_r min_v w_v · u_v(r)    over the window's requests without those that may miss

The window with the largest need gives the demand. Both bounds hold on the recorded trace without moves, and a
fleet must meet the target there. They are loose: bursts, TTFT and whole batches are left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from controlplane.errors import Infeasible
from controlplane.figures import duration_text
from controlplane.perfmodel.capacity import (
    answered_s,
    decode_throughput,
    fluid_workers_of,
    fluid_workers_of_classes,
    least_seconds,
)
from controlplane.perfmodel.profile import Profile
from controlplane.types import Slo
from controlplane.worker_type import WorkerType
from controlplane.workload import Workload
from dataplane.simulated.outcome import attained_by_class
from tokenfleet.planning.search import Search

HALVINGS = 6  # windows of the whole, half, a quarter … of the requests


@dataclass(frozen=True)
class MixBounds:
    """The bounds for mixes of these types: `weights` [types] and the `demand` that a mix must carry."""

    search: Search
    types: tuple[WorkerType, ...]

    @cached_property
    def met(self) -> NDArray[np.bool_]:
        """[types, requests] whether each request meets its targets on an idle worker."""
        outline = self.search.outline
        return np.stack([met_alone(kind.profile, outline, self.search) for kind in self.types])

    @cached_property
    def _seconds(self) -> NDArray[np.float64]:
        outline = self.search.outline
        tpot_s = self.search.terms.targets_s(outline)[1]
        return np.stack([least_seconds(outline, kind.profile, tpot_s) for kind in self.types])

    @cached_property
    def weights(self) -> NDArray[np.float64]:
        return np.asarray(1.0 / np.maximum(self._seconds.mean(axis=1), 1e-12))

    @cached_property
    def demand(self) -> float:
        """The most that any window needs; 0 for agents, who send when they get to it."""
        search, outline = self.search, self.search.outline
        if search.terms.agents is not None:
            return 0.0
        each = outline.requests / len(outline)  # of a thinned trace each request tells of several
        least = np.where(self.met, self._seconds * self.weights[:, None], np.inf).min(axis=0)
        ttft_s, tpot_s = search.terms.targets_s(outline)
        ends_s = answered_s(outline, ttft_s + tpot_s * (outline.output_tokens - 1))
        may_miss, most = int(search.may_miss * len(outline) + 1e-9), 0.0
        # Turns of a session move with the answers before them: of these the whole trace is the only window.
        for halving in range(HALVINGS if outline.sessions is None else 1):
            for rows in np.array_split(np.arange(len(outline)), 2**halving):
                kept = len(rows) - may_miss
                if kept <= 0:
                    continue
                work = float(np.partition(least[rows], kept - 1)[:kept].sum()) * each
                most = max(most, work / float(ends_s[rows].max() - outline.arrival_s[rows[0]]))
        return most

    def reaches(self, used: Sequence[bool]) -> bool:
        """Whether the types that are used meet enough requests, each alone on a worker."""
        met = np.any(self.met[list(used)], axis=0)
        return self.search.terms.attained(met, self.search.outline) >= self.search.request.attainment

    def possible(self, counts: NDArray[np.int64]) -> NDArray[np.bool_]:
        """Which mixes [mixes, types] neither bound rules out."""
        enough = counts @ self.weights >= self.demand * (1.0 - 1e-9)
        used, which = np.unique(counts > 0, axis=0, return_inverse=True)
        reach = np.array([self.reaches(one) for one in used.tolist()], bool)
        return np.asarray(enough & reach[which.reshape(-1)])


def fluid_workers(search: Search, worker_type: WorkerType) -> int:
    """The bound from below; 1 for agents, since they send when they get to it, in whatever time."""
    if search.terms.agents is not None:
        return 1
    profile, workload = worker_type.profile, search.outline
    if search.terms.classes:
        return fluid_workers_of_classes(workload, profile, search.terms.slos, search.terms.asked)
    return fluid_workers_of(workload, profile, search.terms.slo, search.request.attainment)


def by_decode(search: Search, worker_type: WorkerType) -> float:
    """Workers by Eq 6, which counts decode alone: a first guess, no bound."""
    workload = search.outline
    context = float((workload.prompt_tokens + workload.output_tokens / 2.0).mean())
    try:
        per_gpu = decode_throughput(worker_type.profile, search.terms.slo.tpot_s, context)
    except Infeasible:
        return 1.0
    seconds = max(workload.duration_s, 1.0)
    outputs = float(workload.output_tokens.mean()) * workload.requests
    return outputs / seconds / (per_gpu * worker_type.gpus)


def alone_ttft_s(profile: Profile, workload: Workload) -> NDArray[np.float64]:
    """Seconds [requests] to each first token on an idle worker that has cached every earlier request."""
    return profile.alone_ttfts_s(workload.prompt_tokens, workload.ideal_hits)


def alone_tpot_s(profile: Profile, workload: Workload) -> NDArray[np.float64]:
    """Seconds a token [requests] after the first on an idle worker; NaN for an output of one token."""
    # Step time is linear in context, so the mean step is the step at the mean context.
    context = workload.prompt_tokens + workload.output_tokens / 2.0
    return np.where(workload.output_tokens > 1, profile.step.step_s(0, 1, context), np.nan)


def ceiling(profile: Profile, workload: Workload, search: Search) -> float:
    """The attainment of a workload that even endless workers do not exceed."""
    requests = search.terms.attained(met_alone(profile, workload, search), workload)
    if (session_s := search.terms.session_s) is None:
        return requests
    return min(requests, float((alone_session_s(profile, workload) <= session_s).mean()))


def met_alone(profile: Profile, workload: Workload, search: Search) -> NDArray[np.bool_]:
    """Whether each request meets its targets on an idle worker."""
    ttft_target_s, tpot_target_s = search.terms.targets_s(workload)
    slow = alone_tpot_s(profile, workload) > tpot_target_s  # NaN compares false
    return np.asarray(~((alone_ttft_s(profile, workload) > ttft_target_s) | slow))


def alone_session_s(profile: Profile, workload: Workload) -> NDArray[np.float64]:
    """Seconds [sessions] from the first request to the last answer where each has an idle worker."""
    sessions = workload.sessions
    assert sessions is not None
    more = np.nan_to_num(alone_tpot_s(profile, workload)) * (workload.output_tokens - 1)
    end_s = answered_s(workload, alone_ttft_s(profile, workload) + more)
    first_s, last_s = sessions.spans(workload.arrival_s, end_s)
    return np.asarray(last_s - first_s)


def nearest_possible(profile: Profile, workload: Workload, slo: Slo, attainment: float) -> Slo:
    """The tightest loosening of `slo` that endless workers meet, each target raised only if it must be."""
    ttft_s, tpot_s = alone_ttft_s(profile, workload), alone_tpot_s(profile, workload)
    tpot_s = np.where(np.isnan(tpot_s), 0.0, tpot_s)

    def met(ttft_target_s: float, tpot_target_s: float) -> float:
        return float(((ttft_s <= ttft_target_s) & (tpot_s <= tpot_target_s)).mean())

    if met(slo.ttft_s, np.inf) >= attainment and met(np.inf, slo.tpot_s) < attainment:
        among = tpot_s[ttft_s <= slo.ttft_s]
        share = attainment / met(slo.ttft_s, np.inf)
        return Slo(slo.ttft_s, max(slo.tpot_s, _quantile(among, share)))
    if met(np.inf, slo.tpot_s) >= attainment:
        among = ttft_s[tpot_s <= slo.tpot_s]
        share = attainment / met(np.inf, slo.tpot_s)
        return Slo(max(slo.ttft_s, _quantile(among, share)), slo.tpot_s)
    # Both are broken: each gets half of what may be missed.
    share = 1.0 - (1.0 - attainment) / 2.0
    return Slo(max(slo.ttft_s, _quantile(ttft_s, share)), max(slo.tpot_s, _quantile(tpot_s, share)))


def nearest_session_s(search: Search, profile: Profile) -> float | None:
    """The time for sessions, or the shortest that endless workers meet where that is longer."""
    if search.terms.session_s is None:
        return None
    return max(
        search.terms.session_s,
        _quantile(alone_session_s(profile, search.workload), search.request.attainment),
    )


def _quantile(values: NDArray[np.float64], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    return float(np.quantile(values, min(share, 1.0), method="inverted_cdf"))


def alone_text(search: Search, profile: Profile) -> str:
    """The number of requests, or else sessions, that miss their target on idle workers."""
    target = search.request.attainment
    told, requests = _alone_missed(search, profile)
    if requests >= target and (asked_s := search.terms.session_s) is not None:
        took_s = alone_session_s(profile, search.outline)
        most_s = _quantile(took_s, target)
        late = f"{100 * float((took_s > asked_s).mean()):.4g} % of the sessions"
        told = f"{late} take longer than {duration_text(asked_s)} even alone on workers"
        told += f", and {target:g} of them {duration_text(most_s)}"
    return f"{told}, so more workers do not help"


def _alone_missed(search: Search, profile: Profile) -> tuple[str, float]:
    """The same of requests alone, and the attainment that leaves; of classes the one that misses most."""
    met = met_alone(profile, search.outline, search)
    missed, whose = 1.0 - float(met.mean()), ""
    if search.terms.classes:
        share = 1.0 - attained_by_class(met, search.outline)
        worst = int(np.argmax(share / (1.0 - np.array(search.terms.asked))))
        missed, whose = float(share[worst]), f" of class {search.terms.classes[worst].name}"
    told = f"{100 * missed:.4g} % of the requests{whose} miss the target even alone on a worker"
    return told, search.terms.attained(met, search.outline)
