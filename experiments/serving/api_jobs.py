"""Plan jobs ordered at once, their service killed with -9 and started again mid-way.

Bars: every job ends done, none is lost, and none was run to completion twice: each has one kept plan and one
attempt that ended `done` in the database's own record of attempts; no plan differs from another of the same
question.
"""

from __future__ import annotations

import json
import signal
import sqlite3
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from experiments.lib.plan_service import Service
from experiments.lib.results import bar, flags, show


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--jobs", type=int, default=20)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--parallel", type=int, default=2)
    asked = parser.parse_args()
    jobs, kills = (6, 1) if asked.quick else (asked.jobs, asked.kills)
    with tempfile.TemporaryDirectory() as folder:
        rows, found = run(Path(folder), jobs, kills, asked.parallel, asked.seed)
    bars = {
        "jobs lost": bar(jobs - found["ended"], 0),
        "jobs without a plan": bar(jobs - found["done"], 0),
        "jobs run to completion more than once": bar(found["twice"], 0),
        "questions whose plans differ": bar(found["differing"], 0),
        "kills that interrupted a running job": bar(found["interrupting"], kills, at_least=True),
    }
    return show("plan jobs through kill -9", rows, bars, asked)


def run(data: Path, jobs: int, kills: int, parallel: int, seed: int) -> tuple[list[Any], dict[str, int]]:
    """Order all at once, kill at even shares of the work, wait for the rest, and read the records."""
    service = Service(data, parallel)
    service.start()
    began_s = time.monotonic()
    with ThreadPoolExecutor(jobs) as clients:
        names = list(clients.map(lambda i: order(service, i, seed), range(jobs)))
    killed = []
    for kill in range(1, kills + 1):
        while True:
            states = [job["state"] for job in listed(service, names)]
            if states.count("done") >= jobs * kill // (kills + 1) and "running" in states:
                break
            if states.count("done") == jobs:
                break
            time.sleep(0.05)
        service.end(signal.SIGKILL)
        killed.append(time.monotonic() - began_s)
        service.start()
    while not all(job["state"] in ("done", "failed", "cancelled") for job in listed(service, names)):
        time.sleep(0.1)
    plans = {name: service.ask("GET", f"/v1/plans/{name}") for name in names}
    service.end(signal.SIGTERM)
    return records(data, names, plans, killed)


def order(service: Service, i: int, seed: int) -> str:
    """The i-th job; every second one asks what the one before asked, so that their plans can be compared."""
    question = {
        "trace": {"sample": True},
        "window": "0s..10m",
        "model": "llama-3.1-8b",
        "slo": {"ttft_s": 0.4, "tpot_s": 0.03},
        "gpu": ["h100"],
        "tp": [1],
        "seed": seed + i // 2,
    }
    return str(service.ask("POST", "/v1/plans", question, idempotency_key=f"job-{i}")["id"])


def listed(service: Service, names: list[str]) -> list[Any]:
    """The jobs that were ordered, as the service lists them."""
    every = service.ask("GET", "/v1/plans?limit=500")["plans"]
    return [job for job in every if job["id"] in names]


def records(
    data: Path, names: list[str], plans: dict[str, Any], killed: list[float]
) -> tuple[list[Any], dict[str, int]]:
    """A row for each job, from the service and from its database, and the counts the bars need."""
    database = sqlite3.connect(data / "tokenfleet.db")
    runs = database.execute("SELECT job, attempt, outcome FROM runs ORDER BY job, attempt").fetchall()
    kept = dict(database.execute("SELECT id, count(*) FROM plans GROUP BY id").fetchall())
    database.close()
    rows, answers = [], {}
    for name in names:
        outcomes = [outcome for job, _, outcome in runs if job == name]
        job = plans[name]
        answers.setdefault(job["question"]["seed"], set()).add(json.dumps(job["plan"], sort_keys=True))
        rows.append(
            {
                "job": name,
                "state": job["state"],
                "attempts": " ".join(outcomes),
                "plans kept": kept.get(name, 0),
                "workers": job["brief"]["workers"] if job["brief"] else None,
            }
        )
    return rows, {
        "ended": sum(row["state"] in ("done", "failed", "cancelled") for row in rows),
        "done": sum(row["state"] == "done" and row["plans kept"] == 1 for row in rows),
        "twice": sum(row["attempts"].split().count("done") > 1 for row in rows),
        "differing": sum(len(found) > 1 for found in answers.values()),
        "interrupting": min(len(killed), sum(outcome == "killed" for _, _, outcome in runs)),
    }


if __name__ == "__main__":
    sys.exit(main())
