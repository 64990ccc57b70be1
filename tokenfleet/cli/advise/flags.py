"""The flags of `tokenfleet advise`, and what they contradict."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from controlplane.errors import BadInput
from tokenfleet.advise.view import MOST
from tokenfleet.cli.flags import Format, OutputFormat
from tokenfleet.texts import parse_duration_s

WATCHED_S = 10.0, 86_400.0  # the shortest and the longest watch for --plan


@dataclass(frozen=True, slots=True)
class AdviseFlags:
    """What `tokenfleet advise` is asked."""

    slo: Annotated[str, typer.Option(help="targets of each request, e.g. ttft=1s,tpot=50ms")]
    addresses: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ADDRESS]...", help="servers: HOST:PORT, http://HOST:PORT, dns:NAME:PORT"),
    ] = None
    servers: Annotated[
        Path | None, typer.Option(help="file with an address on each line; read again at each look")
    ] = None
    prometheus: Annotated[
        str | None, typer.Option(help="URL of a Prometheus server that scrapes the servers, instead")
    ] = None
    selector: Annotated[
        str | None, typer.Option(help="""--prometheus: labels of the servers, e.g. {namespace="llm"}""")
    ] = None
    gpu: Annotated[str | None, typer.Option(help="GPU of a replica, e.g. h100")] = None
    tp: Annotated[
        int | None, typer.Option(min=1, help="GPUs of a replica, vLLM's --tensor-parallel-size (default: 1)")
    ] = None
    profile: Annotated[
        Path | None, typer.Option(help="step times of a replica, instead of --gpu and --tp")
    ] = None
    model: Annotated[
        str | None, typer.Option(help="model of the library, where the served name says another")
    ] = None
    attainment: Annotated[
        float, typer.Option(min=0.5, max=0.9999, help="share of requests to be within the targets")
    ] = 0.99
    replicas: Annotated[
        str | None, typer.Option(help="floor and ceiling of the advice, MIN..MAX (default: 1, no ceiling)")
    ] = None
    cold_start: Annotated[str, typer.Option(help="time until a new replica serves")] = "2m"
    scale_in_after: Annotated[str, typer.Option(help="how long fewer replicas must be enough")] = "80s"
    every: Annotated[
        str | None, typer.Option(help="time between two looks (default: 5s; 15s with --prometheus)")
    ] = None
    prices: Annotated[Path | None, typer.Option(help="price list instead of the shipped one")] = None
    listen: Annotated[
        str | None, typer.Option(help="HOST:PORT to serve the advice at /metrics, for KEDA and Prometheus")
    ] = None
    scaler: Annotated[
        str | None, typer.Option(help="HOST:PORT to answer KEDA's external scaler (gRPC, without TLS)")
    ] = None
    replay: Annotated[
        list[Path] | None,
        typer.Option(help="show what the advice would have done on a recorded day; a trace of requests"),
    ] = None
    plan: Annotated[
        str | None,
        typer.Option(help="watch for this long, e.g. 10m, then plan for the traffic seen, and end"),
    ] = None
    output_dir: Annotated[Path | None, typer.Option(help="--plan: write plan.json and report.html there")] = (
        None
    )
    once: Annotated[bool, typer.Option("--once", help="print the first advice and end")] = False
    output_format: Format = OutputFormat.TABLE


def refuse_contradictions(flags: AdviseFlags) -> None:
    """Raise BadInput for flags that exclude each other."""
    if flags.profile is not None and (flags.gpu or flags.tp or flags.model):
        raise BadInput("--profile: says model, GPU and TP; leave out --model, --gpu and --tp")
    if flags.prometheus is not None and (flags.addresses or flags.servers):
        raise BadInput("--prometheus: has the servers; leave out addresses and --servers")
    if flags.selector is not None and flags.prometheus is None:
        raise BadInput("--selector: of --prometheus; give its URL too")
    if flags.plan is not None and flags.once:
        raise BadInput("--once: contradicts --plan, which watches for longer; give one of them")
    if flags.output_dir is not None and flags.plan is None:
        raise BadInput("--output-dir: of --plan; say for how long to watch")


def watch_s(flags: AdviseFlags) -> float | None:
    """For how long to watch before a plan; None without one. Raises BadInput."""
    return None if flags.plan is None else seconds(flags.plan, "--plan", *WATCHED_S)


def bounds(text: str | None) -> tuple[int, int]:
    if text is None:
        return 1, MOST
    low, dots, high = text.partition("..")
    if not dots or not (low.isdecimal() and high.isdecimal()) or not 1 <= int(low) <= int(high) <= MOST:
        raise BadInput(f"--replicas: expected MIN..MAX such as 1..8, from 1 on, got {text!r}")
    return int(low), int(high)


def seconds(text: str, flag: str, least: float, most: float) -> float:
    seconds = parse_duration_s(text, flag)
    if not least <= seconds <= most:
        raise BadInput(f"{flag}: expected {least:g}s to {most:g}s, got {text!r}")
    return seconds
