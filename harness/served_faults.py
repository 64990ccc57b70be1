"""Seeded schedules of faults over the processes of a served fleet, and the history of what clients saw.

Schedules and judge are those of `fault_schedules`. Here the fleet is a `tokenfleet serve` with two gateways.
Faults come from outside: signals to its processes, orders to its control API, and each client's link, a TCP
relay. A process's wall clock jumps by an hour, where the fleet began under `Clocks`. A schedule leaves the
fleet as it found it, so that one fleet plays many.

A client's connection may break where its own link is cut or its own gateway is killed, and nowhere else. An
emulated worker is a part of its core's process, and dies with that. The link between core and gateways is a
Unix socket, which nothing can cut: either end stops instead.
"""

from __future__ import annotations

import asyncio
import re
import socket
import urllib.request
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from http.client import HTTPException
from typing import Any, Protocol
from urllib.parse import urlsplit

import aiohttp
import psutil

from harness.clocks import Clocks
from harness.fault_schedules import Fault, History, Schedule
from harness.served import SILENT_S, Stream, by_role, stream

# Faults within this number of received tokens happen at one moment.
TOGETHER = 120
SERVED = (
    *("kill core", "kill core", "stop core", "kill gateway", "stop gateway"),
    *("kill controller", "stop controller", "full disk", "slow link", "held link", "cut link", "leave"),
    *("move", "move", "drain", "evacuate", "restart worker", "restart gateways"),
)
# Workers have processes of their own: an actor and its engine, which may be stopped for good; so has Ray.
REAL = (
    *("kill worker", "kill engine", "hang engine", "kill raylet", "kill gcs_server"),
    *("kill core", "stop core", "kill gateway", "stop gateway", "kill controller", "move", "move", "leave"),
    *("slow link", "held link", "cut link"),
)
# Of a fleet under `Clocks`: jumps alone, which no client may notice, and among other faults.
JUMPS = ("jump core", "jump gateway", "jump controller", "move")
CLOCKS = (
    *JUMPS[:3],
    *JUMPS[:3],
    "kill core",
    "kill controller",
    "kill gateway",
    "evacuate",
    "drain",
    *JUMPS[3:],
)
GATEWAYS, HOUR_S = 2, 3600
LOOK_S, HELD_S, HURRY_S = 0.01, 1.0, 2.0
NO_ANSWER = (OSError, HTTPException, ValueError)  # a core dies while it answers


class Fleet(Protocol):
    """A served fleet, as experiments and tests have it."""

    process: Any
    gateway: str
    control: str

    def ask(self, method: str, path: str, body: Any = None) -> Any: ...


