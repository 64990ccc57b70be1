"""A whole live fleet, put together and run until it is stopped.

    gateway (vLLM's server, FleetCore) ── links ── workers (Ray actors, or emulated engines)
       │  with --gateways N: N processes with vLLM's servers ── Unix socket ── FleetCore
       └─ control API ── HTTP ── controller (its own process: decides, and may die without harm)

All but the supervisor above it (supervisor.py) is one core. When it dies, its successor is put together the
same way. It finds gateways and workers there, and in the estate's record what they are.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Collection, Iterable
from contextlib import AsyncExitStack
from dataclasses import asdict, replace
from functools import partial

import numpy as np
from prometheus_client import REGISTRY, CollectorRegistry

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import Profile
from controlplane.placement.policies import BY_TARGETS, PlacementSettings, Policy
from controlplane.scaler.bounds import Autoscale
from controlplane.types import Slo
from controlplane.worker_type import WorkerType
from dataplane.http.keys import ApiKey, KeyRing, read_control_keys
from dataplane.http.server import QuietServer, address, follow, until_answering
from dataplane.live.control.api import control_app
from dataplane.live.control.controller_process import ControllerProcess, ControllerSettings
from dataplane.live.control.fleet_state import DemandCount
from dataplane.live.control.operations import FleetFacts, Operations
from dataplane.live.control.replanned import Replanned, TypeParts, taken_up
from dataplane.live.control.settings import FleetSettings
from dataplane.live.control.step_times import StepTimes
from dataplane.live.emulated.segment import Noise
from dataplane.live.engine_api.processes import OWN_RAY, Estate
from dataplane.live.engine_api.vllm_surface import VllmCodec, current_platform
from dataplane.live.gateway.events import EventLog, tell_losses
from dataplane.live.gateway.fleet_core import CoreSettings, FleetCore
from dataplane.live.gateway.history import History
from dataplane.live.gateway.idempotency import Answers
from dataplane.live.gateway.metrics import EngineFamilies, Metrics
from dataplane.live.gateway.middleware import DoorPolicy
from dataplane.live.gateway.server import Gateway, engine_settings_of
from dataplane.live.gateway.spans import Spans
from dataplane.live.gateways.core_server import CoreServer
from dataplane.live.gateways.keeper import Gateways
from dataplane.live.gateways.wire import ProcessSettings
from dataplane.live.ledger.placement import Placement
from dataplane.live.ledger.request import Tracked
from dataplane.live.migration.move import MoveBudget
from dataplane.live.pool.emulated_host import EmulatedHost
from dataplane.live.pool.learning import Learning
from dataplane.live.pool.member import Host, Revision
from dataplane.live.pool.notice_watch import NoticeWatch
from dataplane.live.pool.pool import WorkerPool
from dataplane.live.pool.roster import PoolRecord
from dataplane.live.worker.profiling import fingerprint

log = logging.getLogger(__name__)

# Of a core's time: every step of a worker is that much longer while it takes KV in.
CPU_MOVES = MoveBudget(bytes_per_s=200e6, share=0.01, stage_s=30.0)
STILL_S = 10.0
PRIOR_OUTPUT_TOKENS = 256.0  # expected of an output before the fleet has a history
DEFAULT_SLO = Slo(ttft_s=1.6, tpot_s=0.075)
LONE_TOKENS = 1024
EASE = 3.0  # times what such a request takes alone, where the default targets are less


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
        fleet = _Fleet(settings, estate, cleanup, tell)
        await fleet.start_workers()
        kv_blocks = fleet.set_targets()
        keys = KeyRing(settings.keys)
        allow = partial(_allow, keys, fleet.metrics)
        gateways = fleet.gateways(CoreServer(fleet.core, VllmCodec(), kv_blocks, allow, estate.number))
        answering = await fleet.open_control(gateways)
        serving = await fleet.open_endpoint(gateways, kv_blocks, keys, allow)
        is_tls = fleet.gateway.certificate is not None
        await until_answering(settings.control_host, settings.control_port, answering, is_tls)
        await until_answering(settings.gateway.host, settings.gateway.port, serving, is_tls)
        fleet.let_decide()
        fleet.core.on_closing.append(fleet.tell_closing)
        announce(f"ready {fleet.gateway_url} control {fleet.control_url}")
        estate.pulse.serves()
        await serving


class _Fleet:
    """The parts of a fleet, and the stages of its start, in their order. `cleanup` ends what they begin."""

    def __init__(
        self, settings: FleetSettings, estate: Estate, cleanup: AsyncExitStack, tell: Callable[[str], None]
    ) -> None:
        settings = replace(settings, autoscale=taken_up(estate, settings.types, settings.autoscale))
        self.settings, self.estate, self._cleanup, self._tell = settings, estate, cleanup, tell
        self._own_key: str | None = None  # the controller's to the control API
        self.events, self.metrics, self.arrived = EventLog(), Metrics(), DemandCount()
        self.history = History(
            PRIOR_OUTPUT_TOKENS,
            settings.data,
            settings.gateway.model,
            settings.history_limits,
            settings.history_prefixes,
        )
        cleanup.callback(self.history.close)
        self.profiles = {t.name: t.known_profile for t in settings.types if t.known_profile is not None}
        self.step_times = StepTimes(self.profiles, self.events)
        self.placement = self._placement()
        tell(f"reading {settings.gateway.model} and the engine's flags")
        self.gateway = Gateway(settings.gateway)
        certificate = self.gateway.certificate
        self.gateway_url = address(settings.gateway.host, settings.gateway.port, certificate)
        self.control_url = address(settings.control_host, settings.control_port, certificate)
        self.parts = TypeParts(self.profiles, self.placement, self.step_times, self._decide_by)
        self.learning = self._learning()
        self.core = self._core()
        self.controller = ControllerProcess(self.events)
        self.pool: WorkerPool

    def _placement(self) -> Placement:
        """The placement: by step times if every worker type has them, else by KV and slots alone.

        Raises BadInput where the exact policy is asked of a fleet that its program does not cover.
        """
        settings = self.settings
        if settings.policy == Policy.EXACT and len(settings.types) > 1:
            raise BadInput("--policy: exact: needs one kind of worker")
        placement = Placement(
            self.profiles,
            settings.max_workers,
            self.history.lengths,
            np.random.default_rng(0),
            settings.policy,
            PlacementSettings.of(settings.strictness, settings.headroom),
        )
        self.history.on_learnt.append(placement.learn)
        self.step_times.on_refit.append(placement.kinds.refit)
        return placement

    def _learning(self) -> Learning:
        """The learning of worker types without a profile; None if nothing would use it."""
        settings = self.settings
        needed = settings.policy in BY_TARGETS or settings.autoscale is not None
        # A step with drafts makes several tokens, which no measurement here tells apart.
        needed = needed and self.gateway.config.speculative_config is None
        unknown = {t.name: t for t in settings.types if t.known_profile is None and needed}
        flags = engine_settings_of(self.gateway.arguments)
        model = self.gateway.config.model_config
        named = settings.gateway.model, fingerprint(model.hf_config)
        learning = Learning(unknown, named, flags, model.get_vocab_size(), self.events, settings.kept)
        learning.on_learnt.append(self.parts.know)
        learning.on_measured.append(self.step_times.pass_over)
        return learning

    def _core(self) -> FleetCore:
        """The fleet as one engine, and who hears of its requests and steps."""
        settings, history, step_times = self.settings, self.history, self.step_times
        core = FleetCore(
            CoreSettings(
                settings.max_workers,
                settings.slo or DEFAULT_SLO,
                settings.waiting,
                _moves(settings),
                reasons=self.gateway.reasons,
                classes=settings.classes,
            ),
            self.placement,
            self.metrics,
            self.events,
            history.expected_tokens,
        )
        core.on_arrival.append(self.arrived.add)
        core.on_end += [history.add, self.arrived.end]
        core.on_step += [history.add_step, step_times.add]
        if settings.otlp is not None:
            spans = Spans(settings.otlp, settings.gateway.model, core)
            self._cleanup.callback(spans.close)
        step_times.attached = lambda: {at.worker for at in core.attached()}
        step_times.kind_of = history.kind_of = core.kind_of
        self.metrics.registry.register(step_times)
        return core

    async def start_workers(self) -> None:
        """Start the first workers, or adopt those that are there, while the controller loads."""
        settings, core, estate = self.settings, self.core, self.estate
        showing = asyncio.create_task(estate.pulse.show())
        if settings.engine == "vllm":
            self._tell("joining Ray" if os.environ.get("RAY_ADDRESS") else "starting Ray")
        self.pool = pool = WorkerPool(
            await self._host(),
            core,
            settings.max_workers,
            settings.types,
            self._revision(),
            settings.share,
            measure=self.learning.measure,
            record=estate.record,
        )
        if settings.autoscale is not None:
            pool.limits = settings.autoscale.limits
        self._cleanup.push_async_callback(pool.close)
        self._cleanup.callback(showing.cancel)
        self._cleanup.callback(self._tell_stop)
        pool.tasks.spawn(tell_losses(self.events, self._tell))
        telling = asyncio.create_task(tell_start(pool, self._tell))
        self._cleanup.callback(telling.cancel)
        self._cleanup.push_async_callback(self.controller.close)
        self.controller.start()
        await pool.start()
        telling.cancel()

    async def _host(self) -> Host:
        settings = self.settings
        if settings.engine == "emulated":
            if len(self.profiles) < len(settings.types):
                raise BadInput("--profile: emulated engines take their step times from one")
            model = self.gateway.config.model_config
            noise = Noise(last=min(256, model.get_vocab_size()))
            return EmulatedHost(self.profiles, model.max_model_len, noise, settings.emulated_start_s)
        from dataplane.live.pool.ray_host import RayHost

        number, own_ray, wait_s = self.estate.number, self.estate.folder / OWN_RAY, settings.nodes_wait_s
        host: Host = await RayHost.start(
            settings.types, settings.site, wait_s, number, own_ray, settings.kv_transport
        )
        return host

    def _revision(self) -> Revision:
        """The model and flags that workers start with: those asked for, or those of the last update."""
        asked, before = self.settings.gateway, self.estate.record.part("pool", PoolRecord)
        if before is None or before.revision.number == 1:
            settings = engine_settings_of(self.gateway.arguments)
            return Revision(1, asked.model, tuple(asked.engine_flags), settings)
        now = before.revision
        return replace(now, settings=self.gateway.revised(now.model, now.flags))

    def set_targets(self) -> int:
        """Take the default targets, as they were at the fleet's start; the KV blocks of the smallest worker.

        Raises BadInput where the exact policy would not know step times.
        """
        settings, estate, before = self.settings, self.estate, self.estate.record.found
        if before:
            number = estate.number
            self.events.record(time.time(), "core", f"core {number} is here in place of one that was lost")
            slo, kv_blocks = Slo(**before["slo"]), int(before["kv_blocks"])
        else:
            slo = _targets(settings.slo, self.profiles.values(), self.events)
            kv_blocks = min(at.link.info.kv_blocks for at in self.core.attached())
            estate.record.note(slo=asdict(slo), kv_blocks=kv_blocks)
        self.core.settings = replace(self.core.settings, default_slo=slo)
        self.placement.slos = (slo, *settings.targets_by_class.values()) if settings.classes else ()
        if settings.policy == Policy.EXACT and not self.placement.goes_by_targets:
            raise BadInput(f"--policy: exact: step times are not known: {self.learning.why}")
        return kv_blocks

    def tell_closing(self, why: str) -> None:
        """Tell what the fleet's end waits for."""
        left, most_s = len(self.core.requests), self.settings.gateway.shutdown_s
        waits = f" may take {most_s} s more (--shutdown-wait)" if left else ""
        self._tell(f"stopping: {left} open request{'s' * (left != 1)}{waits}")

    def _tell_stop(self) -> None:
        if names := [member.worker for member in self.pool.members()]:
            self._tell(f"stopping {', '.join(names) if len(names) <= 4 else f'{len(names)} workers'}")

    def gateways(self, server: CoreServer) -> Gateways | None:
        """The gateways of a fleet whose gateways have processes of their own; not started yet."""
        settings = self.settings
        if settings.gateways == 1:
            return None
        listening = self.estate.listening.fileno()
        told = ProcessSettings(settings.gateway, settings.keys, self.control_url, listening)
        return Gateways(settings.gateways, told, server, self.events, self.estate)

    async def open_control(self, gateways: Gateways | None) -> asyncio.Task[None]:
        """Serve the control API; its server's task."""
        settings = self.settings
        facts = FleetFacts(settings, self.gateway_url, self.estate)
        operations = Operations(
            facts,
            self.core,
            self.pool,
            self.arrived,
            self.step_times,
            self.gateway.revised,
            self.learning.reasons,
            gateways,
        )
        self.pool.tasks.spawn(self.controller.watch(lambda: operations.looked_s))
        operations.updates.resume()
        replanned = Replanned(operations, self.parts)
        self._register(REGISTRY if gateways is None else gateways.registry())
        for extension in settings.extensions:
            extension.attach(replanned)
            await self._cleanup.enter_async_context(extension.running())
        replanned.resume()
        operators, self._own_key = _operators(settings)
        app = control_app(operations, operators, settings.extensions)
        if (file := settings.control_keys_file) is not None:
            reload = partial(operators.reload, file, read_control_keys)
            self.pool.tasks.spawn(follow((file,), reload, partial(self._say, "control keys")))
        control = QuietServer(app, self.gateway.certificate)
        answering = asyncio.create_task(control.serve(sockets=[self.estate.control]))
        self._cleanup.push_async_callback(_end_server, control, answering)
        return answering

    def _register(self, of_vllm: CollectorRegistry) -> None:
        """Let vLLM's metrics, and those of extensions, be among ours."""
        self.metrics.registry.register(EngineFamilies(self.core.workers_by_slot, of_vllm))
        for extension in self.settings.extensions:
            for collector in extension.collectors:
                self.metrics.registry.register(collector)

    async def open_endpoint(
        self, gateways: Gateways | None, kv_blocks: int, keys: KeyRing, allow: Callable[[str], float]
    ) -> asyncio.Task[None]:
        """Serve the endpoint, here or by `gateways`; the task that ends with it."""
        settings, core = self.settings, self.core
        core.on_arrival.append(lambda one: keys.charge(one.ticket.key, one.prompt_tokens, time.monotonic()))
        core.on_end.append(partial(_charge, keys))
        self.pool.tasks.spawn(self.gateway.follow(keys, self._say))
        if gateways is not None:
            self._tell(f"starting {settings.gateways} gateways")
            self._cleanup.push_async_exit(gateways.close)
            await gateways.start()
            return asyncio.create_task(gateways.serve(core, settings.gateway.shutdown_s))
        self.gateway.prepare(kv_blocks)
        slo, answers = core.settings.default_slo, Answers()
        classes = settings.targets_by_class
        door = DoorPolicy(keys, slo, partial(_now, allow), core.abandon, answers, self.control_url, classes)
        core.on_closing.append(lambda why: setattr(door, "closing", why))
        return asyncio.create_task(self.gateway.serve(core, door, self.estate.listening))

    def _decide_by(self, types: tuple[WorkerType, ...], autoscale: Autoscale | None) -> None:
        """Let the controller decide by these from now on."""
        self.controller.renew(self._controlled(types, autoscale))

    def _controlled(self, types: Iterable[WorkerType], autoscale: Autoscale | None) -> ControllerSettings:
        """The controller's settings, with a key of its own, for these types and bounds."""
        settings = self.settings
        return ControllerSettings(
            self.control_url,
            self._own_key,
            settings.advisory,
            os.getpid(),
            tuple(replace(t, known_profile=self.profiles.get(t.name)) for t in types),
            autoscale,
            None if settings.data is None else str(settings.data.absolute()),
            settings.moves,
            settings.policy,
            settings.strictness,
            settings.headroom,
            settings.attainment,
            settings.classes,
            tells_need=settings.share is not None,
        )

    def let_decide(self) -> None:
        """Let the controller begin, and leave machines that are to go away."""
        self._cleanup.push_async_callback(self.controller.close)  # before the control API that it asks
        self.controller.tell(self._controlled(self.settings.types, self.settings.autoscale))
        self.pool.tasks.spawn(NoticeWatch(self.pool, self.settings.reclaim_notice).run())

    def _say(self, kind: str, line: str) -> None:
        """Tell operators, who look at the events or at the log."""
        self.events.record(time.time(), kind, line)
        log.warning("%s", line)


def _operators(settings: FleetSettings) -> tuple[KeyRing, str | None]:
    """The keys of the control API, and the controller's own, which no change of the operators' takes away."""
    if not settings.control_keys:
        return KeyRing(()), None
    own = ApiKey("the controller", secrets.token_hex(32))
    return KeyRing((*settings.control_keys, own)), own.secret


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


def _moves(settings: FleetSettings) -> MoveBudget:
    bytes_per_s, share = settings.move_bytes_per_s, settings.move_share
    if bytes_per_s is None and share is None and settings.engine == "vllm" and current_platform.is_cpu():
        return CPU_MOVES
    return MoveBudget(bytes_per_s=bytes_per_s or 0.0, share=share or 1.0)


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


async def _end_server(server: QuietServer, answering: asyncio.Task[None]) -> None:
    server.should_exit = True
    await asyncio.wait([answering], timeout=5.0)
