"""Resident memory of a fleet's processes beside its engines: two real workers, two gateways, two minutes on.

Each process counts once, with its resident set (RSS) and its proportional share of it (PSS): a page that n
processes hold counts 1/n in each. The sum of PSS is what the host gives; the sum of RSS counts shared pages
again in each process. The engines themselves (`VLLM::…`) and Ray's daemons have rows and are left out of
the sums that the bars bound.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import psutil

from experiments.lib.results import bar, flags, show
from harness.served import fleet, tiny_model

SETTLED_S, QUICK_S = 120.0, 10.0
MOST_MB, MOST_SUPERVISOR_MB, MOST_CONTROLLER_MB = 2200.0, 120.0, 120.0
# Roles by a part of the command line, the first that matches; what is forked has its role as its name.
ROLES = {
    "control.supervisor": "supervisor",
    "control.controller": "controller",
    "pool.own_ray": "own Ray",
    "VLLM::": "engine",
    "DashboardAgent": "Ray's daemons",
    "RuntimeEnvAgent": "Ray's daemons",
    "ray::": "actor",
    "/ray/": "Ray's daemons",
    "resource_tracker": "Python's trackers",
}
FORKED = ("core", "gateway")
BESIDE = ("engine", "Ray's daemons")


def memory_mb(pid: int) -> tuple[float, float]:
    """A process's RSS and PSS."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    kb = {name: float(rest.split()[0]) for name, _, rest in (line.partition(":") for line in lines[1:])}
    return kb["Rss"] * 1024 / 1e6, kb["Pss"] * 1024 / 1e6


def role(process: psutil.Process) -> str:
    """What a process of the fleet is."""
    words = " ".join(process.cmdline())
    if " serve " in words:
        return process.name() if process.name() in FORKED else "fork server"
    return next((role for part, role in ROLES.items() if part in words), process.name())


def main() -> int:
    asked = flags(__doc__).parse_args()
    rows: dict[str, list[tuple[float, float]]] = {}
    with tiny_model() as model, fleet(model, "--workers", "2", "--gateways", "2") as server:
        time.sleep(QUICK_S if asked.quick else SETTLED_S)
        root = psutil.Process(server.process.pid)
        for process in (root, *root.children(recursive=True)):
            rows.setdefault(role(process), []).append(memory_mb(process.pid))
    table = [
        {
            "process": name,
            "number": len(of),
            "rss_mb": round(sum(rss for rss, _ in of)),
            "pss_mb": round(sum(pss for _, pss in of)),
        }
        for name, of in rows.items()
    ]
    ours = {str(row["process"]): row for row in table if row["process"] not in BESIDE}
    bars = {
        "all beside engines, MB of RSS": bar(sum(row["rss_mb"] for row in ours.values()), MOST_MB),
        "all beside engines, MB of PSS": bar(sum(row["pss_mb"] for row in ours.values()), MOST_MB),
        "the supervisor, MB of RSS": bar(ours["supervisor"]["rss_mb"], MOST_SUPERVISOR_MB),
        "the controller, MB of RSS": bar(ours["controller"]["rss_mb"], MOST_CONTROLLER_MB),
    }
    return show("resident memory beside the engines", table, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
