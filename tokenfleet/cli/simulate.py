"""`tokenfleet simulate`: simulates one fleet on one trace under one policy.

It reports latencies, attainment and utilisation.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from rich.console import RenderableType
from rich.text import Text

from controlplane.errors import BadInput
from controlplane.figures import counted, duration_text
from controlplane.perfmodel.profile import Profile
from controlplane.types import Slo, SloClass
from tokenfleet.cli.flags import Format, MaxBatchedTokens, MaxSeqs, OutputFormat, Verbose, flag, takes_flags
from tokenfleet.cli.plan import TraceSource, asked_instead, asked_trace
from tokenfleet.files import refuse_unwritable, write_files
from tokenfleet.planning.request import PlanRequest
from tokenfleet.report.tables import asked_text, facts_table, fleet_text, share_text, usd_text

if TYPE_CHECKING:
    from controlplane.workload import Workload
    from dataplane.simulated.simulate import Outcome
    from tokenfleet.planning.fleet import Fleet
    from tokenfleet.planning.sizing import MostAgents

MOST_WORKERS = 10_000  # beyond any fleet; a slip of the finger would fill the memory


@dataclass(frozen=True, slots=True)
class OneWorker:
    """The worker that is simulated, and what its engine takes."""

    profile: Path | None = flag(None, "profile file of the workers")
    gpu: str | None = flag(None, "GPU of the workers, with --model and --tp")
    tp: int | None = flag(None, "TP degree of the workers", min=1)
    prefill_workers: int | None = flag(None, "prefill workers among them, in split mode", min=1)
    max_batched_tokens: MaxBatchedTokens = None
    max_seqs: MaxSeqs = None


@dataclass(frozen=True, slots=True)
class SessionFlags:
    """Sessions as load: turns that wait for answers, or do not."""

    open_loop: bool = flag(
        False, "send each turn at its recorded time, even before the last answer", "--open-loop"
    )
    most_agents: bool = flag(
        False, "find the largest --agents that meets --attainment at --confidence", "--most-agents"
    )


@takes_flags(
    without=(
        *("gpu", "tp", "profiles"),  # of one worker here
        *("budget_usd_per_h", "max_gpus", "reclaims_per_h", "cold_start_s", "bias_from"),  # of a search
        *("prompt_scale", "output_scale", "price_scale"),  # of a what-if
    )
)
def simulate_command(
    source: TraceSource,
    workers: Annotated[int, typer.Option(min=1, max=MOST_WORKERS, help="number of workers")],
    worker: OneWorker,
    request: PlanRequest,
    as_sessions: SessionFlags,
    per_request: Annotated[Path | None, typer.Option(help="write one row a request to this CSV")] = None,
    verbose: Verbose = False,
    output_format: Format = OutputFormat.TABLE,
) -> int:
    """Replay a trace on a fleet. A session's turn is sent its think time after the answer it waits for.

    tokenfleet simulate --trace day.csv --model llama-3.1-8b --gpu h100 --tp 1 --workers 3
    --slo ttft=400ms,tpot=30ms --policy jsq --per-request requests.csv

    tokenfleet simulate --request-rate 10 --prompt-tokens 1000 --output-tokens 200 --model llama-3.1-8b
    --gpu h100 --tp 1 --workers 1 --slo ttft=400ms,tpot=30ms

    tokenfleet simulate --trace sessions.parquet --model llama-3.1-8b --gpu h100 --tp 1 --workers 3
    --slo ttft=2s,tpot=40ms --agents 24 --session-time 30m

    tokenfleet simulate --trace sessions.parquet --model llama-3.1-8b --gpu h200 --tp 1 --workers 8
    --slo ttft=2s,tpot=40ms --most-agents --attainment 0.95 --confidence 0.95
    """
    # Imported here: the flags are checked before the compiled simulator is loaded.
    from tokenfleet.api import simulation
    from tokenfleet.cli.terminal import answer, console, warn
    from tokenfleet.planning.inputs import what_drafts_do, without_work
    from tokenfleet.report.progress import tell_compiling

    profile = _profile(worker, request)
    if as_sessions.most_agents and request.agents is not None:
        raise BadInput("--most-agents: finds how many; leave out --agents")
    request = replace(request, agents=1) if as_sessions.most_agents else request
    fleet = _fleet(profile, workers, worker.prefill_workers, request)
    refuse_unwritable([] if per_request is None else [per_request])
    with console(stderr=True).status("reading"):
        trace, read, _ = asked_trace(asked_instead(source), source, request.seed, is_biased=False)
        workload, classes, warnings = simulation.requests_for(trace, request, [profile])
    workload = simulation.as_asked(workload, request, as_sessions.open_loop, as_sessions.most_agents)
    request, warnings = simulation.placed(request, fleet, workload, warnings)
    notes = [*warnings, *what_drafts_do(workload, _of(worker, request)), *without_work(workload, request)]
    tell_compiling()
    began, most = time.perf_counter(), None
    with console(stderr=True).status(f"simulating {len(workload):,} requests") as status:
        if as_sessions.most_agents:
            most = _most_agents(workload, classes, request, fleet, status.update)
            request = replace(request, agents=most.agents)
        outcome = simulation.outcome_of(workload, classes, fleet, request)
    took_s = time.perf_counter() - began
    told = simulation.simulation_json(outcome, classes, request, fleet.usd_per_hour, took_s, most)
    if per_request is not None:
        write_files({per_request: simulation.request_rows(outcome).write_csv()})
    answer(
        output_format,
        json.dumps(told, indent=1),
        lambda: simulation_lines(outcome, classes, request, fleet, most, told, verbose),
    )
    warn([*read, *notes])
    return 0


def _most_agents(
    workload: Workload,
    classes: Sequence[SloClass],
    request: PlanRequest,
    fleet: Fleet,
    tell: Callable[[str], None],
) -> MostAgents:
    """The most agents whose turns, and sessions where they have a target, are in time at the confidence.

    Raises Infeasible where a single one is too many.
    """
    from tokenfleet.planning.planner import strictest
    from tokenfleet.planning.search import Search
    from tokenfleet.planning.sizing import most_agents
    from tokenfleet.planning.threads import open_threads

    request = strictest(request, classes)
    with open_threads(os.cpu_count() or 1) as threads:
        return most_agents(Search.of(request, workload, (), threads, classes=classes), fleet, tell)


def simulation_lines(
    outcome: Outcome,
    classes: Sequence[SloClass],
    request: PlanRequest,
    fleet: Fleet,
    most: MostAgents | None,
    told: dict[str, Any],
    verbose: bool,
) -> Iterator[RenderableType]:
    """The simulation for a terminal: whether the target is met, then latencies, sessions and classes.

    `told`: the same as JSON. `verbose`: engines' figures too.
    """
    from tokenfleet.planning.fleet import parts_of

    asked, within = request.attainment, told["sessions"] and told["sessions"].get("within_target")
    rows, in_slo = told.get("classes", ()), float(outcome.met.mean())
    is_met = within is None or within >= asked
    is_met &= all(r["attainment"] >= r["target"] for r in rows) if rows else in_slo >= asked
    target = "targets by class" if rows else f"target {asked_text(asked)}"
    yield Text(
        f"{fleet_text(parts_of(fleet))} ({counted(fleet.gpus, 'GPU')}, {usd_text(fleet.usd_per_hour)})"
        f" {'meets' if is_met else 'misses'} the target:"
        f" {share_text(in_slo)} of {len(outcome.workload):,} requests in SLO ({target})",
        style="bold green" if is_met else "bold red",
    )
    lines = [*latency_rows(outcome, None if rows else request.slo)]
    for one, row in zip(classes, rows, strict=False):
        limits = f"TTFT {duration_text(one.slo.ttft_s)}, TPOT {duration_text(one.slo.tpot_s)}"
        text = f"{share_text(row['attainment'])} of {row['requests']:,} requests in SLO"
        lines.append((f"Class {one.name}", f"{text} (target {asked_text(row['target'])} within {limits})"))
    lines += [*sessions_rows(told["sessions"], asked)]
    if most is not None:
        lines.append(("Most agents", _most_text(most)))
    if outcome.prefix_hit_rate is not None:
        host = outcome.host_hit_rate
        loaded = "" if host is None else f", {share_text(host)} loaded from host memory"
        lines.append(("Prefix hit rate", share_text(outcome.prefix_hit_rate) + loaded))
    yield facts_table([*lines, *(_engine_rows(outcome, request, told) if verbose else ())])


def latency_rows(outcome: Outcome, slo: Slo | None) -> Iterator[tuple[str, str]]:
    """TTFT and TPOT at their quantiles, with their limits, and how many requests are over them.

    `slo`: None where each class has limits of its own.
    """
    from tokenfleet.planning.result import QUANTILES, latency

    ttft = "TTFT", outcome.ttft_s, outcome.ttft_target_s, None if slo is None else slo.ttft_s
    tpot = "TPOT", outcome.tpot_s, outcome.tpot_target_s, None if slo is None else slo.tpot_s
    for name, values, targets, limit in (ttft, tpot):
        row, late = latency(values), int((values > targets).sum())
        quantiles = "   ".join(f"p{q * 100:.0f} {duration_text(row.at(q))}" for q in QUANTILES)
        bound = "" if limit is None else f"   (limit {duration_text(limit)}, {late:,} late)"
        yield name, quantiles + bound
    if dropped := int((~np.isfinite(outcome.finish_s)).sum()):
        yield "Not served", f"{dropped:,} requests"


def _most_text(most: MostAgents) -> str:
    whole = ", all sessions of the trace" if most.on_trace == most.sessions else ""
    return (
        f"{most.agents:,} concurrent sessions meet {asked_text(most.target)} at"
        f" {most.estimate.confidence * 100:g} % confidence ({share_text(most.estimate.expected)} expected,"
        f" {share_text(most.estimate.low)} lower bound); {most.on_trace:,} on the recorded trace{whole}"
    )


def _engine_rows(outcome: Outcome, request: PlanRequest, told: dict[str, Any]) -> Iterator[tuple[str, str]]:
    means = (f"{name} {duration_text(told[f'{name.lower()}_s']['mean'])}" for name in ("TTFT", "TPOT"))
    yield "Means", ", ".join(means)
    yield "Policy", told["policy"]
    yield "Engines busy", f"{share_text(outcome.utilisation)} of the time, though not always full"
    yield "Preemptions", f"{told['preemptions']:,}"
    yield "Moves", f"{told['migrations']:,}"
    yield "Computed in", duration_text(told["wall_s"])


def _profile(worker: OneWorker, request: PlanRequest) -> Profile:
    """The profile of the one type of worker that is asked for. Raises BadInput, ProfileMissing."""
    from tokenfleet.planning.inputs import chosen_profiles

    if worker.profile is not None and (worker.gpu or worker.tp):
        raise BadInput("--profile: names the worker to simulate; leave out --gpu and --tp")
    profiles = chosen_profiles(_of(worker, request))
    if len(profiles) > 1:
        names = ", ".join(p.type_name for p in profiles)
        raise BadInput(f"simulate: one worker type at a time, got {names}; choose with --gpu and --tp")
    return profiles[0].with_engine(max_batched_tokens=worker.max_batched_tokens, max_seqs=worker.max_seqs)


def _of(worker: OneWorker, request: PlanRequest) -> PlanRequest:
    """The request with the one type of worker that is asked for."""
    return replace(
        request,
        profiles=() if worker.profile is None else (worker.profile,),
        gpu=(worker.gpu,) if worker.gpu else (),
        tp=(worker.tp,) if worker.tp else (),
    )


def _fleet(profile: Profile, workers: int, prefill_workers: int | None, request: PlanRequest) -> Fleet:
    """The workers with their roles, and their price where it is known."""
    from controlplane.worker_type import WorkerGroup
    from tokenfleet.planning.fleet import Fleet
    from tokenfleet.planning.inputs import priced

    (kind,), _ = priced([profile], request)
    if not kind.is_split:
        if prefill_workers is not None:
            raise BadInput("--prefill-workers: only with --engine split")
        return Fleet((WorkerGroup(kind, workers),))
    if prefill_workers is None or prefill_workers >= workers:
        raise BadInput(f"--prefill-workers: with --engine split, some of the {workers} workers but not all")
    prefill = WorkerGroup(replace(kind, role="prefill"), prefill_workers)
    return Fleet((prefill, WorkerGroup(replace(kind, role="decode"), workers - prefill_workers)))


def sessions_rows(told: dict[str, Any] | None, asked: float) -> Iterator[tuple[str, str]]:
    """The same for a terminal; `asked`: the share of sessions that is to be in time."""
    if told is None:
        return
    if "within_target" in told:
        limit = duration_text(told["session_target_s"])
        yield (
            "In session time",
            f"{share_text(told['within_target'])} within {limit} (target {asked_text(asked)})",
        )
    took = ""
    if told["completed"]:
        took = "".join(f", {q} {duration_text(told['session_s'][q])}" for q in ("p50", "p90"))
    yield "Sessions", f"{told['completed']:,} of {told['sessions']:,} completed{took}"
    yield "Session requests", f"{share_text(told['turns_attainment'])} in SLO"
    if "agents" in told:
        usd, an_hour = told["usd_per_session"], told["sessions_per_h"]
        priced = "" if usd is None else f", ${usd:.3g} a session"
        rate = f"{an_hour:,.0f}" if an_hour >= 100 else f"{an_hour:.3g}"
        at_once = f"with {told['agents']:,} at once"
        text = f"{rate} sessions/h{priced}, {at_once}"
        yield "Throughput", text if an_hour else f"unknown: no session ends {at_once}"
