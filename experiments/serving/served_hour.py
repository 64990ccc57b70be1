"""The plan of `make demo`, served for its trace's hour by a fleet that scales itself.

    python experiments/serving/served_hour.py [--quick] [--simulated COLD_START_S] [--resume FOLDER]
        [--format table|json]

`tokenfleet plan` as `make demo` asks it. `serve --plan` runs it with its default
flags before emulated engines, on the real clock. One client sends the whole trace as it was recorded. On a
machine that is full the engines are late themselves: `steps` says how much longer theirs took than the
profile has it. `--simulated`: the same plan, loop and trace on the simulated plane, which no load slows;
workers start in this time. Those of emulated engines start in 0.1 s.

A request is in time by the client's own clock: the first chunk from its due time on, the mean gap after that.
A stream that fails is late. Clairvoyant: in each window of five minutes the cheapest part of the plan's fleet
that serves the window alone at the target, without a start or a drain. Hours of workers and of GPUs, starts
and drains included, are counted from the first request to the last. `fixed`: those of the plan's own count.

`sure` does not know which requests come: its part of the fleet serves the window at the target in each of
DRAWS hours with this hour's rates and other requests, drawn as `plan` draws them. `reachable` also has all of
the plan's workers until the loop's first change.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from controlplane.placement.lengths import LengthTable
from controlplane.workload import Workload
from dataplane.simulated.simulate import WorkerSpec, simulate
from experiments.lib.autoscaling import loop_run
from experiments.lib.command import timed_plan
from experiments.lib.results import bar, flags, show
from experiments.scaling.closed_loop import paid_s, played
from experiments.serving.planned_fleet import TRACE, load
from harness.served import fleet, tiny_model
from tokenfleet.advise.hindsight import LEAD_IN_S, WINDOW_S
from tokenfleet.planning.plan_file import PlanFile, parse_plan
from tokenfleet.planning.traffic.replicates import Doubted, ResampledTraffic

GPUS = ("--gpu", "a100", "--gpu", "h100", "--gpu", "h200")
ASKED = ("--model", "llama-3.1-70b", *GPUS, "--slo", "ttft=1.6s,tpot=75ms")
DRAWS = 19  # all of them: 95 % of such hours
OVER = 1.08  # times the clairvoyant's worker-hours


def served(document: dict[str, Any], hour: Workload) -> dict[str, Any]:
    """The fleet's changes, each request's TTFT and TPOT, and what the loop said of itself."""
    with tempfile.TemporaryDirectory(prefix="tokenfleet-") as name, tiny_model() as model:
        (Path(name) / "plan.json").write_text(json.dumps(document))
        words = ("--plan", f"{name}/plan.json", "--engine", "emulated")
        with fleet(model, *words, engine_flags=()) as server:
            changes, streams = asyncio.run(played(server, hour))
            view = server.ask("GET", "/v1/fleet")
    told = [
        (s.ttft_s, (s.chunks_s[-1] - s.chunks_s[0]) / max(s.tokens - 1, 1))
        if s.is_done and s.chunks_s and not s.error
        else None
        for s in streams
    ]
    said = [one["reason"] for one in view["scaling"]] + sorted({s.error for s in streams if s.error})
    slower = max(one["slowdown"] or 1.0 for one in view["step_times"])
    return {"changes": changes, "told": told, "said": said, "slower": slower}


def simulated(plan: PlanFile, cold_start_s: float, hour: Workload) -> dict[str, Any]:
    """The same, of the fleet's loop on the simulated plane."""
    predictor = LengthTable.from_history(hour.prompt_tokens, hour.output_tokens)
    run, record, _ = loop_run(plan, cold_start_s, hour, predictor)
    told = [(float(t), float(g)) for t, g in zip(run.ttft_s, np.nan_to_num(run.tpot_s), strict=True)]
    wanted = [(0.0, {g.worker_type.name: g.workers for g in plan.groups}), *record.kinds]
    changes = [(at_s, [k for k, n in of.items() for _ in range(n)]) for at_s, of in wanted]
    return {"changes": changes, "told": told, "said": [why for _, why in record.reasons], "slower": 1.0}


