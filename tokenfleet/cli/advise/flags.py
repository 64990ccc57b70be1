"""The flags of `tokenfleet advise`, and what they contradict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer

from controlplane.errors import BadInput
from tokenfleet.advise.bearer import VARIABLE
from tokenfleet.advise.view import MOST
from tokenfleet.cli.flags import Format, OutputFormat, flag
from tokenfleet.texts import parse_duration_s

NAMES = ("gpu", "tp", "profile", "min", "max", "apply")
KIND_HINT = "gpu=h100,tp=2,min=1,max=8,servers=ADDRESSES (or labels of pods; min and tp default to 1)"
WATCHED_S = 10.0, 86_400.0  # the shortest and the longest watch for --plan


@dataclass(frozen=True, kw_only=True)
class ServerFlags:
    """The servers that `advise` and `pick` watch, and what they are."""

    addresses: Annotated[
        list[str] | None,
        typer.Argument(metavar="ADDRESS", help="servers: HOST:PORT, http://HOST:PORT, dns:NAME:PORT"),
    ] = None
    servers: Path | None = flag(None, "file with an address on each line; read again at each look")
    model: str | None = flag(None, "model in the library, if the served name differs")
    gpu: str | None = flag(None, "GPU of a server, e.g. h100")
    tp: int | None = flag(None, "GPUs of a server, vLLM's --tensor-parallel-size (default: 1)", min=1)
    profile: Path | None = flag(None, "step times of a server, instead of --gpu and --tp")


@dataclass(frozen=True, kw_only=True)
class AdviseFlags(ServerFlags):
    """What `tokenfleet advise` is asked."""

    slo: Annotated[str, typer.Option(help="targets of each request, e.g. ttft=1s,tpot=50ms")]
    kind: list[str] | None = flag(
        None,
        "a worker type of a mixed fleet and its servers, once for each type:"
        " gpu=h100,max=8,servers=ADDRESSES, or the pods' labels; servers= comes last",
    )
    prometheus: str | None = flag(None, "Prometheus server that scrapes the servers, instead of addresses")
    selector: str | None = flag(
        None, 'labels of the servers: of pods, app=vllm; with --prometheus, {namespace="llm"}'
    )
    pool: str | None = flag(None, "InferencePool whose pods are the servers, instead of --selector")
    namespace: str | None = flag(None, "Kubernetes namespace (default: the context's, or this pod's)")
    port: int | None = flag(
        None, "port of the pods' metrics (default: the pool's, or 8000)", min=1, max=65535
    )
    token_file: Path | None = flag(
        None, f"bearer token that metrics or Prometheus are asked with (or ${VARIABLE})"
    )
    attainment: float = flag(0.99, "share of requests to be within the targets", min=0.5, max=0.9999)
    replicas: str | None = flag(None, "floor and ceiling of the advice, MIN..MAX (default: 1, no ceiling)")
    cold_start: str = flag("2m", "time until a new replica serves")
    scale_in_after: str = flag("80s", "how long fewer replicas must be enough")
    every: str | None = flag(None, "time between two looks (default: 5s; 15s with --prometheus)")
    prices: Path | None = flag(None, "price list instead of the shipped one")
    listen: str | None = flag(None, "HOST:PORT to serve the advice at /metrics, for KEDA and Prometheus")
    scaler: str | None = flag(None, "HOST:PORT to answer KEDA's external scaler (gRPC, without TLS)")
    picker: list[str] | None = flag(
        None,
        "--scaler: metrics of `tokenfleet pick`, for a fleet that goes to zero; once a picker",
        metavar="ADDRESS",
    )
    apply: str | None = flag(
        None,
        "what to scale: deployment/NAME, statefulset/NAME, or a command with {replicas}; needs"
        " --replicas, and --yes or it is a dry run",
    )
    yes: bool = flag(False, "--apply: really set the replicas", "--yes")
    replay: list[Path] | None = flag(
        None, "show what the advice would have done on a recorded day; a trace of requests"
    )
    plan: str | None = flag(None, "watch for this long, e.g. 10m, then plan for the traffic seen, and end")
    output_dir: Path | None = flag(None, "--plan: write plan.json and report.html there")
    once: bool = flag(False, "print the first advice and end", "--once")
    output_format: Format = OutputFormat.TABLE


def refuse_contradictions(flags: AdviseFlags) -> None:
    """Raise BadInput for flags that exclude each other."""
    for told, holds in (_of_servers(flags) | _of_kinds(flags) | _of_use(flags)).items():
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
        "--port: of --selector or --pool; addresses have their own": flags.port
        and not any(map(of_pods, of_types(flags))),
    }


def _of_kinds(flags: AdviseFlags) -> dict[str, object]:
    """What contradicts --kind, and whether it holds."""
    if not flags.kind:
        return {}
    hardware = flags.gpu or flags.tp or flags.profile
    servers = flags.addresses or flags.servers or flags.selector or flags.pool
    return {
        "--kind: names hardware and servers; leave out --gpu, --tp and --profile": hardware,
        "--kind: has the servers; leave out addresses, --servers, --selector and --pool": servers,
        "--kind: has what is scaled; write apply=deployment/NAME in it": flags.apply,
    }


def _of_use(flags: AdviseFlags) -> dict[str, object]:
    """What is wrong in what becomes of the advice, and whether it holds."""
    return {
        "--apply: needs a floor and a ceiling; give --replicas MIN..MAX": flags.apply and not flags.replicas,
        "--yes: of --apply; say what to scale": flags.yes and not any(one.apply for one in of_types(flags)),
        "--picker: tells --scaler of requests; give --scaler HOST:PORT": flags.picker and not flags.scaler,
        "--picker: of one worker type; with --kind, min=0 lets a type go to zero": flags.picker
        and flags.kind,
        "--once: contradicts --plan, which watches for longer; give one of them": flags.plan and flags.once,
        "--output-dir: of --plan; say for how long to watch": flags.output_dir and not flags.plan,
    }


def of_pods(flags: AdviseFlags) -> bool:
    """Whether the servers are pods that Kubernetes lists."""
    return flags.pool is not None or (flags.selector is not None and flags.prometheus is None)


def of_types(flags: AdviseFlags) -> list[AdviseFlags]:
    """The flags of each worker type alone; those given where --kind names none. Raises BadInput."""
    made = []
    for kind in kinds_asked(flags.kind, bool(flags.replay)):
        replicas = f"{kind.low}..{MOST if kind.high is None else kind.high}"
        one = replace(flags, kind=None, gpu=kind.gpu, tp=kind.tp, profile=kind.profile, apply=kind.apply)
        if kind.is_listed and flags.prometheus is None:
            one = replace(one, addresses=kind.servers.split(","))
        else:
            one = replace(one, selector=kind.servers)
        made.append(replace(one, replicas=replicas))
    return made or [flags]


def watch_s(flags: AdviseFlags) -> float | None:
    """For how long to watch before a plan; None without one. Raises BadInput."""
    return None if flags.plan is None else seconds(flags.plan, "--plan", *WATCHED_S)


def bounds(text: str | None, least: int = 1) -> tuple[int, int]:
    """Floor and ceiling. Raises BadInput."""
    if text is None:
        return 1, MOST
    low, dots, high = text.partition("..")
    if not dots or not (low.isdecimal() and high.isdecimal()) or not least <= int(low) <= int(high) <= MOST:
        raise BadInput(f"--replicas: expected MIN..MAX such as 1..8, from 1 on, got {text!r}")
    return int(low), int(high)


def seconds(text: str, flag: str, least: float, most: float) -> float:
    seconds = parse_duration_s(text, flag)
    if not least <= seconds <= most:
        raise BadInput(f"{flag}: expected {least:g}s to {most:g}s, got {text!r}")
    return seconds


@dataclass(frozen=True, slots=True)
class KindAsked:
    """A worker type: its hardware or step times, bounds, what is scaled, and its servers.

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


