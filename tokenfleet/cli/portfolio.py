"""`tokenfleet portfolio`: several models on one budget, from a file, as tables, JSON, plans and a page."""

from __future__ import annotations

import json
import os
from datetime import date
from pathlib import Path
from typing import Annotated

import typer

from tokenfleet.cli.plan import OutputFormat


def portfolio_command(
    file: Annotated[
        Path, typer.Argument(help="models with their traces and targets, and shared limits (YAML)")
    ],
    jobs: Annotated[int | None, typer.Option(min=1, help="processes side by side (one per core)")] = None,
    no_cache: Annotated[bool, typer.Option("--no-cache", help="plan everything anew, keep nothing")] = False,
    output_dir: Annotated[
        Path | None, typer.Option(help="write portfolio.json, portfolio.html and NAME.plan.json there")
    ] = None,
    output_format: Annotated[OutputFormat, typer.Option("--format", help="on stdout")] = OutputFormat.TABLE,
) -> int:
    """Choose GPUs for several models at once, within limits that they share, at least cost.

    tokenfleet portfolio examples/portfolio.yaml

    tokenfleet portfolio models.yaml --output-dir out      # then: tokenfleet serve --plan out/chat.plan.json
    """
    # Imported here: the flags are checked before the compiled simulator is loaded.
    from tokenfleet.cli.terminal import counted_bar, show, warn
    from tokenfleet.files import refuse_unwritable, write_files
    from tokenfleet.portfolio.plan import plan_portfolio, tasks_of
    from tokenfleet.portfolio.request import read_portfolio
    from tokenfleet.portfolio.view import portfolio_json, portfolio_report, portfolio_tables
    from tokenfleet.whatif.cache import Cache, default_folder

    portfolio = read_portfolio(file)
    plans = (
        {} if output_dir is None else {m.name: output_dir / f"{m.name}.plan.json" for m in portfolio.models}
    )
    files = [] if output_dir is None else [output_dir / "portfolio.json", output_dir / "portfolio.html"]
    refuse_unwritable([*files, *plans.values()])
    asked = tasks_of(portfolio, date.today())
    warn(asked.warnings)
    with counted_bar("planning models", len(asked.tasks)) as advance:
        cache = Cache(None if no_cache else default_folder())
        plan = plan_portfolio(portfolio, asked, jobs or os.cpu_count() or 1, cache, advance)
    text = json.dumps(portfolio_json(plan), indent=1) + "\n"
    if files:
        each = {plans[row.name]: json.dumps(row.plan.document, indent=1) + "\n" for row in plan.rows}
        write_files(dict(zip(files, (text, portfolio_report(plan)), strict=True)) | each)
    if output_format == OutputFormat.JSON:
        print(text, end="")
    else:
        show(portfolio_tables(plan))
        if files:
            print(f"\nwritten: {', '.join(map(str, [*files, *plans.values()]))}")
    return 0
