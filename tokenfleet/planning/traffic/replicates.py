"""The recorded traffic, and resampled traces: the trace with arrivals and coefficients drawn.

Number 0 is the recorded trace on workers as their profiles say. Number i > 0 is a resampled trace, which
draws from (seed, i) alone:

* its arrivals (bootstrap);
* how far the traffic's levels have drifted, unless it is steady;
* the workers' step times and first tokens (`perfmodel.uncertainty`);
* the policy's seed.

Two fleets meet the same resampled traces (common random numbers), so their difference is the fleets' and not
the draw's.

**Arrivals** are drawn as `draws` says: sessions whole, where the trace knows them.

**Drift** of rate and lengths is drawn as `drift` says: where the trace shows that they change, or is too
short to show that they do not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.uncertainty import draw_profile
from controlplane.prefixes import Prefixes
from controlplane.workload import Workload
from tokenfleet.planning.traffic.draws import Units, next_like, time_scale, units_of
from tokenfleet.planning.traffic.drift import Drift, assumed_drift, drift_of
from tokenfleet.planning.traffic.sample import CURVE, ROUGHLY, Sampler
from tokenfleet.traces.shape import Phase, phases_of

AS_IT_IS = 0
Doubted = Literal["arrivals", "drift", "coefficients"]
EVERYTHING: frozenset[Doubted] = frozenset(get_args(Doubted))


@dataclass(frozen=True)
class ResampledTraffic:
    """A workload and its resampled traces.

    `sampler`: of a workload that is too long to be replayed whole each time. `levels`: the uncertainty of
    rate, prompts and outputs where the workload was drawn, not recorded.
    """

    workload: Workload
    seed: int = 0
    sampler: Sampler | None = None
    levels: tuple[float, float, float] | None = None

    @cached_property
    def units(self) -> Units:
        """What a draw keeps whole."""
        return units_of(self.workload)

    @cached_property
    def outline(self) -> Workload:
        """The workload, thinned where it is long: for bounds and means, which need no neighbours."""
        return self.workload.thinned(CURVE)

    @cached_property
    def phases(self) -> tuple[Phase, ...]:
        """The workload's phases, one where its rate is steady."""
        return phases_of(self.workload)

    @cached_property
    def drift(self) -> Drift:
        """How far the workload's levels may go."""
        return drift_of(self.workload) if self.levels is None else assumed_drift(self.levels)

    @property
    def is_slow(self) -> bool:
        """Whether replays take so long that one stops once it is lost."""
        return self.sampler is not None or not self.units.is_plain

    @cached_property
    def rough(self) -> ResampledTraffic:
        """The same with prefixes in large blocks, or by a smaller sample: for ratios and scatter, not counts.

        Blocks come and go together, so hits differ by a point or so. Replays take about half of the time.
        Itself where blocks are large already.
        """
        if self.sampler is not None:
            return replace(self, sampler=replace(self.sampler, requests=ROUGHLY))
        prefixes = self.workload.prefixes
        times = 1 if prefixes is None else larger_blocks(self.workload, prefixes)
        if prefixes is None or times == 1:
            return self
        return replace(self, workload=replace(self.workload, prefixes=prefixes.coarser(times)))

    def grown(self, growth: float) -> Workload:
        """The workload with `growth` times its traffic; of a sampled one its sample is scaled instead."""
        return self.workload if growth == 1.0 or self.sampler is not None else self.units.busier(growth)

    def requests(
        self, replicate: int, workload: Workload, doubted: frozenset[Doubted] = EVERYTHING
    ) -> Workload:
        """`workload` as it comes in a resampled trace; a sample of it where it is sampled."""
        drawn = workload
        if self.sampler is not None and workload is self.workload:
            anew = replicate != AS_IT_IS and "arrivals" in doubted
            drawn = (self.sampler.sample(replicate) if anew else self.sampler.as_it_is).workload
        elif replicate != AS_IT_IS and "arrivals" in doubted:
            units = self.units if workload is self.workload else units_of(workload)
            drawn = next_like(units, np.random.default_rng([self.seed, replicate, 1]))
        if replicate != AS_IT_IS and "drift" in doubted:
            drawn = self.drift.drawn(drawn, self._drifts(replicate))
        return drawn

    def faster(self, replicate: int, growth: float, doubted: frozenset[Doubted]) -> float:
        """Seconds of the trace in one second of the resampled trace: more traffic is a faster trace."""
        rate = growth
        if replicate != AS_IT_IS and "drift" in doubted:
            rate *= self.drift.levels(self._drifts(replicate))[0]
        return time_scale(self.workload, rate)

    def profile(self, replicate: int, profile: Profile) -> Profile:
        """`profile` as drawn for a resampled trace; every type is off by as many standard errors there."""
        if replicate == AS_IT_IS:
            return profile
        return draw_profile(profile, np.random.default_rng([self.seed, replicate, 2]))

    def _drifts(self, replicate: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, replicate, 3])


LARGE = 512  # tokens of a block at most,
OF_PROMPT = 128.0  # and of the mean prompt so small a part


def larger_blocks(workload: Workload, prefixes: Prefixes) -> int:
    """How many blocks may be taken together, a power of two."""
    most = min(LARGE, float(workload.prompt_tokens.mean()) / OF_PROMPT) / prefixes.block_tokens
    return 1 << int(math.log2(most)) if most >= 2.0 else 1
