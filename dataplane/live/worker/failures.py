"""Failures of an engine: the cause of a start that failed, and from when on a silent engine counts as hung.

The cause of a start is read from the log of the processes that failed. vLLM raises "See root cause above" in
the process that waited, while the cause is in the log of the process that failed. Ray sends both to one file:
this actor's standard error.

An engine that hangs raises no error: a lost peer of a collective, a stuck kernel, a stopped process. The
worker looks at a silent engine that has work once a second. The longest silence, from the last output on:

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

import os
import re
import signal
from collections.abc import Mapping
from math import inf
from pathlib import Path

LOG_BYTES = 1 << 18
# Lines may begin with vLLM's process name and logger: "(EngineCore pid=7) ERROR 11-22 10:45 [core:11] ".
PREFIX = re.compile(r"^(\(\w+(?: pid=\d+)?\)\s*)?([A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]*\]\s*)?")
RAISED = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt): ?\S")
ELSEWHERE = re.compile(r"root cause", re.IGNORECASE)
KILLED = re.compile(r"Failed core proc\(s\): \{[^}]*?: -(\d+)")
FLOOR_S, COMPUTES_S, CEILING_S = 10.0, 120.0, 600.0
STEPS = 10
WATCH_FROM_S, WATCHED_S = 4.0, 5.0
IDLE_SHARE = 0.01  # of a core: threads of an engine that hangs still wake now and then


class StartFailure(RuntimeError):
    """An engine that did not start: the message is its cause, `log` the end of what its processes said."""

    def __init__(self, cause: str, log: str = "") -> None:
        super().__init__(cause, log)
        self.cause, self.log = cause, log

    def __str__(self) -> str:
        return self.cause


def start_failure(error: Exception, log: str) -> StartFailure:
    """The failure with its cause: the last error in the log that does not point to another one.

    Where no process said anything, the signal that killed one; else the text of `error` itself.
    """
    lines = [PREFIX.sub("", line).strip() for line in log.splitlines()]
    causes = [line for line in lines if RAISED.match(line) and not ELSEWHERE.search(line)]
    killed = KILLED.search(str(error))
    if causes:
        cause = causes[-1]
    elif killed is not None:
        name = signal.Signals(int(killed[1])).name
        memory = ", as the kernel does when memory runs out" if name == "SIGKILL" else ""
        cause = f"its engine was ended by {name}{memory}"
    else:
        cause = str(error)
    return StartFailure(cause, log)


def own_log() -> str:
    """The end of the file that this process' standard error goes to; empty where it is no file."""
    try:
        path = Path(os.readlink("/proc/self/fd/2"))
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            return file.read().decode(errors="replace")
    except OSError:
        return ""


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
