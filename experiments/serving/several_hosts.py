"""A fleet over two hosts: KV between them, requests moved between them, and hosts and links that fail.

    python experiments/serving/several_hosts.py [--only kv|moves|faults] [--resume FOLDER] [--quick]

The hosts are Linux network namespaces on a bridge (harness/linux_hosts.py; it takes root), with a Ray
node and a real vLLM worker (float32, 2 KB of KV a token) on each. Every stream is compared with the same
request's undisturbed one.

kv      64 MiB in blocks of 8 layers over the workers' KV transport, against the same transport without TLS
        and one `sendfile` of as many bytes over one connection, in turns; and what encryption adds to a
        message between a gateway and a worker. It needs no engine.
moves   requests moved once each; downtime from the cut-over to the target's first token, against two decode
        steps and 10 ms.
faults  40 streams while the far host's cable is out for 5 s or for 60 s, or the host is killed; while only
        what it sends is lost (mute), or what it is sent (deaf), for 15 s; and while the link has 1 Mbit/s for
        15 s. Streams that run on when the host is back show that what it says then changes nothing.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import secrets
import socket
import statistics
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from experiments.lib.results import bar, flags, show
from harness.linux_hosts import Host, Hosts, linux_hosts, why_not
from harness.served import ENGINE_FLAGS, Server, Stream, session, stream, tiny_model

LAYERS, BLOCKS, BLOCK_BYTES = 8, 512, 16 << 10  # 64 MiB
KV_ROUNDS, KV_TURNS = 3, 7
MESSAGES, MESSAGE = 5000, bytes(2048)  # about a step's outputs for 32 requests
LENGTHS, MOVES_OF_EACH = (256, 1024, 2048, 4096, 7800), 20
# Tokens decoded before a move, and after it. A copy between CPU hosts works for a hundredth of its time
# unless told otherwise, and these requests would end before it does.
BEFORE, AFTER, PER_PROMPT_TOKEN = 20, 80, 1 / 32
MOVE_SHARE = "0.2"
SLACK_S = 0.010
STREAMS, STREAM_TOKENS = 40, 600
HOST_KILLED = "host killed"
# Of a fault, how long it is.
FAULTS = {
    "link down 5 s": 5.0,
    HOST_KILLED: 0.0,
    "link down 60 s": 60.0,
    "mute 15 s": 15.0,
    "deaf 15 s": 15.0,
    "slow 15 s": 15.0,
}
HARMLESS = ("link down 5 s", "slow 15 s")
SLOW_MBIT = 1.0
ROUNDS = 20
LONG_FLAGS = tuple("8192" if flag == "4096" else flag for flag in ENGINE_FLAGS)


# KV between two hosts.


def _caches(seed: int) -> Any:
    import torch

    drawn = np.random.default_rng(seed).integers(0, 256, (LAYERS, BLOCKS, BLOCK_BYTES), np.uint8)
    return [torch.from_numpy(layer) for layer in drawn]


def _speak(is_clear: bool) -> None:
    """Let this process' KV transport use TLS, or not."""
    from dataplane.live.kv import transport

    kept = vars(transport).setdefault("within_tls", transport.sealed)
    vars(transport)["sealed"] = (lambda connection, *_: connection) if is_clear else kept


def _hold(host: Host, ready: Any, is_clear: bool) -> None:
    """Serve blocks on a host until killed, in the clear or within TLS, and then a plain file as well."""

    def serve() -> None:
        from dataplane.live.kv.memory import BlockTables, kv_memory
        from dataplane.live.kv.transport import SocketTransport

        tables, caches = BlockTables(), _caches(1)
        order = np.random.default_rng(2).permutation(BLOCKS).tolist()
        tables.update({"s": order}, ())
        _speak(is_clear)
        port = 7002 if is_clear else 7000
        SocketTransport("secret").serve(f"tcp://{host.ip}:{port}", tables, kv_memory(caches))
        if is_clear:
            ready.release()
            threading.Event().wait()
        plain = socket.create_server((host.ip, 7001))
        with open(f"/dev/shm/tokenfleet-{secrets.token_hex(4)}", "w+b", buffering=0) as file:
            os.unlink(file.name)
            file.write(b"".join(cache.numpy().tobytes() for cache in caches))
            ready.release()
            connection, _ = plain.accept()
            while connection.recv(1):
                connection.sendfile(file, 0)

    host.call(serve)


