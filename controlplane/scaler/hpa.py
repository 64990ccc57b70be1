"""Kubernetes' HorizontalPodAutoscaler: the number of replicas that it wants, look after look.

    wanted = ⌈replicas · metric / target⌉, unless metric / target is within the tolerance of 1

A metric is a mean over replicas (`by_mean`) or a total of the fleet (`by_total`, AverageValue). Replicas
that start have no metric of their own: they count as idle where the others ask for more, and as being at the
target where those ask for fewer. A rise is the lowest number wanted within its window, a fall the highest.
A look doubles the replicas at most, or adds `added` where that is more.

Source: https://kubernetes.io/docs/tasks/run-application/horizontal-pod-autoscale/
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

PERIOD_S = 15.0
TOLERANCE = 0.1
MOST_TIMES = 2  # as many replicas, at most, after a period


@dataclass(frozen=True, slots=True)
class HpaRule:
    """The target of the metric for each replica, the bounds, and when changes are held back."""

    target: float
    low: int
    high: int
    tolerance: float = TOLERANCE
    up_window_s: float = 0.0
    down_window_s: float = 300.0
    added: int = 4


@dataclass(frozen=True, slots=True)
class HpaMemory:
    """The numbers of the last looks: when, and how many were wanted."""

    looks: tuple[tuple[float, int], ...] = ()

    def is_due(self, now_s: float) -> bool:
        return not self.looks or now_s - self.looks[-1][0] >= PERIOD_S - 1e-6


def by_mean(rule: HpaRule, metrics: Sequence[float], starting: int) -> int:
    """The replicas that a metric of each replica asks for; `metrics` of those that have one."""
    there = len(metrics) + starting
    if not metrics:
        return there
    ratio = sum(metrics) / (len(metrics) * rule.target)
    if _is_near(rule, ratio):
        return there
    if starting == 0:
        return math.ceil(ratio * there - 1e-9)
    filled = sum(metrics) / rule.target + (starting if ratio < 1.0 else 0)
    if _is_near(rule, filled / there) or (filled > there) != (ratio > 1.0):
        return there
    return math.ceil(filled - 1e-9)


def by_total(rule: HpaRule, total: float, replicas: int) -> int:
    """The replicas that a total of the fleet asks for, at the target for each of them."""
    if replicas and _is_near(rule, total / (rule.target * replicas)):
        return replicas
    return math.ceil(total / rule.target - 1e-9)


def stabilized(
    rule: HpaRule, memory: HpaMemory, now_s: float, replicas: int, asked: int
) -> tuple[HpaMemory, int]:
    """The memory after this look, and the replicas to have. `asked`: what the metric asks for."""
    asked = min(max(asked, rule.low), rule.high)
    kept = max(rule.up_window_s, rule.down_window_s)
    looks = (*(look for look in memory.looks if now_s - look[0] < kept), (now_s, asked))
    up = min(n for at_s, n in looks if now_s - at_s < rule.up_window_s or at_s == now_s)
    down = max(n for at_s, n in looks if now_s - at_s < rule.down_window_s or at_s == now_s)
    wanted = min(max(replicas, up), down)
    most = max(replicas + rule.added, replicas * MOST_TIMES)
    return HpaMemory(looks), min(wanted, most, rule.high)


def _is_near(rule: HpaRule, ratio: float) -> bool:
    return abs(ratio - 1.0) <= rule.tolerance + 1e-9
