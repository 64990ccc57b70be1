"""The worker: a Ray actor around one vLLM engine, with the socket through which gateways reach it.

Ray starts it, checks its health and stops it. Requests and tokens do not pass through Ray: a call per token
halves throughput. They travel on a ZMQ socket in vLLM's own encoding (wire.py).
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from multiprocessing import active_children, resource_tracker
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import psutil
import ray
from ray.util.placement_group import remove_placement_group

from controlplane.types import WorkerId
from dataplane.live.engine_api import processes, wire
from dataplane.live.engine_api import vllm_surface as vllm
from dataplane.live.engine_api.cache_events import CacheChange, CachedBlocks
from dataplane.live.engine_api.kv_messages import Control, message_of, told_of_load
from dataplane.live.engine_api.link import Adapters, Step, WorkerInfo
from dataplane.live.engine_api.notices import Notice, read_notice
from dataplane.live.engine_api.step_trace import StepTrace, step_stats
from dataplane.live.engine_api.wire import Door
from dataplane.live.kv.nixl import Asked
from dataplane.live.kv.transport import reserve_addresses
from dataplane.live.worker.engine import KvDoor, engine_args, start_engine, tells_cached, warm_up, worker_info
from dataplane.live.worker.failures import WATCH_FROM_S, EngineSilence, own_log, start_failure
from dataplane.live.worker.gateway_peers import GatewayPeer, GatewayPeers

log = logging.getLogger(__name__)
TELEMETRY_EVERY_S = 0.05  # at most this often while steps go on
SHUTDOWN_S, ORDERLY_S, CLEANED_S = 10.0, 1.0, 1.0
LINGER_MS = 200
ALONE_S = 300.0  # without a core; a fleet's next one comes within seconds
ANSWERS = {
    "leased": vllm.FinishReason.ABORT,
    "gone": vllm.FinishReason.ERROR,
    "loaded": vllm.FinishReason.STOP,
}


class Worker:
    """One engine. Its asynchronous methods are called by Ray; `start` first, and once."""

    def __init__(self, worker: str, gateways: str, core: int = 0) -> None:
        """`gateways`: the public key of those that may link to it; `core`: the number of their core."""
        self._worker = WorkerId(worker)
        self._gateways, self._core_number = gateways, core
        self._tasks: list[asyncio.Task[None]] = []
        self._shared: set[Path] = set()
        self._adapters: frozenset[int] = frozenset()
        self._is_loading = False  # an adapter, for which the engine makes no step
        self._lost = ""
        self.patience = wire.PATIENCE
        self._phase = "loading the model"
        self._daemon = processes.RayDaemon()
        self._silence = EngineSilence(is_on_cpu=vllm.current_platform.is_cpu())
        self._needed_s = self._heard_s = time.monotonic()  # a core wanted this worker; its engine spoke

    async def phase(self) -> str:
        """The stage of its start."""
        return self._phase

    async def node(self) -> str:
        """Ray's id of the node it runs on."""
        return str(ray.get_runtime_context().get_node_id())

    async def notice(self, source: str) -> Notice | None:
        """A source's interruption notice for this machine, if any."""
        return await asyncio.to_thread(read_notice, source, self._worker)

    async def start(
        self, engine_settings: Mapping[str, Any], host: str, shares: int = 0, transport: Asked = "auto"
    ) -> WorkerInfo:
        """Start the engine, warm it up, open the door; return what gateways need to find it, and no secret.

        `engine_settings` are vLLM engine arguments; the others as in launch.py's `WorkerResources`. Raises
        BadInput for an argument that cannot be, and whatever vLLM raises for a model it cannot load.
        """
        ranks = int(engine_settings.get("tensor_parallel_size") or 1)
        host = host or str(ray.util.get_node_ip_address())
        if shares:
            self._cores = processes.Cores(ranks, shares, str(ray.get_runtime_context().namespace))
            os.environ["VLLM_CPU_OMP_THREADS_BIND"] = self._cores.binding  # which vLLM reads as it starts
        addresses, release = reserve_addresses(host, ranks)
        kv_door = KvDoor(addresses, secrets.token_hex(32), transport=transport)
        # In a thread, so that the actor answers while a large model loads.
        try:
            self._core = await asyncio.to_thread(start_engine, engine_args(engine_settings, kv_door))
            release()
            self._shared, self._engines = processes.shared_memory(processes.descendants()), active_children()
            self._phase = "warming up"
            kv = await warm_up(self._core)
        except (RuntimeError, vllm.EngineDeadError) as error:
            raise start_failure(error, own_log()) from error
        self._door = Door(host, self._gateways)
        self._socket = self._door.socket
        self._info = worker_info(self._worker, self._core, kv, self._door, kv_door, os.getpid())
        self._peers = GatewayPeers(self._socket, self._core.abort_requests_async, vllm.VllmCodec())
        self._trace = StepTrace(self._worker, self._info.kv_blocks)
        tells = kv["groups"] == 1 and tells_cached(self._core)
        self._cached = CachedBlocks(self._info.block_tokens) if tells else None
        self._told_s = 0.0
        self._tasks = [self._spawn(work) for work in (self._listen, self._pump, self._beat)]
        return replace(self._info, kv_secret="")

    async def adopt(self, core: int, gateways: str) -> tuple[WorkerInfo, list[str]]:
        """Serve the core of this number from now on, and none before it.

        Returns what `start` did, and the segments that earlier cores have left: they are aborted. Raises
        RuntimeError for a core that is not newer, and where the engine does not serve.
        """
        if core <= self._core_number:
            raise RuntimeError(f"{self._worker} serves core {self._core_number}")
        if not self._tasks or self._lost:
            raise RuntimeError(f"{self._worker} does not serve: {self._lost or self._phase}")
        self._core_number = core
        self._door.let_in(gateways)
        await self._peers.dismiss_all(f"core {core} has taken its place")
        return replace(self._info, kv_secret=""), self._peers.take_left()

    async def health(self) -> bool:
        """Whether the engine is alive and this actor answers."""
        return not self._lost and not self._core.resources.engine_dead

    async def steps(self, since: int = 0) -> tuple[int, Sequence[Step]]:
        """Executed steps from number `since` on (see `StepTrace.steps`)."""
        return self._trace.steps(since)

    async def reset_prefix_cache(self) -> bool:
        """Forget cached prefixes; False while blocks are in use."""
        return bool(await self._core.reset_prefix_cache_async(reset_connector=True))

    async def stop(self, core: int = 0) -> bool:
        """Tell the gateways, end the engine, close the door. False, and nothing of it, for a core whose
        successor it serves."""
        if core < self._core_number:
            return False
        self._lost = self._lost or "it was stopped"
        await processes.cancel_all(self._tasks)
        if hasattr(self, "_peers"):
            await self._peers.dismiss_all("the worker was stopped")
            self._door.close(LINGER_MS)
        if hasattr(self, "_core"):
            await _end_engine(self._core)
        processes.unlink(self._shared)
        return True

    def _spawn(self, work: Callable[[], Coroutine[Any, Any, None]]) -> asyncio.Task[None]:
        async def run() -> None:
            try:
                await work()
            except vllm.EngineDeadError:
                await self._end(_end_of(self._engines))
            except Exception as error:  # a worker that has lost a task must not look alive
                log.exception("%s broke", self._worker)
                await self._end(f"it broke: {error!r}")

        return asyncio.get_running_loop().create_task(run())

    async def _end(self, reason: str) -> None:
        self._lost = self._lost or reason
        await self._peers.dismiss_all(self._lost)
        if self._core.resources.engine_dead:
            processes.unlink(self._shared)  # killed processes leave it behind

    async def _listen(self) -> None:
        codec = vllm.VllmCodec()
        while True:
            identity, kind, *frames = await self._socket.recv_multipart(copy=False)
            name = identity.bytes
            kind = kind.bytes
            if kind == wire.HELLO:
                await self._greet(name, frames)
                continue
            peer = self._peers.get(name)
            if peer is None:
                continue  # never greeted, or dropped; it has been told
            peer.unheard = 0
            if kind == wire.ADD:
                await self._add(peer, codec, frames)
            elif kind == wire.ADAPTER:
                await self._load_adapter(wire.noun_from(frames[0].bytes, vllm.LoRARequest))
            elif kind == wire.CACHED and self._cached is not None:
                peer.offer(_told(self._cached.all()))
            elif kind == wire.ABORT:
                await self._peers.abort(peer, wire.unpack(frames[0].bytes))
            elif kind == wire.BYE:
                await self._peers.drop(peer, "")

    async def _greet(self, name: bytes, frames: Sequence[Any]) -> None:
        try:
            version, theirs = wire.unpack(frames[0].bytes)
        except (ValueError, TypeError, IndexError):
            return  # not a gateway of this version
        if self._lost:
            refusal = self._lost
        elif (version, theirs) != (wire.WIRE_VERSION, vllm.vllm_version):
            ours = f"it runs vllm {vllm.vllm_version}, wire {wire.WIRE_VERSION}"
            refusal = f"{ours}; this gateway {theirs}, {version}"
        else:
            await self._peers.welcome(name, wire.pack(self._info))
            return
        await self._socket.send_multipart([name, wire.LOST, wire.pack(refusal)])

    async def _add(self, peer: GatewayPeer, codec: vllm.VllmCodec, frames: Sequence[Any]) -> None:
        segment = wire.unpack(frames[0].bytes)
        try:
            request = codec.request(frames[1:])
        except Exception as error:  # whatever a codec may raise on a frame that is not a request
            peer.offer([wire.REFUSED, wire.pack([segment, f"it cannot be read: {error}"])])
            return
        if len(self._peers) >= 4 * self._info.max_seqs and not request.abort_immediately:
            peer.offer([wire.REFUSED, wire.pack([segment, "its queue is full"])])
            return
        adapter = request.lora_request
        if adapter is not None and adapter.lora_int_id not in self._adapters:
            # The engine would load it in the middle of a step, and die of one that cannot be loaded.
            why = await self._load_adapter(adapter)
            if why:
                peer.offer([wire.REFUSED, wire.pack([segment, f"adapter {adapter.lora_name}: {why}"])])
                return
        if not len(self._peers):
            self._heard_s = time.monotonic()  # an engine without work is silent
        message = message_of(request)
        if not (isinstance(message, Control) and message.verb == "release"):
            self._peers.admit(peer, segment)  # an output will come for it
        await self._core.add_request_async(request)

    async def _load_adapter(self, adapter: vllm.LoRARequest) -> str:
        """Let the engine load an adapter, and tell the gateways; return why it could not, or nothing.

        No other message is read meanwhile: the engine could not act on it.
        """
        why, self._is_loading = "", True
        try:
            await self._core.add_lora_async(adapter)
            self._adapters = frozenset(await self._core.list_loras_async())
        except vllm.EngineDeadError:
            raise
        except Exception as error:  # what an engine's utility call raises: whatever is wrong with the files
            why = str(error)
        finally:
            self._is_loading, self._heard_s = False, time.monotonic()
        told = Adapters(tuple(sorted(self._adapters)), adapter.lora_int_id, why)
        self._peers.offer_all([wire.ADAPTERS, wire.pack(told)])
        return why

    async def _pump(self) -> None:
        while True:
            batch: vllm.EngineCoreOutputs = await self._core.get_output_async()
            self._heard_s = time.monotonic()
            stats = batch.scheduler_stats
            did_something = bool(batch.outputs)
            if stats is not None:
                connector_stats = stats.kv_connector_stats or {}
                self._tell_cached(connector_stats.get("events", ()), connector_stats.get("host_events", ()))
                batch.outputs += [_answer(*answer) for answer in connector_stats.get("answers", {}).items()]
                did_something = bool(batch.outputs) | self._observe(stats, batch.timestamp)
                stats.kv_connector_stats = step_stats(connector_stats.get("load", {}))
            if did_something:  # an engine that holds KV steps on without work, a thousand times a second
                await self._peers.deliver(batch)

    def _observe(self, stats: Any, ended_s: float) -> bool:
        """Take a step's statistics in; return whether it computed anything."""
        changed = self._trace.take(stats, ended_s)
        fell_idle = changed and stats.num_running_reqs == 0
        if fell_idle or ended_s - self._told_s > TELEMETRY_EVERY_S:
            self._tell_load(ended_s)
        return changed

    def _tell_cached(self, events: Sequence[Mapping[str, Any]], in_host: Sequence[Mapping[str, Any]]) -> None:
        """Tell what a step has stored and removed, before its outputs."""
        if not (events or in_host) or self._cached is None:
            return
        change = self._cached.take(events, in_host)
        if change is not None:
            self._peers.offer_all(_told(change))

    def _tell_load(self, now_s: float) -> None:
        self._told_s = now_s
        self._peers.offer_all([wire.LOAD, wire.pack(self._trace.telemetry(now_s))])

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self.patience.alive_every_s)
            now_s = time.monotonic()
            self._tell_load(now_s)
            await self._end_stuck(now_s)
            for peer in self._peers.silent(self.patience.alive_every_s):
                log.warning("gateway %s fell silent; its requests are aborted", peer.name.hex())
                await self._peers.drop(peer, "silent for too long")
            if self._peers.has_gateways:
                self._needed_s = now_s
            elif self._daemon.is_gone or (self._core_number and now_s - self._needed_s > ALONE_S):
                await self._leave()

    async def _end_stuck(self, now_s: float) -> None:
        """End an engine that has work and makes no step any more, so that its requests go on elsewhere."""
        silent_s = now_s - self._heard_s
        if self._lost or self._is_loading or not len(self._peers) or silent_s < WATCH_FROM_S:
            return
        pids = processes.descendants()
        is_stopped = any(_status(process) == psutil.STATUS_STOPPED for process in pids)
        ordinary_s = self._trace.ordinary_s
        if not self._silence.is_hung(now_s, self._heard_s, processes.cpu_s(pids), is_stopped, ordinary_s):
            return
        log.error("%s: its engine has work and was silent for %.1f s", self._worker, silent_s)
        await self._end(f"its engine made no step for {silent_s:.0f} s")
        for process in pids:  # one that is stopped ends by no other signal, and keeps its GPU
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)

    async def _leave(self) -> None:
        """End this process, which is no longer needed or reachable, and free what Ray reserves for it."""
        log.warning("%s: no gateway for %g s, or Ray's daemon is gone: it ends itself", self._worker, ALONE_S)
        with suppress(Exception):  # however the engine takes it
            await _end_engine(self._core)
        processes.unlink(self._shared)
        if not self._daemon.is_gone and (group := ray.util.get_current_placement_group()) is not None:
            remove_placement_group(group)
        os._exit(1)


