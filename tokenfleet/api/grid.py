"""A grid of plans: one question with every combination of changes, and the answers as a table."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import polars as pl

from tokenfleet.api.inputs import RequestTrace, trace_of
from tokenfleet.api.options import Targets, as_vary, request_of
from tokenfleet.files import cache_folder, write_files
from tokenfleet.planning.inputs import Bias
from tokenfleet.planning.request import PlanRequest
from tokenfleet.report.page import framed
from tokenfleet.report.progress import counted_bar, tell_compiling
from tokenfleet.report.tables import fleet_text
from tokenfleet.traces import Trace
from tokenfleet.whatifs.axes import Changes, Scenario, checked, grid
from tokenfleet.whatifs.run import planned
from tokenfleet.whatifs.solve import Cache
from tokenfleet.whatifs.view import verdict, whatif_json, whatif_report


@dataclass(frozen=True, repr=False)
class Grid:
    """The plans of a grid, a scenario for each combination of values."""

    scenarios: tuple[Scenario, ...]
    warnings: tuple[str, ...]

    def to_polars(self) -> pl.DataFrame:
        """One row per scenario: its values, fleet, GPUs, dollars an hour, and attainment from 0 to 1.

        Numbers are null where there is no fleet; `reason` says why.
        """
        rows = []
        for one in self.scenarios:
            met = one.plan if one.plan is not None and one.plan.feasible else None
            reached = met.attainment if met else None
            values: dict[str, Any] = {key: checked(key, value) for key, value in one.changes.items()}
            rows.append(
                values
                | {
                    "fleet": fleet_text(met.fleet) if met else None,
                    "gpus": met.gpus if met else None,
                    "usd_per_hour": met.usd_per_hour if met else None,
                    "expected": reached.expected if reached else None,
                    "lower_bound": reached.low if reached else None,
                    "reason": one.error or (one.plan.reason if one.plan else None),
                }
            )
        return pl.DataFrame(rows, infer_schema_length=None)

    @property
    def document(self) -> dict[str, Any]:
        """The JSON object, `tokenfleet.whatif/1`."""
        return whatif_json(self.scenarios)

    def save(self, folder: str | Path) -> Path:
        """Write `whatif.json` and `whatif.html` into a folder; return it. Raises BadInput."""
        write_files({Path(folder, name): text for name, text in grid_texts(self).items()})
        return Path(folder)

    def __len__(self) -> int:
        return len(self.scenarios)

    def __repr__(self) -> str:
        return f"{verdict(self.scenarios)}\n{self.to_polars()}"

    def _repr_html_(self) -> str:
        return framed(whatif_report(self.scenarios))


def grid_texts(plans: Grid) -> dict[str, str]:
    """The files of a grid by their names."""
    document = json.dumps(plans.document, indent=1) + "\n"
    return {"whatif.json": document, "whatif.html": whatif_report(plans.scenarios)}


def whatif(
    trace: RequestTrace | str | Path | Sequence[str | Path],
    model: str | None = None,
    *,
    slo: Targets,
    vary: Mapping[str, Sequence[Any]],
    jobs: int = 1,
    keep: bool = True,
    **options: Any,
) -> Grid:
    """Plan every combination of values: `vary={"rate": [1, 2], "tpot": ["20ms", "30ms"]}`.

    Keys are those of `tokenfleet whatif --vary`; `ttft` and `tpot` are of the targets. `jobs`: processes; a
    script that asks for more than one needs a `__main__` guard. `keep`: keep finished scenarios in the
    user's cache folder, and use those that are there. `options`: those of `plan`. Raises BadInput.
    """
    request = request_of(slo, model=model, **options)
    return kept_grid(trace_of(trace), request, vary, jobs=jobs, keep=keep)


def kept_grid(
    trace: Trace, request: PlanRequest, axes: Mapping[str, Sequence[Any]], *, jobs: int, keep: bool
) -> Grid:
    """The scenarios of axes on a trace as read, kept in the user's cache folder. Raises BadInput."""
    cells, cache = grid(as_vary(dict(axes))), Cache(cache_folder("whatif") if keep else None)
    return grid_of(trace, request, cells, ["--trace", trace.name], cache=cache, jobs=jobs)


def grid_of(
    trace: Trace,
    request: PlanRequest,
    cells: Sequence[Changes],
    source: Sequence[str],
    *,
    cache: Cache,
    jobs: int,
    ray: str | None = None,
    bias_of: Callable[[str], Bias] | None = None,
) -> Grid:
    """The scenarios of the cells, with a bar (`planned`). Interrupted, it prints how many are kept."""
    done = 0
    tell_compiling()
    try:
        with counted_bar("planning scenarios", len(cells)) as advance:

            def on_scenario() -> None:
                nonlocal done
                done += 1
                advance()

            scenarios, warnings = planned(
                trace,
                request,
                cells,
                source=source,
                bias_of=bias_of,
                jobs=jobs,
                ray=ray,
                cache=cache,
                today=date.today(),
                told=on_scenario,
            )
    except KeyboardInterrupt:
        if cache.is_kept:
            of_all = f"{done} of {len(cells)} scenarios are planned and kept"
            print(f"{of_all}; the same command continues", file=sys.stderr)
        raise
    return Grid(tuple(scenarios), tuple(warnings))
