"""`tokenfleet serve`: runs the live data plane.

vLLM and Ray are imported only once the flags have been checked.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from controlplane.errors import BadInput
from controlplane.placement.policies import ONLY_SIMULATED, Policy, read_policy
from controlplane.placement.queue import QueueSettings
from dataplane.http.keys import ApiKey, control_keys_of, keys_of
from dataplane.http.tls import certificate_of
from dataplane.live.engine_api.notices import checked_source
from dataplane.live.kv.nixl import Asked as Transport
from dataplane.live.kv.nixl import check_installed
from tokenfleet.cli.flags import model_at, takes_flags
from tokenfleet.cli.serve import workers
from tokenfleet.cli.serve.flags import ServeFlags
from tokenfleet.cli.serve.loop import autoscale_asked, check_budget, loop_lines, most_workers, replanning_of
from tokenfleet.cli.serve.members import Asked, ServedFleet, members_of
from tokenfleet.cli.serve.processes import (
    Doors,
    Say,
    bound,
    needs_live_extra,
    prepare_process,
    supervise,
    supervise_all,
    teller,
)
from tokenfleet.cli.terminal import warn
from tokenfleet.files import cache_folder
from tokenfleet.profiles.library import LearnedProfiles
from tokenfleet.texts import parse_duration_s

if TYPE_CHECKING:
    from dataplane.live.control.settings import FleetSettings
    from dataplane.live.pool.fleet_types import Site

    Locks = tuple[tuple[ApiKey, ...], tuple[ApiKey, ...], tuple[Path, Path] | None]

DEFAULT_POLICY = "spread+migrate"


@takes_flags()
def serve_command(flags: ServeFlags) -> None:
    """Run the fleet until SIGTERM or SIGINT.

    It prints one line, `ready`, when it can answer. Progress and logs go to stderr.

    tokenfleet serve --model meta-llama/Llama-3.1-8B-Instruct --plan out/plan.json

    tokenfleet serve --model ./tiny --plan out/plan.json --engine emulated

    tokenfleet serve --model ./tiny --workers 2 -- --max-model-len 4096

    tokenfleet serve --model ./tiny --workers 16 --gateways 4

    tokenfleet serve --portfolio out/portfolio.json --model chat=./llama-70b --model code=./llama-8b
    """
    asked = members_of(flags)
    checked = {name: _checked(member) for name, member in asked.members.items()}
    if flags.port == flags.control_port:
        raise BadInput(f"--control-port: {flags.port} is the port of the endpoint, too")
    needs_live_extra()
    keys = keys_of(flags.api_key or [], flags.api_keys, flags.host)
    operators = control_keys_of(flags.control_key, flags.control_keys, {"--control-host": flags.control_host})
    hosts = {"--host": flags.host, "--control-host": flags.control_host}
    certificate = certificate_of(flags.tls_cert, flags.tls_key, flags.insecure, hosts)
    for model in dict.fromkeys(one.gateway.model for one in checked.values()):
        _look_at_host(flags, model)
    prepare_process(flags.verbose)
    tell = teller()
    tell("loading vLLM and Ray")
    from dataplane.http.server import allow_open_files

    for name, member in asked.members.items():
        _check_plan_fits(member, checked[name])
    if flags.as_is:
        warn([workers.AS_IS_MEANS])
    for name, member in asked.members.items():
        if member.plan is not None and (autoscale := checked[name].autoscale) is not None:
            for line in loop_lines(member.plan, autoscale, member.flags.autoscale is None):
                tell(f"{name}: {line}" if name else line)
    allow_open_files()
    files = None if certificate is None else certificate.files
    with ExitStack() as held:
        doors = bound(flags.host, flags.port, flags.control_host, flags.control_port, held)
        if flags.portfolio is None:
            supervise(_opened(asked.members[""], checked[""], (keys, operators, files), held), doors, tell)
        else:
            _serve_all(asked, checked, (keys, operators, files), doors, tell, held)


def _serve_all(
    asked: Asked, checked: Mapping[str, FleetSettings], locks: Locks, doors: Doors, tell: Say, held: ExitStack
) -> None:
    """Run a portfolio: a fleet for each model, on ports of this machine alone, and the front."""
    from dataplane.http.server import address
    from dataplane.live.portfolio.broker import FrontSettings

    keys, operators, certificate = locks
    own = ApiKey("the portfolio", secrets.token_hex(32))
    fleets, controls = {}, {}
    gateways: dict[str, str] = {}
    for name, member in asked.members.items():
        of_fleet = bound(member.flags.host, 0, member.flags.control_host, 0, held)
        port, control_port = (door.getsockname()[1] for door in of_fleet)
        fleet_locks = keys, (*operators, own) if operators else (), None
        settings = _opened(member, checked[name], fleet_locks, held, name)
        settings = replace(
            settings,
            gateway=replace(settings.gateway, port=port),
            control_port=control_port,
            share=member.share,
            site=_site(name, asked, checked),
        )
        fleets[name] = settings, of_fleet
        gateway, controls[name] = (address(member.flags.host, p, None) for p in (port, control_port))
        gateways |= dict.fromkeys((name, *member.adapters), gateway)
    front = FrontSettings(
        asked.flags.host,
        asked.flags.port,
        asked.flags.control_host,
        asked.flags.control_port,
        gateways,
        controls,
        next(iter(checked.values())).gateway.shutdown_s,
        certificate,
        tuple(tenant for member in asked.members.values() for tenant in member.tenants),
        asked.limits,
        parse_duration_s(asked.flags.scale_in_after, "--scale-in-after"),
        own.secret,
    )
    supervise_all(fleets, front, doors, tell)


def _site(name: str, asked: Asked, checked: Mapping[str, FleetSettings]) -> Site:
    """The site of a portfolio model's workers, with the other models' groups that begin there."""
    from dataplane.live.pool.fleet_types import Begun, Site

    zones = {other: member.zone for other, member in asked.members.items()}
    there = [other for other, zone in zones.items() if zone == zones[name]]
    beside = (
        Begun(group, asked.members[other].on_demand)
        for other in there
        if other != name
        for group in checked[other].types.groups
    )
    return Site(zones[name], tuple(beside), name == there[0], asked.members[name].on_demand)


def _check_plan_fits(member: ServedFleet, checked: FleetSettings) -> None:
    """Raise BadInput where engines or flags are not the plan's. Its GPUs are looked for once Ray runs."""
    from dataplane.live.engine_api.vllm_surface import current_platform
    from dataplane.live.gateway.server import parse_flags

    if checked.engine == "vllm" and current_platform.is_cpu():
        checked.types.check_cpus()
    arguments = parse_flags(["--model", checked.gateway.model, *checked.gateway.engine_flags])
    if member.plan is not None:
        checked.types.check_flags(arguments)
    if checked.engine == "vllm":
        checked.types.check_drafts(arguments.speculative_config)
        checked.types.check_host_memory(arguments)