def _end_of(engines: Sequence[BaseProcess]) -> str:
    """The way in which an engine's processes have ended."""
    codes = [engine.exitcode for engine in engines if engine.exitcode]
    if not codes:
        return "its engine died"
    return f"its engine {f'was killed (signal {-codes[0]})' if codes[0] < 0 else f'ended with {codes[0]}'}"


async def _end_engine(core: Any) -> None:
    """End an engine that has no request any more: kill it where it does not end at once.

    Its orderly end takes seconds and finishes nothing. The resource tracker removes what a killed one has
    left in shared memory, once this process no longer uses it.
    """
    engines = [child.pid for child in active_children()]
    ending = asyncio.create_task(asyncio.to_thread(core.shutdown, SHUTDOWN_S))
    await asyncio.wait([ending], timeout=ORDERLY_S)
    if not ending.done():
        for pid in filter(None, engines):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    await ending
    if (needed := resource_tracker.getfd()) is not None:
        os.close(needed)
    until_s = time.monotonic() + CLEANED_S
    while (
        any(_status(one) != psutil.STATUS_ZOMBIE for one in processes.descendants())
        and time.monotonic() < until_s
    ):
        await asyncio.sleep(0.02)


def _status(pid: int) -> str:
    """A process' state; one that has ended stays a child, a zombie, until it is waited for."""
    with suppress(psutil.NoSuchProcess):
        return str(psutil.Process(pid).status())
    return str(psutil.STATUS_ZOMBIE)


def _told(change: CacheChange) -> list[bytes]:
    return [wire.CACHED, wire.pack(change)]


def _answer(segment: str, answer: tuple[str, int]) -> vllm.EngineCoreOutput:
    """The output that answers a begin or a loader (kv_messages.py)."""
    what, tokens = answer
    told = told_of_load(tokens) if what == "loaded" else None
    return vllm.EngineCoreOutput(segment, [], finish_reason=ANSWERS[what], kv_transfer_params=told)
