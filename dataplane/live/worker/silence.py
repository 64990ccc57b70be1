"""The silence of an engine that has work: from when on the engine counts as hung.

An engine that hangs raises no error: a lost peer of a collective, a stuck kernel, a stopped process. The
worker looks at a silent engine once a second. The longest silence, from the last output on:

    one of its processes is stopped (SIGSTOP)         FLOOR_S
    on CPUs, its processes use no CPU time any more   FLOOR_S
    on CPUs, they compute                             STEPS ordinary steps, at least COMPUTES_S
    on GPUs, where they may spin while they wait      STEPS ordinary steps, at least FLOOR_S

and CEILING_S at most, which also holds before the first step. FLOOR_S leaves room for a wait for a lock, the
disk or a garbage collection. COMPUTES_S leaves room for a first step that compiles, and for a full step of a
large model on few cores. An ordinary step is `StepTrace.ordinary_s`: one odd step changes nothing.

A worker that was itself kept from running finds outputs unread. So it looks for WATCHED_S
before it judges, and two looks in a row must agree.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import inf

FLOOR_S, COMPUTES_S, CEILING_S = 10.0, 120.0, 600.0
STEPS = 10
WATCH_FROM_S, WATCHED_S = 4.0, 5.0
IDLE_SHARE = 0.01  # of a core: threads of an engine that hangs still wake now and then


class EngineSilence:
    """One engine's present silence. `is_on_cpu`: it computes on CPUs, so that CPU time shows its work."""

    def __init__(self, is_on_cpu: bool) -> None:
        self._is_on_cpu = is_on_cpu
        self._heard_s = self._since_s = -inf  # the last output, and the first look since
        self._worked_s = -inf  # the last look at which its processes had used CPU time
        self._used_s: Mapping[int, float] = {}
        self._was_too_long = False  # at the look before

    def is_hung(
        self, now_s: float, heard_s: float, used_s: Mapping[int, float], is_stopped: bool, ordinary_s: float
    ) -> bool:
        """Whether an engine with work, last heard at `heard_s`, makes no step any more.

        `used_s`: processor seconds so far of each of its processes; one that began or ended since is work.
        """
        if heard_s != self._heard_s:
            self._heard_s, self._since_s, self._was_too_long = heard_s, now_s, False
        worked_s = sum(used_s.values()) - sum(self._used_s.values())
        if (
            self._since_s == now_s
            or used_s.keys() != self._used_s.keys()
            or worked_s >= IDLE_SHARE * (now_s - self._worked_s)
        ):
            self._worked_s, self._used_s = now_s, dict(used_s)
        if now_s - self._since_s < WATCHED_S:
            return False
        if is_stopped or (self._is_on_cpu and now_s - self._worked_s >= WATCHED_S):
            longest_s = FLOOR_S
        else:
            least_s = COMPUTES_S if self._is_on_cpu else FLOOR_S
            longest_s = min(max(least_s, STEPS * ordinary_s), CEILING_S)
        was_too_long, self._was_too_long = self._was_too_long, now_s - heard_s > longest_s
        return was_too_long and self._was_too_long
