"""The slow, obvious engine with a prefix cache: one chunked worker, block by block and step by step.

The judge of the compiled caches. It follows vLLM's scheduler and block pool as their code reads, with blocks
that have numbers, one queue of free ones and a table of ids, and shares no code with `dataplane.simulated`.
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

    def __init__(self, profile: Profile, workload: Workload) -> None:
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

    def run(self) -> CachedWorker:
        """Serve every request."""
        now_s = 0.0
        while self.coming or self.running or any(self.waiting):
            if not self.running and not any(self.waiting):
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
        preempted = self._plan_running(scheduled)
        if not preempted:
            self._plan_waiting(scheduled)
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

    def _plan_waiting(self, scheduled: dict[CachedRequest, int]) -> None:
        while any(self.waiting) and self._budget(scheduled) > 0:
            if len(self.running) >= self.profile.engine.max_seqs:
                return
            r = (self.waiting[0] or self.waiting[1])[0]
            hits: list[_Block] = []
            while len(hits) < (r.tokens - 1) // self.block:
                block = self.pool.find(r.block_id(len(hits)))
                if block is None:
                    break
                hits.append(block)
            asleep = sum(block.users == 0 for block in hits)
            if self._blocks(r.tokens) - len(hits) + asleep > len(self.pool.free):
                return
            r.computed = len(hits) * self.block
            tokens = min(r.tokens - r.computed, self._budget(scheduled))
            self.pool.touch(hits)
            r.blocks = hits
            assert self._grow(r, tokens)
            r.prefill = r.tokens
            r.cached_tokens = r.computed if r.cached_tokens is None else r.cached_tokens
            self._queue(r).pop(0)
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
