"""A trace replayed on a fleet that is named: latencies, attainment, and one row per request."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from controlplane.errors import BadInput
from controlplane.figures import duration_text
from controlplane.perfmodel.profile import Profile
from controlplane.placement.policies import MIGRATE
from controlplane.types import SloClass
from controlplane.workload import Workload
from dataplane.simulated.simulate import Outcome
from dataplane.simulated.simulate import simulate as replay
from tokenfleet.api.inputs import NamedFleet, RequestTrace, fleet_of, trace_of
from tokenfleet.api.options import Targets, request_of
from tokenfleet.planning.classes import classed, present
from tokenfleet.planning.fleet import Fleet
from tokenfleet.planning.inputs import ignored, refuse_without_sessions, trimmed, within_context
from tokenfleet.planning.moves import unmovable
from tokenfleet.planning.request import PlanRequest, placement_settings, refuse_unshared
from tokenfleet.planning.result import latency
from tokenfleet.planning.reuse import sessions_per_h
from tokenfleet.report.tables import share_text
from tokenfleet.traces import Trace
from tokenfleet.traces.check import doctor_warnings

if TYPE_CHECKING:
    from tokenfleet.planning.sizing import MostAgents

SCHEMA = "tokenfleet.simulation/1"


@dataclass(frozen=True, repr=False)
class Simulation:
    """The outcome of a replay; latencies in seconds, one value per request where it was served."""

    outcome: Outcome
    classes: tuple[SloClass, ...]
    fleet: NamedFleet
    warnings: tuple[str, ...]
    document: dict[str, Any]

    @property
    def attainment(self) -> float:
        """The share of requests within their targets, 0 to 1."""
        return float(self.outcome.met.mean())

    @property
    def ttft_s(self) -> dict[str, float]:
        """Time to first token in seconds: `p50`, `p90`, `p99` and `mean`."""
        return dict(self.document["ttft_s"])

    @property
    def tpot_s(self) -> dict[str, float]:
        """Time per output token in seconds: `p50`, `p90`, `p99` and `mean`."""
        return dict(self.document["tpot_s"])

    @cached_property
    def requests(self) -> pl.DataFrame:
        """One row per request: times in seconds, lengths in tokens, and the worker's number."""
        return request_rows(self.outcome)

    def __repr__(self) -> str:
        lines = [f"{share_text(self.attainment)} of {len(self.outcome.workload):,} requests in SLO"]
        for name, of in (("TTFT", self.ttft_s), ("TPOT", self.tpot_s)):
            shown = (f"{q} {duration_text(of[q])}" for q in ("p50", "p90", "p99") if of[q] is not None)
            lines.append(f"{name}  {'   '.join(shown)}")
        return "\n".join([f"{self.fleet}: {lines[0]}", *lines[1:]])

    def _repr_html_(self) -> str:
        return "".join(f"<p>{escape(line)}</p>" for line in repr(self).splitlines())


def simulate(
    trace: RequestTrace | str | Path | Sequence[str | Path],
    fleet: NamedFleet | str,
    *,
    slo: Targets,
    model: str | None = None,
    policy: str | None = None,
    **options: Any,
) -> Simulation:
    """Replay a trace on a fleet, such as `"3x h100 TP1"`, under a placement policy.

    `slo`: `"ttft=400ms,tpot=30ms"`. `policy` None: `spread+migrate`, and `spread` where moves are not
    simulated (split, data- and pipeline-parallel workers, KV offload). `options`: those of
    `tokenfleet simulate`, by their names with underscores, such as `agents=20` or `rate_scale=1.5`.
    Raises BadInput for what cannot be used and ProfileMissing where no profile ships; both messages are
    one line.
    """
    request = request_of(slo, model=model, policy=policy, **options)
    named = fleet_of(fleet, request) if isinstance(fleet, str) else fleet
    profiles = [group.worker_type.profile for group in named.groups.groups]
    workload, classes, warnings = requests_for(trace_of(trace), request, profiles)
    workload = as_asked(workload, request)
    request, warnings = placed(request, named.groups, workload, warnings)
    began = time.perf_counter()
    outcome = outcome_of(workload, classes, named.groups, request)
    took_s = time.perf_counter() - began
    document = simulation_json(outcome, classes, request, named.usd_per_hour, took_s)
    return Simulation(outcome, classes, named, tuple(warnings), document)


