"""A whole live fleet, put together and run until it is told to stop.

gateway (vLLM's server, FleetCore) ── links ── workers (Ray actors, or emulated engines)
   │  with --gateways N: N processes with vLLM's servers ── Unix socket ── FleetCore
   └─ control API ── HTTP ── controller (its own process: decides, and may die without harm)

All but the supervisor above it (processes.py) is one core. When it dies, its successor is put together the
same way, but finds gateways and workers there, and in the estate's record what they are.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from prometheus_client import REGISTRY

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import Profile
from controlplane.placement.policies import BY_TARGETS, PlacementSettings, Policy
from controlplane.placement.queue import QueueSettings
from controlplane.types import Slo, SloClass
from dataplane.history.files import HistoryLimits
from dataplane.http.keys import ApiKey, KeyRing, read_control_keys
from dataplane.http.server import Extension, address, follow, until_answering
from dataplane.live.control.api import control_app, control_server
from dataplane.live.control.operations import FleetFacts, Operations
from dataplane.live.control.processes import ControllerProcess
from dataplane.live.control.settings import Autoscale, ControllerSettings
from dataplane.live.control.step_times import StepTimes
from dataplane.live.engine_api.processes import Estate
from dataplane.live.engine_api.vllm_surface import current_platform
from dataplane.live.gateway.demand_count import DemandCount
from dataplane.live.gateway.events import EventLog
from dataplane.live.gateway.fleet_core import CoreSettings, FleetCore
from dataplane.live.gateway.history import History
from dataplane.live.gateway.idempotency import Answers
from dataplane.live.gateway.metrics import EngineFamilies, Metrics
from dataplane.live.gateway.middleware import DoorPolicy
from dataplane.live.gateway.placement import Placement
from dataplane.live.gateway.request import Tracked
from dataplane.live.gateway.server import Gateway, GatewaySettings, engine_settings_of
from dataplane.live.gateways.core_server import CoreServer
from dataplane.live.gateways.keeper import Gateways
from dataplane.live.gateways.process import ProcessSettings
from dataplane.live.kv.nixl import Asked
from dataplane.live.migration.move import MoveBudget
from dataplane.live.pool.fleet_types import ANYWHERE, FleetTypes, Site
from dataplane.live.pool.learning import KeptProfiles, Learning
from dataplane.live.pool.leaving import NoticeWatch
from dataplane.live.pool.member import Host, Revision
from dataplane.live.pool.pool import WorkerPool
from dataplane.live.worker.profiling import fingerprint

log = logging.getLogger(__name__)

# Of a core's time: every step of a worker is that much longer while it takes KV in.
CPU_MOVES = MoveBudget(bytes_per_s=200e6, share=0.01, stage_s=30.0)
STILL_S = 10.0
PRIOR_OUTPUT_TOKENS = 256.0  # expected of an output before the fleet has a history
DEFAULT_SLO = Slo(ttft_s=1.6, tpot_s=0.075)
LONE_TOKENS = 1024
EASE = 3.0  # times what such a request takes alone, where the default targets are less


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Everything `tokenfleet serve` was asked for. Types without a profile are measured as they start.

    `slo` None: DEFAULT_SLO, eased where no engine of the fleet could meet it. `kept`: profiles of before.
    `moves`: whether the controller may move requests between serving workers (else only draining ones are).
    `attainment`: the share of requests that should be within their targets. `move_bytes_per_s`: what copies
    may take of a worker, `move_share`: of a core's time. `headroom`: the share of KV kept free beside a
    high-priority request. None of both is CPU_MOVES where copying takes the
    cores that compute, no bound elsewhere. `nodes_wait_s`: how long GPUs may be missing of a Ray cluster.
    `share`: the most workers of one model of several, at first. `site`: where workers may be.
    `emulated_start_s`: how long emulated engines take to start.
    """

    gateway: GatewaySettings
    engine: Literal["vllm", "emulated"]
    types: FleetTypes
    max_workers: int
    control_host: str
    control_port: int
    slo: Slo | None
    attainment: float
    waiting: QueueSettings
    autoscale: Autoscale | None = None
    advisory: bool = False
    policy: Policy = Policy.SPREAD
    moves: bool = True
    data: Path | None = None
    history_limits: HistoryLimits | None = None
    history_prefixes: bool = False
    move_bytes_per_s: float | None = None
    move_share: float | None = None
    reclaim_notice: str | None = None
    kept: KeptProfiles | None = None
    headroom: float = 0.0
    nodes_wait_s: float = 0.0
    kv_transport: Asked = "auto"
    extensions: tuple[Extension, ...] = ()
    keys: tuple[ApiKey, ...] = ()
    control_keys: tuple[ApiKey, ...] = ()
    control_keys_file: Path | None = None
    gateways: int = 1
    classes: tuple[SloClass, ...] = ()
    share: int | None = None
    site: Site = ANYWHERE
    emulated_start_s: float = 0.0

    @property
    def targets_by_class(self) -> dict[str, Slo]:
        """The targets of each class."""
        return {one.name: one.slo for one in self.classes}

    def slos_beside(self, plain: Slo) -> tuple[Slo, ...]:
        """The targets that requests may have, the plain ones among them; none where there are no classes."""
        return (plain, *self.targets_by_class.values()) if self.classes else ()


