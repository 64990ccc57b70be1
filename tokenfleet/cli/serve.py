"""`tokenfleet serve`: runs the live data plane.

vLLM and Ray are imported only once the flags have been checked.
"""

from __future__ import annotations

import os
import secrets
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer

from controlplane.errors import BadInput
from controlplane.placement.policies import ONLY_SIMULATED, Policy, read_policy
from controlplane.types import Slo, SloClass
from dataplane.http.keys import ApiKey, control_keys_of, keys_of
from dataplane.http.tls import certificate_of
from dataplane.live.engine_api.notices import checked_source
from dataplane.live.kv.nixl import Asked as Transport
from dataplane.live.kv.nixl import check_installed
from tokenfleet.cli.flags import ControlKey, ControlKeys, Insecure, TlsCert, TlsKey, model_at, takes
from tokenfleet.cli.serve_plan import (
    AS_IS_MEANS,
    ATTAINMENT,
    WORKERS,
    Asked,
    autoscale_of,
    check_budget,
    engine_words,
    headroom_of,
    members_of,
    most_workers,
    targets_asked,
    types_asked,
)
from tokenfleet.cli.serve_processes import (
    Doors,
    bound,
    needs_live_extra,
    prepare_process,
    supervise,
    supervise_all,
    teller,
)
from tokenfleet.cli.terminal import warn
from tokenfleet.durations import parse_duration_s
from tokenfleet.files import cache_folder
from tokenfleet.planning.plan_file import PlanFile
from tokenfleet.profiles.library import LearnedProfiles

if TYPE_CHECKING:
    from collections.abc import Mapping

    from dataplane.http.tls import ServerCertificate
    from dataplane.live.control.fleet import FleetSettings
    from dataplane.live.control.settings import Autoscale
    from dataplane.live.pool.fleet_types import FleetTypes, Site
    from tokenfleet.cli.serve_processes import Say

    Locks = tuple[tuple[ApiKey, ...], tuple[ApiKey, ...], tuple[Path, Path] | None]

DEFAULT_POLICY = "spread+migrate"


