"""The machine: driver, bus, limits of memory and of reads between processes. It heads every figure."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

from experiments.gpu.bench import Bench, Result

ASKED = "name,driver_version,pcie.link.gen.max,pcie.link.width.max,memory.total,compute_mode,mig.mode.current"
FILES = {
    "ptrace_scope": "/proc/sys/kernel/yama/ptrace_scope",
    "cgroup_memory_max": "/sys/fs/cgroup/memory.max",
    "locked_memory": "/proc/self/limits",
}


def measure(bench: Bench) -> Result:
    facts: dict[str, Any] = {
        "torch": torch.__version__,
        "torch_cuda": torch.version.cuda,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "memory_gib": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30,
        "shm_free_gib": shutil.disk_usage("/dev/shm").free / 2**30,
        "is_container": Path("/.dockerenv").exists() or Path("/run/.containerenv").exists(),
    }
    for name, file in FILES.items():
        text = Path(file).read_text() if Path(file).exists() else ""
        lines = [line for line in text.splitlines() if name != "locked_memory" or "locked" in line]
        facts[name] = lines[0] if lines else None
    if bench.is_gpu:
        told = subprocess.run(
            ["nvidia-smi", f"--query-gpu={ASKED}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            check=False,
        )
        facts["nvidia_smi"] = told.stdout.strip() or told.stderr.strip()
        facts["capability"] = ".".join(map(str, torch.cuda.get_device_capability(bench.device)))
    return Result("the header of every figure", [facts])
