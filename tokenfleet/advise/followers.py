"""The rules that scale a fleet on a replayed day: the advice through KEDA, and those it is compared to.

    advice      the gauge `tokenfleet_wanted_replicas` at a target of 1, followed by Kubernetes' HPA
    HPA         the mean of a metric over replicas: time in which the GPU is busy, KV memory in use, or
                requests that wait
    Ray Serve   one replica more or fewer, after requests in the system have been off target for a time
    schedule    numbers known beforehand, each launch a cold start ahead

A metric is looked at every LOOK_S. A replica's is its mean over the looks since HPA's last one.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from controlplane.control import State
from controlplane.port import Decide
from controlplane.scaler.hpa import HpaMemory, HpaRule, by_mean, by_total, stabilized
from controlplane.snapshot import SERVING, STARTING, Action, Scale, Snapshot, WorkerLoad
from controlplane.types import WorkerId
from dataplane.simulated.elastic_run import ElasticPlane
from tokenfleet.advise.advice import AdviceSettings, AdviceState
from tokenfleet.advise.decide import ORIGIN_S, advise
from tokenfleet.advise.look import Page, Watched, look
from tokenfleet.profiles.engine_metrics import EngineCounts

# The edges of vLLM's histograms.
_SLOW_S = (0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
EDGES_S = {
    "ttft": (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, *_SLOW_S, 160.0, 640.0, 2560.0, math.inf),
    "tpot": (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, *_SLOW_S, math.inf),
}
_SUMS = ("ended", "ended_prompt_tokens", "ended_output_tokens")


class FleetMeter:
    """The metrics of a simulated fleet's servers, as vLLM counts them: what `advise` sees of a replayed day.

    A server is there from the moment that it serves until it drains. One that starts or drains is in no list,
    as pods that are not ready are in none. A slot that is used again is another server, with counters of its
    own. TTFT and TPOT are both counted when a request ends; vLLM counts TTFT at the first token.
    """

    def __init__(self, plane: ElasticPlane) -> None:
        self._plane = plane
        slots = len(plane.run.ledger.workers)
        types = list(dict.fromkeys(plane.fleet.kinds))  # in the order of the advice's settings
        self._kinds = [types.index(name) for name in plane.fleet.kinds]
        self._launched_s = np.full(slots, -1.0)
        self._sums = np.zeros((slots, len(_SUMS)))
        self._buckets = {name: np.zeros((slots, len(edges))) for name, edges in EDGES_S.items()}

    def pages(self, seen: Snapshot, at_s: float) -> dict[str, Page]:
        """What each server shows now."""
        self._renew()
        self._count()
        pages: dict[str, Page] = {}
        for worker in seen.workers:
            if worker.state != SERVING:
                continue
            slot, load = int(worker.worker), worker.counted()
            values = dict(zip(_SUMS, self._sums[slot].tolist(), strict=True))
            values |= {"running": float(load.running), "waiting": float(load.waiting)}
            buckets = {
                name: dict(zip(edges, np.cumsum(self._buckets[name][slot]).tolist(), strict=True))
                for name, edges in EDGES_S.items()
            }
            page = EngineCounts(at_s, values, buckets=buckets, kind=self._kinds[slot])
            pages[f"{slot} of {self._launched_s[slot]:g} s"] = page
        return pages

    def _renew(self) -> None:
        """Start from zero in slots that another server has now."""
        for slot, here in self._plane.fleet.slots.items():
            if here.launched_s != self._launched_s[slot]:
                self._launched_s[slot] = here.launched_s
                self._sums[slot] = 0.0
                for buckets in self._buckets.values():
                    buckets[slot] = 0.0

    def _count(self) -> None:
        """Count the requests that ended since the last look."""
        run, rows = self._plane.run, self._plane.ended.rows
        request, job = run.ledger.requests[rows], run.engines.requests[rows]
        served = np.isfinite(job["finish_s"])
        request, job = request[served], job[served]
        slot, gaps = request["worker"], job["output"] - 1
        first_s, last_s = request["first_s"], job["finish_s"]
        numbers = np.column_stack([np.ones(len(slot)), request["prompt"], job["output"]])
        np.add.at(self._sums, slot, numbers)
        times = {
            "ttft": first_s - request["arrival_s"],
            "tpot": np.where(gaps > 0, (last_s - first_s) / np.maximum(gaps, 1), 0.0),
        }
        for name, edges in EDGES_S.items():
            np.add.at(self._buckets[name], (slot, np.searchsorted(edges, times[name])), 1.0)


LOOK_S = 5.0
UP_S, DOWN_S = 30.0, 600.0  # Ray Serve's delays
Bounds = Mapping[str, tuple[int, int]]  # the fewest and the most replicas, by worker type
Brain = Callable[[ElasticPlane], Decide]
Metric = Callable[[WorkerLoad], float]


@dataclass(frozen=True, slots=True)
class BaselineRule:
    """A rule to compare with. `targets`: those tried, by how each is written."""

    name: str
    targets: dict[str, float]
    brain: Callable[[float, Bounds], Brain]


def busy(worker: WorkerLoad) -> float:
    """Whether the GPU has work: its mean over looks is what a GPU's utilisation counts."""
    return float(worker.counted().running > 0)


