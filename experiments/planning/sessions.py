"""Plans in sessions: 120 recorded coding sessions on four types of GPU, their growth, and their confidence.

    python experiments/planning/sessions.py [--quick] [--part plan|cliff|confidence|agents|most]
        [--cases N] [--seed 0] [--resume FOLDER]

`plan`: `tokenfleet plan` as a user would run it, in a closed loop with prefix caches, on A100, H100, H200
and RTX PRO 6000 (Llama-3.1-8B, TP 1). It has everything that the report explains, and its wall time on two
threads with kernels loaded. Requests beyond the model's context are left out, and think times end after a
minute.

`cliff`: the growth at which the planned fleet loses half of its hits, and its target. A sweep in steps of 5
%, without a search, goes on until both are lost.

`confidence`: sessions are halved at random. One half is planned for (one type, confidence 0.9). The other is
held out and replayed on the planned fleet, with coefficients drawn as they may be wrong. `covered`: the
share of cases whose lower bound was reached.

`agents`: plans for a number of agents on H200s, compared with the load alone, in workers with a fraction. In
`bound` every answer takes as long as its targets allow. A turn that misses takes longer, so this bounds
nothing. In `most` every answer comes as from an idle worker.

`most`: `tokenfleet simulate --most-agents` on 8 H200s. Then sessions are halved at random: the most agents
that 2 H200s carry with one half, and the attainment of that many, and 30 % more, with the other half.
Coefficients are drawn.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from controlplane.perfmodel.capacity import answered_s, worker_seconds
from controlplane.perfmodel.profile import rank_of
from controlplane.perfmodel.uncertainty import draw_profile
from controlplane.placement.lengths import LengthTable
from controlplane.types import Slo
from controlplane.workload import Workload
from dataplane.simulated.simulate import WorkerSpec, simulate
from experiments.lib.results import bar, flags, show
from tokenfleet.planning.comparisons import BASELINES
from tokenfleet.planning.fleet import of_one_kind
from tokenfleet.planning.inputs import Gathered, gather
from tokenfleet.planning.mixes.bounds import alone_session_s
from tokenfleet.planning.planner import make_plan
from tokenfleet.planning.request import PlanRequest
from tokenfleet.planning.result import Plan
from tokenfleet.planning.reuse import LOST, MOST_GROWTH
from tokenfleet.planning.search import Search
from tokenfleet.planning.sizing import MostAgents, most_agents
from tokenfleet.planning.threads import Threads, open_threads
from tokenfleet.planning.traffic.draws import next_like, units_of
from tokenfleet.traces import Trace, read_trace

WEKA = "weka/requests.parquet"
GPUS = ("a100", "h100", "h200", "rtx-pro-6000")
ASKED = PlanRequest(
    Slo(5.0, 0.05),
    model="llama-3.1-8b",
    tp=(1,),
    attainment=0.95,
    confidence=0.9,
    policy="spread",
    drop_too_long=True,
)
SESSIONS = 120  # planned for
MOST_S, OFF, POINTS = 60.0, 0.10, 0.04
PARTS = ("plan", "cliff", "confidence", "agents", "most")
AGENTS = (16, 32, 64)
HELD = ("attained", "with those on the trace", "with 30 % more")
MORE = 1.3  # times as many agents as were found
STEP = 0.05
MOST_THINK_S = 60.0


def of_sessions(trace: Trace, kept: np.ndarray) -> Trace:
    """The trace with some of its sessions."""
    sessions = trace.workload.sessions
    assert sessions is not None
    rows = np.isin(sessions.session, kept)
    return replace(trace, workload=trace.workload.take(rows), tenant=trace.tenant[rows])


def capped(trace: Trace) -> Trace:
    """The trace with think times of a minute at most, as its source's own replayer has them."""
    sessions = trace.workload.sessions
    assert sessions is not None
    sessions = replace(sessions, think_s=np.minimum(sessions.think_s, MOST_THINK_S))
    return replace(trace, workload=replace(trace.workload, sessions=sessions))


def answer(gathered: Gathered, request: PlanRequest, threads: Threads, explained: bool = True) -> Plan:
    return make_plan(
        gathered.workload, gathered.worker_types, request, gathered.inputs, threads, explained=explained
    )


