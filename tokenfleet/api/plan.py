"""The plan of one model: the shared path from a trace to an answer, and the answer as an object."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import polars as pl

from controlplane.errors import BadInput
from tokenfleet.api.inputs import NamedFleet, RequestTrace, StepProfile, trace_of
from tokenfleet.api.options import Targets, request_of
from tokenfleet.files import write_files
from tokenfleet.planning.fleet import Fleet
from tokenfleet.planning.inputs import Gathered, gather
from tokenfleet.planning.plan_file import Considered, FleetCost, PlanFile
from tokenfleet.planning.planner import make_plan
from tokenfleet.planning.request import PlanRequest
from tokenfleet.planning.threads import Watch, open_threads
from tokenfleet.report.page import framed, plan_report
from tokenfleet.report.plan_json import plan_file
from tokenfleet.report.progress import progress_bar
from tokenfleet.report.tables import fleet_text

if TYPE_CHECKING:
    from tokenfleet.api.grid import Grid


def answered(gathered: Gathered, request: PlanRequest, jobs: int | None, watch: Watch | None) -> PlanFile:
    """The plan for what was gathered, on `jobs` threads (default: one per core)."""
    with open_threads(jobs or os.cpu_count() or 1) as threads:
        plan = make_plan(gathered.workload, gathered.worker_types, request, gathered.inputs, threads, watch)
    return plan_file(plan)


def plan_texts(plan: PlanFile) -> Mapping[str, str]:
    """The files of a plan by their names: `plan.json` and `report.html`."""
    return {"plan.json": json.dumps(plan.document, indent=1) + "\n", "report.html": plan_report(plan)}


@dataclass(frozen=True, slots=True)
class Reached:
    """Shares of requests within both targets, 0 to 1: asked for, expected, and their bounds.

    `lower_bound` and `upper_bound` hold at `confidence`; `on_trace` is the recorded trace alone.
    """

    target: float
    expected: float | None
    lower_bound: float | None
    upper_bound: float | None
    on_trace: float | None
    confidence: float | None


@dataclass(frozen=True, repr=False)
class PlanAnswer:
    """The cheapest fleet that meets the targets, how sure, and what else was considered."""

    file: PlanFile
    trace: RequestTrace
    request: PlanRequest

    @property
    def feasible(self) -> bool:
        """Whether a fleet meets the targets."""
        return self.file.feasible

    @property
    def reason(self) -> str | None:
        """Why no fleet does; None where one does."""
        return self.file.reason

    @property
    def fleet(self) -> NamedFleet | None:
        """The recommended fleet, for `simulate`; None without one."""
        return NamedFleet(Fleet(self.file.groups)) if self.feasible else None

    @property
    def workers(self) -> int:
        """Workers of the fleet."""
        return self.file.workers

    @property
    def gpus(self) -> int:
        """GPUs of the fleet."""
        return self.file.gpus

    @property
    def usd_per_hour(self) -> float | None:
        """Dollars an hour; None where a price is not known."""
        return self.file.usd_per_hour

    @property
    def attainment(self) -> Reached:
        """Shares of requests in SLO: target, expected, bounds, on the recorded trace."""
        of = self.file.attainment
        return Reached(of.target, of.expected, of.low, of.high, of.on_trace, of.confidence)

    @property
    def warnings(self) -> tuple[str, ...]:
        """What could mislead the plan."""
        return tuple(self.file.inputs.warnings)

    @property
    def alternatives(self) -> pl.DataFrame:
        """One row per fleet, the recommended first; shares are 0 to 1, latencies in seconds."""
        rows = [self._row(self.file, self.file)] if self.feasible else []
        rows += [self._row(one, one) for one in self.file.alternatives]
        numbers = ("usd_per_hour", "expected", "lower_bound", "on_trace", "ttft_p99_s", "tpot_p99_s")
        schema = {"fleet": pl.String, "workers": pl.Int64, "gpus": pl.Int64}
        return pl.DataFrame(rows, schema=schema | dict.fromkeys(numbers, pl.Float64), orient="row")

    def _row(self, of: PlanFile | FleetCost | Considered, measured: Any) -> tuple[Any, ...]:
        reached = measured.attainment
        p99 = [one and one.p99 for one in (measured.ttft_s, measured.tpot_s)]
        shares = (reached.expected, reached.low, reached.on_trace)
        return (fleet_text(of.fleet), of.workers, of.gpus, of.usd_per_hour, *shares, *p99)

    @property
    def origins(self) -> pl.DataFrame:
        """One row per input: value, origin, what would narrow it."""
        schema = dict.fromkeys(("input", "value", "origin", "source", "narrowed_by"), pl.String)
        rows = {one.title: one.rows for one in self.file.tables}["Where numbers come from"]
        return pl.DataFrame(rows, schema=schema, orient="row")

    @property
    def document(self) -> dict[str, Any]:
        """The plan's JSON object, `tokenfleet.plan/1`."""
        return self.file.document

    def save(self, folder: str | Path) -> Path:
        """Write `plan.json` and `report.html` into a folder, which is made; return it. Raises BadInput."""
        write_files({Path(folder, name): text for name, text in plan_texts(self.file).items()})
        return Path(folder)

    def whatif(self, *, jobs: int = 1, keep: bool = True, **axes: Sequence[Any]) -> Grid:
        """Plan this trace for every combination of values: `plan.whatif(rate=[1, 2])`.

        `axes` as in `whatif`. Raises BadInput.
        """
        from tokenfleet.api.grid import kept_grid

        return kept_grid(self.trace.recorded, self.request, axes, jobs=jobs, keep=keep)

    def __repr__(self) -> str:
        return "\n".join(f"{topic:18} {text}".rstrip() for topic, text in self.file.says)

    def _repr_html_(self) -> str:
        return framed(plan_report(self.file))