@dataclass(frozen=True, slots=True)
class ServeFlags:
    """What `tokenfleet serve` is asked."""

    model: Annotated[
        list[str],
        typer.Option(help="a model folder, or a Hugging Face name; with --portfolio NAME=it, for each model"),
    ]
    workers: Annotated[
        int | None, typer.Option(min=1, help=f"how many to start with (default: {WORKERS})")
    ] = None
    tp: Annotated[
        int | None, typer.Option(min=1, help="GPUs a worker spans (tensor parallel; default: 1)")
    ] = None
    prefill: Annotated[
        int | None, typer.Option(min=1, help="in place of --workers: these only prefill, with --decode")
    ] = None
    decode: Annotated[int | None, typer.Option(min=1, help="and these only decode what those hand over")] = (
        None
    )
    host: Annotated[str, typer.Option(help="address of the OpenAI endpoint")] = "127.0.0.1"
    port: Annotated[int, typer.Option(min=1, max=65535)] = 8000
    gateways: Annotated[
        int, typer.Option(min=1, max=32, help="processes that answer on --port, in front of one placement")
    ] = 1
    control_host: Annotated[str, typer.Option(help="address of the control API")] = "127.0.0.1"
    control_port: Annotated[int, typer.Option(min=1, max=65535)] = 8001
    api_key: Annotated[list[str] | None, typer.Option(help="a key clients must send; repeatable")] = None
    api_keys: Annotated[
        Path | None,
        typer.Option(help="YAML list of keys with bounds and limits, read anew when it changes"),
    ] = None
    control_key: ControlKey = None
    control_keys: ControlKeys = None
    tls_cert: TlsCert = None
    tls_key: TlsKey = None
    insecure: Insecure = False
    slo: Annotated[
        list[str] | None,
        typer.Option(
            help="default targets (without: ttft=1.6s,tpot=75ms, or what the engine can meet), and those of"
            " classes: chat:ttft=400ms,tpot=30ms; a request's class is in its header x-slo-class, its body's"
            " slo_class, or its key's"
        ),
    ] = None
    kind: Annotated[
        list[str] | None,
        typer.Option(
            metavar="gpu=…,tp=…,workers=…",
            help="workers of this kind, in place of --workers and --tp; repeatable, for a fleet of several"
            " (also role=prefill or role=decode, max=N, how many can be had, usd=…, a worker's price an hour,"
            " and reclaims=…, how often an hour a spot worker is taken away)",
        ),
    ] = None
    plan: Annotated[
        Path | None,
        typer.Option(
            help="run a plan's JSON: its workers, step times, targets, policy, engine limits, prices and"
            " limits of GPUs and dollars"
        ),
    ] = None
    portfolio: Annotated[
        Path | None,
        typer.Option(
            help="run the plan of several models (portfolio.json, from `tokenfleet portfolio`) behind one"
            " endpoint, each with a fleet of its own, within its limits"
        ),
    ] = None
    as_is: Annotated[
        bool,
        typer.Option(
            "--as-is",
            help="run the plan's workers, policy and targets on other GPUs, another model or with other flags"
            " than it was made for; its step times are then left out",
        ),
    ] = False
    autoscale: Annotated[str | None, typer.Option(help="let the controller decide within MIN..MAX")] = None
    scale_in_after: Annotated[
        str, typer.Option(help="how long fewer workers must be enough before some are drained")
    ] = "80s"
    budget_usd_per_h: Annotated[
        float | None,
        typer.Option(min=0, help="--autoscale never costs more an hour (default: the plan's budget, if any)"),
    ] = None
    max_workers: Annotated[
        int | None, typer.Option(min=1, help="never more (default: twice, at least 8)")
    ] = None
    advisory: Annotated[bool, typer.Option("--advisory", help="say decisions, do not act on them")] = False
    engine: Annotated[str, typer.Option(help="vllm, or emulated (tokens are made up)")] = "vllm"
    profile: Annotated[
        list[Path] | None,
        typer.Option(
            help="step times of emulated engines, and what placement expects instead of measuring workers as"
            " they start; repeatable, one for each kind"
        ),
    ] = None
    data: Annotated[
        Path | None,
        typer.Option(help="folder for request history, step times and plans (default: $TOKENFLEET_DATA)"),
    ] = None
    history: Annotated[
        bool | None,
        typer.Option(
            "--history/--no-history",
            help="record requests and step times, in your data folder where none is named, or not at all"
            " (default: for as long as it runs; to stay where a folder is named)",
        ),
    ] = None
    history_prefixes: Annotated[
        bool,
        typer.Option(
            "--history-prefixes", help="with salted digests of what requests share, and X-Session-Id"
        ),
    ] = False
    history_days: Annotated[float, typer.Option(min=0.01, help="how long requests are kept there")] = 30.0
    history_mb: Annotated[int, typer.Option(min=1, help="and how much of them at most")] = 1024
    policy: Annotated[
        str | None,
        typer.Option(
            help="placement; with +migrate, running requests move, too (default: the plan's,"
            " else spread+migrate)"
        ),
    ] = None
    queue: Annotated[
        int,
        typer.Option(
            min=0,
            help="requests that may wait for a worker, not counting work that yields to a tighter class",
        ),
    ] = 256
    queue_wait: Annotated[str, typer.Option(help="how long one may wait before 429")] = "30s"
    nodes_wait: Annotated[
        str, typer.Option(help="how long nodes of a Ray cluster may take to bring the GPUs")
    ] = "0s"
    shutdown_wait: Annotated[str, typer.Option(help="how long streams may finish after SIGTERM")] = "20s"
    move_bandwidth: Annotated[
        int | None,
        typer.Option(min=0, help="MB/s of KV a worker's moves may copy, 0: no bound (default: 200 on CPUs)"),
    ] = None
    move_share: Annotated[
        float | None,
        typer.Option(
            min=0.001, max=1, help="and share of a core's time they may take (default: 0.01 on CPUs)"
        ),
    ] = None
    host_kv: Annotated[
        str | None,
        typer.Option(
            metavar="64GiB",
            help="host memory of a worker, below its KV: what has left KV of prompts is loaded from there"
            " (default: the plan's, else none)",
        ),
    ] = None
    kv_transport: Annotated[
        str,
        typer.Option(
            metavar="auto, nixl or sockets",
            help="how KV moves between workers; auto takes NIXL between GPUs of one host, where it is"
            " installed, and sockets between hosts (nixl does not encrypt there)",
        ),
    ] = "auto"
    reclaim_notice: Annotated[
        str | None,
        typer.Option(
            metavar="file:PATH or http://…",
            help="where a machine reads that it goes away: a file, or AWS', Google's or Azure's metadata;"
            " its workers are then evacuated (Ray's draining nodes always are)",
        ),
    ] = None
    priority_headroom: Annotated[
        float | None,
        typer.Option(
            min=0,
            max=0.9,
            help="share of a worker's KV kept free of others where a high-priority request runs (default: the"
            " plan's, else 0)",
        ),
    ] = None
    verbose: Annotated[bool, typer.Option("--verbose", help="log what the engines say, too")] = False
    engine_flags: Annotated[
        list[str] | None, typer.Argument(metavar="-- [VLLM FLAGS]", help="any vLLM engine flag, after --")
    ] = None