async def run_fleet(
    settings: FleetSettings, estate: Estate, announce: Callable[[str], None], tell: Callable[[str], None]
) -> None:
    """Start the fleet, or adopt what is there of it, `announce` its addresses once both answer, and return
    when it has been stopped.

    `tell` is given a line at each phase of the start, and at least every STILL_S.
    Raises BadInput for what the operator can mend (ports, model, flags), RuntimeError for a worker that
    does not start. Whatever it raises, nothing it started is left.
    """
    here = asyncio.current_task()
    assert here is not None
    loop = asyncio.get_running_loop()
    for sign in (signal.SIGTERM, signal.SIGINT):  # until vLLM's server installs its own
        loop.add_signal_handler(sign, here.cancel)
    async with AsyncExitStack() as cleanup:
        events, metrics = EventLog(), Metrics()
        history = History(
            PRIOR_OUTPUT_TOKENS,
            settings.data,
            settings.gateway.model,
            settings.history_limits,
            settings.history_prefixes,
        )
        cleanup.callback(history.close)
        profiles = {t.name: t.known_profile for t in settings.types if t.known_profile is not None}
        step_times = StepTimes(profiles, events)
        placement = _placement(settings, history, profiles, step_times)
        tell(f"reading {settings.gateway.model} and the engine's flags")
        gateway = Gateway(settings.gateway)
        learning = _learning(settings, gateway, events)
        learning.on_learnt.append(partial(_know, placement, step_times))
        learning.on_measured.append(step_times.pass_over)
        if settings.engine == "vllm":
            tell("joining Ray" if os.environ.get("RAY_ADDRESS") else "starting Ray")
        host = await _host(settings, gateway, profiles, estate)
        core = FleetCore(
            CoreSettings(
                settings.max_workers,
                settings.slo or DEFAULT_SLO,
                settings.waiting,
                _moves(settings),
                reasons=gateway.reasons,
                classes=settings.classes,
            ),
            placement,
            metrics,
            events,
            history.expected_tokens,
        )
        core.on_end.append(history.add)
        core.on_step.append(history.add_step)
        core.on_step.append(step_times.add)
        step_times.attached = lambda: {at.worker for at in core.attached()}
        step_times.kind_of = core.kind_of
        metrics.registry.register(step_times)
        core.predict_anew = history.expected_tokens
        arrived = DemandCount()
        core.on_arrival.append(arrived.add)
        core.on_end.append(arrived.end)
        cluster = WorkerPool(
            host,
            core,
            events,
            settings.max_workers,
            settings.types,
            _revision(settings, gateway, estate),
            measure=learning.measure,
            record=estate.record,
        )
        cluster.share = settings.share
        core.is_starting = lambda: cluster.starting > 0
        cleanup.push_async_callback(cluster.close)
        telling = asyncio.create_task(tell_start(cluster, tell))
        cleanup.callback(telling.cancel)
        controller = ControllerProcess(events)
        cleanup.push_async_callback(controller.close)
        controller.start()
        await cluster.start()
        telling.cancel()
        profiles |= learning.learnt
        slo, kv_blocks = _basis(settings, core, profiles.values(), estate, events)
        core.settings = replace(core.settings, default_slo=slo)
        placement.slos = settings.slos_beside(slo)
        if settings.policy == Policy.EXACT and not placement.goes_by_targets:
            raise BadInput(f"--policy: exact: step times are not known: {learning.why}")
        certificate = gateway.certificate
        gateway_url = address(settings.gateway.host, settings.gateway.port, certificate)
        control_url = address(settings.control_host, settings.control_port, certificate)
        facts = FleetFacts(
            settings.gateway.model,
            settings.engine,
            gateway_url,
            settings.advisory,
            settings.autoscale,
            settings.attainment,
            settings.policy,
            settings.moves,
            estate,
        )
        keys = KeyRing(settings.keys)
        allow = partial(_allow, keys, metrics)
        server = CoreServer(core, kv_blocks, allow, estate.number)
        gateways = _gateways(settings, server, control_url, estate, events)
        operations = Operations(
            facts,
            core,
            cluster,
            metrics,
            events,
            arrived,
            step_times,
            gateway.revised,
            learning.reasons,
            gateways,
        )
        operations.resume()
        _register(metrics, core, gateways, settings.extensions)
        for extension in settings.extensions:
            await cleanup.enter_async_context(extension.running())
        operators, own_key = _operators(settings)
        app = control_app(operations, operators, settings.extensions)
        cluster.tasks.spawn(_follow_operators(operators, settings.control_keys_file, events))
        control = control_server(app, certificate)
        answering = asyncio.create_task(control.serve(sockets=[estate.control]))
        cleanup.push_async_callback(_end_server, control, answering)

        core.on_arrival.append(lambda one: keys.charge(one.ticket.key, one.prompt_tokens, time.monotonic()))
        core.on_end.append(partial(_charge, keys))
        cluster.tasks.spawn(gateway.follow(keys, partial(_say, events)))
        if gateways is None:
            gateway.prepare(kv_blocks)
            door = DoorPolicy(keys, slo, partial(_now, allow), core.abandon, Answers(), control_url)
            door.classes = settings.targets_by_class
            core.on_closing.append(lambda why: setattr(door, "closing", why))
            serving = asyncio.create_task(gateway.serve(core, door, estate.listening))
        else:
            tell(f"starting {settings.gateways} gateways")
            cleanup.push_async_callback(gateways.close)
            await gateways.start()
            serving = asyncio.create_task(gateways.serve(core, settings.gateway.shutdown_s))
        is_tls = certificate is not None
        await until_answering(settings.control_host, settings.control_port, answering, is_tls)
        await until_answering(settings.gateway.host, settings.gateway.port, serving, is_tls)
        controller_settings = ControllerSettings(
            control_url,
            own_key,
            settings.advisory,
            os.getpid(),
            tuple(replace(t, known_profile=profiles.get(t.name)) for t in settings.types),
            settings.autoscale,
            None if settings.data is None else str(settings.data.absolute()),
            settings.moves,
            settings.policy,
            settings.headroom,
            settings.attainment,
            settings.classes,
            tells_need=settings.share is not None,
        )
        cleanup.push_async_callback(controller.close)  # before the control API that it asks
        controller.tell(controller_settings)
        cluster.tasks.spawn(NoticeWatch(cluster, settings.reclaim_notice).run())
        announce(f"ready {gateway_url} control {control_url}")
        cluster.tasks.spawn(estate.pulse.show())
        await serving


