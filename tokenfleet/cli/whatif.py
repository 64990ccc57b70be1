"""`tokenfleet whatif`: plans every scenario of a grid and writes a table, JSON, and a page with the plot."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controlplane.errors import BadInput
from tokenfleet.cli.flags import Format, NoCache, OutputFormat, Processes, Verbose, takes_flags
from tokenfleet.cli.plan import TraceSource, asked_instead, asked_trace
from tokenfleet.files import cache_folder, refuse_unwritable, write_files
from tokenfleet.planning.request import PlanRequest

if TYPE_CHECKING:
    from tokenfleet.whatifs.axes import Changes
    from tokenfleet.whatifs.solve import Cache


@takes_flags()
def whatif_command(
    vary: Annotated[
        list[str],
        typer.Option(
            help="what to vary, KEY=V1,V2,…: rate, slo.ttft, slo.tpot, gpu, tp, price, spot, lengths, …"
        ),
    ],
    source: TraceSource,
    request: PlanRequest,
    jobs: Processes = None,
    ray: Annotated[
        str | None, typer.Option(help="run on a Ray cluster: its address, or `local` to start one here")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="folder for finished scenarios (default: the user's cache folder)")
    ] = None,
    no_cache: NoCache = False,
    output_dir: Annotated[Path | None, typer.Option(help="write whatif.json and whatif.html there")] = None,
    verbose: Verbose = False,
    output_format: Format = OutputFormat.TABLE,
) -> int:
    """Plan a grid of changes and show what each costs.

    tokenfleet whatif --trace day.csv --model llama-3.1-8b --slo ttft=400ms,tpot=30ms
    --vary rate=0.5,1,2 --vary slo.tpot=20ms,30ms

    tokenfleet whatif --request-rate 10 --model llama-3.1-8b --slo ttft=400ms,tpot=30ms
    --vary rate=1,1.5,2 --vary lengths.output=1,2

    tokenfleet whatif --trace day.csv --model llama-3.1-70b --slo ttft=1.6s,tpot=75ms
    --reclaims-per-h 0.05 --cold-start 5m --vary spot=no,yes --vary gpu=a100,h100,a100+h100
    """
    if ray is not None and jobs is not None:
        raise BadInput("--jobs: a Ray cluster has its own processors; leave out --jobs or --ray")
    instead = asked_instead(source)
    # Imported here: the flags are checked before the compiled simulator is loaded.
    from tokenfleet.api.grid import grid_of, grid_texts
    from tokenfleet.cli.terminal import answer, console, warn
    from tokenfleet.service.scorecard import kept_bias
    from tokenfleet.whatifs.axes import grid
    from tokenfleet.whatifs.view import whatif_tables

    kept, cells = _cache(cache, no_cache), grid(vary)
    _check_spot(request, cells)
    refuse_unwritable([output_dir / name for name in ("whatif.json", "whatif.html")] if output_dir else [])
    is_biased = request.bias_from is not None or "bias-from" in cells[0]
    with console(stderr=True).status("reading"):
        trace, notes, words = asked_trace(instead, source, request.seed, is_biased)
    if is_biased and source.data is not None:
        words += ["--data", str(source.data)]
    bias_of = lru_cache(partial(kept_bias, source.data))
    jobs = jobs or os.cpu_count() or 1
    plans = grid_of(trace, request, cells, words, cache=kept, jobs=jobs, ray=ray, bias_of=bias_of)
    texts = grid_texts(plans)
    if output_dir is not None:
        write_files({output_dir / name: text for name, text in texts.items()})
    answer(output_format, texts["whatif.json"], lambda: whatif_tables(plans.scenarios, verbose))
    warn([*notes, *plans.warnings])
    return 0 if any(one.feasible for one in plans.scenarios) else 1


def _cache(folder: Path | None, is_off: bool) -> Cache:
    from tokenfleet.whatifs.solve import Cache

    if folder is not None and is_off:
        raise BadInput("--no-cache: contradicts --cache")
    return Cache(None if is_off else folder or cache_folder("whatif"))


def _check_spot(request: PlanRequest, cells: Sequence[Changes]) -> None:
    if request.reclaims_per_h is not None and not request.spot and "spot" not in cells[0]:
        raise BadInput("--reclaims-per-h: only spot workers are interrupted; give --spot, or vary spot")