@dataclass(frozen=True)
class Checked:
    """What the flags stand for, once nothing in them is refused."""

    plan: PlanFile | None
    types: FleetTypes
    max_workers: int
    model: str
    slo: Slo | None
    classes: tuple[SloClass, ...]
    queue_wait_s: float
    nodes_wait_s: float
    shutdown_s: int
    policy: Policy
    moves: bool
    kv_transport: Transport
    headroom: float
    autoscale: Autoscale | None


@takes(ServeFlags)
def serve_command(flags: ServeFlags) -> None:
    """Run the fleet until SIGTERM or SIGINT.

    Prints one line when it answers; how far the start is, and logs, go to stderr.

    tokenfleet serve --model meta-llama/Llama-3.1-8B-Instruct --plan out/plan.json

    tokenfleet serve --model ./tiny --plan out/plan.json --engine emulated

    tokenfleet serve --model ./tiny --workers 2 -- --max-model-len 4096

    tokenfleet serve --model ./tiny --workers 16 --gateways 4

    tokenfleet serve --portfolio out/portfolio.json --model chat=./llama-70b --model code=./llama-8b
    """
    asked = members_of(flags)
    checked = {name: _checked(member.flags, member.plan) for name, member in asked.members.items()}
    if flags.port == flags.control_port:
        raise BadInput(f"--control-port: {flags.port} is the port of the endpoint, too")
    needs_live_extra()
    keys = keys_of(flags.api_key or [], flags.api_keys, flags.host)
    operators = control_keys_of(flags.control_key, flags.control_keys, {"--control-host": flags.control_host})
    certificate = _certificate(flags)
    for model in dict.fromkeys(one.model for one in checked.values()):
        _look_at_host(flags, model)
    prepare_process(flags.verbose)
    tell = teller()
    tell("loading vLLM and Ray")
    from dataplane.http.server import allow_open_files

    for name, member in asked.members.items():
        _check_plan_fits(member.flags, checked[name])
    if flags.as_is:
        warn([AS_IS_MEANS])
    allow_open_files()
    files = None if certificate is None else certificate.files
    with ExitStack() as held:
        if flags.portfolio is None:
            settings = _settings(flags, checked[""], (keys, operators, files), held)
            code = supervise(settings, _bound(flags, held), tell)
        else:
            code = _serve_all(asked, checked, (keys, operators, files), tell, held)
    if code:
        raise typer.Exit(code)


