"""The cause of a failed engine start, read from the log of the processes that failed.

vLLM raises "See root cause above" in the process that waited, while the cause is in the log of the process
that failed. Ray sends both to one file: this actor's standard error.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

LOG_BYTES = 1 << 18
# Lines may begin with vLLM's process name and logger: "(EngineCore pid=7) ERROR 11-22 10:45 [core:11] ".
PREFIX = re.compile(r"^(\(\w+(?: pid=\d+)?\)\s*)?([A-Z]+ \d\d-\d\d [\d:]+ \[[^\]]*\]\s*)?")
RAISED = re.compile(r"^[A-Za-z_][\w.]*(?:Error|Exception|Interrupt): ?\S")
ELSEWHERE = re.compile(r"root cause", re.IGNORECASE)
KILLED = re.compile(r"Failed core proc\(s\): \{[^}]*?: -(\d+)")


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