def swept(plan: Plan, workload: Workload, threads: Threads) -> tuple[float | None, float | None]:
    """Where a sweep loses hits and target."""
    assert plan.best is not None
    asked = plan.request
    search = Search.of(replace(asked, session_s=None, agents=None), workload, (), threads)
    fleet = plan.best.fleet
    kept = LOST * (search.replay(fleet).prefix_hit_rate or 0.0)
    cold, late = [], []
    for first in np.arange(1.0, MOST_GROWTH + STEP / 2, 2 * STEP):
        scales = (float(first), float(first) + STEP)
        outcomes = threads.map(lambda s: search.replay(fleet, growth=s), scales)
        cold += [s for s, o in zip(scales, outcomes, strict=True) if (o.prefix_hit_rate or 0.0) < kept]
        late += [s for s, o in zip(scales, outcomes, strict=True) if o.attainment < asked.attainment]
        if cold and late:
            break
    return (cold[0] if cold else None, late[0] if late else None)


def off(found: float | None, known: float | None) -> float:
    """How far off a growth is; a cliff that only one of them sees is off altogether."""
    if found is None or known is None:
        return 0.0 if found is known else 1.0
    return abs(found / known - 1.0)


def load_kernels(gathered: Gathered) -> None:
    """Compile what a plan runs, or load it from disk."""
    few = gathered.workload.take(np.arange(len(gathered.workload)) < 40)
    next_like(units_of(few), np.random.default_rng(0))
    for policy in (ASKED.policy, *BASELINES):
        simulate(few, [WorkerSpec(gathered.worker_types[0].profile)] * 2, ASKED.slo, policy)


def halves_of(trace: Trace, seed: int) -> list[Trace]:
    """The trace's sessions, halved at random."""
    assert trace.workload.sessions is not None
    names = np.random.default_rng([seed, 1]).permutation(np.unique(trace.workload.sessions.session))
    return [of_sessions(trace, names[i::2]) for i in (0, 1)]


def held_out(trace: Trace, seed: int, threads: Threads) -> dict[str, Any]:
    """One half planned for, and what its fleet makes of the other."""
    request = replace(ASKED, gpu=("h100",), seed=seed)
    known, later = (gather(half, request) for half in halves_of(trace, seed))
    plan = answer(known, request, threads, explained=False)
    if plan.best is None or plan.best.estimate is None:
        return {"case": seed, "workers": None}
    specs = plan.best.fleet.specs(lambda p: draw_profile(p, np.random.default_rng([seed, 77])))
    lengths = LengthTable.from_history(known.workload.prompt_tokens, known.workload.output_tokens)
    outcome = simulate(later.workload, specs, request.slo, request.policy, predictor=lengths)
    low = plan.best.estimate.low
    return {
        "case": seed,
        "workers": plan.best.fleet.workers,
        "low": low,
        "attained": outcome.attainment,
        "hits": outcome.prefix_hit_rate,
        "covered": bool(outcome.attainment >= low),
    }


def of_agents(trace: Trace, agents: int, seed: int, threads: Threads) -> dict[str, Any]:
    """A plan for agents, and the workers that their work alone would ask for."""
    request = replace(ASKED, gpu=("h200",), agents=agents, seed=seed)
    gathered = gather(trace, request)
    plan = answer(gathered, request, threads, explained=False)
    assert plan.best is not None, plan.reason
    workload, profile = gathered.workload, gathered.worker_types[0].profile
    assert workload.sessions is not None
    prompts, outputs, slo = workload.prompt_tokens, workload.output_tokens, request.slo
    each_s = worker_seconds(prompts, outputs, rank_of(profile), slo, request.attainment, workload.ideal_hits)
    ends_s = answered_s(workload, slo.ttft_s + slo.tpot_s * (outputs - 1))
    begin_s, end_s = workload.sessions.spans(workload.arrival_s, ends_s)
    alone_s = alone_session_s(profile, workload)
    return {
        "agents": agents,
        "workers": plan.best.fleet.workers,
        "on the trace": min(n for n, share in plan.on_trace.items() if share >= request.attainment),
        "bound": agents * each_s * len(workload) / float((end_s - begin_s).sum()),
        "most": agents * each_s * len(workload) / float(alone_s.sum()),
    }


def carried(gathered: Gathered, request: PlanRequest, workers: int, threads: Threads) -> MostAgents:
    """The most agents of so many workers."""
    workload = gathered.workload
    search = Search.of(request, workload, (), threads)
    return most_agents(search, of_one_kind(gathered.worker_types[0], workers))


def most_of_all(trace: Trace, workers: int, seed: int, threads: Threads) -> dict[str, Any]:
    """The most agents of so many H200s with all sessions."""
    request = replace(ASKED, gpu=("h200",), seed=seed)
    began = time.perf_counter()
    most = carried(gather(trace, request), request, workers, threads)
    wall_s = time.perf_counter() - began
    return {"most agents": most.agents, "low": most.estimate.low, "on the trace": most.on_trace, "s": wall_s}


