"""The plan of `make demo`, served for its trace's hour by a fleet that scales itself.

    python experiments/serving/served_hour.py [--quick] [--window 4m..29m] [--plan FILE]
        [--resume FOLDER] [--format table|json]

`tokenfleet plan` as `make demo` asks it, or the plan of `--plan`. `serve --plan` runs it with its default
flags before emulated engines, on the real clock. One client sends the whole trace as it was recorded.

A request is in time by the client's own clock: the first chunk from its due time on, the mean gap after that.
A stream that fails is late. Clairvoyant: in each window of five minutes the cheapest part of the plan's fleet
that serves the window alone at the target, without a start or a drain. Hours of workers and of GPUs, starts
and drains included, are counted from the first request to the last. `fixed`: those of the plan's own count.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from controlplane.placement.lengths import LengthTable
from controlplane.workload import Workload
from dataplane.simulated.simulate import WorkerSpec, simulate
from experiments.lib.results import bar, flags, show
from experiments.scaling.closed_loop import paid_s, played
from experiments.serving.planned_fleet import TRACE, load, tokenfleet
from harness.served import fleet, tiny_model
from tokenfleet.advise.hindsight import LEAD_IN_S, WINDOW_S
from tokenfleet.planning.plan_file import PlanFile, parse_plan

GPUS = ("--gpu", "a100", "--gpu", "h100", "--gpu", "h200")
ASKED = ("--model", "llama-3.1-70b", *GPUS, "--slo", "ttft=1.6s,tpot=75ms")
WINDOW, QUICK_WINDOW = "0m..60m", "0m..4m"
OVER = 1.08  # times the clairvoyant's worker-hours


def planned() -> dict[str, Any]:
    made: dict[str, Any] = json.loads(tokenfleet("plan", "--trace", TRACE, *ASKED, "--format", "json"))
    return made


def served(document: dict[str, Any], hour: Workload) -> dict[str, Any]:
    """The fleet's changes, each request's TTFT and TPOT, and what the loop said of itself."""
    with tempfile.TemporaryDirectory(prefix="tokenfleet-") as name, tiny_model() as model:
        (Path(name) / "plan.json").write_text(json.dumps(document))
        words = ("--plan", f"{name}/plan.json", "--engine", "emulated")
        with fleet(model, *words, engine_flags=()) as server:
            changes, streams = asyncio.run(played(server, hour))
            scaling = server.ask("GET", "/v1/fleet")["scaling"]
    told = [
        (s.ttft_s, (s.chunks_s[-1] - s.chunks_s[0]) / max(s.tokens - 1, 1))
        if s.is_done and s.chunks_s and not s.error
        else None
        for s in streams
    ]
    return {"changes": changes, "told": told, "said": [one["reason"] for one in scaling]}


def clairvoyant(plan: PlanFile, hour: Workload) -> tuple[float, float]:
    """Worker-seconds and GPU-seconds of the cheapest part of the fleet in each window."""
    workers = [g.worker_type for g in plan.groups for _ in range(g.workers)]
    parts = {c for n in range(1, len(workers) + 1) for c in itertools.combinations(workers, n)}
    parts_by_price = sorted(parts, key=lambda part: (sum(w.usd_per_h or 0.0 for w in part), len(part)))
    predictor, end_s = LengthTable.from_history(hour.prompt_tokens, hour.output_tokens), hour.arrival_s[-1]
    paid = np.zeros(2)
    for start_s in np.arange(0.0, end_s, WINDOW_S):
        lead_s = min(LEAD_IN_S, start_s)
        part = hour.window(start_s - lead_s, start_s + WINDOW_S)
        judged = part.arrival_s >= lead_s
        for taken in parts_by_price:
            specs = [WorkerSpec(worker_type.profile) for worker_type in taken]
            met = simulate(part, specs, plan.targets, plan.policy, predictor=predictor).met
            if met[judged].mean() >= plan.attainment.target or taken is parts_by_price[-1]:
                paid += min(WINDOW_S, end_s - start_s) * np.array([len(taken), sum(w.gpus for w in taken)])
                break
    return float(paid[0]), float(paid[1])


def main() -> int:
    parser = flags(__doc__, resumes=True)
    parser.add_argument("--window", help=f"part of the trace ({WINDOW}, with --quick {QUICK_WINDOW})")
    parser.add_argument("--plan", type=Path, help="a plan of the sample trace, in place of the demo's")
    asked = parser.parse_args()
    document = json.loads(asked.plan.read_text()) if asked.plan else asked.resume.part("plan", planned)
    plan = parse_plan(document, "plan.json")
    hour = load(plan, asked.window or (QUICK_WINDOW if asked.quick else WINDOW), 1.0)
    end_s = float(hour.arrival_s[-1])
    made = asked.resume.part(f"served {asked.window}", lambda: served(document, hour))
    met = [
        one is not None and one[0] <= plan.targets.ttft_s and one[1] <= plan.targets.tpot_s
        for one in made["told"]
    ]
    gpus = {g.worker_type.name: g.worker_type.gpus for g in plan.groups}
    hours = {
        "workers": paid_s([(at_s, len(kinds)) for at_s, kinds in made["changes"]], 0.0, end_s),
        "GPUs": paid_s([(at_s, sum(gpus[k] for k in kinds)) for at_s, kinds in made["changes"]], 0.0, end_s),
    }
    least = dict(zip(hours, clairvoyant(plan, hour), strict=True))
    fixed = {"workers": plan.workers * end_s, "GPUs": plan.gpus * end_s}
    rows = [
        {"hours of": of, "served": hours[of] / 3600, "clairvoyant": least[of] / 3600}
        | {"ratio": hours[of] / least[of], "fixed": fixed[of] / 3600}
        for of in hours
    ]
    rows += [{"hours of": f"{at_s:.0f} s: {', '.join(kinds)}"} for at_s, kinds in made["changes"]]
    rows += [{"hours of": said} for said in made["said"]]
    bars = {
        f"attainment of {len(met)} requests": bar(float(np.mean(met)), plan.attainment.target, at_least=True),
        "worker-hours over the clairvoyant's": bar(rows[0]["ratio"], OVER),
        "changes of count": bar(len(made["changes"]) - 1, 1, at_least=True),
        "failed streams": bar(made["told"].count(None), 0),
    }
    return show("the demo's hour, served", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
