"""Workers on Ray: a local Ray started for this fleet, or the cluster that RAY_ADDRESS names.

Workers are detached actors in the fleet's namespace: they outlive the core that has started them, and the
next one finds them there by name. Those of a Ray of our own end with it, and new ones wait for the next.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

from controlplane.errors import BadInput
from controlplane.types import WorkerId
from controlplane.worker_type import WorkerType
from dataplane.live.engine_api.link import EngineLink
from dataplane.live.engine_api.notices import Notice
from dataplane.live.engine_api.processes import descendants, free_memory_bytes
from dataplane.live.engine_api.vllm_surface import VllmCodec, current_platform
from dataplane.live.engine_api.wire import new_key, public_key
from dataplane.live.kv.nixl import Asked
from dataplane.live.pool.fleet_types import FleetTypes, Market, Site, accelerator, market_of
from dataplane.live.pool.member import Adopted, Revision
from dataplane.live.pool.own_ray import JoinedRay, RayEnded, connect
from dataplane.live.worker.launch import RayWorker, WorkerResources, adopt_worker, end_worker, launch_worker
from dataplane.live.worker.link import WorkerLink, link_context

log = logging.getLogger("tokenfleet.ray")
ANSWER_S = 2.0
NODES_LOOK_S = 5.0
OTHERS_SAY_S = 30.0


class RayHost:
    """Launches workers as Ray actors and links to them. Make one with `start`."""

    def __init__(self, types: FleetTypes, site: Site, core: int, own: Path, transport: Asked) -> None:
        self._types, self._site, self._transport = types, site, transport
        self._core = core
        self._ray = JoinedRay(own, self._forget_all)
        self._key = new_key()
        self._context = link_context()
        self._workers: dict[WorkerId, RayWorker] = {}
        self._nodes: dict[WorkerId, str] = {}
        self._on_demand: set[WorkerId] = set()  # where the site says how many are

    @classmethod
    async def start(
        cls, types: FleetTypes, site: Site, nodes_wait_s: float, core: int, own: Path, transport: Asked
    ) -> RayHost:
        """Join Ray as the core of this number, for workers of these types that fetch KV by this transport.

        `own`: the file in which the fleet's own Ray says where it is. Raises BadInput when the zone or the
        GPUs that are asked for are not there within `nodes_wait_s`.
        """
        host = cls(types, site, core, own, transport)
        try:
            await host._ray.join()
            # Others of a portfolio are not there to be waited for by a successor, which adopts what is.
            await _until_nodes(types, site if core == 1 else replace(site, beside=()), nodes_wait_s)
        except BaseException:
            await host.close()
            raise
        return host

    async def launch(
        self, worker: WorkerId, kind: str, revision: Revision, say: Callable[[str], None]
    ) -> EngineLink:
        worker_type = self._types[kind]
        engine_settings = self._types.engine_settings(kind, revision.settings, current_platform.is_cpu())
        if not self._ray.is_there.is_set():
            say("waiting for Ray")
            await self._ray.is_there.wait()
        place = replace(await self._place(worker, worker_type), transport=self._transport)
        key = public_key(self._key)
        launching = launch_worker(worker, engine_settings, key, place, say, self._core)
        started = await self._ray.call(launching)
        self._workers[worker] = started
        return await WorkerLink.connect(started.info, self._key, self._context, VllmCodec())

    def room(self, kind: str) -> str | None:
        if current_platform.is_cpu():
            return self._lack_of_memory()
        if not self._ray.is_there.is_set():
            return "Ray has ended, and another is starting"
        gpus = self._types[kind].reserved_gpus
        free = ray._private.state.available_resources_per_node()
        nodes = ray.nodes()
        market = self._site.market(nodes, len(self._on_demand))
        there = [free.get(node["NodeID"], {}) for node in self._site.nodes(nodes, market)]
        if any(node.get("GPU", 0.0) >= gpus for node in there):
            return None
        return f"no node{self._site.where(market)} has {gpus:g} free GPUs"

    def _lack_of_memory(self) -> str | None:
        """A worker on the CPU needs what the largest of its like holds; of other nodes it is not known."""
        if not self._ray.is_own:
            return None
        needs = max((_resident_bytes(w.info.pid) for w in self._workers.values()), default=0)
        free = free_memory_bytes()
        if needs < free:
            return None
        return f"a worker takes {needs / 2**30:.1f} GiB of memory, {free / 2**30:.1f} GiB are free"

    async def stop(self, worker: WorkerId) -> None:
        self._nodes.pop(worker, None)
        self._on_demand.discard(worker)
        started = self._workers.pop(worker, None)
        if started is not None:
            with suppress(RayEnded):  # and it with Ray
                await self._ray.call(started.stop())

    async def is_healthy(self, worker: WorkerId) -> bool:
        started = self._workers.get(worker)
        return started is None or await started.is_healthy()

    async def notices(self, source: str | None) -> Mapping[WorkerId, Notice]:
        """Ray's draining nodes, and what each worker's machine reads from the source."""
        workers, draining = dict(self._workers), dict[str, int]()
        if not self._ray.is_own:
            draining = await asyncio.to_thread(ray._private.state.state.get_draining_nodes)
        found = {
            name: Notice("Ray drains its node", draining[w.node] / 1e3 if draining[w.node] > 0 else None)
            for name, w in workers.items()
            if w.node in draining
        }
        if source is not None:
            names = [name for name in workers if name not in found]
            read = await asyncio.gather(*(workers[name].notice(source) for name in names))
            found |= {name: notice for name, notice in zip(names, read, strict=True) if notice is not None}
        return found

    async def adopt(self, workers: Collection[WorkerId]) -> Mapping[WorkerId, Adopted]:
        there: set[WorkerId] = set(await asyncio.to_thread(ray.util.list_named_actors))
        for worker in there - set(workers):
            end_worker(worker)
        found = await asyncio.gather(*(self._adopt(worker) for worker in there & set(workers)))
        return {at.link.info.worker: at for at in found if at is not None}

    async def _adopt(self, worker: WorkerId) -> Adopted | None:
        left = await adopt_worker(worker, self._core, public_key(self._key))
        if left is None:
            return None
        self._workers[worker], segments = left
        try:
            link = await WorkerLink.connect(self._workers[worker].info, self._key, self._context, VllmCodec())
        except BadInput as error:
            log.warning("%s is not adopted: %s", worker, error)
            await self.stop(worker)
            return None
        if not self._ray.is_own:
            self._nodes[worker] = self._workers[worker].node
        nodes = await asyncio.to_thread(ray.nodes)
        if "on-demand" in {market_of(n) for n in nodes if n["NodeID"] == self._workers[worker].node}:
            self._on_demand.add(worker)
        return Adopted(link, segments)

    async def leave_node(self, address: str, seconds: float) -> None:
        """Let Ray start nothing more on the node at an address. A Ray of our own has but this one."""
        if self._ray.is_own:
            return
        gcs = ray._private.worker.global_worker.gcs_client
        for node in await asyncio.to_thread(ray.nodes):
            if node["Alive"] and node["NodeManagerAddress"] == address:
                until_ms = int((time.time() + seconds) * 1000)
                # The other waits till it is idle.
                reason = DrainNodeReason.Value("DRAIN_NODE_REASON_PREEMPTION")
                await asyncio.to_thread(gcs.drain_node, node["NodeID"], reason, "it is evacuated", until_ms)

    async def close(self) -> None:
        await asyncio.gather(*(self.stop(worker) for worker in tuple(self._workers)))
        self._context.destroy(linger=0)
        await self._ray.close()

    def _forget_all(self) -> None:
        """What runs nowhere any more; links tell of the loss."""
        for gone in (self._workers, self._nodes, self._on_demand):
            gone.clear()

    async def _market(self, worker: WorkerId) -> Market | None:
        """Where this worker goes, which is counted from now on."""
        if self._site.on_demand is None:
            return None
        market = self._site.market(await asyncio.to_thread(ray.nodes), len(self._on_demand))
        if market == "on-demand":
            self._on_demand.add(worker)
        return market

    async def _place(self, worker: WorkerId, worker_type: WorkerType) -> WorkerResources:
        market = await self._market(worker)
        # A cluster's workers are reached at their nodes' addresses; those of a Ray of our own never leave it.
        host = "127.0.0.1" if self._ray.is_own else ""
        if not current_platform.is_cpu():
            name = accelerator(worker_type) if self._types.by_gpu else None
            labels = self._site.labels(market)
            return WorkerResources(gpus=worker_type.reserved_gpus, accelerator=name, host=host, labels=labels)
        node, nodes = "", 1
        if not self._ray.is_own:
            there = await _answering_nodes(self._site, market)
            # Ray sends an actor that asks for nothing to any node.
            used = list(self._nodes.values())
            node, nodes = min(there, key=used.count), len(there)
            self._nodes[worker] = node
        if "VLLM_CPU_OMP_THREADS_BIND" in os.environ:
            return WorkerResources(cores=os.environ["VLLM_CPU_OMP_THREADS_BIND"], host=host, node=node)
        return WorkerResources(shares=-(-max(1, self._types.gpus) // nodes), host=host, node=node)


async def _until_nodes(types: FleetTypes, site: Site, wait_s: float) -> None:
    """Return once Ray's nodes hold the workers. Raises BadInput if they do not within `wait_s`.

    Fleets of one portfolio that lack the same leave it to the first, whose end is theirs, to say so.
    """
    until_s = time.monotonic() + wait_s + (0.0 if site.is_first else OTHERS_SAY_S)
    while True:
        nodes = await asyncio.to_thread(ray.nodes)
        try:
            site.check(nodes, types.groups)
            for market in () if current_platform.is_cpu() else site.markets(nodes):
                types.check_gpus([node["Resources"] for node in site.nodes(nodes, market)], site, market)
            return
        except BadInput as lack:
            if time.monotonic() >= until_s:
                raise
            log.info("waiting for nodes: %s", lack)
        await asyncio.sleep(NODES_LOOK_S)


async def _answering_nodes(site: Site, market: Market | None) -> list[str]:
    """Ray's ids of the site's nodes with cores that can be reached from here, and are bought so.

    Ray takes a quarter of a minute and more to see that a node is gone. Raises RuntimeError if there is none.
    """

    async def answers(node: Mapping[str, Any]) -> bool:
        try:
            async with asyncio.timeout(ANSWER_S):
                address = node["NodeManagerAddress"], node["NodeManagerPort"]
                _, writer = await asyncio.open_connection(*address)
        except OSError:
            return False
        writer.close()
        return True

    leaving: dict[str, int] = await asyncio.to_thread(ray._private.state.state.get_draining_nodes)
    nodes = site.nodes(await asyncio.to_thread(ray.nodes), market)
    nodes = [node for node in nodes if node["NodeID"] not in leaving] or nodes
    nodes = [node for node in nodes if node["Resources"].get("CPU")] or nodes
    found = await asyncio.gather(*map(answers, nodes))
    there = [str(node["NodeID"]) for node, is_there in zip(nodes, found, strict=True) if is_there]
    if not there:
        raise RuntimeError(
            f"none of the Ray cluster's {len(nodes)} nodes{site.where(market)} answers within {ANSWER_S:g} s"
        )
    return there


def sweep(own: Path) -> None:
    """End the workers that a core has left on the cluster that RAY_ADDRESS names."""
    connect(os.environ["RAY_ADDRESS"], own)
    for name in ray.util.list_named_actors():
        end_worker(WorkerId(name))
    ray.shutdown()


def _resident_bytes(pid: int) -> int:
    """The memory that a process and all below it hold."""
    held = 0
    for each in (pid, *descendants(pid)):
        with suppress(psutil.NoSuchProcess):  # it has ended meanwhile
            held += psutil.Process(each).memory_info().rss
    return held
