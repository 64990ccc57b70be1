"""Launch of a worker as a Ray actor, with devices reserved and cores pinned, and its final termination."""

from __future__ import annotations

import asyncio
import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray
from ray.util.placement_group import get_placement_group, placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from controlplane.errors import BadInput
from controlplane.types import WorkerId
from dataplane.live.engine_api.link import WorkerInfo
from dataplane.live.engine_api.notices import Notice
from dataplane.live.engine_api.processes import QUIET
from dataplane.live.kv.nixl import Asked
from dataplane.live.worker.actor import Worker
from dataplane.live.worker.failures import StartFailure

log = logging.getLogger(__name__)
PLACE_S = 30.0
START_S = 1800.0  # a large model loads for minutes
PROCESS_S = 300.0  # and until its process is there, importing vLLM
HEALTH_S = 5.0
ADOPT_S = 20.0  # a worker that is worth waiting for: its model is loaded
PHASE_EVERY_S = 0.5
STOP_S = 20.0
ROOT = (
    Path(__file__).resolve().parents[3]
)  # where our packages are, also for a checkout that is not installed


@dataclass(frozen=True, slots=True)
class WorkerResources:
    """What a worker is given: `gpus` of one node, or a part of one (0 on a CPU host), and `cores` to pin to.

    `accelerator` is Ray's name of the GPUs' type; None takes any.
    `cores` is vLLM's VLLM_CPU_OMP_THREADS_BIND: each rank's cores, joined by "|". Without it, `shares` says
    in how many parts the worker is to cut its node's cores, one for each rank; 0 leaves them to vLLM.
    `host` is the address other machines reach the worker's node by; empty is the one that Ray has for it.
    `node` is Ray's id of the node it must run on; empty leaves that to Ray. `labels`: those of the node that
    its GPUs are on. `transport`: how it fetches KV.
    """

    gpus: float = 0
    cores: str = ""
    host: str = "127.0.0.1"
    accelerator: str | None = None
    node: str = ""
    shares: int = 0
    transport: Asked = "auto"
    labels: Mapping[str, str] = field(default_factory=dict)

    @property
    def bundle(self) -> dict[str, float]:
        """What Ray is asked to reserve. A node has one of its type's resource; any share of it will do."""
        typed = {f"accelerator_type:{self.accelerator}": 0.001} if self.accelerator else {}
        return {"GPU": float(self.gpus), **typed}


@dataclass(frozen=True, slots=True)
class RayWorker:
    """A started worker. `actor`, `group` and `node` are Ray's names; `group` is None without GPUs. `core` is
    the number of the core that runs it."""

    actor: Any
    group: Any
    info: WorkerInfo
    node: str = ""
    core: int = 0

    async def is_healthy(self) -> bool:
        """Whether actor and engine answer in time."""
        try:
            return bool(await asyncio.wait_for(self.actor.health.remote(), HEALTH_S))
        except (ray.exceptions.RayError, TimeoutError):
            return False

    async def notice(self, source: str) -> Notice | None:
        """A source's interruption notice for its machine, if any. Raises RuntimeError where it cannot say."""
        try:
            notice: Notice | None = await asyncio.wait_for(self.actor.notice.remote(source), HEALTH_S)
        except ray.exceptions.RayTaskError as error:
            raise RuntimeError(str(error.cause)) from error
        except (ray.exceptions.RayError, TimeoutError):
            return None  # it is dead or stuck, which others notice
        return notice

    async def stop(self) -> None:
        """End the engine, then the actor; its processes end with it however it went.

        Nothing ends where another core has adopted it.
        """
        with suppress(ray.exceptions.RayError, TimeoutError):  # dead or stuck: killed below
            if not await asyncio.wait_for(self.actor.stop.remote(self.core), STOP_S):
                return
        _end(self.actor, self.group)


async def adopt_worker(worker: WorkerId, core: int, gateways: str) -> tuple[RayWorker, list[str]] | None:
    """Take a worker over from the core before; also the segments that it has left there.

    None where it does not serve: it was starting, hangs or is lost, and is ended.
    """
    actor = ray.get_actor(worker)
    group = _group_of(worker)
    try:
        async with asyncio.timeout(ADOPT_S):
            info, segments = await actor.adopt.remote(core, gateways)
            node = await actor.node.remote()
    except (ray.exceptions.RayError, TimeoutError) as error:
        log.warning("%s is not adopted: %s", worker, getattr(error, "cause", None) or error)
        _end(actor, group)
        return None
    return RayWorker(actor, group, info, node, core), segments


def end_worker(worker: WorkerId) -> None:
    """End a worker of this fleet by its name, however it is."""
    with suppress(ValueError):
        _end(ray.get_actor(worker), _group_of(worker))