def _kv_round(hosts: Hosts) -> dict[str, Any]:
    """Bytes a second of each way, from the second host to the first, by the median."""
    ready = multiprocessing.Semaphore(0)
    holders = [
        multiprocessing.Process(target=_hold, args=(hosts[1], ready, is_clear), daemon=True)
        for is_clear in (False, True)
    ]
    for holder in holders:
        holder.start()
    for _ in holders:
        ready.acquire()

    def take() -> dict[str, Any]:
        from dataplane.live.kv.memory import kv_memory
        from dataplane.live.kv.transport import Fetch, SocketTransport

        transport, caches, source = SocketTransport("secret"), _caches(3), _caches(1)
        memory = kv_memory(caches)
        order = np.random.default_rng(2).permutation(BLOCKS)
        buffer = bytearray(LAYERS * BLOCKS * BLOCK_BYTES)
        plain = socket.create_connection((hosts[1].ip, 7001))
        seconds: dict[str, list[float]] = {"kv": [], "clear": [], "plain": []}
        for _ in range(KV_TURNS + 1):  # the first connects, and touches the memory
            for way, port in (("kv", 7000), ("clear", 7002)):
                _speak(is_clear=way == "clear")
                began_s = time.perf_counter()
                fetch = Fetch("secret", "s", 0, BLOCKS)
                transport.fetch(f"tcp://{hosts[1].ip}:{port}", fetch, memory, range(BLOCKS), 60.0)
                seconds[way].append(time.perf_counter() - began_s)
            began_s = time.perf_counter()
            plain.sendall(b"1")
            rest = memoryview(buffer)
            while rest:
                rest = rest[plain.recv_into(rest) :]
            seconds["plain"].append(time.perf_counter() - began_s)
        for mine, theirs in zip(caches, source, strict=True):
            assert (mine.numpy() == theirs.numpy()[order]).all(), "other bytes arrived"
        kv_s, clear_s, plain_s = (statistics.median(seconds[way][1:]) for way in seconds)
        size = len(buffer)
        return {
            "what": "64 MiB of blocks",
            "GB/s": size / kv_s / 1e9,
            "clear GB/s": size / clear_s / 1e9,
            "plain GB/s": size / plain_s / 1e9,
            "of clear": clear_s / kv_s,
            "of plain": plain_s / kv_s,
            "load": os.getloadavg()[0],
        }

    try:
        return hosts[0].call(take)
    finally:
        for holder in holders:
            holder.kill()
            holder.join()


def _links() -> dict[str, Any]:
    """Processor time of a message there and back between two sockets of one process, by whether encrypted."""
    from zmq.constants import SocketType
    from zmq.sugar.context import Context

    from dataplane.live.engine_api.wire import knock, new_key, public_key

    def processor_s(is_clear: bool) -> float:
        context: Any = Context()
        own, theirs = new_key(), new_key()
        with context, context.socket(SocketType.ROUTER) as door, context.socket(SocketType.DEALER) as link:
            if not is_clear:
                door.curve_server, door.curve_secretkey = True, own.encode()
                knock(link, theirs, public_key(own))
            link.connect(f"tcp://127.0.0.1:{door.bind_to_random_port('tcp://127.0.0.1')}")
            for turn in range(MESSAGES + 100):
                if turn == 100:
                    began_s = time.process_time()
                link.send(MESSAGE)
                door.send_multipart(door.recv_multipart())
                link.recv()
            return (time.process_time() - began_s) / MESSAGES

    both = {clear: statistics.median(processor_s(clear) for _ in range(3)) for clear in (False, True)}
    return {
        "what": f"{len(MESSAGE)} bytes there and back",
        "us": 1e6 * both[False],
        "clear us": 1e6 * both[True],
    }


# Requests on a served fleet.


class Cluster:
    """A served fleet over two hosts, started when it is first needed."""

    def __init__(self, cleanup: ExitStack) -> None:
        self._cleanup = cleanup
        self._hosts: Hosts | None = None
        self._server: Server | None = None

    @property
    def hosts(self) -> Hosts:
        self.server  # noqa: B018
        assert self._hosts is not None
        return self._hosts

    @property
    def server(self) -> Server:
        if self._server is None:
            model: Path = self._cleanup.enter_context(tiny_model())
            self._hosts = self._cleanup.enter_context(linux_hosts(2))
            asked = ("--workers", "2", "--max-workers", "4", "--policy", "jsq", "--move-share", MOVE_SHARE)
            serving = self._hosts.fleet(model, *asked, engine_flags=LONG_FLAGS)
            self._server = self._cleanup.enter_context(serving)
        return self._server

    def play(self, story: Callable[[aiohttp.ClientSession], Any]) -> Any:
        """Run a story beside the gateway."""

        async def scene() -> Any:
            async with session() as http:
                return await story(http)

        return self.hosts[0].call(lambda: asyncio.run(scene()))

    async def ask(self, method: str, path: str, body: Any = None) -> Any:
        return await asyncio.to_thread(self.server.ask, method, path, body)

    async def decisions(self) -> list[dict[str, Any]]:
        """The last ones alone, so that older ones cannot be counted; their ids rise."""
        return list((await self.ask("GET", "/v1/fleet"))["decisions"])

    async def settled(self) -> None:
        """Return once no worker is starting: one whose host dies meanwhile is waited for, for minutes."""
        while any(w["state"] == "starting" for w in (await self.ask("GET", "/v1/fleet"))["workers"]):
            await asyncio.sleep(0.2)

    async def spread_out(self) -> None:
        """Return once each host has a serving worker, and each worker a host of its own."""
        while True:
            workers = (await self.ask("GET", "/v1/fleet"))["workers"]
            serving = [w for w in workers if w["state"] == "serving"]
            if len(workers) == 2 and len({w["host"] for w in serving}) == 2:
                return
            if len(serving) == len(workers) == 2:  # both on the host that had stayed
                await self.ask("POST", f"/v1/workers/{serving[1]['worker']}/drain")
                await self.ask("POST", "/v1/fleet/scale", {"workers": 2})
            await asyncio.sleep(0.2)


