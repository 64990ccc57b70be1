"""The wall clocks of running processes, set from outside: an hour ahead, or back.

A small C library (set_clock.c) is compiled and loaded ahead of libc in every process of a fleet. It adds the
seconds that a shared file names for the process. Monotonic clocks go on as they are.
"""

from __future__ import annotations

import mmap
import shutil
import struct
import subprocess
from pathlib import Path

from harness import ROOT

NUMBER = struct.Struct("=q")
LARGEST_PID = Path("/proc/sys/kernel/pid_max")


def compiler() -> str | None:
    """The C compiler of this machine, if it has one."""
    return shutil.which("cc") or shutil.which("gcc")


class Clocks:
    """The clocks of the processes that have `environment`. It needs a C compiler."""

    def __init__(self, folder: Path) -> None:
        library, file = folder / "set_clock.so", folder / "clocks"
        source = str(ROOT / "harness" / "set_clock.c")
        command = [str(compiler()), "-shared", "-fPIC", "-O2", "-Wall", "-Werror", "-o", str(library), source]
        subprocess.run(command, check=True)
        size = NUMBER.size * (int(LARGEST_PID.read_text()) + 1)
        with file.open("wb+") as numbers:
            numbers.truncate(size)  # nearly all of it takes no space
            self._ahead = mmap.mmap(numbers.fileno(), size)
        self.environment = {"LD_PRELOAD": str(library), "SET_CLOCKS": str(file)}

    def set(self, process: int, ahead_s: int) -> None:
        """Set a process's wall clock ahead of this machine's by `ahead_s`, which may be negative."""
        NUMBER.pack_into(self._ahead, NUMBER.size * process, ahead_s)

    def close(self) -> None:
        self._ahead.close()