def most_held_out(trace: Trace, seed: int, threads: Threads) -> dict[str, Any]:
    """The most agents of 2 H200s with one half of the sessions, and how the other half does with them."""
    request = replace(ASKED, gpu=("h200",), seed=seed)
    known, later = (gather(half, request) for half in halves_of(trace, seed))
    most = carried(known, request, 2, threads)
    fleet = of_one_kind(known.worker_types[0], 2)
    specs = fleet.specs(lambda p: draw_profile(p, np.random.default_rng([seed, 77])))
    lengths = LengthTable.from_history(known.workload.prompt_tokens, known.workload.output_tokens)

    def attained(agents: int) -> float:
        return simulate(
            later.workload, specs, request.slo, request.policy, predictor=lengths, agents=agents
        ).attainment

    return {
        "case": seed,
        "agents": most.agents,
        "on the trace": most.on_trace,
        "attained": attained(most.agents),
        "with those on the trace": attained(most.on_trace),
        "with 30 % more": attained(round(MORE * most.agents)),
    }


def main() -> int:
    parser = flags(__doc__, WEKA, resumes=True)
    parser.add_argument("--part", choices=PARTS, help="only one of them")
    parser.add_argument("--cases", type=int, default=40, help="held-out halves")
    asked = parser.parse_args()
    trace = capped(read_trace(asked.data / WEKA))
    if asked.quick:
        trace = of_sessions(trace, np.arange(20))
    parts = PARTS if asked.part is None else (asked.part,)
    rows: list[dict[str, Any]] = []
    bars: dict[str, Any] = {}
    with open_threads(2) as threads:
        if "plan" in parts or "cliff" in parts:
            request = replace(ASKED, gpu=GPUS, seed=asked.seed)
            known = of_sessions(trace, np.arange(SESSIONS))
            load_kernels(gather(known, request))
            began = time.perf_counter()
            gathered = gather(known, request)
            plan = answer(gathered, request, threads)
            wall_s = time.perf_counter() - began
            assert plan.best is not None, plan.reason
            assert plan.reuse is not None
            cliff = plan.reuse.cliff
            row = {
                "requests": len(gathered.workload),
                "fleet": plan.best.fleet.label,
                "wall_s": wall_s,
                "hits": plan.reuse.hit_rate,
                "ideal": plan.reuse.ideal,
                "hits lost at": cliff.hits_lost,
                "target lost at": cliff.target_lost,
            }
            bars["wall_s"] = bar(wall_s, MOST_S)
            if "cliff" in parts:
                hits, target = swept(plan, gathered.workload, threads)
                row |= {"sweep: hits": hits, "sweep: target": target}
                bars["hits off"] = bar(off(cliff.hits_lost, hits), OFF)
                bars["target off"] = bar(off(cliff.target_lost, target), OFF)
            rows.append(row)
        if "confidence" in parts:
            numbers = range(asked.seed, asked.seed + (2 if asked.quick else asked.cases))
            cases = [asked.resume.part(f"case {i}", partial(held_out, trace, i, threads)) for i in numbers]
            planned = [case for case in cases if case["workers"] is not None]
            rows += cases
            covered = float(np.mean([case["covered"] for case in planned])) if planned else 0.0
            bars[f"covered of {len(planned)}"] = bar(abs(covered - ASKED.confidence), POINTS)
        if "agents" in parts or "most" in parts:
            known = of_sessions(trace, np.arange(SESSIONS))
            request = replace(ASKED, gpu=("h200",), seed=asked.seed)
            load_kernels(gather(known, request))
        if "agents" in parts:
            rows += [of_agents(known, n, asked.seed, threads) for n in AGENTS[: 1 if asked.quick else None]]
        if "most" in parts:
            workers = 2 if asked.quick else 8
            rows.append(asked.resume.part("most", partial(most_of_all, known, workers, asked.seed, threads)))
            numbers = range(asked.seed, asked.seed + (1 if asked.quick else asked.cases))
            cases = [
                asked.resume.part(f"most {i}", partial(most_held_out, trace, i, threads)) for i in numbers
            ]
            rows += cases
            held = {name: sum(case[name] >= ASKED.attainment for case in cases) for name in HELD}
            rows.append({f"held: {name}": f"{n} of {len(cases)}" for name, n in held.items()})
            bars["held by the most agents"] = bar(
                max(ASKED.confidence - held["attained"] / len(cases), 0.0), POINTS
            )
    return show("plans in sessions", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