def requests_for(
    trace: Trace, request: PlanRequest, profiles: Sequence[Profile]
) -> tuple[Workload, tuple[SloClass, ...], list[str]]:
    """The requests that the workers can hold, their classes, and what there is to know of their trace.

    Raises BadInput.
    """
    read = classed(trace, request)
    workload = trimmed(read, request)
    doctored = doctor_warnings(replace(read, workload=workload))
    workload, warnings = within_context(workload, profiles, request.drop_too_long, read.name)
    longest = int((workload.prompt_tokens + workload.output_tokens).max()) if len(workload) else 0
    for worker in profiles:
        if worker.kv.held(longest) > worker.kv.capacity_tokens:
            raise BadInput(
                f"{read.name}: the longest request has {longest} tokens,"
                f" the worker's KV holds {worker.kv.capacity_tokens}"
            )
    workload, classes = present(workload, request, read.name)
    return workload, classes, [*read.warnings, *doctored, *warnings]


def as_asked(
    workload: Workload, request: PlanRequest, open_loop: bool = False, most_agents: bool = False
) -> Workload:
    """The workload with its sessions and prefixes as the request has them.

    `open_loop`: turns are sent at their recorded times. `most_agents`: that flag asked for sessions, not
    `--agents`. Raises BadInput for what the workload does not have.
    """
    agents = "most-agents" if most_agents else "agents"
    refuse_without_sessions(workload, request, agents)
    refuse_unshared(request, workload)
    if request.no_prefix_cache:
        workload = replace(workload, prefixes=None)
    sessions = workload.sessions
    if not open_loop or sessions is None:
        return workload
    if request.agents is not None:
        raise BadInput(f"--open-loop: contradicts --{agents}; agents wait for answers")
    nothing = np.zeros(0, np.int64)
    at_once = replace(sessions, offsets=np.zeros(len(workload) + 1, np.int64), before=nothing)
    return replace(workload, sessions=at_once)


def placed(
    request: PlanRequest, fleet: Fleet, workload: Workload, warnings: Sequence[str]
) -> tuple[PlanRequest, list[str]]:
    """The request with its policy by name; the warnings say what it leaves out."""
    if request.policy is not None:
        return request, [*warnings, *ignored(workload, request)]
    why_not = unmovable(fleet, workload)
    name = request.placement + ("" if why_not else MIGRATE)
    also = [f"{why_not}: simulated without moves"] if why_not else []
    return replace(request, policy=name), [*warnings, *also]


def outcome_of(
    workload: Workload, classes: Sequence[SloClass], fleet: Fleet, request: PlanRequest
) -> Outcome:
    """The replay of the workload on the fleet, by the policy (`placed`) and seed of the request."""
    assert request.policy is not None
    outcome = replay(
        workload,
        fleet.specs(),
        [one.slo for one in classes] or request.slo,
        request.policy,
        settings=placement_settings(request),
        seed=request.seed,
        agents=request.agents,
    )
    return replace(outcome, session_target_s=request.session_s)


