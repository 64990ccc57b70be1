"""`tokenfleet whatif`: the plan over a grid of changes, as a table, JSON, and a page with the plot."""

from __future__ import annotations

import json
import os
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controlplane.types import EngineMode, Slo
from tokenfleet.durations import parse_slo
from tokenfleet.plan_command import OutputFormat

if TYPE_CHECKING:
    from tokenfleet.planning.answer import Plan
    from tokenfleet.whatif import Changes


def whatif_command(
    trace: Annotated[list[Path], typer.Option(help="requests, any known format; repeat to merge several")],
    slo: Annotated[str, typer.Option(help="both targets with units: ttft=1.6s,tpot=75ms")],
    vary: Annotated[
        list[str], typer.Option(help="KEY=V1,V2,…: rate, slo.ttft, slo.tpot, gpu, tp, policy, …")
    ],
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
    window: Annotated[str | None, typer.Option(help="only this part of the trace: 10m..20m")] = None,
    budget_usd_per_h: Annotated[float | None, typer.Option(help="most that may be spent")] = None,
    max_gpus: Annotated[int | None, typer.Option(help="most GPUs that may be used")] = None,
    drop_too_long: Annotated[
        bool, typer.Option("--drop-too-long", help="leave out requests beyond the model's context")
    ] = False,
    seed: Annotated[int, typer.Option(help="of every draw; the same seed gives the same plans")] = 0,
    jobs: Annotated[int | None, typer.Option(min=1, help="simulations side by side (one per core)")] = None,
    output_dir: Annotated[Path | None, typer.Option(help="write whatif.json and whatif.html there")] = None,
    output_format: Annotated[OutputFormat, typer.Option("--format", help="on stdout")] = OutputFormat.TABLE,
) -> int:
    """Plan a grid of changes and show what each costs.

    tokenfleet whatif --trace day.csv --model llama-3.1-8b --slo ttft=400ms,tpot=30ms
    --vary rate=0.5,1,2 --vary slo.tpot=20ms,30ms

    tokenfleet whatif --trace day.csv --model llama-3.1-70b --slo ttft=1.6s,tpot=75ms --vary gpu=a100,h100
    """
    targets = parse_slo(slo)
    # Imported here: the flags are checked before the compiled simulator is loaded.
    from dataclasses import replace

    from tokenfleet.atomic_files import write_files
    from tokenfleet.plan import make_plan
    from tokenfleet.plan_inputs import gather, known_policy
    from tokenfleet.planning.question import Question
    from tokenfleet.planning.threads import threads
    from tokenfleet.planning.watch import Part
    from tokenfleet.terminal import console, progress_bar, show, warn
    from tokenfleet.traces import read_traces
    from tokenfleet.whatif import checked, grid, scenarios, whatif_json
    from tokenfleet.whatif_view import whatif_report, whatif_table

    cells = grid(vary)
    question = Question(
        targets, attainment, confidence, known_policy(policy), seed, max_gpus, budget_usd_per_h
    )
    with console(stderr=True).status("reading"):
        read = read_traces([str(path) for path in trace])
    warned: set[str] = set()
    with threads(jobs or os.cpu_count() or 1) as pool, progress_bar("planning") as bar:

        def planned(changes: Changes) -> Plan:
            values = {key: checked(key, value) for key, value in changes.items()}
            asked = replace(
                question,
                slo=Slo(
                    float(values.get("slo.ttft", targets.ttft_s)),
                    float(values.get("slo.tpot", targets.tpot_s)),
                ),
                attainment=float(values.get("attainment", attainment)),
                confidence=float(values.get("confidence", confidence)),
                policy=known_policy(str(values.get("policy", policy))),
            )
            gathered = gather(
                read,
                model=model,
                gpus=[str(values["gpu"])] if "gpu" in values else gpu or (),
                tps=[int(values["tp"])] if "tp" in values else tp or (),
                profiles=profile or (),
                prices=prices,
                spot=spot,
                engine=str(values["engine"]) if "engine" in values else engine,
                rate_scale=float(values.get("rate", 1.0)),
                window=window,
                drop_too_long=drop_too_long,
                budgeted=budget_usd_per_h is not None,
                price_scale=float(values.get("price", 1.0)),
                today=date.today(),
            )
            warned.update(gathered.inputs.warnings)
            part = Part(bar, cells.index(changes), len(cells))
            return make_plan(
                gathered.workload, gathered.offers, asked, gathered.inputs, pool, part, explained=False
            )

        found = scenarios(cells, planned)
    warn(sorted(warned))
    answer = json.dumps(whatif_json(found), indent=1)
    if output_dir is not None:
        write_files(
            {output_dir / "whatif.json": answer + "\n", output_dir / "whatif.html": whatif_report(found)}
        )
    if output_format == OutputFormat.JSON:
        print(answer)
    else:
        show([whatif_table(found)])
    return 0 if any(s.plan is not None and s.plan.feasible for s in found) else 1
