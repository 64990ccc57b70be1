"""The verbs of `tokenfleet fleet` that change a fleet's workers while it serves, and tell how it goes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Annotated, Any

import typer

from controlplane.errors import BadInput
from tokenfleet.cli.fleet import ControlClient, Format, fleet_app
from tokenfleet.durations import parse_duration_s

__all__ = ["fleet_app"]
LOOK_S = 0.3
LATE = 1


@fleet_app.command()
def evacuate(
    context: typer.Context,
    worker: str,
    deadline: Annotated[str, typer.Option(help="when it must be empty and gone, from now")] = "30s",
    format: Format = "table",
) -> None:
    """Empty a worker by a deadline, since its machine goes away; another is launched in its place.

    Requests are moved with their KV as far as time allows, the others computed anew elsewhere. Exits with 1
    where it was too late, or a stream could not be continued.

    Example: tokenfleet fleet evacuate w0 --deadline 30s
    """
    seconds = parse_duration_s(deadline, "--deadline")
    _check_format(format)
    client: ControlClient = context.obj
    after = _last_event(client)
    reply = client.ask("POST", f"/v1/workers/{worker}/evacuate", {"deadline_s": seconds})
    plan = reply["plan"]
    said = f"{plan['move']} requests to move, {plan['replay']} to compute anew, {plan['stay']} stay"
    _tell(format, f"{worker}: {said}", reply)
    for event in _events(client, after):
        if event.get("worker") == worker and event["kind"] in ("evacuated", "gone"):
            _tell(format, f"{worker}: {event['reason']}", event)
            if event["kind"] == "gone" or event["failed"] or not event["in_time"]:
                raise typer.Exit(LATE)
            return


def _check_format(format: str) -> None:
    if format not in ("table", "json"):
        raise BadInput(f"--format: expected table or json, got {format!r}")


def _tell(format: str, line: str, event: Any) -> None:
    """A line of progress: for people, or as JSON."""
    print(json.dumps(event) if format == "json" else line, flush=True)


def _last_event(client: ControlClient) -> int:
    decisions = client.ask("GET", "/v1/fleet")["decisions"]
    return int(decisions[-1]["id"]) if decisions else 0


def _events(client: ControlClient, after: int) -> Iterator[dict[str, Any]]:
    """The fleet's events as they come, those after an id."""
    while True:
        for event in client.ask("GET", "/v1/fleet")["decisions"]:
            if event["id"] > after:
                after = event["id"]
                yield event
        time.sleep(LOOK_S)
