"""The rules that scale a fleet on a replayed day: the advice through KEDA, and those it is compared to.

    advice      the gauge `tokenfleet_wanted_replicas` at a target of 1, followed by Kubernetes' HPA
    HPA         the mean of a metric over replicas: time in which the GPU is busy, KV memory in use, or
                requests that wait
    Ray Serve   one replica more or fewer, after requests in the system have been off target for a time
    schedule    numbers known beforehand, each launch a cold start ahead

A metric is looked at every LOOK_S. A replica's is its mean over the looks since HPA's last one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from controlplane.control import State
from controlplane.port import Decide
from controlplane.scaler.hpa import HpaMemory, HpaRule, by_mean, by_total, stabilized
from controlplane.snapshot import SERVING, STARTING, Action, Scale, Snapshot, WorkerLoad
from controlplane.types import WorkerId
from dataplane.simulated.elastic_run import ElasticPlane
from tokenfleet.advise.advice import AdviceSettings, AdviceState
from tokenfleet.advise.decide import ORIGIN_S, advise
from tokenfleet.advise.look import Watched, look
from tokenfleet.advise.meter import FleetMeter

LOOK_S = 5.0
UP_S, DOWN_S = 30.0, 600.0  # Ray Serve's delays
Brain = Callable[[ElasticPlane], Decide]
Metric = Callable[[WorkerLoad], float]


@dataclass(frozen=True, slots=True)
class BaselineRule:
    """A rule to compare with. `targets`: those tried, by how each is written."""

    name: str
    targets: dict[str, float]
    brain: Callable[[float, int, int], Brain]


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


def advised(settings: AdviceSettings, low: int, high: int, tolerance: float) -> Brain:
    """The advice, as the ScaledObject of `export keda` follows it, at HPA's tolerance."""
    rule = HpaRule(1.0, low, high, tolerance, down_window_s=0.0, added=0)

    def brain(plane: ElasticPlane) -> Decide:
        meter, watched, known, memory = FleetMeter(plane), Watched(), AdviceState(), HpaMemory()

        def decide(state: State, seen: Snapshot) -> tuple[State, list[Action]]:
            nonlocal watched, known, memory
            at_s = ORIGIN_S + seen.now_s - LOOK_S
            watched, traffic = look(watched, meter.pages(seen, at_s), at_s)
            known, advice = advise(settings, known, traffic)
            if advice.published is None or not memory.is_due(seen.now_s):
                return state, []
            asked = by_total(rule, advice.published, seen.wanted)
            memory, wanted = stabilized(rule, memory, seen.now_s, seen.wanted, asked)
            return state, _scaled(seen, wanted)

        return decide

    return brain


def hpa(metric: Metric, target: float, low: int, high: int) -> Brain:
    """HPA on a metric of each replica, with its own defaults."""
    rule = HpaRule(target, low, high)

    def brain(plane: ElasticPlane) -> Decide:
        values: defaultdict[WorkerId, list[float]] = defaultdict(list)
        memory = HpaMemory()

        def decide(state: State, seen: Snapshot) -> tuple[State, list[Action]]:
            nonlocal memory
            serving = [w for w in seen.workers if w.state == SERVING]
            for worker in serving:
                values[worker.worker].append(metric(worker))
            if not memory.is_due(seen.now_s):
                return state, []
            means = [sum(v) / len(v) for w in serving if (v := values[w.worker])]
            values.clear()
            starting = sum(w.state == STARTING for w in seen.workers)
            asked = by_mean(rule, means, starting)
            memory, wanted = stabilized(rule, memory, seen.now_s, seen.wanted, asked)
            return state, _scaled(seen, wanted)

        return decide

    return brain


def one_by_one(target: float, low: int, high: int) -> Brain:
    """Ray Serve's policy: requests in the system for each replica, at `target`."""

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


def _hpa_on(metric: Metric) -> Callable[[float, int, int], Brain]:
    return lambda target, low, high: hpa(metric, target, low, high)


BASELINES = (
    BaselineRule("HPA on GPU utilisation", {"50 %": 0.5, "70 %": 0.7, "90 %": 0.9}, _hpa_on(busy)),
    BaselineRule("HPA on KV memory", {"20 %": 0.2, "40 %": 0.4, "70 %": 0.7}, _hpa_on(kv_share)),
    BaselineRule("HPA on queue length", {f"{n:g} waiting": n for n in (0.2, 1.0, 5.0)}, _hpa_on(waiting)),
)
RAY_SERVE = BaselineRule("Ray Serve ±1", {f"{n} inside": float(n) for n in (12, 16, 20, 26)}, one_by_one)


def _scaled(seen: Snapshot, wanted: int) -> list[Action]:
    return [] if wanted == seen.wanted else [Scale(wanted, "a rule")]
