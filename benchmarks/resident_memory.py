"""Resident memory of a fleet's processes beside its engines: two real workers, two gateways, two minutes on.

Each process counts once, with its resident set (RSS) and its proportional share of it (PSS): a page that n
processes hold counts 1/n in each. The engines themselves (`VLLM::…`) and Ray's daemons have rows and are left
out of the sums that the bars bound.
"""

from __future__ import annotations

import time

from experiments.lib.results import bar, flags, show
from harness.served import by_role, fleet, tiny_model

SETTLED_S, QUICK_S = 120.0, 10.0
MOST_MB, MOST_SUPERVISOR_MB, MOST_CONTROLLER_MB = 2200.0, 120.0, 120.0
BESIDE = ("engine", "Ray's daemons")


def main() -> int:
    asked = flags(__doc__).parse_args()
    with tiny_model() as model, fleet(model, "--workers", "2", "--gateways", "2") as server:
        time.sleep(QUICK_S if asked.quick else SETTLED_S)
        memory = {name: [one.memory_full_info() for one in of] for name, of in by_role(server).items()}
    table = [
        {
            "process": name,
            "number": len(of),
            "rss_mb": round(sum(one.rss for one in of) / 1e6),
            "pss_mb": round(sum(one.pss for one in of) / 1e6),
        }
        for name, of in memory.items()
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
    raise SystemExit(main())