async def _moved(cluster: Cluster, http: aiohttp.ClientSession, length: int, seed: int) -> dict[str, Any]:
    """Run a request twice, the second time with a move to the other host."""
    prompt = np.random.default_rng((seed, length)).integers(5, 2000, length).tolist()
    body = {"prompt": prompt, "max_tokens": BEFORE + AFTER + int(length * PER_PROMPT_TOKEN)}
    plain = await stream(http, cluster.server.gateway, body)
    running = asyncio.create_task(stream(http, cluster.server.gateway, body))
    request = None
    while request is None or request["output_tokens"] < BEFORE:
        listed = (await cluster.ask("GET", "/v1/requests"))["requests"]
        request = listed[0] if listed else None
        if running.done():
            raise RuntimeError(f"the stream ended before it was moved: {running.result().error}")
    workers = [w["worker"] for w in cluster.server.workers()]
    target = next(w for w in workers if w != request["worker"])
    order = {"request_id": request["request_id"], "target": target}
    move = await cluster.ask("POST", "/v1/migrations", order)
    while move["open"]:
        await asyncio.sleep(0.005)
        move = await cluster.ask("GET", f"/v1/migrations/{move['id']}")
    got = await running
    gaps = np.diff(plain.chunks_s[5:])
    return {
        "tokens": length,
        "moved": move["outcome"] == "done",
        "why not": move["reason"] if move["outcome"] != "done" else "",
        "equal": got.content == plain.content and not got.error,
        "downtime_s": move["downtime_s"],
        "step_s": float(np.median(gaps)),
        "bytes": move["bytes"],
    }


async def _faulty(
    cluster: Cluster, http: aiohttp.ClientSession, fault: str, plain: list[list[Any]]
) -> dict[str, Any]:
    """Let 40 streams run through a fault, on a fleet that is whole; its hosts are, afterwards."""
    await cluster.spread_out()
    far = cluster.hosts[1]
    last = max((d["id"] for d in await cluster.decisions()), default=0)
    running = [asyncio.create_task(_one(cluster, http, number)) for number in range(STREAMS)]
    begun = 0
    while begun < STREAMS:
        listed = (await cluster.ask("GET", "/v1/requests"))["requests"]
        begun = sum(r["output_tokens"] > 0 for r in listed)
        if any(task.done() for task in running):
            raise RuntimeError("streams ended before the fault")
    _spoil(cluster.hosts, fault, True)
    await asyncio.sleep(FAULTS[fault])
    _spoil(cluster.hosts, fault, False)
    unfinished = sum(not task.done() for task in running)
    got: list[Stream] = await asyncio.gather(*running)
    result = {
        "fault": fault,
        "streams": STREAMS,
        "failed": sum(bool(s.error) for s in got),
        "silently wrong": sum(not s.error and list(s.content) != p for s, p in zip(got, plain, strict=True)),
        "running when it was back": unfinished,
        "replays": sum(d["kind"] == "replay" and d["id"] > last for d in await cluster.decisions()),
        "longest gap_s": max(s.worst_gap_s for s in got),
    }
    if fault not in HARMLESS:  # Ray gives such a node up for good: it joins anew
        await cluster.settled()
        if far.first_pid:
            far.die()
        await asyncio.to_thread(cluster.hosts.revive, far)
    return result


def _spoil(hosts: Hosts, fault: str, is_on: bool) -> None:
    """Bring a fault about, or take it away."""
    near, far = hosts[0], hosts[1]
    if fault == HOST_KILLED:
        if is_on:
            far.die()
    elif fault.startswith("mute"):
        far.reaches(near, not is_on)
    elif fault.startswith("deaf"):
        near.reaches(far, not is_on)
    elif fault.startswith("slow"):
        for host in (near, far):
            host.bound(SLOW_MBIT if is_on else 0)
    else:
        far.link(not is_on)


