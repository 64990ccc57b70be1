"""Schemathesis against `tokenfleet api`: thousands of made-up calls, each answer held against the OpenAPI.

Bars: at least 5,000 cases (a tenth with --quick), no 5xx, and no answer whose status, headers, content type
or body is not what the schema documents. All of schemathesis' checks are on but two that ask for what this
API does not promise: `positive_data_acceptance` would have every order that fits the schema accepted, and no
schema can say which models have a profile or what makes a trace (such orders get a documented 400);
`use_after_free` would have a deleted job gone, and a cancelled one is kept.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from experiments.lib.plan_service import Service
from experiments.lib.results import bar, flags, show

HERE = Path(__file__).resolve().parent
CASES = 5000


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--max-examples", type=int, default=1100, help="cases of one operation in one phase")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        said = fuzz(Path(folder), 60 if asked.quick else asked.max_examples, asked.seed)
    kinds: dict[str, int] = {}
    for failure in said["failures"]:
        kinds[failure["type"]] = kinds.get(failure["type"], 0) + 1
    rows = [{"phase": name, "status": phase["status"]} for name, phase in said["phases"].items()]
    rows += [{"phase": "failures", "status": f"{kind}: {count}"} for kind, count in kinds.items()]
    server = kinds.get("ServerError", 0) + len(said["errors"])
    bars = {
        "cases": bar(said["test_cases"]["generated"], CASES // 10 if asked.quick else CASES, at_least=True),
        "operations tested": bar(said["operations"]["tested"], said["operations"]["total"], at_least=True),
        "5xx, or no answer": bar(server, 0),
        "answers unlike the schema": bar(sum(kinds.values()) - kinds.get("ServerError", 0), 0),
        "the service still answers": bar(said["alive"], 1, at_least=True),
    }
    return show("a fuzz of the plan service", rows, bars, asked)


def fuzz(folder: Path, max_examples: int, seed: int) -> dict[str, Any]:
    """Schemathesis' own report on a service that has some jobs already."""
    program = shutil.which("schemathesis", path=str(Path(sys.executable).parent))
    if program is None:
        raise SystemExit("schemathesis is not installed: pip install -r requirements/dev.txt")
    hooks = str(HERE / "api_fuzz_hooks.py")
    service = Service(folder / "data", 1, "--queue", "5", "--job-timeout", "1s")
    service.start()
    try:
        jobs = [ended_job(service, i) for i in range(4)]
        report = folder / "report.json"
        run = subprocess.run(
            [
                program, "run", f"http://127.0.0.1:{service.port}/openapi.json",
                "--checks", "all", "--exclude-checks", "positive_data_acceptance,use_after_free",
                "--max-examples", str(max_examples), "--seed", str(seed), "--continue-on-failure",
                "--suppress-health-check", "all", "--generation-database", "none", "--request-timeout", "60",
                "--report", "json", "--report-json-path", str(report), "--no-color",
            ],
            cwd=folder,
            capture_output=True,
            text=True,
            env=os.environ | {"SCHEMATHESIS_HOOKS": hooks, "FUZZ_JOBS": " ".join(jobs)},
        )  # fmt: skip
        if not report.is_file():
            raise SystemExit(f"schemathesis wrote no report:\n{run.stdout[-2000:]}\n{run.stderr[-2000:]}")
        said: dict[str, Any] = json.loads(report.read_text())
        if said["failures"] or said["errors"]:
            print(run.stdout[-6000:], file=sys.stderr)
        return said | {"alive": int(service.ask("GET", "/health") == {"status": "ok"})}
    finally:
        service.end(15)


def ended_job(service: Service, i: int) -> str:
    """A job that is over: cancelled or failed, whichever is first."""
    question = {
        "trace": {"sample": True},
        "model": "llama-3.1-70b",
        "slo": {"ttft_s": 1, "tpot_s": 1},
        "seed": i,
    }
    name = str(service.ask("POST", "/v1/plans", question)["id"])
    if i % 2:
        service.ask("DELETE", f"/v1/plans/{name}")
    while service.ask("GET", f"/v1/plans/{name}")["state"] in ("queued", "running"):
        time.sleep(0.1)
    return name


if __name__ == "__main__":
    sys.exit(main())
