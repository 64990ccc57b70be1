"""Every experiment's flags, and its results as a table or as JSON beside the figures they must reach."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from dataplane.startup import use_kernel_cache
from experiments.lib.public_data import DATA, ROOT
from experiments.lib.resume import Parts


class Flags(argparse.ArgumentParser):
    """A parser that ends the script, in one line and with code 2, where public data is missing."""

    def __init__(self, says: str | None, *data: str) -> None:
        super().__init__(description=says, formatter_class=argparse.RawDescriptionHelpFormatter)
        self._needed = data
        if data:
            self.add_argument("--data", type=Path, default=DATA, help=f"the public data ({', '.join(data)})")

    def parse_args(self, *words: Any) -> Any:  # type: ignore[override]
        asked = super().parse_args(*words)
        for name in self._needed:
            if not (asked.data / name).exists():
                told = "not found; docs/data.md says where it comes from (--data DIR, $TOKENFLEET_BENCH_DATA)"
                self.exit(2, f"{asked.data / name}: {told}\n")
        return asked


def flags(says: str | None, *data: str, resumes: bool = False) -> Flags:
    """The flags of every experiment, whose kernels stay on disk; a script may add its own.

    `data`: the folders or files of public data without which it cannot run. `resumes`: it works in `Parts`.
    """
    use_kernel_cache()
    parser = Flags(says, *data)
    parser.add_argument("--quick", action="store_true", help="less of it, in seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=("table", "json"), default="table")
    if resumes:
        parser.add_argument(
            "--resume",
            type=lambda folder: Parts(Path(folder)),
            default=Parts(),
            metavar="FOLDER",
            help="keep finished parts there, and go on from those that are there",
        )
    return parser


def bar(value: float, limit: float, at_least: bool = False) -> dict[str, Any]:
    """A figure against what it must reach."""
    ok = value >= limit if at_least else value <= limit
    return {"value": value, "bar": limit, "ok": bool(ok)}


def show(
    experiment: str,
    rows: Sequence[Mapping[str, Any]],
    bars: Mapping[str, Mapping[str, Any]],
    asked: argparse.Namespace,
) -> int:
    """Print rows and bars as asked; 0 when every bar is reached, 1 otherwise."""
    if asked.format == "json":
        script = Path(sys.argv[0]).resolve()
        answer = {
            "experiment": experiment,
            "rows": list(rows),
            "bars": dict(bars),
            "command": " ".join(["python", str(script.relative_to(ROOT)), *sys.argv[1:]]),
            "seed": asked.seed,
        }
        print(json.dumps(answer, indent=1, allow_nan=False, default=float))
    else:
        console = Console(width=160)
        table = Table(title=experiment)
        columns = list(dict.fromkeys(name for row in rows for name in row))
        for name in columns:
            number = any(isinstance(row.get(name), int | float) for row in rows)
            table.add_column(name, justify="right" if number else "left")
        for row in rows:
            table.add_row(*(_text(row.get(name)) for name in columns))
        console.print(table)
        for name, one in bars.items():
            mark = "ok  " if one["ok"] else "MISS"
            console.print(f"{mark} {name}: {_text(one['value'])} (bar {_text(one['bar'])})", highlight=False)
    return 0 if all(one["ok"] for one in bars.values()) else 1


def _text(value: Any) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "-"
    return f"{value:.4g}" if isinstance(value, float) else str(value)