def _serve_all(asked: Asked, checked: Mapping[str, Checked], locks: Locks, tell: Say, held: ExitStack) -> int:
    """Run a portfolio: a fleet for each model, on ports of this machine alone, and the front."""
    from dataplane.http.server import address
    from dataplane.live.portfolio.broker import FrontSettings

    keys, operators, certificate = locks
    own = ApiKey("the portfolio", secrets.token_hex(32))
    doors, fleets, controls = _bound(asked.flags, held), {}, {}
    gateways: dict[str, str] = {}
    for name, member in asked.members.items():
        of_fleet = _bound(replace(member.flags, port=0, control_port=0), held)
        port, control_port = (door.getsockname()[1] for door in of_fleet)
        flags = replace(member.flags, port=port, control_port=control_port)
        fleet_locks = keys, (*operators, own) if operators else (), None
        settings = _settings(flags, checked[name], fleet_locks, held, name)
        share = None if member.pool is None else member.pool.share
        fleets[name] = replace(settings, share=share, site=_site(name, asked, checked)), of_fleet
        gateway, controls[name] = (address(flags.host, p, None) for p in (port, control_port))
        gateways |= dict.fromkeys((name, *member.adapters), gateway)
    front = FrontSettings(
        asked.flags.host,
        asked.flags.port,
        asked.flags.control_host,
        asked.flags.control_port,
        gateways,
        controls,
        next(iter(checked.values())).shutdown_s,
        certificate,
        tuple(member.pool for member in asked.members.values() if member.pool is not None),
        asked.limits,
        parse_duration_s(asked.flags.scale_in_after, "--scale-in-after"),
        own.secret,
    )
    return supervise_all(fleets, front, doors, tell)


def _site(name: str, asked: Asked, checked: Mapping[str, Checked]) -> Site:
    """Where a model of a portfolio has its workers, and what begins there beside them."""
    from dataplane.live.pool.fleet_types import Begun, Site

    zones = {other: None if m.pool is None else m.pool.zone for other, m in asked.members.items()}
    there = [other for other, zone in zones.items() if zone == zones[name]]
    beside = (
        Begun(group, asked.members[other].on_demand)
        for other in there
        if other != name
        for group in checked[other].types.groups
    )
    return Site(zones[name], tuple(beside), name == there[0], asked.members[name].on_demand)


def _bound(flags: ServeFlags, held: ExitStack) -> Doors:
    return bound(flags.host, flags.port, flags.control_host, flags.control_port, held)


def _check_plan_fits(flags: ServeFlags, checked: Checked) -> None:
    """Raise BadInput where engines or flags are not the plan's. Its GPUs are looked for once Ray runs."""
    from dataplane.live.engine_api.vllm_surface import current_platform
    from dataplane.live.gateway.server import parse_flags

    if flags.engine == "vllm" and current_platform.is_cpu():
        checked.types.check_cpus()
    arguments = parse_flags(["--model", checked.model, *engine_words(flags)])
    if checked.plan is not None:
        checked.types.check_flags(arguments)
    if flags.engine == "vllm":
        checked.types.check_drafts(arguments.speculative_config)
        checked.types.check_host_memory(arguments)


def _checked(flags: ServeFlags, plan: PlanFile | None) -> Checked:
    if flags.engine not in ("vllm", "emulated"):
        raise BadInput(f"--engine: expected vllm or emulated, got {flags.engine!r}")
    model = model_at(*flags.model)
    types = types_asked(flags, plan, model)
    engine_words(flags)  # refused here, if at all
    most = most_workers(flags, sum(types.workers.values()))
    check_budget(flags, types)
    if flags.reclaim_notice is not None:
        checked_source(flags.reclaim_notice)
    policy, moves = _policy(flags.policy or (DEFAULT_POLICY if plan is None else plan.policy))
    slo, classes = targets_asked(flags.slo or (), plan)
    return Checked(
        plan=plan,
        types=types,
        max_workers=most,
        model=model,
        slo=slo,
        classes=classes,
        queue_wait_s=parse_duration_s(flags.queue_wait, "--queue-wait"),
        nodes_wait_s=parse_duration_s(flags.nodes_wait, "--nodes-wait"),
        shutdown_s=max(1, round(parse_duration_s(flags.shutdown_wait, "--shutdown-wait"))),
        policy=policy,
        moves=moves,
        kv_transport=_kv_transport(flags),
        headroom=headroom_of(flags.priority_headroom, plan),
        autoscale=None
        if flags.autoscale is None
        else autoscale_of(flags.autoscale, flags.scale_in_after, plan, flags.as_is, flags.budget_usd_per_h),
    )