def _operators(settings: FleetSettings) -> tuple[KeyRing, str | None]:
    """The keys of the control API, and the controller's own, which no change of the operators' takes away."""
    if not settings.control_keys:
        return KeyRing(()), None
    own = ApiKey("the controller", secrets.token_hex(32))
    return KeyRing((*settings.control_keys, own)), own.secret


async def _follow_operators(operators: KeyRing, file: Path | None, events: EventLog) -> None:
    if file is not None:
        reload = partial(operators.reload, file, read_control_keys)
        await follow((file,), reload, partial(_say, events, "control keys"))


def _charge(keys: KeyRing, request: Tracked, outcome: str) -> None:
    """Count a request's output against its key; one that was turned away has not cost its prompt."""
    tokens = -request.prompt_tokens if outcome == "rejected" else len(request.output_token_ids)
    keys.charge(request.ticket.key, tokens, time.monotonic())


def _allow(keys: KeyRing, metrics: Metrics, name: str) -> float:
    """Count a request of a key; the seconds until it may come, 0 for now."""
    wait_s = keys.seconds_until_allowed(keys.named(name), time.monotonic())
    if wait_s > 0:
        metrics.count_limited(name)
    return wait_s


async def _now(allow: Callable[[str], float], key: ApiKey) -> float:
    """As `allow`, where another process need not be asked."""
    return allow(key.name)


