"""The flags of `tokenfleet advise`, and what they contradict."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from controlplane.errors import BadInput
from tokenfleet.advise.bearer import VARIABLE
from tokenfleet.advise.view import MOST
from tokenfleet.cli.flags import Format, OutputFormat
from tokenfleet.texts import parse_duration_s

NAMES = ("gpu", "tp", "profile", "min", "max", "apply")
KIND_HINT = "gpu=h100,tp=2,min=1,max=8,servers=ADDRESSES (or labels of pods; min and tp default to 1)"
WATCHED_S = 10.0, 86_400.0  # the shortest and the longest watch for --plan


@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """The servers that `advise` and `pick` watch, and what they are."""

    addresses: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ADDRESS]...", help="servers: HOST:PORT, http://HOST:PORT, dns:NAME:PORT"),
    ] = None
    servers: Annotated[
        Path | None, typer.Option(help="file with an address on each line; read again at each look")
    ] = None
    model: Annotated[str | None, typer.Option(help="model in the library, if the served name differs")] = None
    gpu: Annotated[str | None, typer.Option(help="GPU of a server, e.g. h100")] = None
    tp: Annotated[
        int | None, typer.Option(min=1, help="GPUs of a server, vLLM's --tensor-parallel-size (default: 1)")
    ] = None
    profile: Annotated[
        Path | None, typer.Option(help="step times of a server, instead of --gpu and --tp")
    ] = None


@dataclass(frozen=True, kw_only=True)
class AdviseFlags(ServerFlags):
    """What `tokenfleet advise` is asked."""

    slo: Annotated[str, typer.Option(help="targets of each request, e.g. ttft=1s,tpot=50ms")]
    kind: Annotated[
        list[str] | None,
        typer.Option(
            help="a worker type of a mixed fleet and its servers, once for each type:"
            " gpu=h100,max=8,servers=ADDRESSES, or the pods' labels; servers= comes last"
        ),
    ] = None
    prometheus: Annotated[
        str | None, typer.Option(help="URL of a Prometheus server that scrapes the servers, instead")
    ] = None
    selector: Annotated[
        str | None,
        typer.Option(
            help="""labels of the servers: of pods, app=vllm; with --prometheus, {namespace="llm"}"""
        ),
    ] = None
    pool: Annotated[
        str | None, typer.Option(help="InferencePool whose pods are the servers, instead of --selector")
    ] = None
    namespace: Annotated[
        str | None, typer.Option(help="Kubernetes namespace (default: the context's, or this pod's)")
    ] = None
    port: Annotated[
        int | None,
        typer.Option(min=1, max=65535, help="port of the pods' metrics (default: the pool's, or 8000)"),
    ] = None
    token_file: Annotated[
        Path | None,
        typer.Option(help=f"bearer token that metrics or Prometheus are asked with (or ${VARIABLE})"),
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
    apply: Annotated[
        str | None,
        typer.Option(
            help="what to scale: deployment/NAME, statefulset/NAME, or a command with {replicas}; needs"
            " --replicas, and --yes or it is a dry run"
        ),
    ] = None
    yes: Annotated[bool, typer.Option("--yes", help="--apply: really set the replicas")] = False
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


@dataclass(frozen=True, slots=True)
class KindAsked:
    """A worker type of a mixed fleet: its hardware or step times, bounds, what is scaled, and its servers.

    `servers`: addresses, or a selector of pods or of Prometheus.
    """

    gpu: str | None
    tp: int | None
    profile: Path | None
    low: int
    high: int | None
    apply: str | None
    servers: str

    @property
    def is_listed(self) -> bool:
        """Whether the servers are addresses: those have a port."""
        return ":" in self.servers and not self.servers.startswith("{")


def kinds_asked(flags: AdviseFlags) -> list[KindAsked]:
    """The worker types of --kind. Raises BadInput."""
    kinds = [_kind(text) for text in flags.kind or ()]
    if len(kinds) == 1:
        raise BadInput("--kind: a mixed fleet has two types or more; of one, give --gpu and its servers")
    if kinds and any(kind.apply and kind.high is None for kind in kinds):
        raise BadInput("--kind: apply: needs a ceiling; give max")
    return kinds


def _kind(text: str) -> KindAsked:
    head, _, servers = text.partition("servers=")
    values: dict[str, str] = {}
    for part in filter(None, head.split(",")):
        name, equals, value = part.strip().partition("=")
        if not equals or name not in NAMES or name in values:
            raise BadInput(f"--kind: expected {KIND_HINT}, got {text!r}")
        values[name] = value.strip()
    if not servers or ("gpu" in values) == ("profile" in values):
        missing = "its GPU or its profile" if servers else "its servers"
        raise BadInput(f"--kind: {missing}: missing or too much in {text!r}; expected {KIND_HINT}")
    counts = {name: values[name] for name in ("tp", "min", "max") if name in values}
    for name, value in counts.items():
        if not value.isdecimal() or not (name == "min" or int(value) >= 1) or int(value) > MOST:
            raise BadInput(f"--kind: {name}: expected a number as in {KIND_HINT}, got {value!r}")
    low, high = int(counts.get("min", "1")), int(counts["max"]) if "max" in counts else None
    if high is not None and low > high:
        raise BadInput(f"--kind: min: must not be above max, got {low} and {high}")
    tp = int(counts["tp"]) if "tp" in counts else None
    profile = Path(values["profile"]) if "profile" in values else None
    return KindAsked(values.get("gpu"), tp, profile, low, high, values.get("apply"), servers)


def refuse_contradictions(flags: AdviseFlags) -> None:
    """Raise BadInput for flags that exclude each other."""
    for told, holds in (_of_servers(flags) | _of_use(flags)).items():
        if holds:
            raise BadInput(told)


def _of_servers(flags: AdviseFlags) -> dict[str, object]:
    """What is wrong where the servers are named, and whether it holds."""
    pool, selector, prometheus = flags.pool, flags.selector or "", flags.prometheus
    library, listed = flags.gpu or flags.tp or flags.model, flags.addresses or flags.servers
    of_pods_alone = "--selector: braces are of --prometheus; give its URL, or app=vllm for pods"
    return {
        "--profile: says model, GPU and TP; leave out --model, --gpu and --tp": flags.profile and library,
        "--prometheus: has the servers; leave out addresses and --servers": prometheus and listed,
        "--pool: contradicts --prometheus; give one of them": prometheus and pool,
        "--pool: has a selector; leave out --selector": pool and selector,
        of_pods_alone: selector.startswith("{") and not prometheus,
        "--port: of --selector or --pool; addresses have their own": flags.port and not of_pods(flags),
        "--kind: names hardware and servers; leave out --gpu, --tp and --profile": flags.kind
        and (flags.gpu or flags.tp or flags.profile),
        "--kind: has the servers; leave out addresses, --servers, --selector and --pool": flags.kind
        and (listed or selector or pool),
        "--kind: has what is scaled; write apply=deployment/NAME in it": flags.kind and flags.apply,
    }


def _of_use(flags: AdviseFlags) -> dict[str, object]:
    """What is wrong in what becomes of the advice, and whether it holds."""
    return {
        "--apply: needs a floor and a ceiling; give --replicas MIN..MAX": flags.apply and not flags.replicas,
        "--yes: of --apply; say what to scale": flags.yes
        and not (flags.apply or any(kind.apply for kind in kinds_asked(flags))),
        "--once: contradicts --plan, which watches for longer; give one of them": flags.plan and flags.once,
        "--output-dir: of --plan; say for how long to watch": flags.output_dir and not flags.plan,
    }


def of_pods(flags: AdviseFlags) -> bool:
    """Whether the servers are pods that Kubernetes lists."""
    labels = flags.selector is not None or any(not kind.is_listed for kind in kinds_asked(flags))
    return flags.pool is not None or (labels and flags.prometheus is None)


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
