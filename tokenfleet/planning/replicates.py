"""Bootstrap replicates: replays of the trace with arrivals resampled and coefficients drawn.

Replicate 0 is the trace as it is on workers as their profiles say. Replicate i > 0 draws its arrivals
(bootstrap), how far the traffic's levels have drifted unless it is steady, the workers' coefficients (from
the profiles' residuals) and the policy's seed, all from (seed, i) alone: two fleets meet the same replicates
(common random numbers), so their difference is the fleets' and not the draw's.

**Arrivals** are drawn as `draws` says: sessions whole, where the trace knows them.

**Drift** of rate and lengths is drawn as `drift` says: where the trace shows that they change, or is too
short to show that they do not.

**A replay is a function** of requests, workers, targets, policy, seed and draw, so what was simulated once is
remembered: of a plan the replays of the trace as it is, which its parts ask for again; of a family of
what-ifs all.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from threading import Lock
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from controlplane.perfmodel.profile import Profile, draw_profile
from controlplane.placement.lengths import LengthTable
from controlplane.placement.policies import PlacementSettings
from controlplane.prefixes import Prefixes
from controlplane.types import Slo, SloClass
from controlplane.workload import Workload
from dataplane.simulated.outcome import attained_by_class, joint, share_of
from dataplane.simulated.simulate import Outcome, simulate
from tokenfleet.planning.fleet import Fleet
from tokenfleet.planning.traffic.draws import Units, next_like, time_scale, units_of
from tokenfleet.planning.traffic.drift import Drift, drift_of
from tokenfleet.planning.traffic.sample import CURVE, ROUGHLY, Sampler

AS_IT_IS = 0
LONGEST_WAIT_S = 120.0  # a window shows what waits no longer: it is judged by itself, whatever comes after it
Doubted = Literal["arrivals", "drift", "coefficients"]
EVERYTHING: frozenset[Doubted] = frozenset(get_args(Doubted))
MOST_BYTES = 300_000_000  # of outcomes kept by one process; the least recently used go first


def workload_digest(workload: Workload) -> str:
    """A digest that tells workloads apart by content."""
    digest = hashlib.sha256(repr(workload.slo_classes).encode())
    for name in ("arrival_s", "prompt_tokens", "output_tokens", "priority", "slo_class"):
        digest.update(getattr(workload, name).tobytes())
    digest.update(b"" if workload.weight is None else workload.weight.tobytes())
    for shared in (workload.prefixes, workload.sessions):
        digest.update(b"none" if shared is None else b"known")
        for column in vars(shared).values() if shared is not None else ():
            digest.update(column.tobytes() if isinstance(column, np.ndarray) else repr(column).encode())
    return digest.hexdigest()


class Memory:
    """Outcomes by what they are a function of. Used from several threads.

    `draws`: those of replicates, other rates and parts of the workload too, each with requests of its own.
    """

    def __init__(self, most_bytes: int = MOST_BYTES, draws: bool = True) -> None:
        self._kept: OrderedDict[tuple[Any, ...], tuple[Outcome, int]] = OrderedDict()
        self._named: dict[int, tuple[Workload, str]] = {}
        self._most, self._bytes, self.draws = most_bytes, 0, draws
        self._lock = Lock()
        self.simulated = 0
        self.recalled = 0

    def replicates(
        self,
        workload: Workload,
        slo: Slo,
        policy: str,
        seed: int,
        predictor: LengthTable,
        told: Callable[[], None],
    ) -> Replicates:
        """Replicates whose replays are looked up here before they are simulated."""
        return Replicates(workload, slo, policy, seed, predictor, told, memory=self)

    def name_of(self, workload: Workload) -> str:
        """The digest of a workload, made once of each; it is kept alive for that."""
        known = self._named.get(id(workload))
        if known is None:
            known = self._named[id(workload)] = workload, workload_digest(workload)
        return known[1]

    def get(
        self, key: tuple[Any, ...], most: float | None, own: Workload, simulate: Callable[[], Outcome]
    ) -> Outcome:
        """The outcome of `key` when stopped past this share of misses; `simulate` makes it where it is new.

        A run that went to its end answers every question that it would not have been stopped by. `own`: the
        workload that an outcome takes no memory for.
        """
        whole = (*key, None)
        with self._lock:
            found = self._kept.get((*key, most))
            if found is None and (ended := self._kept.get(whole)) is not None:
                within = most is None or ended[0].misses <= most * ended[0].workload.requests
                found = ended if within else None
            if found is not None:
                self.recalled += 1
                self._kept.move_to_end(whole if found[0].complete else (*key, most))
                return found[0]
        outcome = simulate()
        with self._lock:
            self.simulated += 1
            self._keep(whole if outcome.complete else (*key, most), outcome, own)
        return outcome

    def _keep(self, key: tuple[Any, ...], outcome: Outcome, own: Workload) -> None:
        if key in self._kept:
            return
        size = size_of(outcome, own)
        self._kept[key] = outcome, size
        self._bytes += size
        while self._bytes > self._most and len(self._kept) > 1:
            _, (_, oldest) = self._kept.popitem(last=False)
            self._bytes -= oldest


def size_of(outcome: Outcome, own: Workload) -> int:
    """Bytes of its columns, those of its workload included where that is not `own`."""
    workload = outcome.workload
    parts = (outcome,) if workload is own else (outcome, workload, workload.prefixes, workload.sessions)
    columns = [v for part in parts if part is not None for v in vars(part).values()]
    return sum(column.nbytes for column in columns if isinstance(column, np.ndarray))


@dataclass(frozen=True)
class Replicates:
    """The workload, the predictor learned from it, and the targets; replays fleets under a policy."""

    workload: Workload
    slo: Slo
    policy: str
    seed: int
    predictor: LengthTable
    told: Callable[[], None] = field(default=lambda: None)  # called after each simulation
    settings: PlacementSettings = PlacementSettings()  # noqa: RUF009 - frozen
    session_s: float | None = None  # target of whole sessions
    agents: int | None = None  # so many sessions run at once
    known: Units | None = None  # of the workload; found where they are not given
    classes: tuple[SloClass, ...] = ()  # where the workload has several; `slo` is the tightest's then
    coarse: Units | None = None  # and with its prefixes in large blocks, once `roughly` was asked for
    sampler: Sampler | None = None  # of a workload too long to be replayed whole each time
    # The share that was missed in each replicate by the fleet that met it last.
    hardness: dict[int, float] = field(default_factory=dict, compare=False)
    memory: Memory | None = field(default=None, compare=False)  # of replays; None: each is simulated

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
        """The same with prefixes in large blocks, or by a smaller sample: for ratios and scatter, not counts.

        Blocks come and go together, so that hits differ by a point or so, in about half of the time. Itself
        where blocks are large already.
        """
        if self.sampler is not None:
            return replace(self, sampler=replace(self.sampler, requests=ROUGHLY))
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
    def is_slow(self) -> bool:
        """Whether replays take so long that one is broken off as soon as it is lost."""
        return not self.units.is_plain or self.sampler is not None

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
        most_missed: float | None = None,
        doubted: frozenset[Doubted] = EVERYTHING,
    ) -> Outcome:
        """The outcome of the requests, or of `workload` instead, on `fleet` in a replicate.

        `growth`: so many times the traffic, and where agents run the sessions so many times the agents.
        Stopped once more than this share of the requests has missed, where only a yes or no is wanted.
        `doubted`: what is drawn there, the rest being as it was.
        """
        memory, is_drawn = self.memory, (replicate, growth, workload) != (AS_IT_IS, 1.0, None)

        def simulated() -> Outcome:
            return self._simulated(fleet, replicate, workload, growth, most_missed, doubted)

        if memory is None or (is_drawn and not memory.draws):
            return simulated()
        groups = tuple(
            (repr(g.worker_type.profile), repr(g.worker_type.kv_link), g.role, g.workers)
            for g in fleet.groups
        )
        sampler = self.sampler
        requests = (
            memory.name_of(self.workload),
            None if workload is None else workload_digest(workload),
            sampler and (sampler.may_miss, sampler.tpot_s, sampler.seed, sampler.requests),
        )
        targets = self.slo, self.classes, self.session_s
        asked = *targets, self.agents, growth, self.policy, self.settings, self.seed
        drawn = replicate, frozenset() if replicate == AS_IT_IS else doubted
        return memory.get((*requests, *asked, groups, *drawn), most_missed, self.workload, simulated)

    def _simulated(
        self,
        fleet: Fleet,
        replicate: int,
        workload: Workload | None,
        growth: float,
        most_missed: float | None,
        doubted: frozenset[Doubted],
    ) -> Outcome:
        sampled = workload is None and self.sampler is not None
        faster = self._faster(replicate, growth if workload is None else 1.0, doubted)
        if workload is None:
            workload = self.workload if growth == 1.0 or sampled else self.units.busier(growth)
        requests = self.requests(replicate, workload, doubted)
        if sampled and growth != 1.0:
            requests = requests.scaled(growth)
        unsure = replicate != AS_IT_IS and "coefficients" in doubted
        outcome = simulate(
            requests,
            fleet.specs((lambda profile: self.profile(replicate, profile)) if unsure else None),
            self._slos(faster),
            self.policy,
            settings=self.settings,
            predictor=self.predictor,
            seed=self.seed + replicate,
            max_misses=None if most_missed is None else int(most_missed * requests.requests + 1e-9),
            agents=None if self.agents is None else max(round(self.agents * growth), 1),
        )
        self.told()
        return replace(outcome, session_target_s=self.session_s, asked=self.asked)

    def _faster(self, replicate: int, growth: float, doubted: frozenset[Doubted]) -> float:
        """So many seconds of the trace pass in one of the replicate's: more traffic is a faster trace."""
        rate = growth
        if replicate != AS_IT_IS and "drift" in doubted:
            rate *= self.drift.levels(self._drifts(replicate))[0]
        return time_scale(self.workload, rate)

    def _drifts(self, replicate: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, replicate, 3])

    def _slos(self, faster: float) -> tuple[Slo, ...]:
        """The targets of each class where time passes so many times faster.

        What may wait for hours waits for as many of the trace's own, or a busier day would be a shorter one,
        most of it within reach.
        """
        return tuple(
            replace(slo, ttft_s=slo.ttft_s / (faster if slo.ttft_s > LONGEST_WAIT_S else 1.0))
            for slo in self.slos
        )

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
        if replicate != AS_IT_IS and "drift" in doubted:
            drawn = self.drift.drawn(drawn, self._drifts(replicate))
        return drawn

    def hardest_first(self, numbers: Sequence[int]) -> list[int]:
        """Replicates by what was missed in them; in their order where all are replayed to their end."""
        if not self.is_slow:
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
