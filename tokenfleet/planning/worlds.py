"""Replays of the trace in worlds that might have been.

World 0 is the trace as it is on workers as their profiles say. World i > 0 draws its arrivals (bootstrap),
where it is asked for how far the traffic's level has drifted, the workers' coefficients (from the profiles'
residuals) and the policy's seed, all from (seed, i) alone: two fleets meet the same worlds (common random
numbers), so their difference is the fleets' and not the draw's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, get_args

import numpy as np

from controlplane.perfmodel.interval import draw_profile
from controlplane.perfmodel.profile import Profile
from controlplane.placement.lengths import LengthTable
from controlplane.types import Slo
from controlplane.workload import Workload
from dataplane.simulated.cluster import Outcome, simulate
from tokenfleet.planning.bootstrap import next_like
from tokenfleet.planning.drift import drift_of
from tokenfleet.planning.fleet import Fleet

AS_IT_IS = 0
Doubted = Literal["arrivals", "drift", "coefficients"]
EVERYTHING: frozenset[Doubted] = frozenset(get_args(Doubted))


@dataclass(frozen=True)
class Worlds:
    """The workload, the predictor learned from it, and the targets; replays fleets under a policy."""

    workload: Workload
    slo: Slo
    policy: str
    seed: int
    predictor: LengthTable
    told: Callable[[], None] = field(default=lambda: None)  # called after each simulation
    drifts: bool = False

    def replay(
        self,
        fleet: Fleet,
        world: int = AS_IT_IS,
        *,
        workload: Workload | None = None,
        max_misses: int | None = None,
        doubted: frozenset[Doubted] = EVERYTHING,
    ) -> Outcome:
        """What becomes of the requests, or of `workload` instead, on `fleet` in a world.

        Stopped once more than `max_misses` requests have missed, where only a yes or no is wanted.
        `doubted`: what is drawn there, the rest being as it was.
        """
        requests = self.workload if workload is None else workload
        as_really: Callable[[Profile], Profile] | None = None
        if world != AS_IT_IS:
            as_it_was = requests
            if "arrivals" in doubted:
                requests = next_like(requests, np.random.default_rng([self.seed, world, 1]))
            if self.drifts and "drift" in doubted:
                rng = np.random.default_rng([self.seed, world, 3])
                requests = drift_of(as_it_was).drawn(requests, rng)
            if "coefficients" in doubted:

                def as_really(profile: Profile) -> Profile:
                    # Each kind of worker gets the same standard errors, scaled by its own residuals.
                    return draw_profile(profile, np.random.default_rng([self.seed, world, 2]))

        outcome = simulate(
            requests,
            fleet.specs(as_really),
            self.slo,
            self.policy,
            predictor=self.predictor,
            seed=self.seed + world,
            max_misses=max_misses,
        )
        self.told()
        return outcome


def missed(outcome: Outcome) -> int:
    """Requests outside their targets, unfinished ones included."""
    return len(outcome.workload) - int(outcome.met.sum())