def kinds_asked(texts: Sequence[str] | None, is_replay: bool = False) -> list[KindAsked]:
    """The worker types of these --kind; those of a replay have no servers. Raises BadInput."""
    kinds = [_kind(text, is_replay) for text in texts or ()]
    if len(kinds) == 1:
        raise BadInput("--kind: a mixed fleet has two types or more; of one, give --gpu and its servers")
    if is_replay and any(kind.servers or kind.apply for kind in kinds):
        raise BadInput("--replay: reads a trace and no servers; leave out servers= and apply= of --kind")
    if any(kind.apply and kind.high is None for kind in kinds):
        raise BadInput("--kind: apply: needs a ceiling; give max")
    return kinds


def _kind(text: str, is_replay: bool) -> KindAsked:
    head, _, servers = text.partition("servers=")
    values: dict[str, str] = {}
    for part in filter(None, head.split(",")):
        name, equals, value = part.strip().partition("=")
        if not equals or name not in NAMES or name in values:
            raise BadInput(f"--kind: expected {KIND_HINT}, got {text!r}")
        values[name] = value.strip()
    has_servers = bool(servers) or is_replay
    if not has_servers or ("gpu" in values) == ("profile" in values):
        needs = "either gpu= or profile=" if has_servers else "servers= at its end"
        raise BadInput(f"--kind: needs {needs}, got {text!r}; expected {KIND_HINT}")
    low, high = _count(values, "min", 0), _count(values, "max", 1)
    low = 1 if low is None else low
    if high is not None and low > high:
        raise BadInput(f"--kind: min: must not be above max, got {low} and {high}")
    profile = Path(values["profile"]) if "profile" in values else None
    tp = _count(values, "tp", 1)
    return KindAsked(values.get("gpu"), tp, profile, low, high, values.get("apply"), servers)


def _count(values: dict[str, str], name: str, least: int) -> int | None:
    value = values.get(name)
    if value is not None and not (value.isdecimal() and least <= int(value) <= MOST):
        raise BadInput(f"--kind: {name}: expected a number from {least} on, got {value!r}")
    return None if value is None else int(value)