def _kv_transport(flags: ServeFlags) -> Transport:
    """How KV moves. Raises BadInput for a way that is not known, not there or not safe."""
    asked: Transport | None = next((each for each in get_args(Transport) if each == flags.kv_transport), None)
    if asked is None:
        raise BadInput(f"--kv-transport: expected auto, nixl or sockets, got {flags.kv_transport!r}")
    if asked == "nixl" and "RAY_ADDRESS" not in os.environ:
        check_installed(asked)
    elif asked == "nixl" and not flags.insecure:
        raise BadInput(
            "--kv-transport nixl: KV would go between hosts in the clear, and who reaches UCX's ports can"
            " write it; on a network of the fleet's own, add --insecure"
        )
    return asked


def _certificate(flags: ServeFlags) -> ServerCertificate | None:
    hosts = {"--host": flags.host, "--control-host": flags.control_host}
    return certificate_of(flags.tls_cert, flags.tls_key, flags.insecure, hosts)


def _settings(
    flags: ServeFlags, checked: Checked, locks: Locks, held: ExitStack, name: str = ""
) -> FleetSettings:
    """All settings of a fleet, with its data folder, which `held` keeps. `name`: the model of several."""
    from controlplane.placement.queue import QueueSettings
    from dataplane.history.files import HistoryLimits
    from dataplane.live.control.fleet import FleetSettings
    from dataplane.live.gateway.server import GatewaySettings
    from tokenfleet.console.pages import console_extension
    from tokenfleet.service.app import fleet_extension, folder_of_fleet

    keys, operators, certificate = locks
    folder = held.enter_context(folder_of_fleet(flags.data, flags.history, name))
    planning = fleet_extension(folder, checked.plan, flags.history is not False)
    bandwidth = flags.move_bandwidth
    gateway = GatewaySettings(
        checked.model,
        flags.host,
        flags.port,
        tuple(engine_words(flags)),
        checked.shutdown_s,
        certificate=certificate,
        keys_file=flags.api_keys,
    )
    return FleetSettings(
        gateway=gateway,
        engine="emulated" if flags.engine == "emulated" else "vllm",
        types=checked.types,
        max_workers=checked.max_workers,
        control_host=flags.control_host,
        control_port=flags.control_port,
        control_keys_file=flags.control_keys,
        slo=checked.slo,
        attainment=ATTAINMENT if checked.plan is None else checked.plan.attainment.target,
        waiting=QueueSettings(flags.queue, checked.queue_wait_s),
        autoscale=checked.autoscale,
        advisory=flags.advisory,
        policy=checked.policy,
        moves=checked.moves,
        kv_transport=checked.kv_transport,
        data=None if flags.history is False else folder,
        history_limits=HistoryLimits(flags.history_days, flags.history_mb << 20),
        history_prefixes=flags.history_prefixes,
        move_bytes_per_s=None if bandwidth is None else bandwidth * 1e6,
        move_share=flags.move_share,
        reclaim_notice=flags.reclaim_notice,
        kept=LearnedProfiles(cache_folder("learned")),
        headroom=checked.headroom,
        nodes_wait_s=checked.nodes_wait_s,
        extensions=(planning, console_extension("live.html")),
        keys=keys,
        control_keys=operators,
        gateways=flags.gateways,
        classes=checked.classes,
        emulated_start_s=0.0 if checked.plan is None else checked.plan.cold_start_s,
    )


def _look_at_host(flags: ServeFlags, model: str) -> None:
    """The cheap part of `tokenfleet doctor`: raise BadInput for what stops a fleet, warn of the rest."""
    from dataplane.live.worker.host_checks import first_stop, look

    found = look(model)
    if flags.engine == "emulated":  # it computes nothing
        found = tuple(f for f in found if f.check not in ("GPUs", "model"))
    first_stop(found)
    warn(f"{f.check}: {f.says}" for f in found if f.state == "warns")


def _policy(name: str) -> tuple[Policy, bool]:
    """A placement policy by name, and whether running requests move. Raises BadInput listing the names."""
    try:
        policy, moves = read_policy(name)
    except BadInput as refusal:
        raise BadInput(f"--{refusal}") from None
    if policy in ONLY_SIMULATED:
        raise BadInput(f"--policy: {policy} is a baseline of simulations, no fleet runs it; use spread")
    return policy, moves
