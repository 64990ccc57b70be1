"""How long a whole plan takes, and how much memory: the Azure conversation hour, four kinds of worker.

    python experiments/planning/plan_time.py [--quick] [--seed N] [--format table|json]

Runs `tokenfleet plan` as a user would, with the default confidence and everything the report explains, and
reads the wall time and the peak memory of the process. A run on a two-minute window comes before, so that
the simulator is compiled (`compiled_s`: once on a machine, and after an upgrade). `cpu_s` is what the plan
asks of all cores together: where other work shares them, the wall time says little. --quick plans ten
minutes.
"""

from __future__ import annotations

import sys
import tempfile

from experiments.lib.command import timed_plan
from experiments.lib.public_data import AZURE_HOUR
from experiments.lib.results import bar, flags, show

MOST_S, MOST_GB = 12.0, 1.0
KINDS = ("--gpu", "a100", "--gpu", "h100", "--tp", "4", "--tp", "8")


def main() -> int:
    asked = flags(__doc__, AZURE_HOUR).parse_args()
    command = ["--trace", str((asked.data / AZURE_HOUR).resolve()), "--model", "llama-3.1-70b", *KINDS]
    command += ["--slo", "ttft=1.6s,tpot=75ms", "--seed", str(asked.seed)]
    _, compiled = timed_plan(*command, "--window", "0..120", "--attainment", "0.9")
    window = ["--window", "0..600"] if asked.quick else []
    with tempfile.TemporaryDirectory() as folder:
        plan, row = timed_plan(*command, *window, "--output-dir", folder)
    row |= {"kinds": len(plan["inputs"]["profiles"]), "compiled_s": compiled["wall_s"]}
    bars = {"wall_s": bar(row["wall_s"], MOST_S), "peak_gb": bar(row["peak_gb"], MOST_GB)}
    return show("time of a plan", [row], bars, asked)


if __name__ == "__main__":
    sys.exit(main())
