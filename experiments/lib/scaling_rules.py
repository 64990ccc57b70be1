"""The autoscalers that ours is compared with, as brains for the simulated fleet.

    hpa        Kubernetes' HorizontalPodAutoscaler on requests in the system per worker: wanted =
               ⌈workers · metric / target⌉ unless the ratio is within 10 % of 1, every 15 s; scaling in takes
               the highest number of the last 300 s
    ray-serve  ±1: requests in the system per worker above the target for 30 s adds one, below it (with one
               fewer) for 600 s takes one away

Both rules count workers that are starting. The target is theirs to choose: the experiment tries several.
"""

from __future__ import annotations

import math
from typing import Any

from controlplane.control import State
from controlplane.port import Decide
from controlplane.snapshot import SERVING, STARTING, Action, Scale, Snapshot
from tokenfleet.advise.followers import one_by_one

_NO_PLANE: Any = None  # that rule looks at snapshots alone


def hpa(target: float, low: int, high: int) -> Decide:
    """Requests in the system per worker at `target`."""
    wants: list[tuple[float, int]] = []
    last = [-math.inf]

    def decide(state: State, seen: Snapshot) -> tuple[State, list[Action]]:
        if seen.now_s - last[0] < 15.0:
            return state, []
        last[0] = seen.now_s
        there, ratio = _ratio(seen, target)
        wanted = there if abs(ratio - 1.0) <= 0.1 else math.ceil(there * ratio)
        wanted = min(max(wanted, low), high)
        wants.append((seen.now_s, wanted))
        wants[:] = [w for w in wants if seen.now_s - w[0] <= 300.0]
        if wanted < seen.wanted:
            wanted = min(max(w for _, w in wants), seen.wanted)
        return state, _scaled(seen, wanted)

    return decide


def ray_serve(target: float, low: int, high: int) -> Decide:
    """One worker more or fewer, as the advice's baselines have it."""
    return one_by_one(target, low, high)(_NO_PLANE)


def _ratio(seen: Snapshot, target: float) -> tuple[int, float]:
    """Workers serving and starting, and requests in the system per one of them over the target."""
    there = sum(w.state in (SERVING, STARTING) for w in seen.workers)
    inside = sum(w.counted().running + w.counted().waiting for w in seen.workers) + seen.waiting_requests
    return max(there, 1), inside / (max(there, 1) * target)


def _scaled(seen: Snapshot, wanted: int) -> list[Action]:
    return [] if wanted == seen.wanted else [Scale(wanted, "a rule")]
