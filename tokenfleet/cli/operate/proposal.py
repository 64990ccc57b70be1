"""The verbs of `tokenfleet fleet` for plans that a fleet makes again from its own history."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from controlplane.errors import BadInput
from tokenfleet.cli.flags import Format, OutputFormat
from tokenfleet.cli.fleet import ControlClient
from tokenfleet.cli.operate.changes import fleet_app, roll
from tokenfleet.cli.terminal import answer
from tokenfleet.files import refuse_to_replace, write_files

__all__ = ["fleet_app"]
LOOK_S = 0.5
NONE = 1
HISTORY = "1d"


@fleet_app.command()
def proposal(
    context: typer.Context,
    now: Annotated[bool, typer.Option("--now", help="plan again now, and wait for the result")] = False,
    since: Annotated[
        str | None, typer.Option(metavar="1d", help="history to plan from, with --now (default: 1d)")
    ] = None,
    output: Annotated[Path | None, typer.Option(help="also write the proposed plan.json here")] = None,
    format: Format = OutputFormat.TABLE,
) -> None:
    """Show what the fleet's last re-plan would change.

    A fleet served with a plan and a history plans again once a day, and when its plan no longer holds.
    The fleet stays unchanged until `fleet apply`. Exit code 1: there is no proposal.

    Examples:
    tokenfleet fleet proposal
    tokenfleet fleet proposal --now --since 6h
    """
    if since is not None and not now:
        raise BadInput("--since: is the history that --now plans from; give --now too")
    if output is not None:
        refuse_to_replace(output, overwrite=True)
    client: ControlClient = context.obj
    if now:
        client.ask("POST", "/v1/fleet/proposal", {"since": since or HISTORY})
    while (view := client.ask("GET", "/v1/fleet/proposal"))["state"] == "planning" and now:
        time.sleep(LOOK_S)
    if output is not None:
        if view["plan"] is None:
            raise BadInput(f"--output: there is no proposed plan: {view['line']}")
        plan = client.ask("GET", f"/v1/plans/{view['plan']}")["plan"]
        write_files({output: json.dumps(plan, indent=2) + "\n"})
    answer(format, json.dumps(view, indent=2), lambda: _lines(view))
    if view["plan"] is None:
        raise typer.Exit(NONE)


@fleet_app.command()
def apply(context: typer.Context, format: Format = OutputFormat.TABLE) -> None:
    """Serve by the proposed plan, one worker after another.

    A new worker starts before old ones leave, where there is room. Requests move along, and no stream is
    cut. If SLO attainment falls below its target, or a new worker does not start, the fleet
    becomes what it was. `fleet update --cancel` stops it. Exit code 1: it was rolled back.
    """
    roll(context.obj, format, "/v1/fleet/apply", {})


def _lines(view: dict[str, Any]) -> Iterator[str]:
    """A proposal for a terminal."""
    yield f"Proposed: {view['line']}"
    if view["state"] == "ready":
        yield "The fleet stays unchanged; `tokenfleet fleet apply` applies the plan while it serves."
