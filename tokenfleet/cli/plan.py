"""`tokenfleet plan`: finds the cheapest fleet that holds the targets on a trace, and gives its reasons."""

from __future__ import annotations

import json
import os
from datetime import date
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from tokenfleet.cli.flags import TraceSource, takes_request
from tokenfleet.planning.request import PlanRequest


class OutputFormat(StrEnum):
    """How a result is printed on stdout."""

    TABLE = "table"
    JSON = "json"


@takes_request()
def plan_command(
    source: TraceSource,
    request: PlanRequest,
    jobs: Annotated[int | None, typer.Option(min=1, help="simulations side by side (one per core)")] = None,
    output_dir: Annotated[Path | None, typer.Option(help="write plan.json and report.html there")] = None,
    output_format: Annotated[OutputFormat, typer.Option("--format", help="on stdout")] = OutputFormat.TABLE,
) -> int:
    """Find the cheapest fleet that meets the targets, and say how sure that is and why not one fewer.

    tokenfleet plan --trace day.csv --model llama-3.1-8b --slo ttft=400ms,tpot=30ms

    tokenfleet plan --trace day.csv --model llama-3.1-70b --gpu h100 --gpu a100 --tp 4 --tp 8
    --slo ttft=1.6s,tpot=75ms --attainment 0.999 --max-gpus 64 --output-dir out
    """
    request.consistent()
    # Imported here: the flags are checked before the compiled simulator is loaded.
    from tokenfleet.cli.terminal import console, progress_bar, show, warn
    from tokenfleet.files import refuse_unwritable, write_files
    from tokenfleet.planning.inputs import gather
    from tokenfleet.planning.plan_json import plan_json
    from tokenfleet.planning.planner import make_plan
    from tokenfleet.planning.threads import threads
    from tokenfleet.report.page import plan_report
    from tokenfleet.report.tables import plan_tables
    from tokenfleet.service.forks import asked_traces
    from tokenfleet.service.scorecard import kept_bias
    from tokenfleet.traces import read_traces

    files = [] if output_dir is None else [output_dir / "plan.json", output_dir / "report.html"]
    refuse_unwritable(files)
    with console(stderr=True).status("reading"):
        paths, notes = asked_traces(source.trace, source.since, source.data, request.bias_from is not None)
        bias = None if request.bias_from is None else kept_bias(source.data, request.bias_from)
        gathered = gather(read_traces(paths), request, bias, date.today())
    warn([*notes, *gathered.inputs.warnings])
    with threads(jobs or os.cpu_count() or 1) as pool, progress_bar("planning") as bar:
        plan = make_plan(gathered.workload, gathered.worker_types, request, gathered.inputs, pool, bar)
    text = json.dumps(plan_json(plan), indent=1) + "\n"
    if files:
        write_files(dict(zip(files, (text, plan_report(plan)), strict=True)))
    if output_format == OutputFormat.JSON:
        print(text, end="")
    else:
        show(plan_tables(plan))
        if files:
            print(f"\nwritten: {', '.join(map(str, files))}")
    return 0 if plan.feasible else 1
