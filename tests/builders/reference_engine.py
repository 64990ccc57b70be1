"""The slow, obvious engine: one worker, one step at a time, plain Python lists.

The judge of the compiled simulator. It is written from docs/engine.md alone and shares no code with
`dataplane.simulated`; every step is really taken, nothing is jumped, nothing is kept between steps that could
be computed again.

Rules that the words leave open, decided here:

- Capacity is counted in whole blocks, `capacity_tokens // block_tokens`.
- A prefill-first admission counts blocks: held + what those already taken will hold + blocks(L + 1), plus one
  block for every running or taken request. An empty worker admits its first request whatever its size.
- After a preemption at a boundary the decode step runs; admission is tried again at the next boundary.
- Chunked: a step that preempted admits no request. A request that runs alone may outgrow the capacity.
- An engine that plans ahead gives a request that joins a step all its tokens later, by that step without
  those that join with it. It does not where prefill had spent the last step's budget and the request waited
  since then.
- Arrivals at the very time of a boundary are in the queue at that boundary.
- Split: a decode worker admits a handed-over request like a prefill-first worker would, but at no cost in
  time. One that it preempts waits at the head of the queue with its KV parked elsewhere. The worker admits it
  without a second prefill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from controlplane.perfmodel.profile import Profile
from controlplane.types import EngineMode


@dataclass(frozen=True)
class ReferenceResult:
    """What became of one request: absolute seconds, and how often it was preempted."""

    first_token_s: float
    finish_s: float
    preemptions: int


@dataclass(eq=False)
class _Request:
    index: int
    arrival_s: float
    prompt: int
    output: int
    priority: int = 0
    generated: int = 0
    to_compute: int = 0  # chunked: prompt + tokens generated before this admission
    computed: int = 0  # chunked: how much of `to_compute` is done
    first_token_s: float | None = None
    finish_s: float | None = None
    preemptions: int = 0
    lag_s: float = 0.0  # the step that was planned before it could join

    @property
    def length(self) -> int:
        return self.prompt + self.generated

    @property
    def decoding(self) -> bool:
        return self.computed == self.to_compute

    def take_token(self, now_s: float) -> None:
        self.generated += 1
        if self.first_token_s is None:
            self.first_token_s = now_s
        if self.generated == self.output:
            self.finish_s = now_s


@dataclass
class _Worker:
    profile: Profile
    coming: list[_Request]
    high: list[_Request] = field(default_factory=list)
    normal: list[_Request] = field(default_factory=list)
    running: list[_Request] = field(default_factory=list)  # in order of admission
    planned_s: float = 0.0  # when the last step was planned,
    spent: bool = False  # and whether prefill used its budget up

    @property
    def capacity_blocks(self) -> int:
        return self.profile.kv.capacity_tokens // self.profile.kv.block_tokens

    def blocks(self, tokens: int) -> int:
        kv = self.profile.kv
        own, window = -(-kv.request_tokens // kv.block_tokens), max(kv.window_tokens, 1)
        return -(-tokens // kv.block_tokens) + -(-own * min(tokens, window) // window)

    def waiting(self) -> list[_Request]:
        return self.high + self.normal

    def receive(self, now_s: float) -> None:
        while self.coming and self.coming[0].arrival_s <= now_s:
            request = self.coming.pop(0)
            (self.high if request.priority else self.normal).append(request)

    def admit(self, request: _Request) -> None:
        (self.high if request.priority else self.normal).remove(request)
        self.running.append(request)

    def preempt_newest(self) -> _Request:
        victim = self.running.pop()
        victim.preemptions += 1
        victim.computed = 0
        (self.high if victim.priority else self.normal).insert(0, victim)
        return victim

    def drop_finished(self) -> None:
        self.running = [r for r in self.running if r.finish_s is None]


def simulate_worker(
    profile: Profile,
    arrival_s: Sequence[float],
    prompt_tokens: Sequence[int],
    output_tokens: Sequence[int],
    priority: Sequence[int] | None = None,
) -> list[ReferenceResult]:
    """Run one prefill-first or chunked worker until every request is finished; results in the given order.

    Inputs have shape [requests]; `priority` 0 is normal, 1 high.
    """
    steps = {EngineMode.PREFILL_FIRST: _prefill_first_step, EngineMode.CHUNKED: _chunked_step}
    step = steps[profile.engine.mode]
    requests = _requests(arrival_s, prompt_tokens, output_tokens, priority)
    _run(_Worker(profile, sorted(requests, key=lambda r: (r.arrival_s, r.index))), step)
    return _results(requests)


def simulate_split(
    prefill_profile: Profile,
    decode_profile: Profile,
    arrival_s: Sequence[float],
    prompt_tokens: Sequence[int],
    output_tokens: Sequence[int],
    prefill_worker: Sequence[int],
    decode_worker: Sequence[int],
    transfer_s: float = 0.0,
    priority: Sequence[int] | None = None,
) -> list[ReferenceResult]:
    """Run a prefill pool and a decode pool; request i goes to the two workers named at i.

    `transfer_s` passes between a prefill's end and the request's standing in the decode worker's queue.
    """
    requests = _requests(arrival_s, prompt_tokens, output_tokens, priority)
    for w in sorted(set(prefill_worker)):
        mine = [r for r in requests if prefill_worker[r.index] == w]
        worker = _Worker(prefill_profile, sorted(mine, key=lambda r: (r.arrival_s, r.index)))
        _run(worker, _prefill_pool_step)
    for w in sorted(set(decode_worker)):
        mine = [r for r in requests if decode_worker[r.index] == w and r.finish_s is None]
        for r in mine:
            assert r.first_token_s is not None
            r.arrival_s = r.first_token_s + transfer_s
        worker = _Worker(decode_profile, sorted(mine, key=lambda r: (r.arrival_s, r.index)))
        _run(worker, _decode_pool_step)
    return _results(requests)


def simulate_ranks(
    profile: Profile,
    ranks: int,
    shared_token_s: float,
    arrival_s: Sequence[float],
    prompt_tokens: Sequence[int],
    output_tokens: Sequence[int],
    rank: Sequence[int],
) -> list[ReferenceResult]:
    """Run chunked engines that step together until every request is finished; request i is on rank[i].

    `profile` is one engine's. Each step lasts as long as the slowest of them, without what prefill shares,
    and what is shared of all of them behind each other.
    """
    requests = _requests(arrival_s, prompt_tokens, output_tokens, None)
    in_order = sorted(requests, key=lambda r: (r.arrival_s, r.index))
    workers = [_Worker(profile, [r for r in in_order if rank[r.index] == w]) for w in range(ranks)]
    now_s = 0.0
    while any(w.coming or w.waiting() or w.running for w in workers):
        for worker in workers:
            worker.receive(now_s)
        busy = [w for w in workers if w.waiting() or w.running]
        if not busy:
            now_s = min(w.coming[0].arrival_s for w in workers if w.coming)
            continue
        batches = [(w, _chunked_batch(w)) for w in busy]
        shared_s = [shared_token_s * _prefill_of(b) for _, b in batches]
        own_s = [_batch_s(w, batch) - s for (w, batch), s in zip(batches, shared_s, strict=True)]
        now_s += max(0.0, *own_s) + sum(shared_s)
        for worker, batch in batches:
            _end_chunked(worker, batch, now_s)
    return _results(requests)


def _requests(arrival_s, prompt_tokens, output_tokens, priority) -> list[_Request]:
    priorities = [0] * len(arrival_s) if priority is None else priority
    columns = zip(arrival_s, prompt_tokens, output_tokens, priorities, strict=True)
    return [_Request(i, float(a), int(p), int(o), int(h)) for i, (a, p, o, h) in enumerate(columns)]


def _results(requests: list[_Request]) -> list[ReferenceResult]:
    return [ReferenceResult(r.first_token_s + r.lag_s, r.finish_s + r.lag_s, r.preemptions) for r in requests]


def _run(worker: _Worker, step) -> None:
    now_s = 0.0
    while worker.coming or worker.waiting() or worker.running:
        worker.receive(now_s)
        if not worker.waiting() and not worker.running:
            now_s = worker.coming[0].arrival_s
            continue
        now_s = step(worker, now_s)


# --- prefill-first, and the two pools of split (its prefill workers chunk) ----------------------------------


def _take_prefill_batch(worker: _Worker) -> list[_Request]:
    """Waiting requests that the next prefill step carries, in queue order; the first misfit ends it."""
    limits = worker.profile.engine
    taken: list[_Request] = []
    for candidate in worker.waiting():
        seats = len(worker.running) + len(taken)
        if seats > 0:
            tokens = sum(r.length for r in taken) + candidate.length
            held = sum(worker.blocks(r.length) for r in worker.running)
            held += sum(worker.blocks(r.length + 1) for r in taken)
            if seats + 1 > limits.max_seqs:
                break
            if taken and tokens > limits.max_batched_tokens:
                break
            if held + worker.blocks(candidate.length + 1) + seats > worker.capacity_blocks:
                break
        taken.append(candidate)
    return taken


def _prefill(worker: _Worker, taken: list[_Request], now_s: float) -> float:
    lengths = [r.length for r in taken]
    assert worker.profile.prefill is not None
    end_s = now_s + float(worker.profile.prefill.prefill_s(sum(lengths), sum(n * n for n in lengths)))
    for r in taken:
        worker.admit(r)
        r.take_token(end_s)
    worker.drop_finished()
    return end_s


def _decode(worker: _Worker, now_s: float) -> float:
    def wanted() -> int:
        return sum(worker.blocks(r.length + 1) for r in worker.running)

    while len(worker.running) > 1 and wanted() > worker.capacity_blocks:
        worker.preempt_newest()
    context = sum(r.length for r in worker.running)
    end_s = now_s + float(worker.profile.step.step_s(0, len(worker.running), context))
    for r in worker.running:
        r.take_token(end_s)
    worker.drop_finished()
    return end_s


def _prefill_first_step(worker: _Worker, now_s: float) -> float:
    taken = _take_prefill_batch(worker)
    return _prefill(worker, taken, now_s) if taken else _decode(worker, now_s)


def _prefill_pool_step(worker: _Worker, now_s: float) -> float:
    end_s = _chunked_step(worker, now_s)
    worker.running = [r for r in worker.running if r.first_token_s is None]  # their KV has left with them
    return end_s


def _decode_pool_step(worker: _Worker, now_s: float) -> float:
    for candidate in worker.waiting():
        seats = len(worker.running)
        if seats > 0:
            held = sum(worker.blocks(r.length) for r in worker.running)
            if seats + 1 > worker.profile.engine.max_seqs:
                break
            if held + worker.blocks(candidate.length) + seats + 1 > worker.capacity_blocks:
                break
        worker.admit(candidate)
    return _decode(worker, now_s)


# --- chunked -----------------------------------------------------------------------------------------------


def _chunked_step(worker: _Worker, now_s: float) -> float:
    before = list(worker.running)
    batch = _chunked_batch(worker)
    _note_lags(worker, batch, before)
    worker.planned_s = now_s
    worker.spent = _prefill_of(batch) > 0 and sum(batch.values()) >= worker.profile.engine.max_batched_tokens
    end_s = now_s + _batch_s(worker, batch)
    _end_chunked(worker, batch, end_s)
    return end_s


def _chunked_batch(worker: _Worker) -> dict[_Request, int]:
    """The requests of the next step, and their tokens in it."""
    budget = worker.profile.engine.max_batched_tokens
    scheduled: dict[_Request, int] = {}  # tokens each request gets in this step
    preempted = False

    def held(r: _Request) -> int:
        """Blocks of a running request, counting what this step has already given it."""
        if r.decoding:
            return worker.blocks(r.length + (1 if r in scheduled else 0))
        done = r.computed + scheduled.get(r, 0)
        return worker.blocks(done + 1 if done == r.to_compute else done)

    def fits(r: _Request, tokens: int) -> bool:
        """Whether `r` may get `tokens` in this step with everyone else holding what they hold."""
        others = sum(held(other) for other in worker.running if other is not r)
        if r.decoding:
            mine = worker.blocks(r.length + 1)
        else:
            done = r.computed + tokens
            mine = worker.blocks(done + 1 if done == r.to_compute else done)
        return others + mine <= worker.capacity_blocks

    # Pass 1: those that run already, oldest first.
    for r in list(worker.running):
        if r not in worker.running:
            break  # preempted for an older one, and so is everything after it
        tokens = 1 if r.decoding else min(r.to_compute - r.computed, budget)
        if tokens == 0:
            continue
        while not fits(r, tokens) and len(worker.running) > 1:
            preempted = True
            victim = worker.preempt_newest()
            budget += scheduled.pop(victim, 0)
            if victim is r:
                break
        if r not in worker.running:
            break
        scheduled[r] = tokens
        budget -= tokens

    # Pass 2: those that wait, while the budget, the seats and the blocks last.
    if not preempted:
        for r in worker.waiting():
            if len(worker.running) >= worker.profile.engine.max_seqs or budget <= 0:
                break
            r.to_compute, r.computed = r.length, 0
            tokens = min(r.to_compute, budget)
            if worker.running and not fits(r, tokens):
                break
            worker.admit(r)
            scheduled[r] = tokens
            budget -= tokens

    return scheduled


def _note_lags(worker: _Worker, batch: dict[_Request, int], before: list[_Request]) -> None:
    """Those that join now come a step later where this step was planned as the last one began."""
    alone = {r: tokens for r, tokens in batch.items() if r in before}
    ahead_s = worker.profile.engine.steps_ahead * (_batch_s(worker, alone) if alone else 0.0)
    for r in batch:
        if r not in before and r.first_token_s is None:
            r.lag_s = 0.0 if worker.spent and r.arrival_s < worker.planned_s else ahead_s


def _prefill_of(batch: dict[_Request, int]) -> int:
    return sum(tokens for r, tokens in batch.items() if not r.decoding)


def _batch_s(worker: _Worker, batch: dict[_Request, int]) -> float:
    decoding = [r for r in batch if r.decoding]
    chunks = [(r.computed, r.computed + tokens) for r, tokens in batch.items() if not r.decoding]
    return float(
        worker.profile.step.step_s(
            _prefill_of(batch),
            len(decoding),
            sum(r.length for r in decoding),
            sum(end**2 - start**2 for start, end in chunks),
        )
    )


def _end_chunked(worker: _Worker, batch: dict[_Request, int], end_s: float) -> None:
    decoding = [r for r in batch if r.decoding]
    prefilling = [r for r in batch if not r.decoding]
    for r in decoding:
        r.take_token(end_s)
    for r in prefilling:
        r.computed += batch[r]
        if r.decoding:
            r.take_token(end_s)
    worker.drop_finished()
