"""The slow, obvious engine with a prefix cache: one chunked worker, block by block and step by step.

The judge of the compiled caches. It follows vLLM's scheduler and block pool as their code reads: blocks have
numbers; there are a queue of free ones and a table of ids. It shares no code with `dataplane.simulated`.
Every block is taken, stored, evicted and freed one by one; nothing is jumped.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from controlplane.perfmodel.profile import Profile
from controlplane.workload import Workload


@dataclass(eq=False)
class _Block:
    number: int
    id: Hashable = None
    users: int = 0


@dataclass
class _Pool:
    """All blocks of a worker; `free` from the one taken next to the one taken last."""

    free: list[_Block]
    table: dict[Hashable, dict[int, _Block]] = field(default_factory=dict)
    evicted: list[Hashable] = field(default_factory=list)

    def find(self, block_id: Hashable) -> _Block | None:
        return next(iter(self.table[block_id].values())) if block_id in self.table else None

    def take(self, count: int) -> list[_Block]:
        taken, self.free = self.free[:count], self.free[count:]
        for block in taken:
            if block.id is not None:
                del self.table[block.id][block.number]
                if not self.table[block.id]:
                    del self.table[block.id]
                self.evicted.append(block.id)
                block.id = None
            block.users = 1
        return taken

    def touch(self, blocks: Sequence[_Block]) -> None:
        for block in blocks:
            if block.users == 0:
                self.free.remove(block)
            block.users += 1

    def store(self, block: _Block, block_id: Hashable) -> None:
        block.id = block_id
        self.table.setdefault(block_id, {})[block.number] = block

    def release(self, blocks: Sequence[_Block]) -> None:
        """Free the blocks of a request, given first to last."""
        nobodys = []
        for block in reversed(blocks):
            block.users -= 1
            if block.users == 0:
                nobodys.append(block)
        empty = [b for b in nobodys if b.id is None]
        self.free = empty + self.free + [b for b in nobodys if b.id is not None]


@dataclass(eq=False)
class _Chunk:
    id: Hashable
    loads: int = 0
    is_new: bool = True  # of the step that is planned


class _Host:
    """Host memory of `room` blocks; `chunks` from the one used longest ago to the one used last."""

    def __init__(self, room: int, block_s: float) -> None:
        self.room, self.block_s, self.free_s = room, block_s, 0.0
        self.chunks: dict[Hashable, _Chunk] = {}
        self.evicted: list[Hashable] = []

    def use(self, block_id: Hashable) -> None:
        if block_id in self.chunks:
            self.chunks[block_id] = self.chunks.pop(block_id)

    def offer(self, r: CachedRequest, full: int) -> None:
        """Take a request's full blocks, those that it has not offered yet, if there is room for all."""
        ids = [r.block_id(block) for block in range(r.offered, full)]
        if not ids:
            return
        new = [i for i in ids if i not in self.chunks]
        r.used |= {i for i in ids if i in new or not self.chunks[i].is_new}
        idle = [c.id for c in self.chunks.values() if not c.loads and not c.is_new]
        may_go = [i for i in idle if i not in ids]
        need = max(len(self.chunks) + len(new) - self.room, 0)
        if need > len(may_go):
            return
        for gone in may_go[:need]:
            del self.chunks[gone]
            self.evicted.append(gone)
        self.chunks |= {i: _Chunk(i) for i in new}
        r.offered = full


@dataclass(eq=False)
class CachedRequest:
    """One request: its inputs, its state, and what became of it."""

    index: int
    arrival_s: float
    prompt: int
    output: int
    priority: int
    ids: Sequence[int]
    generated: int = 0
    computed: int = 0
    prefill: int = 0  # its tokens when it was admitted
    blocks: list[_Block] = field(default_factory=list)
    cached_tokens: int | None = None  # when it was first admitted
    loaded_tokens: int = 0  # of these, from host memory
    offered: int = 0  # blocks
    used: set[Hashable] = field(default_factory=set)  # of host memory
    loads: list[_Chunk] = field(default_factory=list)
    ready_s: float = 0.0  # when they are there
    is_found: bool = True  # what it has loaded can be hit by others
    preemptions: int = 0
    first_token_s: float | None = None
    finish_s: float | None = None

    @property
    def tokens(self) -> int:
        return self.prompt + self.generated

    @property
    def decoding(self) -> bool:
        return self.computed >= self.prefill

    def block_id(self, block: int) -> Hashable:
        return self.ids[block] if block < len(self.ids) else ("own", self.index, block)


@dataclass(frozen=True)
class Step:
    """What one step did: tokens by request in the order they were planned, who was preempted, blocks free."""

    scheduled: dict[int, int]
    preempted: list[int]
    free: int