def _gateways(
    settings: FleetSettings, server: CoreServer, page: str, estate: Estate, events: EventLog
) -> Gateways | None:
    """The gateways of a fleet whose gateways have processes of their own; not started yet."""
    if settings.gateways == 1:
        return None
    told = ProcessSettings(settings.gateway, settings.keys, page, estate.listening.fileno())
    return Gateways(settings.gateways, told, server, events, estate)


def _revision(settings: FleetSettings, gateway: Gateway, estate: Estate) -> Revision:
    """What workers start with: what was asked for, or what the fleet was updated to."""
    asked = settings.gateway
    number, model, flags = 1, asked.model, asked.engine_flags
    if estate.record.found:
        number, model, flags = estate.record.found["pool"]["revision"]
    if number == 1:
        return Revision(1, model, tuple(flags), engine_settings_of(gateway.arguments))
    return Revision(number, model, tuple(flags), gateway.revised(model, flags))


def _register(
    metrics: Metrics, core: FleetCore, gateways: Gateways | None, extensions: Sequence[Extension]
) -> None:
    """Let vLLM's metrics, and those of extensions, be among ours."""
    of_vllm = REGISTRY if gateways is None else gateways.registry()
    metrics.registry.register(EngineFamilies(core.workers_by_slot, of_vllm))
    for extension in extensions:
        for collector in extension.collectors:
            metrics.registry.register(collector)


def _moves(settings: FleetSettings) -> MoveBudget:
    bytes_per_s, share = settings.move_bytes_per_s, settings.move_share
    if bytes_per_s is None and share is None and settings.engine == "vllm" and current_platform.is_cpu():
        return CPU_MOVES
    return MoveBudget(bytes_per_s=bytes_per_s or 0.0, share=share or 1.0)


def _placement(
    settings: FleetSettings, history: History, profiles: Mapping[str, Profile], step_times: StepTimes
) -> Placement:
    """By step times where they are known of every kind, else by KV and seats alone.

    Raises BadInput where the exact policy is asked of a fleet that its program does not cover.
    """
    if settings.policy == Policy.EXACT and len(settings.types) > 1:
        raise BadInput("--policy: exact: needs one kind of worker")
    placement = Placement(
        profiles,
        settings.max_workers,
        history.lengths,
        np.random.default_rng(0),
        settings.policy,
        PlacementSettings(headroom=settings.headroom),
    )
    history.on_learnt.append(placement.learn)
    for kind, times in step_times.kinds.items():
        times.on_refit.append(partial(placement.refit, kind))
    return placement


def _learning(settings: FleetSettings, gateway: Gateway, events: EventLog) -> Learning:
    """What the fleet learns of the kinds that have no profile; nothing where nothing would go by it."""
    needed = settings.policy in BY_TARGETS or settings.autoscale is not None
    unknown = {t.name: t for t in settings.types if t.known_profile is None and needed}
    flags = engine_settings_of(gateway.arguments)
    model = gateway.config.model_config
    named = settings.gateway.model, fingerprint(model.hf_config)
    return Learning(unknown, named, flags, model.get_vocab_size(), events, settings.kept)


