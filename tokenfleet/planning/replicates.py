"""Bootstrap replicates: replays of the trace with arrivals resampled and coefficients drawn.

Replicate 0 is the trace as it is on workers as their profiles say. Replicate i > 0 draws its arrivals
(bootstrap), where it is asked for how far the traffic's level has drifted, the workers' coefficients (from
the profiles' residuals) and the policy's seed, all from (seed, i) alone: two fleets meet the same replicates
(common random numbers), so their difference is the fleets' and not the draw's.

**Arrivals** are drawn as `draws` says: sessions whole, where the trace knows them.

**Drift** is how far the traffic's level may have gone by the time a plan is used: other rates, longer
prompts, other outputs. Of each of `SPANS` equal spans of the trace (more, where those would be longer than an
hour), x = (log requests, log mean prompt, log mean output). A trend is the trace's shape, which a plan keeps;
what departs from it shows in the second differences d = x₋ - 2x + x₊. As much as a level changes from one
span to the next, it is taken to change from the trace to what is planned for:

    drift ~ N(0, S),   S seen = E[d dᵀ] / 3

That is the law of levels whose changes are of one size at every distance (1/f). It lies between levels that
scatter about a mean, whose stretches differ the less the longer they are, and random walks, whose changes
grow in variance with the distance. ServeGen's m-mid, in its first week, is about so: from half an hour to the
next its rate differs by 0.18 in the logarithm, from one, three and six hours to the next by 0.18 to 0.21
(`experiments/planning/drift_settings.py`).

A span's level also scatters because its requests are only so many, or come in bursts. That is the bootstrap's
part, and shows in spans of a fifth as well: a fifth of their E[d dᵀ] is taken off. That holds while a fifth
of a span sees some bursts; where it sees fewer than `FEWEST_BURSTS`, nothing is seen of drift. What is left
is known from a few spans only, and half an hour that happened to be calm says little about the next. So it is
joined with what is usual, `USUAL` for the rate and nothing for lengths, as an inverse Wishart law of `WEIGHT`
degrees of freedom would be; a draw of drift then has Student's t distribution:

    S = (n · S seen + WEIGHT · USUAL²) / (n + WEIGHT),   n + WEIGHT degrees of freedom

n is less than the number of second differences, because neighbours share spans: `INDEPENDENT` of them count.
A long trace outweighs what is usual.

A swing within the trace that its spans are too coarse to follow is taken for drift, too, and a plan is hedged
even for traffic that never changes; for traffic that keeps the trace's shape drift is better left out (`plan
--drift` asks for it).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from controlplane.perfmodel.profile import Profile, draw_profile
from controlplane.placement.lengths import LengthTable
from controlplane.placement.policies import PlacementSettings
from controlplane.prefixes import Prefixes
from controlplane.types import Slo, SloClass
from controlplane.workload import INSTANT_S, Workload
from dataplane.simulated.run import attained_by_class, joint, share_of
from dataplane.simulated.simulate import Outcome, simulate
from tokenfleet.planning.fleet import Fleet
from tokenfleet.planning.traffic.draws import Units, busier, next_draw, next_like, units_of
from tokenfleet.planning.traffic.sample import CURVE, Sampler

AS_IT_IS = 0
Doubted = Literal["arrivals", "drift", "coefficients"]
EVERYTHING: frozenset[Doubted] = frozenset(get_args(Doubted))


@dataclass(frozen=True)
class Replicates:
    """The workload, the predictor learned from it, and the targets; replays fleets under a policy."""

    workload: Workload
    slo: Slo
    policy: str
    seed: int
    predictor: LengthTable
    told: Callable[[], None] = field(default=lambda: None)  # called after each simulation
    drifts: bool = False
    settings: PlacementSettings = PlacementSettings()  # noqa: RUF009 - frozen
    session_s: float | None = None  # target of whole sessions
    agents: int | None = None  # so many sessions run at once
    known: Units | None = None  # of the workload; found where they are not given
    classes: tuple[SloClass, ...] = ()  # where the workload has several; `slo` is the tightest's then
    coarse: Units | None = None  # and with its prefixes in large blocks, once `roughly` was asked for
    sampler: Sampler | None = None  # of a workload too long to be replayed whole each time
    # The share that was missed in each replicate by the fleet that met it last.
    hardness: dict[int, float] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.known is None or self.known.workload is not self.workload:
            object.__setattr__(self, "known", units_of(self.workload))

    @cached_property
    def outline(self) -> Workload:
        """The workload, thinned where it is long: for bounds and means, which need no neighbours."""
        return self.workload.thinned(CURVE)

    @cached_property
    def drift(self) -> Drift:
        """How far the workload's levels may go."""
        return drift_of(self.workload)

    def roughly(self) -> Replicates:
        """The same with prefixes in large blocks, of which replays take about half of the time.

        Blocks come and go together, so that hits differ by a point or so: for ratios and scatter, not for
        counts. Itself where blocks are large already.
        """
        prefixes = self.workload.prefixes
        times = 1 if prefixes is None else larger_blocks(self.workload, prefixes)
        if prefixes is None or times == 1:
            return self
        if self.coarse is None:
            workload = replace(self.workload, prefixes=prefixes.coarser(times))
            object.__setattr__(self, "coarse", units_of(workload))
        assert self.coarse is not None
        return replace(self, workload=self.coarse.workload, known=self.coarse)

    @property
    def slos(self) -> tuple[Slo, ...]:
        """The targets of each class."""
        return tuple(one.slo for one in self.classes) or (self.slo,)

    @property
    def asked(self) -> tuple[float, ...]:
        """The attainment asked of each class, where there are several."""
        return tuple(one.attainment for one in self.classes)

    @property
    def counts(self) -> list[int]:
        """The requests of each class, where there are several."""
        return [int((self.workload.slo_class == c).sum()) for c in range(len(self.classes))]

    def may_miss(self, attainment: float) -> float:
        """The share of the requests that may miss at most; with several classes what each may, summed."""
        if not self.classes:
            return 1.0 - attainment
        return float((np.array(self.counts) * (1.0 - np.array(self.asked))).sum() / len(self.workload))

    def targets_s(self, workload: Workload) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The TTFT and TPOT targets of each request, seconds."""
        ttft_s, tpot_s = (
            np.array([getattr(slo, name) for slo in self.slos]) for name in ("ttft_s", "tpot_s")
        )
        of = workload.slo_class if self.classes else np.zeros(len(workload), np.int64)
        return ttft_s[of], tpot_s[of]

    def eased(self, ttft: float, tpot: float) -> Replicates:
        """The same with targets so many times as loose, those of every class."""
        classes = tuple(replace(c, slo=Slo(c.slo.ttft_s * ttft, c.slo.tpot_s * tpot)) for c in self.classes)
        return replace(self, slo=Slo(self.slo.ttft_s * ttft, self.slo.tpot_s * tpot), classes=classes)

    def attained(self, met: NDArray[np.bool_], workload: Workload) -> float:
        """The attainment of requests of which these are met."""
        if self.asked:
            return joint(attained_by_class(met, workload), self.asked)
        return share_of(met, workload)

    @property
    def units(self) -> Units:
        """What a draw keeps whole."""
        assert self.known is not None
        return self.known

    def replay(
        self,
        fleet: Fleet,
        replicate: int = AS_IT_IS,
        *,
        workload: Workload | None = None,
        growth: float = 1.0,
        max_misses: int | None = None,
        doubted: frozenset[Doubted] = EVERYTHING,
    ) -> Outcome:
        """The outcome of the requests, or of `workload` instead, on `fleet` in a replicate.

        `growth`: so many times the traffic, and where agents run the sessions so many times the agents.
        Stopped once more than `max_misses` requests have missed, where only a yes or no is wanted.
        `doubted`: what is drawn there, the rest being as it was.
        """
        sampled = workload is None and self.sampler is not None
        if workload is None:
            workload = self.workload if growth == 1.0 or sampled else self.units.busier(growth)
        requests = self.requests(replicate, workload, doubted)
        if sampled and growth != 1.0:
            requests = requests.scaled(growth)
        unsure = replicate != AS_IT_IS and "coefficients" in doubted
        outcome = simulate(
            requests,
            fleet.specs((lambda profile: self.profile(replicate, profile)) if unsure else None),
            self.slos,
            self.policy,
            settings=self.settings,
            predictor=self.predictor,
            seed=self.seed + replicate,
            max_misses=max_misses,
            agents=None if self.agents is None else max(round(self.agents * growth), 1),
        )
        self.told()
        return replace(outcome, session_target_s=self.session_s, asked=self.asked)

    def requests(
        self, replicate: int, workload: Workload, doubted: frozenset[Doubted] = EVERYTHING
    ) -> Workload:
        """`workload` as it comes in a replicate; a sample of it where it is sampled."""
        drawn = workload
        if self.sampler is not None and workload is self.workload:
            anew = replicate != AS_IT_IS and "arrivals" in doubted
            drawn = (self.sampler.sample(replicate) if anew else self.sampler.as_it_is).workload
        elif replicate != AS_IT_IS and "arrivals" in doubted:
            units = self.units if workload is self.workload else units_of(workload)
            drawn = next_like(units, np.random.default_rng([self.seed, replicate, 1]))
        if replicate != AS_IT_IS and "drift" in doubted and self.drifts:
            drift = self.drift if workload is self.workload else drift_of(workload)
            drawn = drift.drawn(drawn, np.random.default_rng([self.seed, replicate, 3]))
        return drawn

    def count(self, replicate: int) -> int:
        """How many requests come in a replicate."""
        if self.drifts:
            return len(self.requests(replicate, self.workload))
        draw = next_draw(self.units, np.random.default_rng([self.seed, replicate, 1]))
        return int(np.diff(self.units.offsets)[draw.unit].sum())

    def hardest_first(self, numbers: Sequence[int]) -> list[int]:
        """Replicates by what was missed in them; in their order where units are single requests."""
        if self.units.is_plain:
            return list(numbers)
        return sorted(numbers, key=lambda i: (-self.hardness.get(i, 0.0), i))

    def profile(self, replicate: int, profile: Profile) -> Profile:
        """`profile` as its workers are in a replicate; every type has the same standard errors there."""
        if replicate == AS_IT_IS:
            return profile
        return draw_profile(profile, np.random.default_rng([self.seed, replicate, 2]))


LARGE = 512  # tokens of a block at most,
OF_PROMPT = 128.0  # and of the mean prompt so small a part


def larger_blocks(workload: Workload, prefixes: Prefixes) -> int:
    """How many blocks may be taken together, a power of two."""
    most = min(LARGE, float(workload.prompt_tokens.mean()) / OF_PROMPT) / prefixes.block_tokens
    return 1 << int(math.log2(most)) if most >= 2.0 else 1


def missed(outcome: Outcome) -> int:
    """Requests outside their targets, unfinished ones included; as many more as sessions miss theirs.

    Of several classes as many as the worst of them misses, at the strictest one's scale.
    """
    if outcome.workload.weight is not None:
        return round((1.0 - outcome.attainment) * outcome.workload.requests)
    if outcome.session_target_s is None and not outcome.asked:
        return len(outcome.workload) - int(outcome.met.sum())
    return math.ceil((1.0 - outcome.attainment) * len(outcome.workload) - 1e-6)


SPANS = 24
LONGEST_S = 3600.0
USUAL = 0.15  # of log rate: m-mid's 0.18 with its outliers, 0.12 by its middle 68 %
WEIGHT = 8.0
INDEPENDENT = 0.6  # between 0.5, where levels scatter about a mean, and 0.7, where they walk
PARTS = 5  # of a span: what they differ by is chance
FEWEST = 5.0  # requests of a part, in the mean; of fewer nothing could be told
FEWEST_BURSTS = 2.0  # and bursts of it: the logarithm of a count of one burst or none says nothing of a level


@dataclass(frozen=True)
class Drift:
    """The drift of levels: `spread`, [3, 3], a root of S for (rate, prompts, outputs), and its certainty."""

    spread: NDArray[np.float64]
    freedom: float  # degrees of it; what Student's t is asked for

    def drawn(self, workload: Workload, rng: np.random.Generator) -> Workload:
        """The same requests at levels they might have gone to; none longer than the longest there was."""
        normal, chance = rng.standard_normal(3), rng.chisquare(self.freedom) / self.freedom
        rate, prompts, outputs = np.exp(self.spread @ normal / np.sqrt(chance))
        drawn = busier(workload, float(rate)).longer(float(prompts), float(outputs))
        return replace(
            drawn,
            prompt_tokens=np.minimum(drawn.prompt_tokens, workload.prompt_tokens.max()),
            output_tokens=np.minimum(drawn.output_tokens, workload.output_tokens.max()),
        )


def drift_of(
    workload: Workload, fewest_spans: int = SPANS, usual: float = USUAL, weight: float = WEIGHT
) -> Drift:
    """The trace's drift joined with the usual one, which weighs so many degrees of freedom."""
    seen, independent = drift_seen(workload, fewest_spans)
    freedom = independent + weight
    return Drift(_root((independent * seen + weight * np.diag([usual**2, 0.0, 0.0])) / freedom), freedom)