def plan(
    trace: RequestTrace | str | Path | Sequence[str | Path],
    model: str | None = None,
    *,
    slo: Targets,
    gpus: Sequence[str] | str = (),
    tps: Sequence[int] | int = (),
    profiles: Sequence[StepProfile | str | Path] = (),
    attainment: float | None = None,
    confidence: float | None = None,
    jobs: int | None = None,
    progress: bool | None = None,
    **options: Any,
) -> PlanAnswer:
    """Find the cheapest fleet that meets latency targets on a trace.

    `trace`: a `Trace`, a path, or several paths. `model`: a name of the profile library. `slo`: targets such
    as `"ttft=1.6s,tpot=75ms"`. `gpus`, `tps`: GPU types and tensor-parallel degrees to consider (default:
    all). `attainment`: the share of requests within both targets (default 0.99). `confidence`: the
    probability of reaching it (default 0.95). `jobs`: threads (default: one per core). `progress`: show a
    bar (default: in a terminal). `options`: all others of `tokenfleet plan`, with
    underscores, such as `max_gpus=8` or `window="10m..20m"`.

    An infeasible question is an answer with a `reason`. Raises BadInput and ProfileMissing.
    """
    for name in options.keys() & {"gpu", "tp"}:
        raise BadInput(f"{name}: no such argument (did you mean {name}s?)")
    request = request_of(
        slo,
        model=model,
        gpu=gpus,
        tp=tps,
        profiles=paths_of(profiles),
        attainment=attainment,
        confidence=confidence,
        **options,
    )
    read = trace_of(trace)
    gathered = gather(read, request, None, date.today())
    bar = partial(progress_bar, is_shown=progress)
    shown: Callable[[], AbstractContextManager[Watch | None]] = nullcontext if progress is False else bar
    with shown() as watch:
        return PlanAnswer(answered(gathered, request, jobs, watch), RequestTrace(read), request)


def paths_of(profiles: Sequence[StepProfile | str | Path]) -> tuple[Path, ...]:
    """The files of profiles. Raises BadInput for one of the library that was not saved."""
    paths = []
    for one in profiles:
        path = one.path if isinstance(one, StepProfile) else Path(one)
        if path is None:
            raise BadInput(f"profiles: {one!r} has no file; save it, or name it by gpus and tps")
        paths.append(path)
    return tuple(paths)
