"""The migration coordinator: walks the move of a running request through `controlplane.migration.move`.

The truth is the client's token list, F tokens long with the prompt. The KV of positions 0 … F-2 is complete
at the source, for the step that made the last token has ended. So, while the source decodes on:

1. *begin* at the source, and wait for its answer: its blocks may be read, and outlive the request.
2. pre-copy: a *loader* on the target takes the full blocks so far and holds them; again for what was
   decoded meanwhile, until less than two blocks are missing. The target's engine looks for cached blocks as
   it admits the loader. It uses and keeps those that it finds, and takes only the others. A *hand-over* off a
   prefill worker may begin before the first token: its first loader waits for the chunks as they are
   computed.
3. cut over: the client's stream listens to a continuation on the target, which computes exactly one token.
   Its prompt is found in the loaders' blocks, and its tail of KV is taken from the source.
4. release both.

A cached prefix that no request uses is *brought* from cache to cache (`bring`). A *keeper* holds its blocks
at the source, and a loader takes them at the target. When both are released the target has them cached.

Before 3 any failure leaves the request where it was. After 3 FleetCore replays it from its tokens.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import defaultdict, deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from itertools import count

from controlplane.migration.move import CLOSED, Happened, Stage
from controlplane.types import RequestId, WorkerId
from dataplane.live.engine_api import kv_messages as kv
from dataplane.live.engine_api import segment
from dataplane.live.engine_api.link import WorkerInfo
from dataplane.live.engine_api.messages import EngineRequest, Finish, SegmentOutput
from dataplane.live.migration.move import (
    CopyFailed,
    EngineCalls,
    Mode,
    MovableFleet,
    MoveBudget,
    MovePaces,
    MoveRecord,
    Running,
)

log = logging.getLogger(__name__)
FIRST_TOKEN_S = 0.002  # between two looks for it
REMEMBERED_MOVES = 1000
MOST_MOVES = 16  # at once, without those from prefill to decode
MOST_STAGES = 8  # of pre-copies, before the rest is copied in a pause


class RequestEnded(Exception):
    """The request runs nowhere any more: it finished, its client left, or its worker was lost."""


class Migrations:
    """The moves of one gateway's requests: those open, and the last ones closed."""

    def __init__(self, fleet: MovableFleet, budget: MoveBudget) -> None:
        self._fleet = fleet
        self._budget = budget
        # Several gateways may move requests to and from one worker; their ids must differ there.
        self._gateway = secrets.token_hex(4)
        self._ids = count(1)
        self._slots = asyncio.Semaphore(MOST_MOVES)
        self._worker_slots: defaultdict[WorkerId, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(budget.per_worker)
        )
        self._handover_slots: defaultdict[WorkerId, asyncio.Semaphore] = defaultdict(
            lambda: asyncio.Semaphore(budget.handovers)
        )
        self.engines = EngineCalls(fleet, budget.stage_s)
        self.paces = MovePaces()
        self.open: dict[RequestId, MoveRecord] = {}
        self.closed: deque[MoveRecord] = deque(maxlen=REMEMBERED_MOVES)

    async def migrate(
        self,
        request: RequestId,
        target: WorkerId,
        mode: Mode = "live",
        why: str = "",
        hurried: bool = False,
    ) -> MoveRecord:
        """Move a request, waiting for the budget; return the closed move. Raises nothing of its own.

        `stop-and-copy` copies all KV after the cut-over, `recompute` none: what live migration is measured
        against. The first is also what is done where prefixes are not cached, the second between workers of
        two kinds, which lay KV out differently.
        `hurried`: its worker must be gone soon, so its copy takes what it can.
        """
        running = self._fleet.running(request)
        source = None if running is None else running.worker
        name = f"{kv.LOADER_PREFIX}{self._gateway}-{next(self._ids)}"
        move = MoveRecord(name, request, source, target, mode, time.time(), why=why, hurried=hurried)
        if request in self.open:
            move.take(Happened.REFUSED, "it is already being moved")
            return self._close(move)
        self.open[request] = move
        try:
            async with self._budgeted(source, target, mode):
                await self._walk(move)
        finally:
            del self.open[request]
            if move.stage not in CLOSED:  # cancelled
                ended = Happened.RESUME_FAILED if move.stage is Stage.CUTTING_OVER else Happened.ENDED
                move.take(ended, "given up by its caller")
            self._close(move)
        return move

    async def bring(self, text: EngineRequest, tokens: int, source: WorkerId, target: WorkerId) -> int:
        """Copy the KV of a text's first `tokens` from one worker's cache to another's; how many were sent.

        Raises CopyFailed; nothing is held anywhere then.
        """
        name = f"{kv.LOADER_PREFIX}{self._gateway}-{next(self._ids)}"
        keeper, loader = f"{name}-keeper", f"{name}-loader"

        def check() -> bool:
            self.engines.info(source), self.engines.info(target)  # raise where one is gone
            return False

        async with self._budgeted(source, target, "live"):
            info = self.engines.info(source)
            try:
                kept = await self.engines.answer(
                    check, source, keeper, segment.keeper_request(text, keeper, tokens)
                )
                if kept.finish_reason != Finish.LENGTH:
                    raise CopyFailed(f"{source} could not keep a text")
                pace = self._budget.pace(tokens * info.kv_bytes_per_token)
                load = kv.KvLoad(info.kv_addresses, keeper, tokens, pace=pace, secret=info.kv_secret)
                request = segment.loader_request(text, (), loader, load, ())
                answer = await self.engines.answer(check, target, loader, request)
                if answer.finish_reason not in (Finish.LENGTH, Finish.STOP):
                    raise CopyFailed(f"{target} could not load a text")
                return _taken(answer, tokens)
            except BaseException:
                await self.engines.end(target, loader)
                await self.engines.end(source, keeper)
                raise
            finally:
                await self.engines.release(name, text, target, loader)
                await self.engines.release(name, text, source, keeper)

    def find(self, move: str) -> MoveRecord | None:
        """A move by its id, open or closed."""
        moves = [*self.open.values(), *self.closed]
        return next((m for m in moves if m.id == move), None)

    def _close(self, move: MoveRecord) -> MoveRecord:
        self.closed.append(move)
        self.paces.learn(move)
        log.info("%s of %s to %s: %s %s", move.id, move.request, move.target, move.outcome, move.reason)
        return move

    @asynccontextmanager
    async def _budgeted(self, source: WorkerId | None, target: WorkerId, mode: Mode) -> AsyncIterator[None]:
        # Always in the same order, so that two moves never wait for each other.
        workers = sorted({w for w in (source, target) if w is not None})
        needed = [*(self._worker_slots[w] for w in workers), self._slots]
        if mode == "hand-over":
            needed = [self._handover_slots[target]]
        taken = []
        try:
            for slots in needed:
                await slots.acquire()
                taken.append(slots)
            yield
        finally:
            for slots in taken:
                slots.release()

    async def _walk(self, move: MoveRecord) -> None:
        running = self._fleet.running(move.request)
        if running is None:
            move.take(Happened.ENDED, "it ended before its turn")
            return
        move.source = running.worker
        refusal = self._refusal(running, move)
        if refusal is not None:
            move.take(Happened.REFUSED, refusal)
            return
        if not running.output_token_ids and move.mode != "hand-over":
            move.take(Happened.WAITING)
            await self._cut_over(move, running, kv.Transfer())
            return
        if layout(self.engines.info(running.worker)) != layout(self.engines.info(move.target)):
            move.mode = "recompute"
            move.reason = f"{running.worker} and {move.target} lay KV out differently, so it is recomputed"
        elif move.mode == "live" and not self.engines.info(move.target).caches_prefixes:
            move.mode = "stop-and-copy"
            move.reason = f"{move.target} caches no prefixes, so nothing can be copied ahead"
        await self._move_running(move, running)

    def _refusal(self, running: Running, move: MoveRecord) -> str | None:
        source, target = self._fleet.link(running.worker), self._fleet.link(move.target)
        if source is None or target is None:
            return f"{running.worker if source is None else move.target} is gone"
        if running.worker == move.target:
            return f"it is on {move.target} already"
        if meaning(source.info) != meaning(target.info):
            return f"{running.worker} and {move.target} do not run the same model in the same way"
        return segment.obstacle_to_move(running.request, running.output_token_ids, source.info)

    async def _move_running(self, move: MoveRecord, running: Running) -> None:
        loader: str | None = None
        copied = 0
        move.take(Happened.ACCEPTED)
        resumed = False
        try:
            if move.mode != "recompute":
                await self._begin(move, running)
            block = self.engines.info(running.worker).block_tokens
            is_stream = not running.output_token_ids
            while move.mode in ("live", "hand-over") and len(move.stages) < MOST_STAGES:
                tokens = (running.tokens - 1) // block * block
                if tokens - copied < (2 * block if copied else block):
                    break
                began_s = time.monotonic()
                loader, taken = await self._copy(move, running, tokens, copied, loader, is_stream)
                move.copy_s += time.monotonic() - began_s
                is_stream = False
                move.stages.append(tokens - copied)
                move.cached_tokens += tokens - copied - taken
                move.copied_bytes += taken * self.engines.info(running.worker).kv_bytes_per_token
                copied = tokens
                move.take(Happened.COPIED)
                while not running.output_token_ids:  # on its way: the KV overtook it
                    await asyncio.sleep(FIRST_TOKEN_S)
                    self._check(move, running)
            self._check(move, running)
            transfer = self._last_load(move, running, copied, loader)
            move.take(Happened.SWITCHED)
            resumed = await self._cut_over(move, running, transfer)
        except RequestEnded:
            move.take(Happened.ENDED, "it ended, or left its worker, while it was copied")
        except CopyFailed as failure:
            move.take(Happened.COPY_FAILED, str(failure))
        finally:
            # The continuation drops the loader at its admission. If it gave no token, it may never have been
            # admitted.
            if loader is not None and not resumed:
                await self.engines.release(move.id, running.request, move.target, loader)
            if move.mode != "recompute":
                await self.engines.release(move.id, running.request, running.worker, running.segment)

    def _last_load(self, move: MoveRecord, running: Running, copied: int, loader: str | None) -> kv.Transfer:
        if move.mode == "recompute":
            return kv.Transfer()
        info = self.engines.info(running.worker)
        tokens = running.tokens - 1
        move.tail_tokens = tokens - copied
        blocks = -(-tokens // info.block_tokens) - copied // info.block_tokens
        move.tail_bytes = blocks * info.block_tokens * info.kv_bytes_per_token
        # A short tail is loaded in the step that resumes; a long one would stop every other request of
        # the target for as long as it travels.
        inline = move.tail_tokens <= 4 * info.block_tokens
        load = kv.KvLoad(info.kv_addresses, running.segment, tokens, inline, secret=info.kv_secret)
        return kv.Transfer(load, drop=() if loader is None else (loader,))

    async def _cut_over(self, move: MoveRecord, running: Running, transfer: kv.Transfer) -> bool:
        """Switch the stream; return whether the target gave a token."""
        began_s = time.monotonic()
        # Runs up to its first wait in this very turn of the loop, so `running` is not stale in it.
        arrival = await self._fleet.cut_over(move.request, move.target, transfer)
        resumed = await arrival
        if resumed:
            if running.output_token_ids:
                move.downtime_s = time.monotonic() - began_s
            move.take(Happened.RESUMED)
        elif self._fleet.running(move.request) is None and self._fleet.link(move.target) is not None:
            move.take(Happened.ENDED, "it ended before the target's first token")
        else:
            move.take(Happened.RESUME_FAILED, f"{move.target} could not go on; replayed from its tokens")
        return resumed

    async def _copy(
        self,
        move: MoveRecord,
        running: Running,
        tokens: int,
        copied: int,
        previous: str | None,
        is_stream: bool,
    ) -> tuple[str, int]:
        """One pre-copy: bring the KV of [0, tokens) to the target, except what the target has cached.

        Return the loader that holds it, and the tokens taken from the source.
        """
        self._check(move, running)
        name = f"{move.id}-{len(move.stages)}"
        source = self.engines.info(running.worker)
        size = tokens * source.kv_bytes_per_token
        pace = kv.UNBOUND if move.hurried else self._budget.pace(size)
        where, secret = source.kv_addresses, source.kv_secret
        load = kv.KvLoad(where, running.segment, tokens, pace=pace, stream=is_stream, secret=secret)
        drop = () if previous is None else (previous,)
        request = segment.loader_request(running.request, running.output_token_ids, name, load, drop)
        try:
            check = partial(self._check, move, running)
            answer = await self.engines.answer(check, move.target, name, request)
            if answer.finish_reason not in (Finish.LENGTH, Finish.STOP):
                raise CopyFailed(f"{move.target} could not load the KV of {running.segment}")
        except BaseException:
            # Whatever went wrong, this loader and what it was to take over from must go.
            await self.engines.end(move.target, name)
            for loader in (name, *drop):
                await self.engines.release(move.id, running.request, move.target, loader)
            raise
        return name, _taken(answer, tokens - copied)

    async def _begin(self, move: MoveRecord, running: Running) -> None:
        """Lease the source's segment, and return once the source has said so."""
        name = f"{move.id}-begin-{running.segment}"
        request = segment.control_request(running.request, name, kv.Control("begin", running.segment))
        check = partial(self._check, move, running)
        answer = await self.engines.answer(check, running.worker, name, request)
        if answer.finish_reason == Finish.ERROR:
            raise RequestEnded

    def _check(self, move: MoveRecord, running: Running) -> bool:
        """Whether to be patient with an engine: what is waited for is the prefill.

        Raises RequestEnded or CopyFailed where the request or a worker of the move is no longer there.
        """
        now = self._fleet.running(move.request)
        if now is None:
            raise RequestEnded
        if now.segment != running.segment:
            raise CopyFailed(f"{running.worker} is gone; the request is being replayed")
        for worker in (running.worker, move.target):
            if self._fleet.link(worker) is None:
                raise CopyFailed(f"{worker} is gone")
        return not running.output_token_ids


def _taken(answer: SegmentOutput, most: int) -> int:
    """The tokens that a loader took from its source, of `most`: all, where its engine does not say."""
    if answer.finish_reason == Finish.LENGTH:
        return 0
    told = kv.loaded_tokens(answer)
    return most if told is None else told


def meaning(info: WorkerInfo) -> tuple[str, ...]:
    """The settings that must be equal for one engine to continue another's output token for token."""
    return (info.engine, info.model, info.weights, info.dtype, info.vllm_version)


def layout(info: WorkerInfo) -> tuple[int | str, ...]:
    """The settings that must also be equal for one engine to read another's KV blocks."""
    return (info.block_tokens, info.kv_bytes_per_token, info.kv_dtype, info.tp_degree)
