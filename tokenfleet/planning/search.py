"""The search for a fleet: the request, its traffic and terms, and the replays that answer it.

**A replay is a function** of requests, workers, terms, seed and draw, so its outcome is remembered. A plan
remembers its replays of the recorded trace, which several of its parts ask for. A family of what-ifs
remembers all replays.
"""

from __future__ import annotations

import hashlib
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from types import MappingProxyType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controlplane.placement.lengths import LengthTable
from controlplane.placement.policies import PlacementSettings
from controlplane.types import Slo, SloClass
from controlplane.worker_type import WorkerType
from controlplane.workload import Workload
from dataplane.simulated.outcome import attained_by_class, joint, share_of
from dataplane.simulated.simulate import Outcome, simulate
from tokenfleet.planning.fleet import Fleet
from tokenfleet.planning.request import PlanRequest, placement_settings
from tokenfleet.planning.threads import Threads, Watch
from tokenfleet.planning.traffic.replicates import AS_IT_IS, EVERYTHING, Doubted, ResampledTraffic

LONGEST_WAIT_S = 120.0  # a window shows what waits no longer: it is judged by itself, whatever comes after it
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


class Replayer:
    """Outcomes, kept by what they are a function of. Used from several threads.

    `draws`: also keep outcomes of resampled traces, other rates and parts of the workload. Each of these has
    requests of its own.
    """

    def __init__(self, most_bytes: int = MOST_BYTES, draws: bool = True) -> None:
        self._kept: OrderedDict[tuple[Any, ...], tuple[Outcome, int]] = OrderedDict()
        self._named: dict[int, tuple[Workload, str]] = {}
        self._most, self._bytes, self.draws = most_bytes, 0, draws
        self._lock = Lock()
        self.simulated = 0
        self.recalled = 0

    def name_of(self, workload: Workload) -> str:
        """The digest of a workload, made once for each; its id is the key, so the workload is kept alive."""
        known = self._named.get(id(workload))
        if known is None:
            known = self._named[id(workload)] = workload, workload_digest(workload)
        return known[1]

    def get(
        self, key: tuple[Any, ...], most: float | None, own: Workload, simulate: Callable[[], Outcome]
    ) -> Outcome:
        """The outcome of `key`, stopped past `most`, a share of misses; `simulate` makes it where it is new.

        A run that went to its end answers every request that would not have stopped it. `own`: the workload
        that counts as no memory of an outcome.
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
class ServingTerms:
    """How requests are placed and judged.

    Searches place them without moves; `planning.moves` judges the answer with them.
    `classes`: set where the workload has several; `slo` is then the tightest's. `session_s`: the target of
    whole sessions. `agents`: the number of concurrent sessions.
    """

    slo: Slo
    classes: tuple[SloClass, ...]
    session_s: float | None
    agents: int | None
    policy: str
    settings: PlacementSettings

    @classmethod
    def of(cls, request: PlanRequest, classes: Sequence[SloClass] = ()) -> ServingTerms:
        """The terms of a request about a workload with these classes."""
        return cls(
            request.slo,
            tuple(classes) if len(classes) > 1 else (),
            request.session_s,
            request.agents,
            request.placement,
            placement_settings(request),
        )

    @property
    def slos(self) -> tuple[Slo, ...]:
        """The targets of each class."""
        return tuple(one.slo for one in self.classes) or (self.slo,)

    @property
    def asked(self) -> tuple[float, ...]:
        """The attainment asked of each class, where there are several."""
        return tuple(one.attainment for one in self.classes)

    def targets_s(self, workload: Workload) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """The TTFT and TPOT targets of each request, seconds."""
        ttft_s, tpot_s = (
            np.array([getattr(slo, name) for slo in self.slos]) for name in ("ttft_s", "tpot_s")
        )
        of = workload.slo_class if self.classes else np.zeros(len(workload), np.int64)
        return ttft_s[of], tpot_s[of]

    def attained(self, met: NDArray[np.bool_], workload: Workload) -> float:
        """The attainment of a workload whose requests in `met` are within their targets."""
        if self.asked:
            return joint(attained_by_class(met, workload), self.asked)
        return share_of(met, workload)

    def slos_at(self, faster: float) -> tuple[Slo, ...]:
        """The targets of each class where time passes `faster` times as fast.

        A TTFT target over `LONGEST_WAIT_S` counts the trace's own time, so it is divided by `faster`.
        Otherwise a busier day would be a shorter one, most of it within reach.
        """
        return tuple(
            replace(slo, ttft_s=slo.ttft_s / (faster if slo.ttft_s > LONGEST_WAIT_S else 1.0))
            for slo in self.slos
        )


class Hardest:
    """The share missed in each resampled trace: by the last fleet replayed on it, or the most by any."""

    def __init__(self, missed: Mapping[int, float] = MappingProxyType({})) -> None:
        self._missed = dict(missed)

    def __bool__(self) -> bool:
        return bool(self._missed)

    def note(self, replicate: int, share: float, *, most: bool = False) -> None:
        """A fleet missed this share; `most`: a fleet that missed more is still what counts."""
        self._missed[replicate] = max(share, self._missed.get(replicate, 0.0)) if most else share

    def first(self, numbers: Sequence[int]) -> list[int]:
        """The numbers of these resampled traces, the hardest first."""
        return sorted(numbers, key=lambda i: (-self._missed.get(i, 0.0), i))


@dataclass(frozen=True)
class Search:
    """One request about one traffic; plans, sizings and explanations search for fleets with it."""

    request: PlanRequest
    terms: ServingTerms
    traffic: ResampledTraffic
    types: tuple[WorkerType, ...]
    threads: Threads
    watch: Watch
    replayer: Replayer
    predictor: LengthTable
    hardest: Hardest = field(default_factory=Hardest, compare=False)

    @classmethod
    def of(
        cls,
        request: PlanRequest,
        workload: Workload,
        types: Sequence[WorkerType],
        threads: Threads,
        watch: Watch | None = None,
        classes: Sequence[SloClass] = (),
        replayer: Replayer | None = None,
    ) -> Search:
        """The search that a request opens; the predictor learns from the workload."""
        traffic, terms = ResampledTraffic(workload, request.seed), ServingTerms.of(request, classes)
        outline, replayer = traffic.outline, replayer or Replayer(draws=False)
        predictor = LengthTable.from_history(outline.prompt_tokens, outline.output_tokens)
        return cls(request, terms, traffic, tuple(types), threads, watch or Watch(), replayer, predictor)

    @property
    def workload(self) -> Workload:
        return self.traffic.workload

    @property
    def outline(self) -> Workload:
        return self.traffic.outline

    @property
    def is_slow(self) -> bool:
        return self.traffic.is_slow

    def roughly(self) -> Search:
        """The same in less time, for ratios and scatter (`ResampledTraffic.rough`)."""
        rough = self.traffic.rough
        return self if rough is self.traffic else replace(self, traffic=rough)

    def on(self, **terms: Any) -> Search:
        """The same on other terms."""
        return replace(self, terms=replace(self.terms, **terms))

    def eased(self, ttft: float, tpot: float) -> Search:
        """The same with looser targets in every class: TTFT times `ttft`, TPOT times `tpot`."""
        slo, classes = self.terms.slo, self.terms.classes
        classes = tuple(replace(c, slo=Slo(c.slo.ttft_s * ttft, c.slo.tpot_s * tpot)) for c in classes)
        return self.on(slo=Slo(slo.ttft_s * ttft, slo.tpot_s * tpot), classes=classes)

    @property
    def counts(self) -> list[int]:
        """The requests of each class, where there are several."""
        return [int((self.workload.slo_class == c).sum()) for c in range(len(self.terms.classes))]

    @property
    def may_miss(self) -> float:
        """The largest share of requests that may miss; with several classes, the sum of what each may."""
        if not self.terms.classes:
            return 1.0 - self.request.attainment
        return float((np.array(self.counts) * (1.0 - np.array(self.terms.asked))).sum() / len(self.workload))

    def meets(self, outcome: Outcome) -> bool:
        """Whether a replay ran to its end and attained what is asked."""
        return outcome.complete and outcome.attainment >= self.request.attainment

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
        """The outcome of the requests, or of `workload` instead, on `fleet` in a resampled trace.

        `growth`: multiplies the traffic, and the agents where agents run the sessions. `most_missed`: stop
        once more than this share of the requests has missed, where only a yes or no is wanted. `doubted`:
        what is drawn there; the rest stays as recorded.
        """
        replayer, is_drawn = self.replayer, (replicate, growth, workload) != (AS_IT_IS, 1.0, None)

        def simulated() -> Outcome:
            return self._simulated(fleet, replicate, workload, growth, most_missed, doubted)

        if is_drawn and not replayer.draws:
            return simulated()
        groups = tuple(
            (repr(g.worker_type.profile), repr(g.worker_type.kv_link), g.role, g.workers)
            for g in fleet.groups
        )
        sampler = self.traffic.sampler
        requests = (
            replayer.name_of(self.workload),
            None if workload is None else workload_digest(workload),
            sampler and (sampler.may_miss, sampler.tpot_s, sampler.seed, sampler.requests),
        )
        drawn = growth, self.traffic.seed, replicate, frozenset() if replicate == AS_IT_IS else doubted
        key = (*requests, self.terms, groups, *drawn)
        return replayer.get(key, most_missed, self.workload, simulated)

    def _simulated(
        self,
        fleet: Fleet,
        replicate: int,
        workload: Workload | None,
        growth: float,
        most_missed: float | None,
        doubted: frozenset[Doubted],
    ) -> Outcome:
        traffic, terms = self.traffic, self.terms
        faster = traffic.faster(replicate, growth if workload is None else 1.0, doubted)
        requests = traffic.requests(
            replicate, traffic.grown(growth) if workload is None else workload, doubted
        )
        if workload is None and traffic.sampler is not None and growth != 1.0:
            requests = requests.scaled(growth)
        unsure = replicate != AS_IT_IS and "coefficients" in doubted
        outcome = simulate(
            requests,
            fleet.specs((lambda profile: traffic.profile(replicate, profile)) if unsure else None),
            terms.slos_at(faster),
            terms.policy,
            settings=terms.settings,
            predictor=self.predictor,
            seed=traffic.seed + replicate,
            max_misses=None if most_missed is None else int(most_missed * requests.requests + 1e-9),
            agents=None if terms.agents is None else max(round(terms.agents * growth), 1),
        )
        self.watch.simulated()
        return replace(outcome, session_target_s=terms.session_s, asked=terms.asked)


def missed(outcome: Outcome) -> int:
    """Requests outside their targets, unfinished ones included; more where a larger share of sessions misses.

    With several classes: as many as the worst class misses, at the strictest one's scale.
    """
    if outcome.workload.weight is not None:
        return round((1.0 - outcome.attainment) * outcome.workload.requests)
    if outcome.session_target_s is None and not outcome.asked:
        return len(outcome.workload) - int(outcome.met.sum())
    return math.ceil((1.0 - outcome.attainment) * len(outcome.workload) - 1e-6)