def _group_of(worker: WorkerId) -> Any:
    """Ray's reservation for a worker; None without one."""
    with suppress(ValueError):
        return get_placement_group(worker)
    return None


async def launch_worker(
    worker: WorkerId,
    engine_settings: Mapping[str, Any],
    gateways: str,
    place: WorkerResources = WorkerResources(),
    say: Callable[[str], None] = lambda phase: None,
    core: int = 0,
) -> RayWorker:
    """Start one worker and return when it has warmed up; Ray must be initialised.

    `engine_settings` are vLLM engine arguments, `gateways` the public key of those that may link to it.
    `say` gets each phase of the start. With `core`, the number of a fleet's core, it outlives this process.
    Raises BadInput when its devices are not to be had, RuntimeError with the engine's reason when it does not
    start.
    """
    if place.gpus:
        say("waiting for its GPUs")
    lasting: dict[str, Any] = {"name": worker, "lifetime": "detached"} if core else {}
    group = await _reserve(place, lasting) if place.gpus else None
    actor = None
    try:
        options: dict[str, Any] = {
            "num_cpus": 0,
            "num_gpus": place.gpus,
            "max_restarts": 0,
            "runtime_env": {"env_vars": _environment(place)},
            **lasting,
        }
        if group is not None:
            options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(group)
        elif place.node:
            options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(place.node, soft=False)
        say("starting the process")
        actor = ray.remote(Worker).options(**options).remote(worker, gateways, core)
        # A node that has just died is one that Ray waits for.
        await asyncio.wait_for(actor.phase.remote(), PROCESS_S)
        start = actor.start.remote(dict(engine_settings), place.host, place.shares, place.transport)
        starting = asyncio.wrap_future(start.future())
        following = asyncio.create_task(_follow_phases(actor, say))
        try:
            info = await asyncio.wait_for(starting, START_S)
        finally:
            following.cancel()
    except BaseException as error:
        _end(actor, group)
        if isinstance(error, ray.exceptions.RayTaskError):
            raise RuntimeError(f"worker {worker}: {error.cause}{_kept_log(error.cause)}") from error
        if isinstance(error, ray.exceptions.RayError | TimeoutError):
            raise RuntimeError(f"worker {worker}: {error or 'did not start in time'}") from error
        raise
    return RayWorker(actor, group, info, await actor.node.remote(), core)


async def _follow_phases(actor: Any, say: Callable[[str], None]) -> None:
    """Say what the actor is at until cancelled; its end is `start`'s to tell."""
    with suppress(ray.exceptions.RayError):
        while True:
            say(await actor.phase.remote())
            await asyncio.sleep(PHASE_EVERY_S)


async def _reserve(place: WorkerResources, lasting: Mapping[str, Any]) -> Any:
    """All GPUs of a worker on one node: tensor parallelism across nodes would wait for the network."""
    labels = {"bundle_label_selector": [dict(place.labels)]} if place.labels else {}
    group = placement_group([place.bundle], strategy="STRICT_PACK", **labels, **lasting)
    try:
        await asyncio.wait_for(group.ready(), PLACE_S)
    except TimeoutError:
        remove_placement_group(group)
        what = f"{place.accelerator} GPUs" if place.accelerator else "GPUs"
        node = " ".join(["no node", *(f"with {key}={value}" for key, value in place.labels.items())])
        raise BadInput(f"workers: {node} has {place.gpus:g} free {what}") from None
    return group


def _environment(place: WorkerResources) -> dict[str, str]:
    variables = {
        # A rank that hangs is an engine's death after this long; vLLM's own is five minutes.
        "VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS": os.environ.get("VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS", "60"),
        "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
        **QUIET,
    }
    # An installed package is on every node; a checkout is where it is here, or not needed there.
    checkout = [] if ROOT.name in ("site-packages", "dist-packages") else [str(ROOT)]
    paths = [*checkout, *filter(None, [os.environ.get("PYTHONPATH", "")])]
    if paths:
        variables["PYTHONPATH"] = os.pathsep.join(paths)
    if place.cores:
        variables["VLLM_CPU_OMP_THREADS_BIND"] = place.cores
    return variables


def _kept_log(error: BaseException) -> str:
    """Keep what the failed engine said, the last such only, and say where; Ray's own logs end with Ray."""
    if not isinstance(error, StartFailure) or not error.log:
        return ""
    path = Path(tempfile.gettempdir(), f"tokenfleet-{os.getpid()}-failed-start.log")
    with suppress(OSError):
        path.write_text(error.log)
        return f" (its log: {path})"
    return ""


def _end(actor: Any, group: Any) -> None:
    if actor is not None:
        ray.kill(actor, no_restart=True)
    if group is not None:
        remove_placement_group(group)