def _know(placement: Placement, step_times: StepTimes, kind: str, profile: Profile) -> None:
    """Place by a learned profile from now on, and refit it."""
    placement.know(kind, profile)
    step_times.know(kind, profile).on_refit.append(partial(placement.refit, kind))


def _basis(
    settings: FleetSettings, core: FleetCore, profiles: Collection[Profile], estate: Estate, events: EventLog
) -> tuple[Slo, int]:
    """The default targets, and the KV blocks of the smallest worker, as they were at the fleet's start."""
    before = estate.record.found
    if before:
        events.record(time.time(), "core", f"core {estate.number} is here in place of one that was lost")
        return Slo(**before["slo"]), before["kv_blocks"]
    slo = _targets(settings.slo, profiles, events)
    kv_blocks = min(at.link.info.kv_blocks for at in core.attached())
    estate.record.note(slo=asdict(slo), kv_blocks=kv_blocks)
    return slo, kv_blocks


def _targets(asked: Slo | None, profiles: Collection[Profile], events: EventLog) -> Slo:
    """The default targets: those asked for, else DEFAULT_SLO, eased to what the fastest engine can meet.

    Under a target that no worker meets even for a request alone every request would wait for nothing.
    """
    ttft_s = min((p.alone_ttft_s(LONE_TOKENS) for p in profiles), default=0.0)
    tpot_s = min((p.alone_tpot_s(LONE_TOKENS) for p in profiles), default=0.0)
    if asked is None:
        return Slo(max(DEFAULT_SLO.ttft_s, EASE * ttft_s), max(DEFAULT_SLO.tpot_s, EASE * tpot_s))
    if ttft_s > asked.ttft_s or tpot_s > asked.tpot_s:
        why = (
            f"no worker meets the targets: a request of {LONE_TOKENS} tokens alone takes"
            f" {ttft_s:.3g} s to its first token and {tpot_s:.3g} s for each after it"
        )
        events.record(time.time(), "targets", why)
        log.warning("%s", why)
    return asked


async def _host(
    settings: FleetSettings, gateway: Gateway, profiles: Mapping[str, Profile], estate: Estate
) -> Host:
    if settings.engine == "emulated":
        from dataplane.live.emulated.segment import Noise
        from dataplane.live.pool.emulated_host import EmulatedHost

        if len(profiles) < len(settings.types):
            raise BadInput("--profile: emulated engines take their step times from one")
        model = gateway.config.model_config
        noise = Noise(last=min(256, model.get_vocab_size()))
        return EmulatedHost(profiles, model.max_model_len, noise, settings.emulated_start_s)
    from dataplane.live.pool.ray_host import RayHost

    wait_s = settings.nodes_wait_s
    host: Host = await RayHost.start(
        settings.types, settings.site, wait_s, estate.number, estate.own_ray, settings.kv_transport
    )
    return host


async def tell_start(cluster: WorkerPool, tell: Callable[[str], None]) -> None:
    """Tell what the workers' starts are at whenever that changes, and every STILL_S, until cancelled."""
    said, said_s = "", time.monotonic()
    while True:
        now, now_s = _phases(cluster), time.monotonic()
        if now != said or now_s - said_s >= STILL_S:
            tell(f"still: {now}" if now == said else now)
            said, said_s = now, now_s
        await asyncio.sleep(0.2)


def _phases(cluster: WorkerPool) -> str:
    """Each phase with its workers: by name where they are few, else how many."""
    by_phase: dict[str, list[str]] = {}
    for member in cluster.members():
        by_phase.setdefault("ready" if member.state == "serving" else member.phase, []).append(member.worker)
    return "; ".join(
        f"{', '.join(names) if len(names) <= 4 else f'{len(names)} workers'}: {phase}"
        for phase, names in by_phase.items()
    )


async def _end_server(server: object, answering: asyncio.Task[None]) -> None:
    server.should_exit = True  # type: ignore[attr-defined]
    await asyncio.wait([answering], timeout=5.0)


def _say(events: EventLog, kind: str, line: str) -> None:
    """Tell operators, who look at the events or at the log."""
    events.record(time.time(), kind, line)
    log.warning("%s", line)