def kv_share(worker: WorkerLoad) -> float:
    """The share of KV memory in use, as vllm:kv_cache_usage_perc counts it."""
    return worker.counted().held_tokens / max(worker.capacity_tokens, 1)


def waiting(worker: WorkerLoad) -> float:
    """The requests that wait in the engine, as vllm:num_requests_waiting counts them."""
    return float(worker.counted().waiting)


def inside(worker: WorkerLoad) -> float:
    """The requests that run or wait."""
    return float(worker.counted().running + worker.counted().waiting)


class Autoscalers:
    """Kubernetes' HPA of each worker type. Each remembers the replicas that it starts with."""

    def __init__(self, rule: HpaRule, bounds: Bounds) -> None:
        self._rules = {name: replace(rule, low=low, high=high) for name, (low, high) in bounds.items()}
        self._memories: dict[str, HpaMemory] = {}

    def follow(self, seen: Snapshot, ask: Callable[[HpaRule, str], int]) -> list[Action]:
        """The change to the count of each type that `ask` returns. None before a look is due."""
        if not self._memories:
            self._memories = {
                name: HpaMemory(((seen.now_s, seen.wanted_kinds[name]),)) for name in self._rules
            }
        if not all(memory.is_due(seen.now_s) for memory in self._memories.values()):
            return []
        wanted = {}
        for name, rule in self._rules.items():
            memory, had = self._memories[name], seen.wanted_kinds[name]
            self._memories[name], wanted[name] = stabilized(rule, memory, seen.now_s, had, ask(rule, name))
        if wanted == seen.wanted_kinds:
            return []
        return [Scale(sum(wanted.values()), "a rule", kinds=wanted)]


def advised(each: Sequence[AdviceSettings], bounds: Bounds, tolerance: float) -> Brain:
    """The advice, as the ScaledObjects of `export keda` follow it, at HPA's tolerance.

    `each`: the settings of one `advise` over all servers, or of one over the servers of each worker type.
    """

    def brain(plane: ElasticPlane) -> Decide:
        meter = FleetMeter(plane)
        known = [(Watched(), AdviceState()) for _ in each]
        autoscalers = Autoscalers(HpaRule(1.0, 0, 0, tolerance, down_window_s=0.0, added=0), bounds)

        def decide(state: State, seen: Snapshot) -> tuple[State, list[Action]]:
            at_s = ORIGIN_S + seen.now_s - LOOK_S
            pages = meter.pages(seen, at_s)
            gauges: dict[str, int | None] = {}
            for n, (settings, (watched, before)) in enumerate(zip(each, known, strict=True)):
                own = {server: replace(page, kind=0) for server, page in pages.items() if page.kind == n}
                watched, traffic = look(watched, pages if len(each) == 1 else own, at_s)
                after, advice = advise(settings, before, traffic)
                known[n] = watched, after
                gauges |= {one.worker_type.name: one.published for one in advice.of_types}

            def ask(rule: HpaRule, name: str) -> int:
                gauge, had = gauges[name], seen.wanted_kinds[name]
                return had if gauge is None else by_total(rule, gauge, had)

            return state, autoscalers.follow(seen, ask)

        return decide

    return brain


