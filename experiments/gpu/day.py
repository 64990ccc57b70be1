"""Part A of the GPU day: what torch alone can measure of the live plane on this machine.

    python -m experiments.gpu.day --output FOLDER [--call 1|2|3] [--quick]

Each call takes at most ten minutes and writes one JSON file. Without a GPU all parts run on CPU tensors of
small size, and checks that need a stream are not applicable. Exit code 1: a check failed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.gpu import facts, host_tier, interference, order, penalties, shared_gpu, staging, transports
from experiments.gpu.bench import Bench, Result, bench_here

# A wrong order makes fast figures, so order comes before what it makes fast.
CALLS: dict[int, dict[str, Callable[[Bench], Result]]] = {
    1: {"facts": facts.measure, "transports": transports.measure, "staging": staging.measure},
    2: {"order": order.measure, "interference": interference.measure},
    3: {"penalties": penalties.measure, "host tier": host_tier.measure, "shared GPU": shared_gpu.measure},
}


def run_call(bench: Bench, call: int, file: Path) -> dict[str, Any]:
    """Run the parts of a call. A part that raises is one failed check; the others still run.

    The file is written after each part: a call that is cut off leaves what it has measured.
    """
    answer: dict[str, Any] = {"call": call, "device": str(bench.device), "is_gpu": bench.is_gpu}
    answer |= {"is_quick": bench.is_quick, "parts": {}}
    for name, measure in CALLS[call].items():
        began_s = time.monotonic()
        try:
            found = asdict(measure(bench))
        except Exception as error:
            traceback.print_exc()
            why = f"{type(error).__name__}: {error}".splitlines()[0]
            found = asdict(Result("", [{"error": why}], {f"{name} runs to its end": "failed"}))
        answer["parts"][name] = found | {"took_s": time.monotonic() - began_s}
        file.write_text(json.dumps(answer, indent=1) + "\n")
        told = [f"  {verdict}: {check}" for check, verdict in found["checks"].items()]
        print(f"{name}: {time.monotonic() - began_s:.1f} s", *told, sep="\n", flush=True)
    return answer


def failed(answer: Mapping[str, Any]) -> list[str]:
    """The checks of a call that failed."""
    checks = [one for part in answer["parts"].values() for one in part["checks"].items()]
    return [name for name, found in checks if found == "failed"]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--call", type=int, choices=sorted(CALLS), help="only this call")
    parser.add_argument("--output", type=Path, required=True, help="folder for one JSON file a call")
    parser.add_argument("--quick", action="store_true", help="small sizes and few rounds")
    asked = parser.parse_args()
    bench, is_well = bench_here(asked.quick), True
    asked.output.mkdir(parents=True, exist_ok=True)
    for call in [asked.call] if asked.call else CALLS:
        file = asked.output / f"call-{call}.json"
        answer = run_call(bench, call, file)
        print(f"wrote {file}")
        is_well &= not failed(answer)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