async def _one(cluster: Cluster, http: aiohttp.ClientSession, number: int) -> Stream:
    prompt = np.random.default_rng((7, number)).integers(5, 2000, 40).tolist()
    return await stream(http, cluster.server.gateway, {"prompt": prompt, "max_tokens": STREAM_TOKENS})


# The figures.


def kv(asked: Any, cleanup: ExitStack) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rounds = 1 if asked.quick else KV_ROUNDS
    hosts = cleanup.enter_context(linux_hosts(2, has_ray=False))
    rows = [asked.resume.part(f"kv {n}", lambda: _kv_round(hosts)) for n in range(rounds)]
    bars = {"64 MiB over a plain sendfile": bar(min(r["of plain"] for r in rows), 0.8, at_least=True)}
    return [*rows, asked.resume.part("links", _links)], bars


def moves(asked: Any, cluster: Cluster) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    each = 2 if asked.quick else asked.moves
    found: dict[int, list[Any]] = {length: [] for length in LENGTHS}
    for n in range(each):
        for length in LENGTHS:
            one = partial(_moved, cluster, length=length, seed=asked.seed + n)
            found[length].append(asked.resume.part(f"move {length} {n}", partial(cluster.play, one)))
    rows, bars = [], {}
    for length, results in found.items():
        moved = [r for r in results if r["moved"]]
        if not moved:
            raise SystemExit(
                f"none of {len(results)} requests of {length} tokens was moved: {results[0]['why not']}"
            )
        downtime_s = statistics.median(r["downtime_s"] for r in moved)
        step_s = statistics.median(r["step_s"] for r in results)
        row = {
            "what": f"moves at {length} tokens",
            "requests": len(results),
            "moved": len(moved),
            "equal": sum(r["equal"] for r in results),
            "decode step (ms)": 1e3 * step_s,
            "downtime p50 (ms)": 1e3 * downtime_s,
            "downtime max (ms)": 1e3 * max(r["downtime_s"] for r in moved),
            "MB": statistics.median(r["bytes"] for r in moved) / 1e6,
        }
        rows.append(row)
        limit_ms = 1e3 * (2 * step_s + SLACK_S)
        bars[f"downtime at {length} tokens (ms)"] = bar(1e3 * downtime_s, limit_ms)
    requests = sum(r["requests"] for r in rows)
    bars[f"moved and token-equal of {requests}"] = bar(
        min(sum(r["equal"] for r in rows), sum(r["moved"] for r in rows)), requests, at_least=True
    )
    return rows, bars


def faults(asked: Any, cluster: Cluster) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    rounds = 1 if asked.quick else asked.rounds

    async def undisturbed(http: aiohttp.ClientSession) -> Any:
        got = await asyncio.gather(*(_one(cluster, http, number) for number in range(STREAMS)))
        return [s.content for s in got]

    alone = asked.resume.part("undisturbed", partial(cluster.play, undisturbed))
    plain = [list(content) for content in alone]
    rows, bars = [], {}
    for fault in asked.fault or FAULTS:
        one = partial(cluster.play, partial(_faulty, cluster, fault=fault, plain=plain))
        results = [asked.resume.part(f"{fault} {n}", one) for n in range(rounds)]
        row = {"what": fault, "rounds": len(results)}
        for name in ("streams", "failed", "silently wrong", "running when it was back", "replays"):
            row[name] = sum(r[name] for r in results)
        row["longest gap (s)"] = max(r["longest gap_s"] for r in results)
        rows.append(row)
        bars[f"{fault}: streams silently wrong"] = bar(row["silently wrong"], 0)
        bars[f"{fault}: streams that failed"] = bar(row["failed"], 0)
    return rows, bars


def main() -> int:
    parser = flags(__doc__, resumes=True)
    parser.add_argument("--only", choices=("kv", "moves", "faults"), action="append", help="repeatable")
    parser.add_argument("--fault", choices=FAULTS, action="append", help="only this one; repeatable")
    parser.add_argument("--moves", type=int, default=MOVES_OF_EACH, help="at each length (default: 20)")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help=f"of each fault (default: {ROUNDS})")
    asked = parser.parse_args()
    if reason := why_not():
        parser.exit(2, f"no hosts can be made here: {reason}\n")
    rows: list[dict[str, Any]] = []
    bars: dict[str, Any] = {}
    with ExitStack() as cleanup:
        cluster = Cluster(cleanup)
        for part in asked.only or ("kv", "moves", "faults"):
            if part == "kv":
                with ExitStack() as of_kv:
                    found, its_bars = kv(asked, of_kv)
            else:
                found, its_bars = (moves if part == "moves" else faults)(asked, cluster)
            rows += found
            bars |= its_bars
    return show("several_hosts", rows, bars, asked)


if __name__ == "__main__":
    raise SystemExit(main())
