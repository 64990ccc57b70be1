"""What every experiment shares: its flags, and its answer as a table or as JSON."""

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

from dataplane.kernel_cache import use_kernel_cache

SHARED_DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"


def flags(says: str) -> argparse.ArgumentParser:
    """The flags of every experiment, whose kernels stay on disk; a script may add its own."""
    use_kernel_cache()
    parser = argparse.ArgumentParser(description=says)
    parser.add_argument("--quick", action="store_true", help="less of it, in seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--format", choices=("table", "json"), default="table")
    parser.add_argument("--data", type=Path, default=SHARED_DATA, help="the public data")
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
            "command": " ".join(["python", f"{script.parent.name}/{script.name}", *sys.argv[1:]]),
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
