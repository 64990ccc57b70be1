"""The rate limit of a copy: its bytes per second, and its share of one core's time.

On a host whose cores are the accelerator a copy lengthens steps: it takes its processor time from the engines
that compute there. Bytes per second say little of that, since the time a byte takes depends on the machine;
so a copy counts the processor time it used, and pauses until that is a small share of the time that has
passed.
"""

from __future__ import annotations

import threading
import time

from dataplane.live.engine_api.kv_messages import Pace


class Share:
    """The time that the copies of one process have used together; safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free_s = float("-inf")

    def wait_s(self, now_s: float, worked_s: float, share: float) -> float:
        """Seconds to pause after work of `worked_s` that ended now."""
        with self._lock:
            self._free_s = max(self._free_s, now_s - worked_s) + worked_s / share
            return self._free_s - now_s


class Pacer:
    """The pauses of one copy, made in the thread that copies."""

    def __init__(self, pace: Pace, share: Share) -> None:
        self._pace, self._share = pace, share
        self._began_s, self._worked_s = time.monotonic(), time.thread_time()

    def wait(self, done: int) -> None:
        """Pause before the first piece and after each; `done` are the bytes copied so far."""
        pace = self._pace
        if pace.bytes_per_s <= 0 and pace.share >= 1:
            return
        now_s, worked_s = time.monotonic(), time.thread_time()
        elapsed_s = now_s - self._began_s
        rest_s = 0.0
        if pace.bytes_per_s > 0:
            rest_s = done / pace.bytes_per_s - elapsed_s
        if pace.share < 1:
            rest_s = max(rest_s, self._share.wait_s(now_s, worked_s - self._worked_s, pace.share))
        if pace.least_bytes_per_s > 0:
            rest_s = min(rest_s, done / pace.least_bytes_per_s - elapsed_s)
        if rest_s > 0:
            time.sleep(rest_s)
        self._worked_s = worked_s