def hpa(metric: Metric, target: float, bounds: Bounds) -> Brain:
    """HPA on a metric of each replica, with its own defaults; one for each worker type."""

    def brain(plane: ElasticPlane) -> Decide:
        values: defaultdict[WorkerId, list[float]] = defaultdict(list)
        autoscalers = Autoscalers(HpaRule(target, 0, 0), bounds)

        def decide(state: State, seen: Snapshot) -> tuple[State, list[Action]]:
            for worker in seen.workers:
                if worker.state == SERVING:
                    values[worker.worker].append(metric(worker))

            def ask(rule: HpaRule, name: str) -> int:
                of_type = [w for w in seen.workers if w.kind == name]
                serving = [w.worker for w in of_type if w.state == SERVING]
                means = [sum(v) / len(v) for worker in serving if (v := values.pop(worker, []))]
                return by_mean(rule, means, sum(w.state == STARTING for w in of_type))

            return state, autoscalers.follow(seen, ask)

        return decide

    return brain


def one_by_one(target: float, bounds: Bounds) -> Brain:
    """Ray Serve's policy for one worker type: requests in the system for each replica, at `target`."""
    ((low, high),) = bounds.values()

    def brain(plane: ElasticPlane) -> Decide:
        since: dict[int, float] = {}

        def decide(state: State, seen: Snapshot) -> tuple[State, list[Action]]:
            there = max(sum(w.state in (SERVING, STARTING) for w in seen.workers), 1)
            total = seen.waiting_requests + sum(map(inside, seen.workers))
            for change, holds, wait_s in (
                (1, total > target * there, UP_S),
                (-1, there > 1 and total < target * (there - 1), DOWN_S),
            ):
                if not holds:
                    since.pop(change, None)
                elif seen.now_s - since.setdefault(change, seen.now_s) >= wait_s:
                    del since[change]
                    return state, _scaled(seen, min(max(seen.wanted + change, low), high))
            return state, []

        return decide

    return brain


def scheduled(schedule: Sequence[tuple[float, int]], lead_s: float) -> Decide:
    """Follow (start, workers) rows: up `lead_s` before one that asks for more, down at one that asks less."""

    def decide(state: State, seen: Snapshot) -> tuple[State, list[Action]]:
        now = max((row for row in schedule if row[0] <= seen.now_s), default=schedule[0])[1]
        soon = max((row for row in schedule if row[0] <= seen.now_s + lead_s), default=schedule[0])[1]
        return state, _scaled(seen, max(now, soon))

    return decide


BASELINES = (
    BaselineRule("HPA on GPU utilisation", {"50 %": 0.5, "70 %": 0.7, "90 %": 0.9}, partial(hpa, busy)),
    BaselineRule("HPA on KV memory", {"20 %": 0.2, "40 %": 0.4, "70 %": 0.7}, partial(hpa, kv_share)),
    BaselineRule("HPA on queue length", {f"{n:g} waiting": n for n in (0.2, 1, 5)}, partial(hpa, waiting)),
)
RAY_SERVE = BaselineRule("Ray Serve ±1", {f"{n} inside": float(n) for n in (12, 16, 20, 26)}, one_by_one)


def _scaled(seen: Snapshot, wanted: int) -> list[Action]:
    return [] if wanted == seen.wanted else [Scale(wanted, "a rule")]