def _checked(member: ServedFleet) -> FleetSettings:
    """What flags and plan say of a fleet, without what `_opened` adds. Raises BadInput."""
    from dataplane.history.files import HistoryLimits
    from dataplane.live.control.settings import FleetSettings
    from dataplane.live.gateway.settings import GatewaySettings
    from dataplane.live.gateway.spans import endpoint_of

    flags, plan = member.flags, member.plan
    if flags.engine not in ("vllm", "emulated"):
        raise BadInput(f"--engine: expected vllm or emulated, got {flags.engine!r}")
    model = model_at(*flags.model)
    types = workers.types_asked(flags, plan, model)
    engine_flags = tuple(flags.engine_words())
    replanning_of(flags, "")  # refused here, if at all
    autoscale = autoscale_asked(flags, plan, types.workers)
    if autoscale is not None and len(member.tenants) > 1:
        autoscale = replace(autoscale, most_kinds=member.share or {})
    most = most_workers(flags, sum(types.workers.values()), plan is not None)
    check_budget(flags, types)
    if flags.reclaim_notice is not None:
        checked_source(flags.reclaim_notice)
    otlp = None if flags.otlp is None else endpoint_of(flags.otlp)
    policy, moves = _policy(flags.policy or (DEFAULT_POLICY if plan is None else plan.policy))
    slo, classes = workers.targets_asked(flags.slo or (), plan)
    waiting = QueueSettings(flags.queue, parse_duration_s(flags.queue_wait, "--queue-wait"))
    nodes_wait_s = parse_duration_s(flags.nodes_wait, "--nodes-wait")
    shutdown_s = max(1, round(parse_duration_s(flags.shutdown_wait, "--shutdown-wait")))
    return FleetSettings(
        gateway=GatewaySettings(
            model, flags.host, flags.port, engine_flags, shutdown_s, keys_file=flags.api_keys
        ),
        engine="emulated" if flags.engine == "emulated" else "vllm",
        types=types,
        max_workers=most,
        control_host=flags.control_host,
        control_port=flags.control_port,
        control_keys_file=flags.control_keys,
        slo=slo,
        attainment=workers.ATTAINMENT if plan is None else plan.attainment.target,
        waiting=waiting,
        autoscale=autoscale,
        advisory=flags.advisory,
        policy=policy,
        moves=moves,
        kv_transport=_kv_transport(flags),
        history_limits=HistoryLimits(flags.history_days, flags.history_mb << 20),
        history_prefixes=flags.history_prefixes,
        otlp=otlp,
        move_bytes_per_s=None if flags.move_bandwidth is None else flags.move_bandwidth * 1e6,
        move_share=flags.move_share,
        reclaim_notice=flags.reclaim_notice,
        strictness=workers.strictness_of(flags.strictness, plan),
        headroom=workers.headroom_of(flags.priority_headroom, plan),
        nodes_wait_s=nodes_wait_s,
        gateways=flags.gateways,
        classes=classes,
        emulated_start_s=0.0 if plan is None else plan.cold_start_s,
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
            "--kv-transport nixl: KV would go between hosts in the clear, and anyone who reaches UCX's ports"
            " can write it; on a network of the fleet's own, add --insecure"
        )
    return asked


def _opened(
    member: ServedFleet, checked: FleetSettings, locks: Locks, held: ExitStack, name: str = ""
) -> FleetSettings:
    """The settings with keys, certificate, extensions, and the data folder, which `held` keeps.

    `name`: the model of several.
    """
    from tokenfleet.console.pages import console_extension
    from tokenfleet.service.app import fleet_extension, folder_of_fleet

    flags, (keys, operators, certificate) = member.flags, locks
    folder = held.enter_context(folder_of_fleet(flags.data, flags.history, name))
    planning = fleet_extension(folder, member.plan, flags.history is not False, replanning_of(flags, name))
    return replace(
        checked,
        gateway=replace(checked.gateway, certificate=certificate),
        data=None if flags.history is False else folder,
        kept=LearnedProfiles(cache_folder("learned")),
        extensions=(planning, console_extension("live.html")),
        keys=keys,
        control_keys=operators,
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
