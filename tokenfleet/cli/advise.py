"""`tokenfleet advise`: how many replicas a running vLLM fleet should have, by its own metrics."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from controlplane.errors import BadInput, ProfileMissing
from controlplane.perfmodel.profile import Profile
from controlplane.types import EngineMode
from controlplane.worker_type import WorkerType
from tokenfleet.advise.view import MOST
from tokenfleet.cli.advise_shown import ShownAdvice, replay_day
from tokenfleet.cli.flags import Format, OutputFormat, takes
from tokenfleet.cli.terminal import warn
from tokenfleet.profiles.library import find_profiles, read_profile
from tokenfleet.profiles.prices import read_prices
from tokenfleet.texts import parse_duration_s, parse_slo

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from tokenfleet.advise.advice import AdviceSettings
    from tokenfleet.profiles.engine_metrics import EngineCounts


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
    once: Annotated[bool, typer.Option("--once", help="print the first advice and end")] = False
    output_format: Format = OutputFormat.TABLE


@takes(AdviseFlags)
def advise_command(flags: AdviseFlags) -> None:
    """Advise how many replicas a running vLLM fleet should have. It reads metrics and changes nothing.

    The first advice takes some 30 seconds. Model and KV size come from the metrics. The GPU does not: give
    --gpu, or --profile. Step times are then corrected by what the servers count.

    tokenfleet advise vllm-0:8000 vllm-1:8000 --gpu h100 --slo ttft=1s,tpot=50ms
    tokenfleet advise dns:vllm-headless:8000 --profile mine.yaml --slo ttft=1s,tpot=50ms --listen 0.0.0.0:9105

    tokenfleet advise --servers servers.txt --gpu h100 --slo ttft=1s,tpot=50ms --once --format json
    tokenfleet advise --replay day.csv --model llama-3.1-8b --gpu h100 --slo ttft=1s,tpot=50ms
    """
    slo = parse_slo(flags.slo)
    low, high = _bounds(flags.replicas)
    of_prometheus = flags.prometheus is not None
    usual, longest_s = ("15s", 60.0) if of_prometheus else ("5s", 30.0)
    every_s = _seconds(flags.every or usual, "--every", 1.0, longest_s)
    cold_start_s = _seconds(flags.cold_start, "--cold-start", 0.0, 86_400.0)
    hold_s = _seconds(flags.scale_in_after, "--scale-in-after", 1.0, 86_400.0)
    if flags.profile is not None and (flags.gpu or flags.tp or flags.model):
        raise BadInput("--profile: says model, GPU and TP; leave out --model, --gpu and --tp")
    if of_prometheus and (flags.addresses or flags.servers):
        raise BadInput("--prometheus: has the servers; leave out addresses and --servers")
    if flags.selector is not None and not of_prometheus:
        raise BadInput("--selector: of --prometheus; give its URL too")
    given = None if flags.profile is None else read_profile(flags.profile)

    from dataplane.live.control.settings import Autoscale
    from tokenfleet.advise.advice import AdviceSettings

    follows = Autoscale(low, high, hold_s=hold_s, attainment=flags.attainment)

    def settings_of(profile: Profile) -> AdviceSettings:
        worker_type = _priced(profile, flags.prices)
        return AdviceSettings(
            worker_type, slo, flags.attainment, follows.settings((worker_type,)), cold_start_s
        )

    if flags.replay:
        profile = _replayed(flags, given)
        replay_day(flags.replay, settings_of(profile), (low, high), flags.output_format)
        return

    def settings(first: Mapping[str, EngineCounts]) -> AdviceSettings:
        return settings_of(_profile(flags, first, given))

    with ExitStack() as cleanup:
        asyncio.run(_watch(flags, every_s, settings, cleanup))


async def _watch(
    flags: AdviseFlags,
    every_s: float,
    settings_of: Callable[[Mapping[str, EngineCounts]], AdviceSettings],
    cleanup: ExitStack,
) -> None:
    from tokenfleet.advise.external_scaler import scaler_at
    from tokenfleet.advise.gauges import AdviceGauges
    from tokenfleet.advise.prometheus import PrometheusServers
    from tokenfleet.advise.servers import Servers
    from tokenfleet.advise.watch import FleetWatch, answering, first_pages

    servers: Servers | PrometheusServers
    if flags.prometheus is None:
        servers = Servers(flags.addresses or (), flags.servers)
    else:
        servers = PrometheusServers(flags.prometheus, flags.selector or "{}")
    listening = None if flags.listen is None else _listening(flags.listen)
    if listening is not None:
        cleanup.callback(listening.close)
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for one in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(one, stop.set)
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(servers)
        first = await first_pages(servers)
        model = next(iter(first.values())).model
        settings = replace(settings_of(first), served=model)
        gauges = AdviceGauges(model, settings)
        if listening is not None:
            await stack.enter_async_context(answering(listening, gauges))
        if flags.scaler is not None:
            await stack.enter_async_context(scaler_at(flags.scaler, gauges))
        shown = ShownAdvice(flags.once, flags.output_format, settings, gauges, cleanup)
        await FleetWatch(servers, settings, model, every_s).run(first, shown, stop)


def _replayed(flags: AdviseFlags, given: Profile | None) -> Profile:
    """The step times of a replica, where no server tells its model."""
    given_too = {"an address": flags.addresses, "--servers": flags.servers, "--listen": flags.listen}
    given_too |= {"--prometheus": flags.prometheus, "--scaler": flags.scaler}
    for flag, value in {**given_too, "--once": flags.once}.items():
        if value:
            raise BadInput(f"--replay: reads a trace and no servers; leave out {flag}")
    if given is None and flags.model is None:
        raise BadInput("--replay: which model? give --model and --gpu, or --profile")
    return _chunked(given or _of_library(flags, ""))


def _chunked(profile: Profile) -> Profile:
    if profile.engine.mode != EngineMode.CHUNKED:
        raise BadInput(
            f"--profile: {profile.label}: is of a {profile.engine.mode} engine, vLLM's are chunked"
        )
    return profile


def _profile(flags: AdviseFlags, first: Mapping[str, EngineCounts], given: Profile | None) -> Profile:
    """The step times of a replica, with the KV that the servers tell of."""
    from tokenfleet.profiles.engine_metrics import kv_of

    profile = _chunked(given or _of_library(flags, next(iter(first.values())).model))
    kv_tokens, block_tokens = kv_of(first)
    if not kv_tokens:
        warn(["the servers report no common KV size; the profile's is used"])
        return profile
    profile = profile.with_kv(None, kv_tokens)
    return replace(profile, kv=replace(profile.kv, block_tokens=block_tokens))


def _of_library(flags: AdviseFlags, served: str) -> Profile:
    name = flags.model or served
    try:
        found = find_profiles(name, [flags.gpu] if flags.gpu else [], [flags.tp or 1])
    except ProfileMissing as missing:
        hint = "" if flags.model else "; --model names another, --profile gives step times"
        raise ProfileMissing(f"{missing}{hint}") from None
    if len(found) > 1:
        names = ", ".join(one.gpu for one in found)
        raise BadInput(f"--gpu: the metrics do not tell; for {name} there are {names}")
    return found[0]


def _priced(profile: Profile, prices: Path | None) -> WorkerType:
    price = read_prices(prices).usd_per_gpu_h(profile.gpu)
    usd_per_h = None if price is None else price.usd * profile.gpus / profile.workers_per_gpu
    return WorkerType.of(profile, usd_per_h)


def _bounds(text: str | None) -> tuple[int, int]:
    if text is None:
        return 1, MOST
    low, dots, high = text.partition("..")
    if not dots or not (low.isdecimal() and high.isdecimal()) or not 1 <= int(low) <= int(high) <= MOST:
        raise BadInput(f"--replicas: expected MIN..MAX such as 1..8, from 1 on, got {text!r}")
    return int(low), int(high)


def _seconds(text: str, flag: str, least: float, most: float) -> float:
    seconds = parse_duration_s(text, flag)
    if not least <= seconds <= most:
        raise BadInput(f"{flag}: expected {least:g}s to {most:g}s, got {text!r}")
    return seconds


def _listening(text: str) -> socket.socket:
    """A bound socket at HOST:PORT."""
    from dataplane.http.server import bind
    from tokenfleet.advise.target import host_port

    return bind(*host_port(text, "--listen"), "--listen")
