"""The verbs of `tokenfleet fleet` that change a fleet's workers while it serves, and tell how it goes.

Two are for plans that a fleet makes again from its own history: `proposal` and `apply`.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from controlplane.errors import BadInput
from tokenfleet.cli.flags import Format, OutputFormat
from tokenfleet.cli.fleet import ControlClient, fleet_app
from tokenfleet.cli.terminal import answer
from tokenfleet.files import refuse_to_replace, write_files
from tokenfleet.texts import parse_duration_s

__all__ = ["fleet_app"]
LOOK_S = 0.3
PROPOSAL_LOOK_S = 0.5
PROPOSED_FROM = "1d"
LATE = NOT_DONE = NO_PROPOSAL = 1
GATEWAYS = "gateways"  # in place of a worker's name
CHECK_S = 60.0  # vLLM reads the new model's configuration before the order is taken


@fleet_app.command()
def evacuate(
    context: typer.Context,
    worker: Annotated[str, typer.Argument(help="worker to empty, or use --node")] = "",
    node: Annotated[str, typer.Option(help="all workers of the node at this address")] = "",
    deadline: Annotated[str, typer.Option(help="time until the worker must be empty")] = "30s",
    format: Format = OutputFormat.TABLE,
) -> None:
    """Empty a worker by a deadline, and launch another in its place.

    Use it when a machine goes away. Requests move with their KV while there is time; the others are computed
    again elsewhere. Exit code 1: it was too late, or a stream could not continue.

    Examples:
    tokenfleet fleet evacuate w0 --deadline 30s
    tokenfleet fleet evacuate --node 10.0.0.7 --deadline 2m
    """
    seconds = parse_duration_s(deadline, "--deadline")
    if bool(worker) == bool(node):
        raise BadInput("evacuate: give a worker, or --node with an address")
    client: ControlClient = context.obj
    after = _last_event(client)
    where = f"/v1/nodes/{node}" if node else f"/v1/workers/{worker}"
    reply = client.ask("POST", f"{where}/evacuate", {"deadline_s": seconds})
    plan, left = reply["plan"], set(reply.get("workers", [worker]))
    said = f"{plan['move']} requests to move, {plan['replay']} to recompute, {plan['stay']} stay"
    _tell(format, f"{worker or node}: {said if left else 'no worker runs there'}", reply)
    is_late = False
    for event in _events(client, after) if left else ():
        if event.get("worker") in left and event["kind"] in ("evacuated", "gone"):
            left.discard(event["worker"])
            _tell(format, f"{event['worker']}: {event['reason']}", event)
            is_late |= event["kind"] == "gone" or bool(event["failed"]) or not event["in_time"]
            if not left:
                break
    if is_late:
        raise typer.Exit(LATE)


FinishWithin = Annotated[str, typer.Option(help="longest time for requests that cannot be moved to finish")]


@fleet_app.command()
def restart(
    context: typer.Context,
    worker: str,
    finish_within: FinishWithin = "10m",
    format: Format = OutputFormat.TABLE,
) -> None:
    """Replace a worker by a new one of its type.

    Its requests move there or elsewhere, or finish. If there is room, the new worker starts first. `gateways`
    in place of a worker replaces all gateways of a fleet with several, one after another. The new processes
    run the version that is then installed. Streams finish where they are.

    Examples:
    tokenfleet fleet restart w0
    tokenfleet fleet restart gateways
    """
    finish_s = parse_duration_s(finish_within, "--finish-within")
    if worker == GATEWAYS:
        _restart_gateways(context.obj, format, finish_s)
        return
    roll(context.obj, format, f"/v1/workers/{worker}/restart", {"finish_s": finish_s})


def _restart_gateways(client: ControlClient, format: OutputFormat, finish_s: float) -> None:
    after = _last_event(client)
    client.ask("POST", "/v1/gateways/restart", {"finish_s": finish_s})
    for event in _events(client, after):
        if event["kind"] == "gateway-start":
            _tell(format, f"{event['gateway']}: {event['reason']}", event)
        elif event["kind"] == "gateways":
            _tell(format, event["reason"], event)
            if not event["is_done"]:
                raise typer.Exit(NOT_DONE)
            return


@fleet_app.command()
def update(
    context: typer.Context,
    engine_flags: Annotated[
        list[str] | None,
        typer.Argument(metavar="-- [VLLM FLAGS]", help="engine flags from now on, all of them"),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="a folder or a Hugging Face name, with the same tokenizer")
    ] = None,
    finish_within: FinishWithin = "10m",
    cancel: Annotated[bool, typer.Option("--cancel", help="roll back the update under way")] = False,
    format: Format = OutputFormat.TABLE,
) -> None:
    """Update all workers to other flags or another model.

    Workers are replaced one after another; the flags are vLLM's. A new worker takes requests once it is
    healthy. If one does not start, or is lost, the update is rolled back. Requests move to a new worker
    if it has the same weights. With another model they finish where they are, within --finish-within, or
    end in an error.

    Examples:
    tokenfleet fleet update -- --max-num-seqs 128 --dtype bfloat16
    tokenfleet fleet update --model /models/llama-tuned-2
    """
    if cancel:
        if engine_flags or model:
            raise BadInput("--cancel: takes neither a model nor flags")
        reply = context.obj.ask("DELETE", "/v1/fleet/update")
        _tell(format, f"{reply['what']}: is rolled back", reply)
        return
    if not engine_flags and model is None:
        raise BadInput("update: give the engine flags from now on after --, or --model")
    order: dict[str, Any] = {"finish_s": parse_duration_s(finish_within, "--finish-within")}
    if model is not None:
        order["model"] = str(Path(model).expanduser().resolve()) if Path(model).is_dir() else model
    if engine_flags:
        order["flags"] = engine_flags
    roll(context.obj, format, "/v1/fleet/update", order)


def roll(client: ControlClient, format: OutputFormat, path: str, order: dict[str, Any]) -> None:
    """Order a rollout, or a change of plan, and tell how it goes until its end."""
    after = _last_event(client)
    what = client.ask("POST", path, order, CHECK_S)["what"]
    try:
        for event in _events(client, after):
            if event["kind"] != "update" or event["what"] != what:
                continue
            _tell(format, event["reason"], event)
            if event["state"] not in ("running", "rolling-back"):
                break
    except KeyboardInterrupt:
        print(f"{what} goes on without this command: `tokenfleet fleet status`", file=sys.stderr)
        raise
    if event["state"] != "done":
        raise typer.Exit(NOT_DONE)


def _tell(format: OutputFormat, line: str, event: Any) -> None:
    """A line of progress: for people, or as JSON."""
    print(json.dumps(event) if format == OutputFormat.JSON else line, flush=True)


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
        client.ask("POST", "/v1/fleet/proposal", {"since": since or PROPOSED_FROM})
    while (view := client.ask("GET", "/v1/fleet/proposal"))["state"] == "planning" and now:
        time.sleep(PROPOSAL_LOOK_S)
    if output is not None:
        if view["plan"] is None:
            raise BadInput(f"--output: there is no proposed plan: {view['line']}")
        plan = client.ask("GET", f"/v1/plans/{view['plan']}")["plan"]
        write_files({output: json.dumps(plan, indent=2) + "\n"})
    answer(format, json.dumps(view, indent=2), lambda: _lines(view))
    if view["plan"] is None:
        raise typer.Exit(NO_PROPOSAL)


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
