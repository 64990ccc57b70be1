"""Predictions beside measured runs of vLLM, and docs/accuracy-sweeps.md's table of them.

    python experiments/profiling/accuracy.py [--only NAME] [--write] [--data DIR] [--format table|json]

LMBench's ladders of rates (docs/data.md): ShareGPT (each conversation's turns one after another), `long`
(21,000 tokens, of which 1,041 are everybody's) and `short`. Each is simulated as `scorecard accuracy` does
it, with the library's profile, and with one calibrated on its three lowest rates. DEVELOPMENT ladders were
looked at while terms and defaults were chosen, JUDGED ones only for the table. `--write` puts the table into
docs/accuracy-sweeps.md, and lowers the errors of FROZEN that fell: tests/experiments/test_accuracy_ratchet.py
fails where one rises by more than its noise. To raise one, edit that file and say why in the commit.

Not replayed: LMCache (KV kept in the host's memory), long prompts on two replicas (picked by chance), an
engine whose GPU is not known (`l8-k8s`). A mixture of experts (Llama 4 Scout) is replayed by `--only` alone.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from experiments.lib.ladders import LMBENCH, ladder
from experiments.lib.public_data import ROOT
from experiments.lib.results import bar, flags, show
from tokenfleet.cli.scorecard import ACCURACY_COLUMNS, accuracy_cells
from tokenfleet.profiles.accuracy import CALIBRATED_ON, accuracy_of, overall

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
FIGURES = (("e2e", "mean"), ("tpot", "mean"), ("ttft", "mean"), ("ttft", "p99"))
FROZEN = Path(__file__).with_name("accuracy.json")
LEAST_NOISE, RESAMPLES = 0.002, 200
# What a median over judged ladders is to be (mean of E2E, of TPOT, of TTFT, its p99).
WANTED = {False: (0.03, 0.03, 0.09, 0.15), True: (0.01, 0.01, 0.05, 0.12)}
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
    """A table for a page."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    return "\n".join([*lines, *("| " + " | ".join(row.values()) + " |" for row in rows)]) + "\n"


def errors_of(found: dict[str, Any]) -> dict[str, list[float]]:
    """A sweep's errors with their noise: how far the median over its rates scatters with the rates drawn."""
    skipped = CALIBRATED_ON * found["calibrated"]
    rates = found["rates"][skipped : skipped + found["judged"]]
    rng, errors = np.random.default_rng(0), {}
    for figure, what in FIGURES:
        sizes = np.abs([rate["errors"][figure][what] for rate in rates])
        drawn = np.median(rng.choice(sizes, (RESAMPLES, len(sizes))), axis=1)
        noise = max(float(drawn.std()), LEAST_NOISE)
        errors[f"{figure} {what}"] = [round(float(np.median(sizes)), 4), round(noise, 4)]
    hits = [rate["hits"] for rate in rates if rate["hits"] is not None]
    lack = max((100.0 * (one["allowed"] - one["simulated"]) for one in hits), default=0.0)
    return errors | {
        "rates from the saturation point": [float(abs(found["knee"]["rates_apart"])), 0.0],
        "points of hits": [round(lack, 2), 0.01],
    }


def digest(data: Path, name: str) -> str:
    return hashlib.sha256((data / LMBENCH / f"{name}.parquet").read_bytes()).hexdigest()[:16]


def worse(found: dict[str, Any], frozen: dict[str, Any]) -> Iterator[str]:
    """The errors of a sweep that are past the frozen ones by more than their noise."""
    rows = frozen["calibrated" if found["calibrated"] else "as it is"][found["runs"]]
    for figure, (error, _) in errors_of(found).items():
        most, noise = rows[figure]
        if error > most + noise:
            yield f"{found['runs']}: {figure}: {error:g}, at most {most:g} + {noise:g}"


def shrunk(found: list[dict[str, Any]], frozen: dict[str, Any]) -> dict[str, Any]:
    """Frozen errors, those that fell lowered; a sweep that was not there joins."""
    for one in found:
        rows = frozen["calibrated" if one["calibrated"] else "as it is"]
        before = rows.setdefault(one["runs"], {})
        for figure, now in errors_of(one).items():
            before[figure] = min(before.get(figure, now), now)
    return frozen


def between(path: Path, begin: str, text: str, end: str) -> None:
    """Put `text` between two lines of a file."""
    before, _, rest = path.read_text(encoding="utf-8").partition(begin)
    path.write_text(before + begin + text + end + rest.partition(end)[2], encoding="utf-8")


def main() -> int:
    parser = flags(__doc__, LMBENCH, resumes=True)
    parser.add_argument("--only", choices=(*DEVELOPMENT, *JUDGED, *MIXTURES), help="this ladder")
    parser.add_argument("--write", action="store_true", help="put the table into docs/accuracy-sweeps.md")
    asked = parser.parse_args()
    names = (asked.only,) if asked.only else (*DEVELOPMENT, *JUDGED)
    rows, bars, everything = [], {}, []
    frozen = json.loads(FROZEN.read_text(encoding="utf-8"))
    for calibrates, words in ((False, "as it is"), (True, "calibrated")):
        found = [
            asked.resume.part(f"{name} {words}", partial(of_ladder, name, asked.data, calibrates))
            for name in names
        ]
        everything += found
        rows += [row_of(one) for one in found]
        known = [one for one in found if one["runs"] in frozen[words]]
        bars |= {line: bar(1, 0) for one in known for line in worse(one, frozen)}
        medians = overall([one for one in found if one["runs"] in JUDGED] or found)
        for (figure, what), limit in zip(FIGURES, WANTED[calibrates], strict=True):
            value = round(float(medians["errors"][figure][what]), 4)
            bars[f"{words}: {figure} {what}, median"] = bar(value, limit)
    if asked.write:
        between(ROOT / "docs" / "accuracy-sweeps.md", BEGIN, markdown(rows), END)
        frozen = shrunk(everything, frozen) | {"data": {name: digest(asked.data, name) for name in names}}
        FROZEN.write_text(json.dumps(frozen, indent=1) + "\n", encoding="utf-8")
    return show("accuracy", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
