"""A plan, served by `serve --plan`, beside its own simulation at a load where it can fail.

    python experiments/serving/planned_fleet.py [--quick] [--format table|json] [--resume FOLDER]

`tokenfleet plan` sizes a fleet for the sample trace; `serve --plan` runs it, with emulated engines, which
need no GPU and keep the plan's step times on the real clock. Nothing but the plan says what it is: policy,
targets and engine limits are read back from the fleet. `tokenfleet compare` then replays minutes of the
trace, at the rate at which the simulated fleet just misses its target (RATES; the share of `AIMED`), and
simulates the requests as they were sent. A second replay goes to the same workers placed by load alone
(`least-kv`, as a fleet does that knows no step times), to show that the load tells policies apart.
"""

from __future__ import annotations

import json
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from controlplane.workload import Workload
from dataplane.simulated.simulate import WorkerSpec, simulate
from experiments.lib.command import timed_plan, tokenfleet
from experiments.lib.public_data import ROOT
from experiments.lib.results import bar, flags, show
from harness.served import fleet, tiny_model
from tokenfleet.planning.inputs import trimmed
from tokenfleet.planning.plan_file import PlanFile, parse_plan
from tokenfleet.planning.request import PlanRequest
from tokenfleet.profiles.library import write_profile
from tokenfleet.traces import read_traces

TRACE = "examples/sample_trace.csv"
ASKED = ("--model", "llama-3.1-70b", "--gpu", "a100", "--tp", "4", "--slo", "ttft=1.6s,tpot=50ms")
SURE = ("--confidence", "0.8", "--window", "15m..30m", "--rate-scale", "0.5")
WINDOW, QUICK_WINDOW = "20m..22m", "20m..21m"
AIMED = 0.97
RATES = (0.3, 1.5)  # between which the rate is looked for
WITHIN = 0.02
BY_LOAD = "least-kv"


def load(plan: PlanFile, window: str, rate: float) -> Workload:
    return trimmed(
        read_traces([str(ROOT / TRACE)]), PlanRequest(plan.targets, rate_scale=rate, window=window)
    )


def simulated(plan: PlanFile, window: str, rate: float, policy: str) -> float:
    """The attainment of the plan's fleet at a rate."""
    workers = [WorkerSpec(g.worker_type.profile) for g in plan.groups for _ in range(g.workers)]
    return simulate(load(plan, window, rate), workers, plan.targets, policy).attainment


def near_its_limit(plan: PlanFile, window: str) -> float:
    """The rate at which the simulated fleet is at AIMED, found by halving RATES."""
    low, high = RATES
    for _ in range(7):
        rate = (low + high) / 2
        low, high = (rate, high) if simulated(plan, window, rate, plan.policy) >= AIMED else (low, rate)
    return round(low, 3)


def served(document: dict[str, Any], window: str, rate: float, policy: str | None) -> dict[str, Any]:
    """The comparison of a replay on the plan's fleet, with what the fleet says of its placement."""
    plan = parse_plan(document, "plan.json")
    with tempfile.TemporaryDirectory(prefix="tokenfleet-") as name, tiny_model() as model:
        folder = Path(name)
        (folder / "plan.json").write_text(json.dumps(document))
        write_profile(plan.groups[0].worker_type.profile, folder / "profile.yaml")
        other = [] if policy is None else ["--policy", policy]
        words = ["--plan", str(folder / "plan.json"), "--fixed", "--engine", "emulated", *other]
        with fleet(model, *words, engine_flags=()) as server:
            view = server.ask("GET", "/v1/fleet")
            words = ["compare", "--trace", TRACE, "--endpoint", server.gateway, "--control", server.control]
            words += ["--profile", str(folder / "profile.yaml"), "--slo", plan.slo_text, "--format", "json"]
            words += ["--window", window, "--rate-scale", repr(rate), "--policy", policy or plan.policy]
            compared: dict[str, Any] = json.loads(tokenfleet(*words))
        assert view["slo"] == {"ttft_s": plan.slo.ttft_s, "tpot_s": plan.slo.tpot_s}
        return {"placement": view["placement"], **compared}


def main() -> int:
    parser = flags(__doc__, resumes=True)
    asked = parser.parse_args()
    window = QUICK_WINDOW if asked.quick else WINDOW
    document = asked.resume.part("plan", lambda: timed_plan("--trace", TRACE, *ASKED, *SURE)[0])
    plan = parse_plan(document, "plan.json")
    rate = near_its_limit(plan, window)
    rows, gaps = [], {}
    for policy in (None, BY_LOAD):
        name = policy or plan.policy
        made = asked.resume.part(f"{name}-{window}-{rate}", partial(served, document, window, rate, policy))
        (share,) = [f for f in made["figures"] if f["name"] == "attainment"]
        gaps[name] = abs(share["live"] - share["simulated"])
        rows.append(
            {
                "placed by": f"{made['placement']['by']} ({made['placement']['policy']})",
                "workers": made["workers"],
                "requests": made["requests"],
                "rate": rate,
                "live %": round(100 * share["live"], 2),
                "simulated %": round(100 * share["simulated"], 2),
                "failed": made["failed"],
            }
        )
    bars = {"live attainment beside the simulated one": bar(round(gaps[plan.policy], 4), WITHIN)}
    bars["the plan's placement over placement by load"] = bar(
        round((rows[0]["live %"] - rows[1]["live %"]) / 100, 4), 0.0, at_least=True
    )
    return show("planned fleet", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