def drift_seen(workload: Workload, fewest_spans: int = SPANS) -> tuple[NDArray[np.float64], float]:
    """The drift of the trace alone: S, and its degrees of freedom; 0 for a trace that is too short."""
    spans = max(fewest_spans, round(workload.duration_s / LONGEST_S))
    if workload.duration_s <= INSTANT_S or len(workload) < FEWEST * PARTS * spans:
        return np.zeros((3, 3)), 0.0
    if len(workload) < FEWEST_BURSTS * PARTS * spans * burst_requests(workload, spans):
        return np.zeros((3, 3)), 0.0
    root = _root((_changes(workload, spans) - _changes(workload, PARTS * spans) / PARTS) / 3.0)
    return root @ root.T, INDEPENDENT * (spans - 2)


def burst_requests(workload: Workload, spans: int) -> float:
    """Requests that come together: the variance of counts in parts of spans over Poisson's, at least 1.

    From second differences inside of each span, E[(n₋ - 2n + n₊)²] / 6, so that levels do not count.
    """
    counts, _ = np.histogram(workload.arrival_s - workload.arrival_s[0], PARTS * spans)
    departs = np.diff(counts.reshape(spans, PARTS).astype(float), n=2, axis=1)
    return max(float((departs**2).mean()) / 6.0 / float(counts.mean()), 1.0)


def _root(matrix: NDArray[np.float64]) -> NDArray[np.float64]:
    """A root of a symmetric matrix; a difference of estimates may have parts below nothing, left out."""
    value, axis = np.linalg.eigh(matrix)
    return np.asarray(axis * np.sqrt(np.maximum(value, 0.0)))


def _changes(workload: Workload, spans: int) -> NDArray[np.float64]:
    """E[d dᵀ] over neighbouring spans, shape [3, 3]; a span without requests counts as half a one."""
    arrival_s = workload.arrival_s - workload.arrival_s[0]
    edges = np.linspace(0.0, workload.duration_s, spans + 1)
    cut = np.append(np.searchsorted(arrival_s, edges[:-1]), len(workload))
    count = np.maximum(np.diff(cut), 0.5)
    columns = (workload.prompt_tokens, workload.output_tokens)
    sums = np.array([[of[a:b].sum() for a, b in pairwise(cut)] for of in columns], float)
    overall = np.array([of.mean() for of in columns])
    means = np.where(sums > 0, sums / count, overall[:, None])
    departs = np.diff(np.log(np.vstack((count, means))), n=2, axis=1)
    return np.asarray(departs @ departs.T / departs.shape[1])
