"""Runs eight fixed inputs and compares the answers of two checkouts, field by field.

    python benchmarks/answers.py --against ../other-checkout

Each answer is the JSON of one command: three plans, two simulations, a what-if grid, a portfolio and a trace
check. They cover mixes, split workers, spot prices, sessions with prefix caches and host memory, moves, and
limits. A field is a difference when it is in one answer only, or its value differs; floats must be equal.
`--save DIR` keeps the answers, and `--against` also takes such a folder.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TRACE = "examples/sample_trace.csv"
TARGETS = ["--slo", "ttft=1.6s,tpot=75ms"]
SESSIONS = [
    *("trace", "synth", "--arrivals", "poisson:0.4", "--turns", "lognormal:5:1", "--requests", "1500"),
    *("--lengths", "lognormal:800:1-lognormal:200:1", "--system-tokens", "1000", "--output"),
]
CASES: dict[str, list[str]] = {
    "demo": [
        *("plan", "--trace", TRACE, "--model", "llama-3.1-70b", *TARGETS),
        *("--gpu", "a100", "--gpu", "h100", "--gpu", "h200"),
    ],
    "spot": [
        *("plan", "--trace", TRACE, "--model", "llama-3.1-8b", "--gpu", "h100", "--gpu", "a100", "--tp", "1"),
        *("--slo", "ttft=400ms,tpot=30ms", "--rate-scale", "4", "--spot", "--reclaims-per-h", "0.5"),
        *("--cold-start", "2m", "--window", "0m..10m"),
    ],
    "split": [
        *("plan", "--trace", TRACE, "--model", "llama-3.1-8b", "--gpu", "h100", "--tp", "1"),
        *("--engine", "split", "--slo", "ttft=400ms,tpot=30ms", "--rate-scale", "4", "--window", "0m..10m"),
    ],
    "moves": [
        *("simulate", "--trace", TRACE, "--model", "llama-3.1-8b", "--gpu", "a100", "--tp", "1", *TARGETS),
        *("--workers", "3", "--rate-scale", "3", "--policy", "spread+migrate"),
    ],
    "sessions": [
        *("simulate", "--trace", "SESSIONS", "--model", "llama-3.1-8b", "--gpu", "h100", "--tp", "1"),
        *("--workers", "2", "--slo", "ttft=2s,tpot=40ms", "--host-kv", "16GiB@25GB/s"),
        *("--kv-tokens", "60000"),
    ],
    "whatif": [
        *("whatif", "--trace", TRACE, "--model", "llama-3.1-8b", "--gpu", "h100", "--gpu", "a100"),
        *("--tp", "1", "--slo", "ttft=400ms,tpot=30ms", "--window", "0m..8m"),
        *("--vary", "rate=1,3", "--vary", "slo.tpot=20ms,30ms"),
    ],
    "portfolio": ["portfolio", "examples/portfolio.yaml"],
    "check": ["trace", "check", TRACE],
}
# What names the run, not the answer.
RUN = {"seconds", "elapsed_s", "plan_s", "created", "created_at", "made_at", "version", "took_s", "wall_s"}


def answers_of(checkout: Path, sessions: Path) -> dict[str, Any]:
    """Every case's JSON, by the checkout's own code."""
    answers = {}
    for name, command in CASES.items():
        words = [str(sessions) if word == "SESSIONS" else word for word in command]
        answers[name] = json.loads(run(checkout, [*words, "--format", "json"]))
        print(f"{name:10} answered", file=sys.stderr)
    return answers


def run(checkout: Path, words: list[str]) -> str:
    """What a command prints; a fleet that misses its target (exit code 1) is an answer, too."""
    ended = subprocess.run(
        [sys.executable, "-m", "tokenfleet", *words],
        cwd=checkout,
        env=os.environ | {"PYTHONPATH": str(checkout), "COLUMNS": "200"},
        capture_output=True,
        text=True,
    )
    if ended.returncode not in (0, 1):
        raise SystemExit(f"{checkout}: {' '.join(words)}\n{ended.stderr}")
    return ended.stdout


def differences(one: Any, other: Any, where: str = "") -> Iterator[str]:
    """Each field in which two answers differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in sorted({*one, *other} - RUN):
            if key not in one or key not in other:
                yield f"{where}.{key}: only in {'the first' if key in one else 'the second'}"
            else:
                yield from differences(one[key], other[key], f"{where}.{key}")
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for i, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from differences(left, right, f"{where}[{i}]")
    elif one != other:
        yield f"{where}: {json.dumps(one)[:80]} != {json.dumps(other)[:80]}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--against", type=Path, help="another checkout, or a folder that --save wrote")
    parser.add_argument("--save", type=Path, help="keep this checkout's answers here")
    asked = parser.parse_args()
    here = Path(__file__).resolve().parent.parent
    with tempfile.TemporaryDirectory() as scratch:
        sessions = Path(scratch) / "sessions.parquet"
        run(here, [*SESSIONS, str(sessions)])
        ours = answers_of(here, sessions)
        if asked.save:
            asked.save.mkdir(parents=True, exist_ok=True)
            for name, answer in ours.items():
                (asked.save / f"{name}.json").write_text(json.dumps(answer, indent=1))
        if asked.against is None:
            return 0
        if (asked.against / "controlplane").is_dir():
            theirs = answers_of(asked.against.resolve(), sessions)
        else:
            theirs = {name: json.loads((asked.against / f"{name}.json").read_text()) for name in CASES}
    differs = 0
    for name in CASES:
        found = list(differences(ours[name], theirs[name]))
        differs += bool(found)
        print(f"{name:10} {'equal' if not found else f'{len(found)} fields differ'}")
        for line in found[:20]:
            print(f"    {line}")
    return int(differs > 0)


if __name__ == "__main__":
    sys.exit(main())
