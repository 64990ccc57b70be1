"""Bounds on the load that a mix can carry: no placement beats them, so mixes beyond them need no replay.

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

from controlplane.perfmodel.capacity import answered_s, least_seconds
from controlplane.worker_type import WorkerType
from tokenfleet.planning.search import Search
from tokenfleet.planning.sizing import met_alone

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
