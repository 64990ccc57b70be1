"""`tokenfleet whatif`: plans every scenario of a grid and writes a table, JSON, and a page with the plot."""

from __future__ import annotations

import json
import os
import sys
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controlplane.errors import BadInput
from controlplane.types import EngineMode
from tokenfleet.cli.plan import OutputFormat
from tokenfleet.durations import parse_duration_s, parse_slo, parse_window_s

if TYPE_CHECKING:
    from tokenfleet.traces import Trace
    from tokenfleet.whatif.marginal import Clock


def whatif_command(
    slo: Annotated[str, typer.Option(help="both targets with units: ttft=1.6s,tpot=75ms")],
    vary: Annotated[
        list[str],
        typer.Option(help="KEY=V1,V2,…: rate, slo.ttft, slo.tpot, gpu, tp, price, spot, lengths, …"),
    ],
    trace: Annotated[
        list[Path] | None, typer.Option(help="requests, any known format; repeat to merge several")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="instead: what the fleet has served in the last 1h, 7d, …")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="the fleet's folder, for --since (default: $TOKENFLEET_DATA)")
    ] = None,
    model: Annotated[str | None, typer.Option(help="a model of the library, e.g. llama-3.1-8b")] = None,
    attainment: Annotated[float, typer.Option(help="share of requests within both targets")] = 0.99,
    confidence: Annotated[float, typer.Option(help="probability that the share is reached")] = 0.95,
    gpu: Annotated[list[str] | None, typer.Option(help="GPUs to consider (all that are known)")] = None,
    tp: Annotated[list[int] | None, typer.Option(help="TP degrees to consider (all that are known)")] = None,
    profile: Annotated[list[Path] | None, typer.Option(help="profile files instead of the library")] = None,
    prices: Annotated[Path | None, typer.Option(help="price list instead of the shipped one")] = None,
    spot: Annotated[bool, typer.Option("--spot", help="spot prices instead of on demand")] = False,
    reclaims_per_h: Annotated[
        float | None, typer.Option(help="how often an hour a spot worker is taken away; buys spares")
    ] = None,
    cold_start: Annotated[
        str | None, typer.Option(help="until an ordered worker serves (2m): orders and pays for it in time")
    ] = None,
    engine: Annotated[EngineMode | None, typer.Option(help="engine mode instead of the profile's")] = None,
    policy: Annotated[str, typer.Option(help="how requests are placed on workers")] = "spread",
    window: Annotated[str | None, typer.Option(help="only this part of the trace: 10m..20m")] = None,
    budget_usd_per_h: Annotated[float | None, typer.Option(help="most that may be spent")] = None,
    max_gpus: Annotated[int | None, typer.Option(help="most GPUs that may be used")] = None,
    drop_too_long: Annotated[
        bool, typer.Option("--drop-too-long", help="leave out requests beyond the model's context")
    ] = False,
    seed: Annotated[int, typer.Option(help="of every draw; the same seed gives the same plans")] = 0,
    jobs: Annotated[int | None, typer.Option(min=1, help="processes side by side (one per core)")] = None,
    ray: Annotated[
        str | None, typer.Option(help="a Ray cluster instead: its address, or `local` to start one here")
    ] = None,
    cache: Annotated[
        Path | None, typer.Option(help="where planned scenarios are kept (the user's cache folder)")
    ] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="plan everything anew, keep nothing")] = False,
    output_dir: Annotated[Path | None, typer.Option(help="write whatif.json and whatif.html there")] = None,
    output_format: Annotated[OutputFormat, typer.Option("--format", help="on stdout")] = OutputFormat.TABLE,
) -> int:
    """Plan a grid of changes and show what each costs.

    tokenfleet whatif --trace day.csv --model llama-3.1-8b --slo ttft=400ms,tpot=30ms
    --vary rate=0.5,1,2 --vary slo.tpot=20ms,30ms

    tokenfleet whatif --trace day.csv --model llama-3.1-70b --slo ttft=1.6s,tpot=75ms
    --reclaims-per-h 0.05 --cold-start 5m --vary spot=no,yes --vary gpu=a100,h100,a100+h100
    """
    targets = parse_slo(slo)
    cold_start_s = None if cold_start is None else parse_duration_s(cold_start, "--cold-start")
    if ray is not None and jobs is not None:
        raise BadInput("--jobs: a Ray cluster has its own processors; leave out --jobs or --ray")
    if cache is not None and no_cache:
        raise BadInput("--no-cache: contradicts --cache")
    # Imported here: the flags are checked before the compiled simulator is loaded.
    from tokenfleet.cli.terminal import console, counted_bar, show, warn
    from tokenfleet.files import write_files
    from tokenfleet.service.forks import asked_traces
    from tokenfleet.traces import read_traces
    from tokenfleet.whatif.axes import grid
    from tokenfleet.whatif.cache import Cache, default_folder
    from tokenfleet.whatif.run import planned
    from tokenfleet.whatif.scenario import Asked
    from tokenfleet.whatif.view import whatif_json, whatif_report, whatif_tables

    cells = grid(vary)
    if reclaims_per_h is not None and not spot and not any("spot" in cell for cell in cells):
        raise BadInput("--reclaims-per-h: only spot workers are reclaimed; give --spot, or vary spot")
    paths, said = asked_traces(trace, since, data)
    asked = Asked(
        traces=tuple(paths),
        slo=targets,
        model=model,
        attainment=attainment,
        confidence=confidence,
        gpus=tuple(gpu or ()),
        tps=tuple(tp or ()),
        profiles=tuple(profile or ()),
        prices=prices,
        spot=spot,
        engine=engine,
        policy=policy,
        cold_start_s=cold_start_s,
        reclaims_per_h=reclaims_per_h,
        window=window,
        budget_usd_per_h=budget_usd_per_h,
        max_gpus=max_gpus,
        drop_too_long=drop_too_long,
        seed=seed,
    )
    with console(stderr=True).status("reading"):
        read = read_traces(paths)
    kept = Cache(None if no_cache else cache or default_folder())
    done = 0
    try:
        with counted_bar("planning scenarios", len(cells)) as advance:

            def told() -> None:
                nonlocal done
                done += 1
                advance()

            found, warnings = planned(
                read,
                asked,
                cells,
                jobs=jobs or os.cpu_count() or 1,
                ray=ray,
                cache=kept,
                today=date.today(),
                told=told,
            )
    except KeyboardInterrupt:
        if not no_cache:
            print(f"{done} of {len(cells)} scenarios are kept; ask again to go on", file=sys.stderr)
        raise
    warn([*said, *warnings])
    clock = _clock(read, window)
    answer = json.dumps(whatif_json(found, clock), indent=1)
    if output_dir is not None:
        report = whatif_report(found, clock)
        write_files({output_dir / "whatif.json": answer + "\n", output_dir / "whatif.html": report})
    if output_format == OutputFormat.JSON:
        print(answer)
    else:
        show(whatif_tables(found, clock))
    return 0 if any(one.feasible for one in found) else 1


def _clock(read: Trace, window: str | None) -> Clock:
    """Times of day, where the trace has them."""
    from tokenfleet.whatif.marginal import Clock

    if read.clock_start_s is None:
        return Clock()
    return Clock(read.clock_start_s + (parse_window_s(window)[0] if window else 0.0))