def simulation_json(
    outcome: Outcome,
    classes: Sequence[SloClass],
    request: PlanRequest,
    usd_per_h: float | None,
    wall_s: float,
    most: MostAgents | None = None,
) -> dict[str, Any]:
    """`tokenfleet.simulation/1`; `wall_s` is how long it took to run, `most` the most agents, where asked."""
    finished = outcome.finish_s == outcome.finish_s  # NaN is not itself
    hits = outcome.prefix_hit_rate
    return {
        "schema": SCHEMA,
        "policy": request.policy,
        "requests": len(outcome.workload),
        "finished": int(finished.sum()),
        "attainment": round(outcome.attainment, 6),
        "ttft_s": latency(outcome.ttft_s).quantiles.model_dump(),
        "tpot_s": latency(outcome.tpot_s).quantiles.model_dump(),
        "preemptions": int(outcome.preemptions.sum()),
        "migrations": int(outcome.migrations.sum()),
        "utilisation": round(outcome.utilisation, 6),
        "prefix_hit_rate": None if hits is None else round(hits, 6),
        **({} if outcome.host_hit_rate is None else {"host_hit_rate": round(outcome.host_hit_rate, 6)}),
        "wall_s": round(wall_s, 3),
        "sessions": _sessions(outcome, request.agents, usd_per_h),
        **({} if most is None else {"most_agents": _most_agents(most)}),
        **_classes(outcome, classes),
    }


def _most_agents(most: MostAgents) -> dict[str, Any]:
    return {
        "agents": most.agents,
        "target": most.target,
        "confidence": most.estimate.confidence,
        "expected": round(most.estimate.expected, 6),
        "low": round(most.estimate.low, 6),
        "on_trace": most.on_trace,
        "sessions": most.sessions,
    }


def _sessions(outcome: Outcome, agents: int | None, usd_per_h: float | None) -> dict[str, Any] | None:
    """What became of the sessions; None for a workload without any."""
    sessions = outcome.workload.sessions
    if sessions is None or (sessions.session < 0).all():
        return None
    took_s = outcome.session_s
    ended_s = took_s[np.isfinite(took_s)]
    of_sessions = sessions.session >= 0
    told: dict[str, Any] = {
        "sessions": len(took_s),
        "completed": len(ended_s),
        "session_s": {f"p{q}": float(np.percentile(ended_s, q)) if len(ended_s) else None for q in (50, 90)},
        "turns_attainment": round(float(outcome.met[of_sessions].mean()), 6),
    }
    if (within := outcome.session_attainment) is not None:
        told |= {"session_target_s": outcome.session_target_s, "within_target": round(within, 6)}
    if agents is not None:
        an_hour = sessions_per_h(outcome, agents)
        usd = usd_per_h / an_hour if usd_per_h is not None and an_hour > 0 else None
        told |= {"agents": agents, "sessions_per_h": an_hour, "usd_per_session": usd}
    return told


def _classes(outcome: Outcome, classes: Sequence[SloClass]) -> dict[str, Any]:
    """What became of each class; nothing where the targets are plain."""
    attained = outcome.class_attainments.tolist()
    of = np.bincount(outcome.workload.slo_class, minlength=len(attained)).tolist()
    rows = [
        {"name": one.name, "requests": n, "target": one.attainment, "attainment": round(share, 6)}
        for one, n, share in zip(classes, of, attained, strict=False)
    ]
    return {"classes": rows} if rows else {}


def request_rows(outcome: Outcome) -> pl.DataFrame:
    """One row a request; an empty cell is what did not happen."""
    workload, cached, loaded = outcome.workload, outcome.cached_tokens, outcome.loaded_tokens
    never = pl.lit(None, pl.Int64).alias("cached_tokens")
    return pl.DataFrame(
        {
            "request": range(len(workload)),
            "arrival_s": outcome.arrival_s,
            "prompt_tokens": workload.prompt_tokens,
            "output_tokens": workload.output_tokens,
            "worker": outcome.worker,
            "first_token_s": outcome.first_token_s,
            "finish_s": outcome.finish_s,
            "preemptions": outcome.preemptions,
            "migrations": outcome.migrations,
        }
    ).with_columns(
        pl.col("arrival_s", "first_token_s", "finish_s").fill_nan(None),
        never if cached is None else pl.Series("cached_tokens", cached).replace(-1, None),
        *([] if loaded is None else [pl.Series("loaded_tokens", loaded)]),
    )