class CachedWorker:
    """One worker, driven step by step; `run` goes to the end."""

    def __init__(self, profile: Profile, workload: Workload, host: tuple[int, float] | None = None) -> None:
        """`host`: blocks that host memory has room for, and the seconds that one takes to be loaded."""
        assert workload.prefixes is not None
        assert workload.prefixes.block_tokens == profile.kv.block_tokens
        self.profile = profile
        self.block = profile.kv.block_tokens
        self.pool = _Pool([_Block(n) for n in range(profile.kv.capacity_tokens // self.block)])
        rows = zip(
            workload.arrival_s.tolist(),
            workload.prompt_tokens.tolist(),
            workload.output_tokens.tolist(),
            workload.priority.tolist(),
            strict=True,
        )
        self.requests = [
            CachedRequest(i, *row, workload.prefixes.of(i).tolist()) for i, row in enumerate(rows)
        ]
        self.coming = list(self.requests)
        self.waiting: tuple[list[CachedRequest], list[CachedRequest]] = ([], [])  # high, normal
        self.running: list[CachedRequest] = []
        self.steps: list[Step] = []
        self.host = None if host is None else _Host(*host)
        self.loading: list[CachedRequest] = []
        self.ended: list[CachedRequest] = []

    def run(self) -> CachedWorker:
        """Serve every request."""
        now_s = 0.0
        while self.coming or self.running or any(self.waiting) or self.loading or self.ended:
            if not (self.running or any(self.waiting) or self.loading or self.ended):
                now_s = max(now_s, self.coming[0].arrival_s)
            self.receive(now_s)
            now_s = self.step(now_s)
        return self

    def receive(self, now_s: float) -> None:
        while self.coming and self.coming[0].arrival_s <= now_s:
            request = self.coming.pop(0)
            self._queue(request).append(request)

    def step(self, now_s: float) -> float:
        """Take one step; when it ends."""
        scheduled: dict[CachedRequest, int] = {}
        self._end_loads(now_s)
        preempted = self._plan_running(scheduled)
        if not preempted and self._plan_loaded(scheduled):
            self._plan_waiting(scheduled, now_s)
        self._offer(scheduled)
        if not scheduled:  # a step of nothing: the next is planned at once, unless nothing can have changed
            return now_s if preempted else self._idle_until_s(now_s)
        row = {r.index: tokens for r, tokens in scheduled.items()}
        self.steps.append(Step(row, [r.index for r in preempted], len(self.pool.free)))
        end_s = now_s + self._lasts_s(scheduled)
        for r, tokens in scheduled.items():
            r.computed += tokens
            if r.computed == r.tokens:
                r.generated += 1
                r.first_token_s = end_s if r.first_token_s is None else r.first_token_s
            if r.generated == r.output:
                r.finish_s = end_s
                self.pool.release(r.blocks)
                if self.host is not None:  # its blocks there are used when the next step is planned
                    self.ended.append(r)
        self.running = [r for r in self.running if r.finish_s is None]
        return end_s

    def _queue(self, r: CachedRequest) -> list[CachedRequest]:
        return self.waiting[0] if r.priority else self.waiting[1]

    def _plan_running(self, scheduled: dict[CachedRequest, int]) -> list[CachedRequest]:
        preempted: list[CachedRequest] = []
        i = 0
        while i < len(self.running) and self._budget(scheduled) > 0:
            r = self.running[i]
            tokens = min(r.tokens - r.computed, self._budget(scheduled))
            while not self._grow(r, tokens):
                victim = self.running.pop()
                self.pool.release(victim.blocks)
                victim.blocks, victim.computed = [], 0
                victim.preemptions += 1
                preempted.append(victim)
                self._queue(victim).insert(0, victim)
                if victim is r:
                    return preempted
            scheduled[r] = tokens
            i += 1
        return preempted

    def _idle_until_s(self, now_s: float) -> float:
        times = [r.ready_s for r in self.loading if r.ready_s > now_s] + [
            r.arrival_s for r in self.coming[:1]
        ]
        return min(times) if times else now_s  # where none is, a request has just ended

    def _end_loads(self, now_s: float) -> None:
        """What loads are done by now lets go of its blocks; what the last step stored is there."""
        for chunk in [] if self.host is None else self.host.chunks.values():
            chunk.is_new = False
        for r in self.loading:
            if r.ready_s <= now_s:
                for chunk in r.loads:
                    chunk.loads -= 1
                r.loads = []

    def _plan_loaded(self, scheduled: dict[CachedRequest, int]) -> bool:
        """Begin the prefill of those whose blocks are there; whether those that wait are looked at too."""
        for r in list(self.loading):
            if self._budget(scheduled) == 0 or len(self.running) >= self.profile.engine.max_seqs:
                return False
            if r.loads:
                continue
            if not r.is_found:
                for number, block in enumerate(r.blocks):
                    if block.id is None:
                        self.pool.store(block, r.block_id(number))
                r.is_found = True
            if self._blocks(r.tokens) - len(r.blocks) > len(self.pool.free):
                return False
            self.loading.remove(r)
            r.computed = min(r.computed, r.tokens - 1)
            tokens = min(r.tokens - r.computed, self._budget(scheduled))
            assert self._grow(r, tokens)
            self.running.append(r)
            scheduled[r] = tokens
        return True

    def _in_host(self, r: CachedRequest, hits: int) -> list[_Chunk] | None:
        """The blocks that host memory has beyond a request's hits; None where another loads one of them."""
        found: list[_Chunk] = []
        if self.host is not None:
            for block in range(hits, r.tokens // self.block):
                if r.block_id(block) not in self.host.chunks:
                    break
                found.append(self.host.chunks[r.block_id(block)])
        return None if any(chunk.loads for chunk in found) else found

    def _load(self, r: CachedRequest, hits: list[_Block], found: list[_Chunk], now_s: float) -> bool:
        """Let a request load what it needs, if there is memory for it on top of what others still need."""
        assert self.host is not None
        begun = [p for p in self.running if p.computed < p.prefill] + self.loading
        kept = sum(self._blocks(p.tokens) - len(p.blocks) for p in begun)
        asleep = sum(block.users == 0 for block in hits)
        if len(found) + asleep > len(self.pool.free) - kept:
            return False
        self.pool.touch(hits)
        r.blocks = hits + self.pool.take(len(found))
        r.computed = len(r.blocks) * self.block
        r.prefill = r.tokens
        if r.cached_tokens is None:
            r.cached_tokens = min(r.computed, r.tokens - 1)
            r.loaded_tokens = r.cached_tokens - len(hits) * self.block
        for chunk in found:
            chunk.loads += 1
        self.host.free_s = max(now_s, self.host.free_s) + len(found) * self.host.block_s
        r.loads, r.ready_s, r.is_found = found, self.host.free_s, False
        r.offered = len(r.blocks)
        r.used |= {chunk.id for chunk in found}
        self.loading.append(r)
        return True

    def _offer(self, scheduled: dict[CachedRequest, int]) -> None:
        """Offer what this step fills; then the blocks of what has ended are used, the last one first."""
        if self.host is None:
            return
        for r, tokens in scheduled.items():
            self.host.offer(r, min(r.computed + tokens, r.prompt) // self.block)
        for r in self.ended:
            self.host.offer(r, r.prompt // self.block)
        for r in self.ended:
            for block in reversed(range(r.tokens // self.block)):
                if r.block_id(block) in r.used:
                    self.host.use(r.block_id(block))
        self.ended = []

    def _plan_waiting(self, scheduled: dict[CachedRequest, int], now_s: float) -> None:
        for r in self.waiting[0] + self.waiting[1]:
            if self._budget(scheduled) == 0 or len(self.running) >= self.profile.engine.max_seqs:
                return
            hits: list[_Block] = []
            while len(hits) < (r.tokens - 1) // self.block:
                block = self.pool.find(r.block_id(len(hits)))
                if block is None:
                    break
                hits.append(block)
            found = self._in_host(r, len(hits))
            if found is None:
                continue
            asleep = sum(block.users == 0 for block in hits)
            if self._blocks(r.tokens) - len(hits) + asleep > len(self.pool.free):
                return
            if found:
                if not self._load(r, hits, found, now_s):
                    return
                self._queue(r).remove(r)
                continue
            r.computed = len(hits) * self.block
            tokens = min(r.tokens - r.computed, self._budget(scheduled))
            self.pool.touch(hits)
            r.blocks = hits
            assert self._grow(r, tokens)
            r.prefill = r.tokens
            r.cached_tokens = r.computed if r.cached_tokens is None else r.cached_tokens
            self._queue(r).remove(r)
            self.running.append(r)
            scheduled[r] = tokens

    def _grow(self, r: CachedRequest, tokens: int) -> bool:
        """Take the blocks for a request's next tokens, and store those that are full then."""
        need = self._blocks(r.computed + tokens) - len(r.blocks)
        if need > len(self.pool.free):
            return False
        r.blocks += self.pool.take(need)
        for number in range((r.computed + tokens) // self.block):
            if r.blocks[number].id is None:
                self.pool.store(r.blocks[number], r.block_id(number))
        return True

    def _blocks(self, tokens: int) -> int:
        return -(-tokens // self.block)

    def _budget(self, scheduled: dict[CachedRequest, int]) -> int:
        return self.profile.engine.max_batched_tokens - sum(scheduled.values())

    def _lasts_s(self, scheduled: dict[CachedRequest, int]) -> float:
        decoding = [r for r in scheduled if r.decoding]
        chunks = [(r.computed, r.computed + n) for r, n in scheduled.items() if not r.decoding]
        return float(
            self.profile.step.step_s(
                sum(end - start for start, end in chunks),
                len(decoding),
                sum(r.tokens for r in decoding),
                sum(end**2 - start**2 for start, end in chunks),
            )
        )