class Link:
    """A client's way to the gateways: it can be slow, stand still or be cut."""

    def __init__(self) -> None:
        self.port = 0  # of its end at the gateway
        self.pause_s = 0.0  # before each piece of 4 KiB
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self._writers: list[asyncio.StreamWriter] = []

    async def open(self, gateway: str) -> str:
        """Listen for the client; the address that it calls."""
        at = urlsplit(gateway)

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            end = socket.socket()
            end.setblocking(False)
            end.bind(("127.0.0.1", 0))
            self.port = end.getsockname()[1]  # known before the gateway has the connection
            await asyncio.get_running_loop().sock_connect(end, (at.hostname, at.port))
            there, to = await asyncio.open_connection(sock=end)
            self._writers += [writer, to]
            with suppress(asyncio.CancelledError):  # asyncio's own callback does not expect it
                await asyncio.gather(self._pass_on(reader, to), self._pass_on(there, writer))

        self._server = await asyncio.start_server(serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _pass_on(self, source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        with suppress(OSError):
            while piece := await source.read(1 << 12):
                await asyncio.sleep(self.pause_s)
                await self.goes_on.wait()
                to.write(piece)
                await to.drain()
        to.close()

    def cut(self) -> None:
        """Reset it at both ends."""
        for writer in self._writers:
            writer.transport.abort()

    def close(self) -> None:
        self._server.close()
        self.goes_on.set()
        self.cut()


@dataclass(slots=True, eq=False)
class Client:
    """A client, its link, and what it has received."""

    name: str
    link: Link
    got: Stream
    task: asyncio.Task[Stream]

    @property
    def end(self) -> str:
        """The end of its stream as vLLM names it; an ending of no such name where the judge must look."""
        got = self.got
        if got.is_broken:
            return "ABORT"
        if got.error:
            return "a clean end after an error" if got.is_done else "ERROR"
        if not got.is_done:
            return "neither an end nor an error"
        if got.tokens != len(got.token_ids):
            return f"{len(got.token_ids)} tokens, told of as {got.tokens}"
        return got.finish.upper() or "a clean end without a reason"


async def played_served(
    fleet: Fleet, schedule: Schedule, workers: int, settle_s: float = 90.0, clocks: Clocks | None = None
) -> History:
    """Play a schedule on a served fleet until every stream has ended and the fleet is whole again."""
    play = _Play(fleet, schedule, workers, settle_s, clocks)
    try:
        async with asyncio.timeout(settle_s):
            await asyncio.gather(play.send(), play.happen())
            await play.ended()
    except TimeoutError:
        play.history.happened["did not settle"] += 1
    await play.close()
    return play.history


async def undisturbed(fleet: Fleet, schedule: Schedule) -> list[list[int]]:
    """The tokens of each stream of a schedule where nothing happens."""
    async with _session() as http:
        bodies = [_body(*one) for one in zip(schedule.prompts, schedule.outputs, strict=True)]
        return [s.token_ids for s in await asyncio.gather(*(stream(http, fleet.gateway, b) for b in bodies))]


def await_status(process: psutil.Process, status: str) -> None:
    """Wait until a process is in a state or has ended. Meanwhile no client of ours connects."""
    with suppress(psutil.NoSuchProcess):
        while process.status() not in (status, psutil.STATUS_ZOMBIE):
            pass


def _body(prompt: tuple[int, ...], tokens: int) -> dict[str, Any]:
    return {"prompt": list(prompt), "max_tokens": tokens, "return_token_ids": True}


def _session() -> aiohttp.ClientSession:
    """A connection for each request, as the links are."""
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    return aiohttp.ClientSession(
        connector=connector, timeout=aiohttp.ClientTimeout(total=None, sock_read=SILENT_S)
    )


def _counted(fleet: Fleet) -> dict[str, float]:
    """The requests that the present core counts as ended, by outcome."""
    with urllib.request.urlopen(f"{fleet.control}/metrics", timeout=30) as reply:
        text = reply.read().decode()
    counts: dict[str, float] = {}
    for outcome, count in re.findall(r'^tokenfleet_requests_total\{.*outcome="(\w+)".*\} (\S+)$', text, re.M):
        counts[outcome] = counts.get(outcome, 0.0) + float(count)
    return counts


class _Play:
    """A served fleet that a schedule happens to."""

    def __init__(
        self, fleet: Fleet, schedule: Schedule, workers: int, settle_s: float, clocks: Clocks | None = None
    ) -> None:
        self.history, self._clocks = History(schedule), clocks
        self._fleet, self._workers, self._settle_s = fleet, workers, settle_s
        self._clients: dict[str, Client] = {}
        self._undo: list[Callable[[], None]] = []
        self._orders: list[asyncio.Future[None]] = []
        self._is_over = False
        self._http = _session()
        self._mark = f"{id(self):x}-"
        view = fleet.ask("GET", "/v1/fleet")
        self._core = view["core"]["number"]
        self._lost_before = {one["worker"] for one in view["losses"]}
        self._before = _counted(fleet)
        self._watching = asyncio.ensure_future(self._watch())

    # Clients.

    async def send(self) -> None:
        """Begin each stream in its turn."""
        plan = self.history.schedule
        for i, (prompt, tokens, begin) in enumerate(
            zip(plan.prompts, plan.outputs, plan.begins, strict=True)
        ):
            await self._until(begin, 0)
            link, got = Link(), Stream()
            url = await link.open(self._fleet.gateway)
            headers = {"x-request-id": f"{self._mark}r{i}"}
            asked = stream(self._http, url, _body(prompt, tokens), headers, got)
            client = self._clients[f"r{i}"] = Client(f"r{i}", link, got, asyncio.ensure_future(asked))
            self.history.sent.add(client.name)
            self.history.tokens[client.name] = got.token_ids
            client.task.add_done_callback(lambda _, client=client: self._end(client))

    def _end(self, client: Client) -> None:
        if self._is_over:  # it hung
            return
        client.link.close()
        self.history.ends[client.name] = ["ABORT" if client.task.cancelled() else client.end]

    def _running(self) -> list[Client]:
        return [c for c in self._clients.values() if c.name not in self.history.ends]

    async def _until(self, tokens: int, streams: int) -> None:
        """Return once a stream runs and clients have received `tokens` tokens in all, or none runs and
        `streams` have begun."""
        while sum(map(len, self.history.tokens.values())) < tokens or not self._running():
            if not self._running() and len(self._clients) >= streams:
                return
            await asyncio.sleep(LOOK_S)

    async def ended(self) -> None:
        """Return once every stream has ended."""
        while self._running():
            await asyncio.sleep(LOOK_S)

    async def _watch(self) -> None:
        """Ask the core again and again for requests that have ended already, or that it has twice."""
        seen = self.history
        while True:
            over = {f"{self._mark}{name}" for name in seen.ends.keys() - seen.left}
            with suppress(*NO_ANSWER):
                asked = await asyncio.to_thread(self._fleet.ask, "GET", "/v1/requests")
                names = [one["x_request_id"] for one in asked["requests"]]
                seen.too_many = max(
                    seen.too_many, len(names) - len(set(names)) + sum(name in over for name in names)
                )
            await asyncio.sleep(10 * LOOK_S)

    # Faults.

    async def happen(self) -> None:
        """Let each fault happen in its turn."""
        for fault in self.history.schedule.faults:
            await self._until(fault.after, len(self.history.schedule.prompts))
            done = await self._happen(fault) if self._running() else False
            self.history.happened[fault.what if done else "nothing: nobody to hit"] += 1

    async def _happen(self, fault: Fault) -> bool:
        """Whether there was something that it could happen to."""
        verb, _, whom = fault.what.partition(" ")
        if whom == "link":
            self._on_link(verb, self._chosen(fault, self._running()).link)
        elif fault.what == "leave":
            client = self._chosen(fault, self._running())
            self.history.left.add(client.name)
            client.task.cancel()
        elif verb == "jump":
            processes = await asyncio.to_thread(self._processes, whom)
            if not processes or self._clocks is None:
                return False
            self._jump(self._clocks, self._chosen(fault, processes).pid, HOUR_S * (-1) ** (fault.stream // 2))
        elif verb in ("kill", "stop", "hang", "full"):
            processes = await asyncio.to_thread(self._processes, "core" if verb == "full" else whom)
            if not processes:
                return False
            with suppress(psutil.NoSuchProcess):
                self._on_process(verb, whom, self._chosen(fault, processes), 0.2 * (1 + fault.stream))
        else:
            self._orders.append(asyncio.ensure_future(asyncio.to_thread(self._order, fault)))
        return True

    @staticmethod
    def _chosen(fault: Fault, among: list[Any]) -> Any:
        return among[fault.stream % len(among)]

    def _processes(self, whom: str) -> list[psutil.Process]:
        with suppress(psutil.NoSuchProcess, *NO_ANSWER):
            if whom in ("raylet", "gcs_server"):
                below = psutil.Process(self._fleet.process.pid).children(recursive=True)
                return [one for one in below if one.name() == whom]
            if whom not in ("worker", "engine"):
                return by_role(self._fleet).get(whom, [])  # type: ignore[arg-type]
            workers = self._fleet.ask("GET", "/v1/fleet")["workers"]
            actors = [psutil.Process(w["pid"]) for w in workers if w["state"] == "serving"]
            if whom == "worker":
                return actors
            return [c for a in actors for c in a.children(recursive=True) if "EngineCore" in c.name()]
        return []

    def _on_link(self, verb: str, link: Link) -> None:
        if verb == "cut":
            self.history.left |= {c.name for c in self._running() if c.link is link}
            link.cut()
        elif verb == "held":
            link.goes_on.clear()
            self._later(HELD_S, link.goes_on.set)
        else:
            link.pause_s = 0.2
            self._later(HELD_S, partial(setattr, link, "pause_s", 0.0))

    def _on_process(self, verb: str, whom: str, process: psutil.Process, held_s: float) -> None:
        if verb == "full":
            process.rlimit(psutil.RLIMIT_FSIZE, (0, psutil.RLIM_INFINITY))
            unlimited = (psutil.RLIM_INFINITY, psutil.RLIM_INFINITY)
            self._later(held_s, partial(process.rlimit, psutil.RLIMIT_FSIZE, unlimited))
        elif verb == "kill":
            if whom == "gateway":
                self._part_from(process)
            process.kill()
            if whom == "gateway":
                await_status(process, psutil.STATUS_ZOMBIE)  # until then it takes connections
        else:
            process.suspend()
            if verb == "stop":
                self._later(held_s, process.resume)

    def _jump(self, clocks: Clocks, process: int, ahead_s: int) -> None:
        """Set a process's wall clock; it jumps back at the end of the schedule."""
        clocks.set(process, ahead_s)
        self._undo.append(partial(clocks.set, process, 0))

    def _part_from(self, gateway: psutil.Process) -> None:
        """Stop a gateway, so that it accepts no more; those connected to it may lose their streams."""
        gateway.suspend()
        await_status(gateway, psutil.STATUS_STOPPED)
        accepted = gateway.net_connections("tcp")
        listens = {c.laddr.port for c in accepted if c.status == psutil.CONN_LISTEN}
        # A connection in the backlog of a port has no process yet.
        backlog = [c for c in psutil.net_connections("tcp") if c.pid is None and c.laddr.port in listens]
        ends = {c.raddr.port for c in (*accepted, *backlog) if c.raddr}
        self.history.left |= {c.name for c in self._clients.values() if c.link.port in ends}

    def _later(self, after_s: float, undo: Callable[[], None]) -> None:
        """End what is only for a while."""

        def once() -> None:
            if undo in self._undo:
                self._undo.remove(undo)
                with suppress(psutil.NoSuchProcess):
                    undo()

        self._undo.append(undo)
        asyncio.get_running_loop().call_later(after_s, once)

    def _order(self, fault: Fault) -> None:
        """An order of an operator; a core that dies, or will not, answers as it can."""
        ask, hurry = self._fleet.ask, {"finish_s": HURRY_S}
        with suppress(*NO_ANSWER):
            if fault.what == "restart gateways":
                ask("POST", "/v1/gateways/restart", {"finish_s": self._settle_s})
            elif fault.what == "move":
                if running := ask("GET", "/v1/requests")["requests"]:
                    one = self._chosen(fault, running)["request_id"]
                    ask("POST", "/v1/migrations", {"request_id": one})
            else:
                serving = [w for w in ask("GET", "/v1/fleet")["workers"] if w["state"] == "serving"]
                if len(serving) > 1:
                    name = self._chosen(fault, serving)["worker"]
                    bodies = {"drain": {}, "evacuate": {"deadline_s": HURRY_S}, "restart": hurry}
                    verb = fault.what.partition(" ")[0]
                    ask("POST", f"/v1/workers/{name}/{verb}", bodies[verb])

    # The end.

    async def close(self) -> None:
        """Count what is left once all that will be freed is, and the fleet is whole again."""
        self._is_over = True
        while self._undo:
            with suppress(psutil.NoSuchProcess):
                self._undo.pop()()
        await asyncio.gather(*self._orders)
        for client in self._running():
            client.task.cancel()
            client.link.close()
        await self._http.close()
        self._watching.cancel()
        with suppress(TimeoutError):
            async with asyncio.timeout(self._settle_s):
                while await asyncio.to_thread(self._look):
                    await asyncio.sleep(10 * LOOK_S)

    def _look(self) -> bool:
        """Whether the fleet is not whole yet, or has something left; what that is goes to the history."""
        seen = self.history
        seen.remains = {"looks without an answer": 1}
        with suppress(psutil.NoSuchProcess, *NO_ANSWER):
            view = self._fleet.ask("GET", "/v1/fleet")
            if view["wanted_workers"] != self._workers:
                self._fleet.ask("POST", "/v1/fleet/scale", {"workers": self._workers})
            now = left(view, self._workers)
            losses = {one["worker"]: one["cause"] for one in view["losses"] if "cause" in one}
            seen.lost |= {w: cause for w, cause in losses.items() if w not in self._lost_before}
            now["missing controllers"] = 1 - len(by_role(self._fleet).get("controller", []))  # type: ignore[arg-type]
            if view["core"]["number"] == self._core:
                ends = _counted(self._fleet)
                new = {outcome: int(ends[outcome] - self._before.get(outcome, 0.0)) for outcome in ends}
                seen.counted = sum(new.values()), new.get("finished", 0)
            seen.remains = now
        return any(seen.remains.values())


def left(view: dict[str, Any], workers: int) -> dict[str, int]:
    """What a fleet at rest should have none of, by its own view."""
    loads = [w["telemetry"] for w in view["workers"] if w.get("telemetry")]
    serving = [sum(one["state"] == "serving" for one in view[what]) for what in ("workers", "gateways")]
    return {
        "requests in the core": view["requests"]["running"] + view["requests"]["waiting"],
        "requests at gateways": sum(g["requests"] for g in view["gateways"]),
        "requests in engines": sum(load["running"] + load["waiting"] for load in loads),
        "KV blocks": sum(load["kv_used_blocks"] for load in loads),
        "moves": len(view["moving"]),
        "missing workers": workers - serving[0],
        "missing gateways": GATEWAYS - serving[1],
    }
