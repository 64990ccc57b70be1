"""`tokenfleet plan`: finds the cheapest fleet that holds the targets on a trace, and gives its reasons."""

from __future__ import annotations

import json
import os
from datetime import date
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from controlplane.errors import BadInput
from controlplane.types import EngineMode
from tokenfleet.durations import parse_duration_s, parse_slo


class OutputFormat(StrEnum):
    """How a result is printed on stdout."""

    TABLE = "table"
    JSON = "json"


def plan_command(
    slo: Annotated[str, typer.Option(help="both targets with units: ttft=1.6s,tpot=75ms")],
    trace: Annotated[
        list[Path] | None, typer.Option(help="requests, any known format; repeat to merge several")
    ] = None,
    since: Annotated[
        str | None, typer.Option(help="instead: what the fleet has served in the last 1h, 7d, …")
    ] = None,
    data: Annotated[
        Path | None, typer.Option(help="the fleet's folder, for --since and --bias-from ($TOKENFLEET_DATA)")
    ] = None,
    model: Annotated[str | None, typer.Option(help="a model of the library, e.g. llama-3.1-8b")] = None,
    attainment: Annotated[float, typer.Option(help="share of requests within both targets")] = 0.99,
    confidence: Annotated[float, typer.Option(help="probability that the share is reached")] = 0.95,
    gpu: Annotated[list[str] | None, typer.Option(help="GPUs to consider (all that are known)")] = None,
    tp: Annotated[list[int] | None, typer.Option(help="TP degrees to consider (all that are known)")] = None,
    profile: Annotated[list[Path] | None, typer.Option(help="profile files instead of the library")] = None,
    prices: Annotated[Path | None, typer.Option(help="price list instead of the shipped one")] = None,
    spot: Annotated[bool, typer.Option("--spot", help="spot prices instead of on demand")] = False,
    engine: Annotated[EngineMode | None, typer.Option(help="engine mode instead of the profile's")] = None,
    policy: Annotated[str, typer.Option(help="how requests are placed on workers")] = "spread",
    reclaims_per_h: Annotated[
        float | None, typer.Option(help="how often an hour a spot worker is taken away; buys spares")
    ] = None,
    cold_start: Annotated[
        str | None, typer.Option(help="until an ordered worker serves (2m): orders and pays for it in time")
    ] = None,
    rate_scale: Annotated[float, typer.Option(help="requests arrive this many times as fast")] = 1.0,
    prompt_scale: Annotated[float, typer.Option(help="prompts are this many times as long")] = 1.0,
    output_scale: Annotated[float, typer.Option(help="outputs are this many times as long")] = 1.0,
    price_scale: Annotated[float, typer.Option(help="prices are this many times as high")] = 1.0,
    window: Annotated[str | None, typer.Option(help="only this part of the trace: 10m..20m")] = None,
    budget_usd_per_h: Annotated[float | None, typer.Option(help="most that may be spent")] = None,
    max_gpus: Annotated[int | None, typer.Option(help="most GPUs that may be used")] = None,
    drop_too_long: Annotated[
        bool, typer.Option("--drop-too-long", help="leave out requests beyond the model's context")
    ] = False,
    bias_from: Annotated[
        str | None, typer.Option(help="a kept plan (or last): lengthen step times as its scorecard found")
    ] = None,
    drift: Annotated[
        bool, typer.Option("--drift", help="let rate and lengths drift, as the trace shows and as is usual")
    ] = False,
    seed: Annotated[int, typer.Option(help="of every draw; the same seed gives the same plan")] = 0,
    jobs: Annotated[int | None, typer.Option(min=1, help="simulations side by side (one per core)")] = None,
    output_dir: Annotated[Path | None, typer.Option(help="write plan.json and report.html there")] = None,
    output_format: Annotated[OutputFormat, typer.Option("--format", help="on stdout")] = OutputFormat.TABLE,
) -> int:
    """Find the cheapest fleet that meets the targets, and say how sure that is and why not one fewer.

    tokenfleet plan --trace day.csv --model llama-3.1-8b --slo ttft=400ms,tpot=30ms

    tokenfleet plan --trace day.csv --model llama-3.1-70b --gpu h100 --gpu a100 --tp 4 --tp 8
    --slo ttft=1.6s,tpot=75ms --attainment 0.999 --max-gpus 64 --output-dir out
    """
    targets = parse_slo(slo)
    cold_start_s = None if cold_start is None else parse_duration_s(cold_start, "--cold-start")
    if reclaims_per_h is not None and not spot:
        raise BadInput("--reclaims-per-h: only spot workers are reclaimed; give --spot too")
    # Imported here: the flags are checked before the compiled simulator is loaded.
    from tokenfleet.cli.terminal import console, progress_bar, show, warn
    from tokenfleet.files import write_files
    from tokenfleet.planning.inputs import gather, known_policy
    from tokenfleet.planning.plan_json import plan_json
    from tokenfleet.planning.planner import make_plan
    from tokenfleet.planning.question import Question
    from tokenfleet.planning.threads import threads
    from tokenfleet.report.tables import plan_tables
    from tokenfleet.service.forks import asked_traces
    from tokenfleet.service.scorecard import kept_bias
    from tokenfleet.traces import read_traces

    question = Question(
        targets,
        attainment,
        confidence,
        known_policy(policy),
        seed,
        max_gpus,
        budget_usd_per_h,
        cold_start_s,
        reclaims_per_h,
        drift,
    )
    with console(stderr=True).status("reading"):
        paths, said = asked_traces(trace, since, data, bias_from)
        bias = None if bias_from is None else kept_bias(data, bias_from)
        gathered = gather(
            read_traces(paths),
            model=model,
            gpus=gpu or (),
            tps=tp or (),
            profiles=profile or (),
            prices=prices,
            spot=spot,
            engine=engine,
            rate_scale=rate_scale,
            prompt_scale=prompt_scale,
            output_scale=output_scale,
            price_scale=price_scale,
            window=window,
            drop_too_long=drop_too_long,
            budgeted=budget_usd_per_h is not None,
            bias=bias,
            today=date.today(),
        )
    warn([*said, *gathered.inputs.warnings])
    with threads(jobs or os.cpu_count() or 1) as pool, progress_bar("planning") as bar:
        plan = make_plan(gathered.workload, gathered.worker_types, question, gathered.inputs, pool, bar)
    answer = plan_json(plan)
    if output_dir is not None:
        from tokenfleet.report.page import plan_report

        text = json.dumps(answer, indent=1) + "\n"
        write_files({output_dir / "plan.json": text, output_dir / "report.html": plan_report(plan)})
    if output_format == OutputFormat.JSON:
        print(json.dumps(answer, indent=1))
    else:
        show(plan_tables(plan))
        if output_dir is not None:
            print(f"\nwritten: {output_dir / 'plan.json'}, {output_dir / 'report.html'}")
    return 0 if plan.feasible else 1
