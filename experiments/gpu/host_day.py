"""The GPU day on a user's host: part A, then part B with vLLM, a report by rows of docs/limits-hardware.md.

    make gpu-day [MODEL=/models/llama-3.1-8b]
    python -m experiments.gpu.host_day [--model MODEL] [--output FOLDER] [--dry]

Part B is commands that exist: `doctor`, two engines that move a request, exact tokens, pauses, step times
learned against those that a fleet then serves, a fleet near its limit, and killed engines. With `--model` it
also starts that model twice, cold and warm, and compares what it learned with the shipped profile. `--dry`
runs the shortest of it on vLLM's CPU build and measures nothing of a GPU. A day takes one to two hours.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from dataplane.startup import child_environment
from experiments.lib.public_data import ROOT

OUTPUT = Path("tokenfleet-out/gpu-day")
PYTHON = sys.executable
BATCHES = ((0, 1, 1024, 0), (0, 32, 32_768, 0), (0, 128, 131_072, 0), (2048, 0, 0, 2048**2))
SHOWN = 12  # lines of a step's output in the report


@dataclass(frozen=True, slots=True)
class Step:
    """A command of the day; `turns`: the row of docs/limits-hardware.md that it replaces by a figure."""

    name: str
    turns: str
    command: Sequence[str]
    limit_s: float
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a step printed. `code` is None where it ran past its limit."""

    name: str
    turns: str
    code: int | None
    took_s: float
    printed: str


def steps(output: Path, model: str, is_dry: bool, gpus: int) -> list[Step]:
    """The steps of a day, in their order: what the others rest on comes first."""
    own, script = [PYTHON, "-m", "tokenfleet"], [PYTHON]
    quick = ["--quick"] if is_dry else []
    part_a = [PYTHON, "-m", "experiments.gpu.day", "--output", str(output), *quick]
    day = [
        Step("part A", "see its calls below", part_a, 1800),
        Step("doctor", "drivers and busy GPUs of `doctor`", [*own, "doctor"], 300),
    ]
    if is_dry:
        return day
    serving, tp = "experiments/serving", 2
    day += [
        Step("two engines", "`doctor --engine`", [*own, "doctor", "--engine"], 900),
        Step("exact tokens", "any GPU", [*script, f"{serving}/migration_equality.py", "--quick"], 1800),
        Step("pauses of moves", "any GPU", [*script, f"{serving}/migration_downtime.py", "--quick"], 1800),
        Step("learned", "any GPU", [*script, "experiments/profiling/learned_profile.py", "--quick"], 1800),
        Step("near its limit", "any GPU", [*script, f"{serving}/near_the_limit.py", "--quick"], 3600),
        Step(
            "killed engines",
            "any GPU",
            [*script, f"{serving}/fault_rounds.py", "--quick", "--real", "6"],
            3600,
        ),
    ]
    if model:
        tried, exact = [*own, "doctor", "--engine", "--model", model], {"VLLM_BATCH_INVARIANT": "1"}
        day.append(Step("two engines of the model", "`doctor --engine`", tried, 1800, exact))
        if gpus >= 2 * tp:
            wide = [*tried, "--tp", str(tp)]
            day.append(Step("two engines of TP 2", "TP 2, 4, 8 on GPUs", wide, 1800, exact))
        start = [PYTHON, "-m", "experiments.gpu.host_day", "--start", model]
        day += [Step(f"{how} start", "any GPU", start, 3600) for how in ("cold", "warm")]
    return day


def run(step: Step) -> Outcome:
    """Run a step to its end, or to its limit."""
    began_s = time.monotonic()
    environment = child_environment() | dict(step.environment)
    try:
        done = subprocess.run(
            step.command,
            cwd=ROOT,
            env=environment,
            timeout=step.limit_s,
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
        )
        code, printed = done.returncode, done.stdout
    except subprocess.TimeoutExpired as late:
        code, printed = None, (late.stdout or b"").decode(errors="replace")
    return Outcome(step.name, step.turns, code, time.monotonic() - began_s, printed)


def report(outcomes: Sequence[Outcome], calls: Sequence[Mapping[str, Any]], gpu: str) -> str:
    """The day as Markdown: which row of docs/limits-hardware.md each step turns into a figure."""
    lines = [f"# GPU day on {gpu or 'a CPU (nothing here was measured on a GPU)'}", ""]
    lines += ["| step | row of docs/limits-hardware.md | ended | minutes |", "|---|---|---|---|"]
    for one in outcomes:
        ended = "past its limit" if one.code is None else "well" if one.code == 0 else f"with code {one.code}"
        lines.append(f"| {one.name} | {one.turns} | {ended} | {one.took_s / 60:.1f} |")
    lines += [
        "",
        "## Part A",
        "",
        "| part | row of limits-hardware.md | check | verdict |",
        "|---|---|---|---|",
    ]
    for call in calls:
        for name, part in call["parts"].items():
            checks = part["checks"] or {"–": "measured"}
            lines += [f"| {name} | {part['turns']} | {check} | {found} |" for check, found in checks.items()]
    for one in outcomes[1:]:
        tail = one.printed.strip().splitlines()[-SHOWN:]
        lines += ["", f"## {one.name}", "", "```", *tail, "```"]
    return "\n".join(lines) + "\n"


def start(model: str) -> dict[str, Any]:
    """Start two workers of a model: seconds to ready, and what they learned beside the shipped profile."""
    from harness.served import fleet
    from tokenfleet.files import cache_folder
    from tokenfleet.profiles.form import parse_profile
    from tokenfleet.profiles.library import find_profiles

    before, began_s = time.time(), time.monotonic()
    with fleet(Path(model).resolve(), "--workers", "2", engine_flags=()):
        found: dict[str, Any] = {"start_s": time.monotonic() - began_s}
    kept = [f for f in cache_folder("learned").glob("*.json") if f.stat().st_mtime >= before]
    for file in kept:
        learned = parse_profile(json.loads(file.read_text())["profile"], str(file))
        (shipped,) = find_profiles(model, [learned.gpu], [1])
        ratios = [float(learned.step.step_s(*b) / shipped.step.step_s(*b)) for b in BATCHES]
        found["learned_over_shipped"] = dict(zip(map(str, BATCHES), ratios, strict=True))
    return found


def gpu_names() -> list[str]:
    """The GPUs that PyTorch sees."""
    import torch

    return [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="", help="a model's folder, for its starts and exact tokens")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="folder for JSON files and the report")
    parser.add_argument("--dry", action="store_true", help="the shortest of it, without a GPU")
    parser.add_argument("--start", metavar="MODEL", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.start:
        print(json.dumps(start(asked.start), indent=1))
        return 0
    gpus = gpu_names()
    if not gpus and not asked.dry:
        print("gpu-day: PyTorch sees no GPU here (--dry rehearses it on a CPU)", file=sys.stderr)
        return 2
    asked.output.mkdir(parents=True, exist_ok=True)
    outcomes = []
    for step in steps(asked.output.resolve(), asked.model, asked.dry, len(gpus)):
        print(f"{step.name} …", flush=True)
        outcomes.append(run(step))
    calls = [json.loads(file.read_text()) for file in sorted(asked.output.glob("call-*.json"))]
    (asked.output / "part-b.json").write_text(json.dumps([asdict(one) for one in outcomes], indent=1) + "\n")
    (asked.output / "report.md").write_text(report(outcomes, calls, ", ".join(gpus)))
    print(f"wrote {asked.output / 'report.md'}")
    return 0 if all(one.code == 0 for one in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
