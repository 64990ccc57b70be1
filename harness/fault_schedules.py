"""Seeded schedules of faults over a `FleetCore` of emulated engines, and a judge of what clients saw.

A schedule has streams that begin at random moments and faults among them. Workers are killed, also at a stage
of a move, detached, closed to new requests and added; clients leave; links are slow or cut. An emulated
engine's token is a hash of all before it, so one that is lost, repeated or swapped shows in all that follow.
The same seed gives the same schedule; how its steps interleave is up to the event loop.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from controlplane.migration.move import Stage
from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.profile import Profile, Residuals, Source
from controlplane.perfmodel.step import StepModel
from controlplane.placement.lengths import LengthTable
from controlplane.types import Slo, WorkerId
from dataplane.live.emulated.engine import EmulatedEngine, Fabric
from dataplane.live.emulated.segment import Noise
from dataplane.live.gateway.events import EventLog
from dataplane.live.gateway.fleet_core import CoreSettings, FleetCore
from dataplane.live.gateway.metrics import Metrics
from dataplane.live.ledger.placement import Placement
from dataplane.live.ledger.request import CURRENT_TICKET, Ticket
from harness.bare_fleet import token_request

WHATS = (
    *("kill", "kill", "kill both", "detach", "close", "join"),
    *("leave", "leave", "move", "move", "slow link", "cut link"),
)
STAGES = (None, Stage.PENDING, Stage.COPYING, Stage.CUTTING_OVER)
STREAMS, FAULTS, WORKERS = 8, 10, 3
OUTPUTS = (20, 200)
SETTLE_S, FREE_S = 60.0, 5.0
SLO = Slo(10.0, 1.0)
PROFILE = Profile(
    model="any",
    gpu="none",
    tp_degree=1,
    step=StepModel(0.002, 1e-6, 1e-5, 1e-9),
    kv=KvModel(capacity_tokens=16 * 192, block_tokens=16, bytes_per_token=20_000),  # some preempt
    engine=EngineLimits(max_batched_tokens=512, max_seqs=8),
    residuals=Residuals(0.0, 0.0, 0.0, 1),
    source=Source("composed", "made up for schedules of faults", "none", "2026-01-01"),
)


@dataclass(frozen=True, slots=True)
class Fault:
    """What happens once clients have received `after` tokens in all.

    `stream` counts among those that run then: its worker is hit. `at`: the stage of a move of that stream to
    wait for; None needs no move. `victim`: which end of the move.
    """

    after: int
    what: str
    stream: int
    at: Stage | None
    victim: Literal["source", "target"]


@dataclass(frozen=True, slots=True)
class Schedule:
    """Prompts and outputs of the streams, the tokens received before each begins, and the faults in order."""

    prompts: tuple[tuple[int, ...], ...]
    outputs: tuple[int, ...]
    begins: tuple[int, ...]
    faults: tuple[Fault, ...]


@dataclass(slots=True)
class History:
    """What every client sent and saw, what happened meanwhile, and what was left at the end."""

    schedule: Schedule
    sent: set[str] = field(default_factory=set)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    ends: dict[str, list[str]] = field(default_factory=dict)
    left: set[str] = field(default_factory=set)
    happened: Counter[str] = field(default_factory=Counter)
    too_many: int = 0  # the most requests that the core had beyond those sent and not ended
    remains: dict[str, int] = field(default_factory=dict)
    counted: tuple[int, int] | None = None  # requests that ended in the core, and that finished there
    expected: list[list[int]] | None = None  # the streams undisturbed, of an engine with a model
    lost: dict[str, str] = field(default_factory=dict)  # workers, and why, as the fleet reports it


def schedule_of(seed: int, whats: Sequence[str] = WHATS, together: int = 1) -> Schedule:
    """The schedule of a seed, of these faults. Those within `together` tokens happen at one moment."""
    rng = np.random.default_rng(seed)
    outputs = tuple(int(n) for n in rng.integers(*OUTPUTS, STREAMS))
    total = sum(outputs)
    prompts = tuple(tuple(rng.integers(1, 2000, n).tolist()) for n in rng.integers(3, 400, STREAMS))
    faults = [
        Fault(
            after // together * together,
            whats[int(rng.integers(len(whats)))],
            int(rng.integers(STREAMS)),
            STAGES[int(rng.integers(len(STAGES)))],
            "source" if rng.random() < 0.5 else "target",
        )
        for after in sorted(rng.integers(0, int(0.9 * total), FAULTS).tolist())
    ]
    begins = sorted([0, 0, *rng.integers(0, total // 2, STREAMS - 2).tolist()])
    return Schedule(prompts, outputs, tuple(begins), tuple(faults))


def violations(history: History) -> list[str]:
    """What no client and no operator may see, a sentence each; an explicit error is allowed.

    Each token comes once and in order. No unfinished stream ends cleanly, and each stream ends once. No
    request and no KV block stays behind. The core never has more requests than were sent and have not ended.
    """
    return list(_of_streams(history)) + list(_of_fleet(history))


def _of_streams(history: History) -> Iterator[str]:
    plan = history.schedule
    for i, (prompt, wanted) in enumerate(zip(plan.prompts, plan.outputs, strict=True)):
        name = f"r{i}"
        got, ends = history.tokens.get(name, []), history.ends.get(name, [])
        if name not in history.sent:
            yield f"{name}: was never sent"
        whole = Noise().continuation(prompt, wanted) if history.expected is None else history.expected[i]
        if got != whole[: len(got)]:
            yield f"{name}: a token was lost, repeated or swapped"
        if len(ends) != 1:
            yield f"{name}: ended {len(ends)} times"
        elif ends[0] == "LENGTH" and len(got) != wanted:
            yield f"{name}: ended as if whole after {len(got)} of {wanted} tokens"
        elif ends[0] == "ABORT" and name not in history.left:
            yield f"{name}: was aborted though its client stayed"
        elif ends[0] not in ("LENGTH", "ABORT", "ERROR"):
            yield f"{name}: ended in {ends[0]}"


def _of_fleet(history: History) -> Iterator[str]:
    if history.too_many:
        yield f"the core had {history.too_many} requests too many at an instant"
    for what, count in history.remains.items():
        if count:
            yield f"{count} {what} were left"
    if history.counted is not None:
        ended, finished = history.counted
        whole = sum(ends == ["LENGTH"] for ends in history.ends.values())
        if not whole <= finished <= min(ended, whole + len(history.left)) <= ended <= len(history.sent):
            of = f"of {len(history.sent)} sent, {whole} of them whole"
            yield f"the core counted {ended} requests that ended, {finished} that finished, {of}"


async def played(schedule: Schedule) -> History:
    """Play a schedule on a fresh fleet until every stream has ended and nothing more is freed."""
    play = _Play(schedule)
    try:
        async with asyncio.timeout(SETTLE_S):
            await asyncio.gather(play.send(), play.happen())
            while len(play.history.ends) < STREAMS or len(play.core.requests):
                await asyncio.sleep(0.002)
    except TimeoutError:
        play.history.happened["did not settle"] += 1
    await play.close()
    return play.history


class _Play:
    """A fleet of emulated engines that a schedule happens to."""

    def __init__(self, schedule: Schedule) -> None:
        self.history = History(schedule)
        self.fabric = Fabric(speed=4.0)
        self.engines: dict[WorkerId, EmulatedEngine] = {}
        placement = Placement({"": PROFILE}, 64, LengthTable.constant(100), np.random.default_rng(0))
        self.core = FleetCore(CoreSettings(64, SLO), placement, Metrics(), EventLog(), lambda *_: OUTPUTS[1])
        for _ in range(WORKERS):
            self._join()
        self._news = asyncio.Event()
        self._moves: list[asyncio.Future[Any]] = []
        self._pump = asyncio.ensure_future(self._read())

    def _join(self) -> None:
        worker = WorkerId(f"w{len(self.engines)}")
        self.engines[worker] = EmulatedEngine(worker, PROFILE, self.fabric)
        self.core.attach(self.engines[worker])

    async def _read(self) -> None:
        seen = self.history
        while True:
            for output in (await self.core.get_output_async()).outputs:
                name = output.request_id
                seen.tokens.setdefault(name, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    seen.ends.setdefault(name, []).append(output.finish_reason.name)
            seen.too_many = max(seen.too_many, len(self.core.requests) - len(seen.sent - seen.ends.keys()))
            self._news.set()

    async def _reached(self, tokens: int) -> None:
        """Return once clients have received `tokens` tokens in all, or every stream sent has ended."""
        while True:
            received = sum(map(len, self.history.tokens.values()))
            if received >= tokens or not self.history.sent - self.history.ends.keys():
                return
            self._news.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(0.05):
                    await self._news.wait()

    async def send(self) -> None:
        """Begin each stream in its turn."""
        plan = self.history.schedule
        for i, (prompt, tokens, begin) in enumerate(
            zip(plan.prompts, plan.outputs, plan.begins, strict=True)
        ):
            await self._reached(begin)
            name = f"r{i}"
            CURRENT_TICKET.set(Ticket(name, "schedule", SLO, 0))
            self.history.sent.add(name)
            await self.core.add_request_async(token_request(name, prompt, {"max_tokens": tokens}))

    async def happen(self) -> None:
        """Let each fault happen in its turn; a fleet never stays without a worker that takes requests."""
        for fault in self.history.schedule.faults:
            await self._reached(fault.after)
            await self._happen(fault)
            usable = [e for e in self.engines.values() if not e.is_lost]
            if len(usable) < 2:
                self._join()

    async def _happen(self, fault: Fault) -> None:
        running = [r for r in self.core.requests if r.worker is not None]
        if not running:
            self.history.happened["nothing: no stream runs"] += 1
            return
        tracked = running[fault.stream % len(running)]
        name, source = str(tracked.id), tracked.worker
        assert source is not None
        target = next((w for w, e in self.engines.items() if w != source and not e.is_lost), source)
        stage = "no move"
        if fault.at is not None or fault.what == "move":
            moving = asyncio.ensure_future(self.core.segments.move(tracked.id, target, "a schedule"))
            self._moves.append(moving)
            while fault.at is not None and not moving.done():
                open_move = self.core.migrations.open.get(tracked.id)
                if open_move is not None and open_move.stage is fault.at:
                    stage = fault.at.name.lower()
                    break
                await asyncio.sleep(0)
        victim = source if fault.victim == "source" else target
        self.history.happened[f"{fault.what} at {stage}"] += 1
        if fault.what in ("kill", "kill both"):
            for worker in {victim} if fault.what == "kill" else {source, target}:
                self.engines[worker].kill("kill -9")
        elif fault.what == "detach":
            await self.core.detach(victim)
        elif fault.what == "close":
            self._join()
            self.core.set_open(victim, False)
        elif fault.what == "join":
            self._join()
        elif fault.what == "leave" and name not in self.history.ends:
            self.history.left.add(name)
            await self.core.abandon(tracked.ticket)
        elif fault.what == "slow link":
            self.fabric.bytes_per_s = 1e7
            asyncio.get_running_loop().call_later(0.05, setattr, self.fabric, "bytes_per_s", 2e9)
        elif fault.what == "cut link":
            self._cut(victim)

    def _cut(self, worker: WorkerId) -> None:
        """Hide an engine's KV from the others for 30 ms. The engine itself goes on."""
        engine = self.engines[worker]
        address = engine.info.kv_addresses[0]
        self.fabric.engines.pop(address, None)

        def mend() -> None:
            if not engine.is_lost:
                self.fabric.engines[address] = engine

        asyncio.get_running_loop().call_later(0.03, mend)

    async def close(self) -> None:
        """Count what is left once all that will be freed is, and end the fleet."""
        living = [e for e in self.engines.values() if not e.is_lost]
        with suppress(TimeoutError):
            async with asyncio.timeout(FREE_S):  # a hold that was not released has its own time limit
                await asyncio.gather(*self._moves, return_exceptions=True)
                while any(e.batch.free_blocks < e.batch.total_blocks for e in living):
                    await asyncio.sleep(0.005)
        self.history.remains = {
            "KV blocks": sum(e.batch.total_blocks - e.batch.free_blocks for e in living),
            "requests in engines": sum(len(e.batch) for e in living),
            "requests in the core": len(self.core.requests),
            "requests in the ledger": len(self.core.placement.request_rows),
            "moves": len(self.core.migrations.open),
        }
        await asyncio.to_thread(self.core.shutdown, 0.0)
        for at in tuple(self.core.attached()):
            await self.core.detach(at.worker)
        self._pump.cancel()
