"""`tokenfleet whatif`: plans every scenario of a grid and writes a table, JSON, and a page with the plot."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from datetime import date
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controlplane.errors import BadInput
from tokenfleet.cli.flags import Format, OutputFormat, TraceSource, Verbose, takes_request
from tokenfleet.planning.request import PlanRequest
from tokenfleet.texts import Parsed

if TYPE_CHECKING:
    from tokenfleet.traces import Trace
    from tokenfleet.whatifs.axes import Changes, Scenario
    from tokenfleet.whatifs.marginal import TimeOfDay
    from tokenfleet.whatifs.solve import Cache


@takes_request()
def whatif_command(
    vary: Annotated[
        list[str],
        typer.Option(
            help="what to vary, KEY=V1,V2,…: rate, slo.ttft, slo.tpot, gpu, tp, price, spot, lengths, …"
        ),
    ],
    source: TraceSource,
    request: PlanRequest,
    jobs: Annotated[
        int | None, typer.Option(min=1, help="processes at the same time (default: one per core)")
    ] = None,
    ray: Annotated[
        str | None, typer.Option(help="run on a Ray cluster: its address, or `local` to start one here")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="folder for finished scenarios (default: the user's cache folder)")
    ] = None,
    no_cache: Annotated[
        bool, typer.Option("--no-cache", help="plan everything again and keep nothing")
    ] = False,
    output_dir: Annotated[Path | None, typer.Option(help="write whatif.json and whatif.html there")] = None,
    verbose: Verbose = False,
    output_format: Format = OutputFormat.TABLE,
) -> int:
    """Plan a grid of changes and show what each costs.

    tokenfleet whatif --trace day.csv --model llama-3.1-8b --slo ttft=400ms,tpot=30ms
    --vary rate=0.5,1,2 --vary slo.tpot=20ms,30ms

    tokenfleet whatif --trace day.csv --model llama-3.1-70b --slo ttft=1.6s,tpot=75ms
    --reclaims-per-h 0.05 --cold-start 5m --vary spot=no,yes --vary gpu=a100,h100,a100+h100
    """
    _check_at_once(jobs, ray)
    # Imported here: the flags are checked before the compiled simulator is loaded.
    from tokenfleet.cli.terminal import answer, console, warn
    from tokenfleet.files import refuse_unwritable, write_files
    from tokenfleet.service.forks import asked_traces
    from tokenfleet.traces import read_traces
    from tokenfleet.whatifs.axes import grid
    from tokenfleet.whatifs.view import whatif_json, whatif_report, whatif_tables

    kept, cells = _cache(cache, no_cache), grid(vary)
    _check_spot(request, cells)
    files = [] if output_dir is None else [output_dir / "whatif.json", output_dir / "whatif.html"]
    refuse_unwritable(files)
    is_biased = request.bias_from is not None or "bias-from" in cells[0]
    paths, notes = asked_traces(source.trace, source.since, source.data, is_biased)
    with console(stderr=True).status("reading"):
        read = read_traces(paths)
    words, jobs = _source(paths, source.data if is_biased else None), jobs or os.cpu_count() or 1
    scenarios, warnings = _planned(read, request, cells, words, source.data, jobs=jobs, ray=ray, cache=kept)
    clock = _clock(read, request.window)
    text = json.dumps(whatif_json(scenarios, clock), indent=1) + "\n"
    if files:
        write_files(dict(zip(files, (text, whatif_report(scenarios, clock)), strict=True)))
    answer(output_format, text, lambda: whatif_tables(scenarios, clock, verbose))
    warn([*notes, *warnings])
    return 0 if any(one.feasible for one in scenarios) else 1


def _check_at_once(jobs: int | None, ray: str | None) -> None:
    if ray is not None and jobs is not None:
        raise BadInput("--jobs: a Ray cluster has its own processors; leave out --jobs or --ray")


def _cache(folder: Path | None, is_off: bool) -> Cache:
    from tokenfleet.files import cache_folder
    from tokenfleet.whatifs.solve import Cache

    if folder is not None and is_off:
        raise BadInput("--no-cache: contradicts --cache")
    return Cache(None if is_off else folder or cache_folder("whatif"))


def _check_spot(request: PlanRequest, cells: Sequence[Changes]) -> None:
    if request.reclaims_per_h is not None and not request.spot and "spot" not in cells[0]:
        raise BadInput("--reclaims-per-h: only spot workers are interrupted; give --spot, or vary spot")


def _source(paths: Sequence[Path | str], data: Path | None) -> list[str]:
    """The flags of a plan that say where its trace and its bias are from."""
    source = [word for path in paths for word in ("--trace", str(path))]
    return source if data is None else [*source, "--data", str(data)]


def _planned(
    read: Trace,
    request: PlanRequest,
    cells: list[Changes],
    source: list[str],
    data: Path | None,
    *,
    jobs: int,
    ray: str | None,
    cache: Cache,
) -> tuple[list[Scenario], list[str]]:
    """The scenarios and their warnings, with a bar; interrupted, it prints how many are kept."""
    from tokenfleet.cli.terminal import counted_bar
    from tokenfleet.report.progress import tell_compiling
    from tokenfleet.service.scorecard import kept_bias
    from tokenfleet.whatifs.run import planned

    done = 0
    tell_compiling()
    try:
        with counted_bar("planning scenarios", len(cells)) as advance:

            def on_scenario() -> None:
                nonlocal done
                done += 1
                advance()

            return planned(
                read,
                request,
                cells,
                source=source,
                bias_of=lru_cache(partial(kept_bias, data)),
                jobs=jobs,
                ray=ray,
                cache=cache,
                today=date.today(),
                told=on_scenario,
            )
    except KeyboardInterrupt:
        if cache.is_kept:
            print(
                f"{done} of {len(cells)} scenarios are planned and kept; the same command continues",
                file=sys.stderr,
            )
        raise


def _clock(read: Trace, window: Parsed[tuple[float, float]] | None) -> TimeOfDay:
    """Times of day, where the trace has them."""
    from tokenfleet.whatifs.marginal import TimeOfDay

    if read.clock_start_s is None:
        return TimeOfDay()
    return TimeOfDay(read.clock_start_s + (window.value[0] if window else 0.0))