def cheapest(plan: PlanFile, hours: Sequence[Workload]) -> list[tuple[float, list[str]]]:
    """The cheapest part of the fleet in each window that holds the target in all hours, from when."""
    workers = [g.worker_type for g in plan.groups for _ in range(g.workers)]
    parts = {c for n in range(1, len(workers) + 1) for c in itertools.combinations(workers, n)}
    parts_by_price = sorted(parts, key=lambda part: (sum(w.usd_per_h or 0.0 for w in part), len(part)))
    predictor = LengthTable.from_history(hours[0].prompt_tokens, hours[0].output_tokens)

    def holds(hour: Workload, start_s: float, specs: list[WorkerSpec]) -> bool:
        lead_s = min(LEAD_IN_S, start_s)
        part = hour.window(start_s - lead_s, start_s + WINDOW_S)
        met = simulate(part, specs, plan.targets, plan.policy, predictor=predictor).met
        return bool(met[part.arrival_s >= lead_s].mean() >= plan.attainment.target)

    found: list[tuple[float, list[str]]] = []
    for start_s in np.arange(0.0, hours[0].arrival_s[-1], WINDOW_S).tolist():
        for taken in parts_by_price:
            specs = [WorkerSpec(worker_type.profile) for worker_type in taken]
            if taken is parts_by_price[-1] or all(holds(hour, start_s, specs) for hour in hours):
                found.append((start_s, [worker_type.name for worker_type in taken]))
                break
    return found


def main() -> int:
    parser = flags(__doc__, resumes=True)
    parser.add_argument("--simulated", type=float, metavar="COLD_START_S", help="on the simulated plane")
    asked = parser.parse_args()
    document = asked.resume.part("plan", lambda: timed_plan("--trace", TRACE, *ASKED)[0])
    plan = parse_plan(document, "plan.json")
    hour = load(plan, "0m..4m" if asked.quick else "0m..60m", 1.0)
    end_s = float(hour.arrival_s[-1])
    run = partial(served, document)
    if (cold_start_s := asked.simulated) is not None:
        run = partial(simulated, plan, cold_start_s)
    made = asked.resume.part(f"served {asked.quick} {cold_start_s}", lambda: run(hour))
    met = [
        one is not None and one[0] <= plan.targets.ttft_s and one[1] <= plan.targets.tpot_s
        for one in made["told"]
    ]
    gpus = {g.worker_type.name: g.worker_type.gpus for g in plan.groups}
    traffic, arrivals = ResampledTraffic(hour), frozenset[Doubted](("arrivals",))
    drawn = [traffic.requests(i, hour, arrivals) for i in range(1, 2 if asked.quick else DRAWS + 1)]
    known = {"clairvoyant": cheapest(plan, [hour])}
    known["sure"] = asked.resume.part(f"sure {asked.quick}", lambda: cheapest(plan, drawn))
    (_, first), *later = made["changes"]
    until_s = later[0][0] if later else end_s
    kept = max(n for n, (at_s, _) in enumerate(known["sure"]) if at_s <= until_s)
    known["reachable"] = [(0.0, first), (until_s, known["sure"][kept][1]), *known["sure"][kept + 1 :]]
    known["fixed"] = [(0.0, first)]
    rows = []
    for of, size in (("workers", dict.fromkeys(gpus, 1)), ("GPUs", gpus)):
        hours = {
            name: paid_s([(at, sum(size[k] for k in kinds)) for at, kinds in one], 0.0, end_s) / 3600
            for name, one in {"served": made["changes"], **known}.items()
        }
        rows.append({"hours of": of, **hours, "ratio": hours["served"] / hours["clairvoyant"]})
    rows += [{"hours of": f"{at_s:.0f} s: {', '.join(kinds)}"} for at_s, kinds in made["changes"]]
    rows += [{"hours of": said} for said in (*made["said"], f"steps: {made['slower']:.2f} x the profile's")]
    bars = {
        f"attainment of {len(met)} requests": bar(float(np.mean(met)), plan.attainment.target, at_least=True),
        "worker-hours over the clairvoyant's": bar(rows[0]["ratio"], OVER),
        "changes of count": bar(len(made["changes"]) - 1, 1, at_least=True),
        "failed streams": bar(made["told"].count(None), 0),
    }
    return show("the demo's hour, served", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
