"""Predictions beside measured runs of vLLM, and docs/accuracy-sweeps.md's table of them.

    python experiments/profiling/accuracy.py [--only NAME] [--write] [--data DIR] [--format table|json]

LMBench's ladders of rates (docs/data.md): ShareGPT (each conversation's turns one after another), `long`
(21,000 tokens, of which 1,041 are everybody's) and `short`. Each is simulated as `scorecard accuracy` does
it, with the library's profile, and with one calibrated on its three lowest rates. DEVELOPMENT ladders were
looked at while terms and defaults were chosen, JUDGED ones only for the table. `--write` puts the table into
docs/accuracy-sweeps.md.

Not replayed: LMCache (KV kept in the host's memory), long prompts on two replicas (picked by chance), an
engine whose GPU is not known (`l8-k8s`). A mixture of experts (Llama 4 Scout) is replayed by `--only` alone.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lib.ladders import LMBENCH, ladder
from experiments.lib.public_data import ROOT
from experiments.lib.results import bar, flags, show
from tokenfleet.cli.scorecard import ACCURACY_COLUMNS, accuracy_cells
from tokenfleet.profiles.accuracy import accuracy_of, overall

DEVELOPMENT = (
    "l70-k8s-vllm-sharegpt",
    "l70-k8s-vllm-short",
    "apr29-root-sharegpt",
    "apr29-root-short",
    "apr29-root-long",
    "apr29-llmd-short",
)
JUDGED = (
    "l70-ocp-llmd-sharegpt",
    "l70-a100-llmd-x2-short",
    "l70-h100-vllm-x2-short",
    "l8-ocp-vllm-x2-short",
    "l8-ocp-vllm-long-high",
    "l8-ocp-vllm-long-low",
    "l8-ocp-llmd-long-low",
    "apr29-vllm-sharegpt",
    "apr29-vllm-long",
)
MIXTURES = ("scout-vllm-tp4-sharegpt",)  # by --only: settings of its engines were not published
# What a median over ladders is to be, as it is and calibrated (mean of E2E, of TPOT, of TTFT, its p99).
BARS = {False: (0.06, 0.05, 0.15, 0.25), True: (0.03, 0.03, 0.08, 0.15)}
FIGURES = (("e2e", "mean"), ("tpot", "mean"), ("ttft", "mean"), ("ttft", "p99"))
KNEES = {False: (0.0, 0.8), True: (0.6, 0.9)}  # met, within one rate
BEGIN, END = "<!-- table: experiments/profiling/accuracy.py --write -->\n", "<!-- end of the table -->\n"


def of_ladder(name: str, data: Path, calibrates: bool) -> dict[str, Any]:
    """The errors of one ladder."""
    runs = ladder(data, name)
    return accuracy_of(runs, runs.worker(), calibrates)


def row_of(found: dict[str, Any]) -> dict[str, str]:
    """A row of the table."""
    profile = "calibrated" if found["calibrated"] else "as it is"
    split = "" if found["runs"] in DEVELOPMENT else " (judged)"
    return dict(
        zip(ACCURACY_COLUMNS, (f"{found['runs']}{split}", profile, *accuracy_cells(found)), strict=True)
    )


def markdown(rows: list[dict[str, str]]) -> str:
    """The table for docs/accuracy-sweeps.md."""
    lines = ["| " + " | ".join(ACCURACY_COLUMNS) + " |", "|" + "---|" * len(ACCURACY_COLUMNS)]
    return "\n".join([*lines, *("| " + " | ".join(row.values()) + " |" for row in rows)]) + "\n"


def bars_of(found: list[dict[str, Any]], calibrates: bool, words: str) -> dict[str, dict[str, Any]]:
    """The medians of all ladders and of those judged, and the knees met, beside what they are to be."""
    bars = {}
    parts = {"all": found, "judged": [one for one in found if one["runs"] in JUDGED]}
    for part, ladders in parts.items():
        medians = overall(ladders) if ladders else None
        for (figure, what), limit in zip(FIGURES, BARS[calibrates], strict=True) if medians else ():
            value = float(np.round(medians["errors"][figure][what], 4))
            bars[f"{words}: {figure} {what}, median over {part} ladders"] = bar(value, limit)
    knees = overall(found)["knees"]
    for name, limit in zip(("met", "within_one"), KNEES[calibrates], strict=True):
        share = knees[name] / max(knees["ladders"], 1)
        what = f"{words}: knees {name.replace('_', ' ')}, of {knees['ladders']} ladders that have one"
        bars[what] = bar(float(np.round(share, 2)), limit, at_least=True)
    return bars


def hits_of(found: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """How many points hits are below what the block ids allow, at the worst of the rates that are judged."""
    lacks = {}
    for one in found:
        hits = [rate["hits"] for rate in one["rates"][: one["judged"]] if rate["hits"] is not None]
        lacks[one["runs"]] = max((100.0 * (h["allowed"] - h["simulated"]) for h in hits), default=0.0)
    return {
        f"points of hits below the block ids', {part}": bar(round(max(values), 2), 1.0)
        for part, values in {
            kind: [lack for name, lack in lacks.items() if kind in name]
            for kind in ("sharegpt", "long", "short")
        }.items()
        if values
    }


def main() -> int:
    parser = flags(__doc__, LMBENCH, resumes=True)
    parser.add_argument("--only", choices=(*DEVELOPMENT, *JUDGED, *MIXTURES), help="this ladder")
    parser.add_argument("--development", action="store_true", help="only those of development")
    parser.add_argument("--write", action="store_true", help="put the table into docs/accuracy-sweeps.md")
    asked = parser.parse_args()
    names = DEVELOPMENT if asked.development else (*DEVELOPMENT, *JUDGED)
    rows, bars = [], {}
    for calibrates, words in ((False, "as it is"), (True, "calibrated")):
        found = [
            asked.resume.part(f"{name} {words}", partial(of_ladder, name, asked.data, calibrates))
            for name in ((asked.only,) if asked.only else names)
        ]
        rows += [row_of(one) for one in found]
        bars |= bars_of(found, calibrates, words)
        if not calibrates:
            bars |= hits_of(found)
    if asked.write:
        path = ROOT / "docs" / "accuracy-sweeps.md"
        before, _, rest = path.read_text(encoding="utf-8").partition(BEGIN)
        path.write_text(before + BEGIN + markdown(rows) + END + rest.partition(END)[2], encoding="utf-8")
    return show("accuracy", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
