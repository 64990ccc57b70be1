"""An engine with two steps in flight, driven by hand: vLLM's `AsyncScheduler` with our half of the connector.

`Engine.turn` is `EngineCore.step_with_batch_queue`. The GPU is made up, and late: a step's kernels run when
a thread waits for them. A cell of KV holds a digest of all tokens up to its position. A step that finds
another digest in a cell samples a wrong token and writes wrong cells, as a model would. So a read of blocks
that are not its own, or not there yet, shows in the tokens or bytes that clients or readers get.
"""

from __future__ import annotations

import zlib
from collections import deque
from dataclasses import dataclass, field
from typing import Any

from dataplane.live.engine_api.kv_messages import VLLM_KEY, Control, KvLoad, Transfer, params_from
from dataplane.live.kv import connector as connector_module
from dataplane.live.kv.memory import BlockTables, Grant

BLOCK = 4  # tokens
BLOCKS = 25  # one of which vLLM keeps for itself
STEP_S = 0.01
END = 2  # ends an answer
WRONG = -1


def digest(before: int, token: int) -> int:
    return zlib.crc32(token.to_bytes(4, "big"), before)


def chain(tokens: list[int]) -> list[int]:
    """What the cells of these tokens hold."""
    cells, last = [], 1
    for token in tokens:
        last = digest(last, token)
        cells.append(last)
    return cells


def next_token(cells: list[int]) -> int:
    """The model: one answer in ten ends at each token."""
    return END if cells[-1] % 10 == 0 else 3 + cells[-1] % 90


@dataclass
class Client:
    """A request as its gateway knows it."""

    prompt: list[int]
    params: Transfer | Control
    tokens: list[int] = field(default_factory=list)
    finish: str = ""

    @property
    def known(self) -> list[int]:
        return self.prompt + self.tokens


@dataclass
class Slot:
    """A request in the model runner."""

    tokens: list[int]
    blocks: list[int]


@dataclass
class Launched:
    """A step whose kernels are launched: of each request its slot, its first position and how many."""

    rows: dict[str, tuple[Slot, int, int]]
    sampled: dict[str, list[int]] = field(default_factory=dict)
    is_done: bool = False
    ready_s: float = 0.0


@dataclass
class Event:
    """A mark on the GPU's stream: it comes once the steps launched before it have run."""

    engine: Engine
    recorded_s: float = 0.0
    after: Launched | None = None

    def record(self) -> None:
        self.recorded_s = self.engine.now_s
        self.after = self.engine.newest

    @property
    def _at_s(self) -> float:
        return max(self.recorded_s, self.after.ready_s if self.after else 0.0)

    def query(self) -> bool:
        return self.engine.now_s >= self._at_s

    def elapsed_time(self, end: Event) -> float:
        """In milliseconds, as CUDA's."""
        return 1e3 * (end._at_s - self._at_s)


@dataclass
class Read:
    """A copy of a segment's blocks under way in another engine."""

    grant: Grant
    first: int
    right: list[int]  # what the cells from the first block on must hold


class Engine:
    """The scheduler, a queue of two steps, a late GPU, a rank's half of moves, and its clients."""

    def __init__(self, config: Any, cache: Any, patch: Any, loads_inside: bool = True) -> None:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.structured_output import StructuredOutputManager

        self.now_s = 0.0
        patch.setattr(connector_module.time, "monotonic", lambda: self.now_s)
        patch.setattr(connector_module, "loads_inside_steps", lambda: loads_inside)
        self.scheduler = AsyncScheduler(
            config, cache, StructuredOutputManager(config), block_size=BLOCK, log_stats=True
        )
        hashed = get_hash_fn_by_name(config.cache_config.prefix_caching_hash_algo)
        init_none_hash(hashed)
        self._hasher = get_request_block_hasher(BLOCK, hashed)
        self._deep = config.max_concurrent_batches
        self._queue: deque[tuple[Any, Any, Launched]] = deque()
        self.clients: dict[str, Client] = {}
        self.answers: dict[str, str] = {}
        self.aborts: list[str] = []  # that come while a step runs
        self.steps: list[tuple[dict[str, Any], float, int]] = []  # statistics, end, running
        self.mistakes: list[str] = []
        # The GPU
        self.cells: dict[int, int] = {}
        self._slots: dict[str, Slot] = {}
        self._launched: list[Launched] = []
        self.newest: Launched | None = None
        self._ready_s = 0.0
        self._marks = connector_module.StepMarks(lambda: Event(self))
        # The rank
        self.tables = BlockTables()
        self._safe = 0  # so many launched steps are before the event of the last step's begin
        self.loading: list[Any] = []
        self._freed: set[str] = set()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self.inline_fails = False

    # What gateways do

    def add(
        self, name: str, prompt: list[int], most: int, params: Transfer | Control, priority: int = 0
    ) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(
            temperature=0.0,
            max_tokens=most,
            stop_token_ids=[END],
            extra_args={VLLM_KEY: params_from(params)},
        )
        self.clients[name] = Client(prompt, params)
        request = Request(
            name, prompt, sampling, None, arrival_time=0.0, priority=priority, block_hasher=self._hasher
        )
        self.scheduler.add_request(request)
        if isinstance(params, Control):
            self.abort([name])

    def load(self, name: str, tokens: list[int], *, drop: tuple[str, ...] = ()) -> None:
        """A loader: the KV of these tokens but the last."""
        load = KvLoad(("unix://s",), "source", len(tokens) - 1)
        self.add(name, tokens, 1, Transfer(load, hold=True, drop=drop), -1)

    def go_on(self, name: str, tokens: list[int], most: int, drop: tuple[str, ...]) -> None:
        """A continuation that brings its tail inside its first step."""
        load = KvLoad(("unix://s",), "source", len(tokens) - 1, inline=True)
        self.add(name, tokens, most, Transfer(load, drop=drop))

    def control(self, verb: Any, segment: str) -> str:
        name = f"{verb}-{len(self.clients)}"
        self.add(name, [0], 1, Control(verb, segment))
        return name

    def abort(self, names: list[str]) -> None:
        from vllm.v1.request import RequestStatus

        for name in names:
            self.clients[name].finish = self.clients[name].finish or "abort"
        self.scheduler.finish_requests(names, RequestStatus.FINISHED_ABORTED)

    # What EngineCore does

    def turn(self) -> None:
        """Plan a step if there is room for one, else take the oldest one's outputs in."""
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self._queue.appendleft((output, *self._launch(output)))
            some = output.total_num_scheduled_tokens > 0
            if len(self._queue) < self._deep and (some or self.scheduler.has_requests()):
                return
        elif not self._queue:
            return
        output, moved, step = self._queue.pop()
        self._run(step)
        self.now_s = max(self.now_s, step.ready_s)
        self.abort(self.aborts)
        self.aborts = []
        self._take_in(output, moved, step)

    def _take_in(self, output: Any, moved: Any, step: Launched) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        names = list(step.rows)
        result = ModelRunnerOutput(
            names,
            {name: at for at, name in enumerate(names)},
            [step.sampled[name] for name in names],
            kv_connector_output=moved,
        )
        expected = sum(output.num_scheduled_tokens.values())
        for batch in self.scheduler.update_from_output(output, result).values():
            for made in batch.outputs:
                self._deliver(made)
            if (stats := batch.scheduler_stats) is not None:
                told = stats.kv_connector_stats
                load = told["load"]
                if load["prefill_tokens"] + load["sequences"] != expected:
                    self.mistakes.append(f"statistics {load} of a step of {expected} tokens")
                self.steps.append((told, self.now_s, stats.num_running_reqs))
                for name, (answer, _) in told["answers"].items():
                    if name in self.answers:
                        self.mistakes.append(f"{name} was answered twice")
                    self.answers[name] = answer

    def _deliver(self, made: Any) -> None:
        client = self.clients[made.request_id]
        for token in made.new_token_ids:
            if client.finish:
                self.mistakes.append(f"{made.request_id} got a token after its end")
            if token != next_token(chain(client.known)):
                self.mistakes.append(f"{made.request_id} got a wrong token after {len(client.tokens)}")
            client.tokens.append(token)
        if made.finish_reason is not None:
            client.finish = str(made.finish_reason)

    # What the model runner and the rank's connector do, in the second runner's order

    def _launch(self, output: Any) -> tuple[Any, Launched]:
        from vllm.v1.outputs import KVConnectorOutput

        for name in output.finished_req_ids | (output.preempted_req_ids or set()):
            self._slots.pop(name, None)
        for new in output.scheduled_new_reqs:
            self._slots[new.req_id] = Slot(list(new.prefill_token_ids), list(new.block_ids[0]))
        cached = output.scheduled_cached_reqs
        begins = {new.req_id: new.num_computed_tokens for new in output.scheduled_new_reqs}
        for name, blocks, begin in zip(
            cached.req_ids, cached.new_block_ids, cached.num_computed_tokens, strict=True
        ):
            begins[name] = begin
            if blocks is not None:
                self._slots[name].blocks += blocks[0]
        self._marks.begin()
        orders, invalid = output.kv_connector_metadata.orders, set()
        self._safe = len(self._launched)
        self.tables.update(orders.offered, orders.withdrawn)
        if output.has_sync_kv_loads:
            invalid = self._begin_loads(orders)
        rows = {n: (self._slots[n], begins[n], count) for n, count in output.num_scheduled_tokens.items()}
        step = Launched(rows, ready_s=max(self._ready_s, self.now_s) + STEP_S * bool(rows))
        self._ready_s = step.ready_s
        self._launched.append(step)
        self.newest = step
        if not output.has_sync_kv_loads:
            invalid = self._begin_loads(orders)
        moved = KVConnectorOutput(
            finished_sending=self._freed or None,
            finished_recving=self._received or None,
            failed_recving=self._failed,
            invalid_block_ids=invalid,
            kv_connector_stats=connector_module.StepStats(data={"marks": self._marks.end()}),
        )
        self._freed, self._received, self._failed = set(), set(), set()
        return moved, step

    def _begin_loads(self, orders: Any) -> set[int]:
        """Begin loads, and do those inside the step; the blocks of these that failed."""
        self._freed |= set(orders.freed)
        self._received |= set(orders.dropped)
        self._failed |= set(orders.dropped)
        invalid: set[int] = set()
        for job in orders.jobs:
            if job.load.inline:
                self.settle()
                self._fill(job, fails=self.inline_fails)
                if self.inline_fails:
                    invalid |= set(job.blocks)
            else:
                self.loading.append(job)
        return invalid

    def end_load(self, at: int, *, fails: bool) -> None:
        """A load between steps ends."""
        job = self.loading.pop(at)
        self.settle()
        self._fill(job, fails)
        self._received.add(job.segment)
        if fails:
            self._failed.add(job.segment)

    def _fill(self, job: Any, fails: bool) -> None:
        right = chain(self.clients[job.segment].prompt)[: job.load.tokens]
        for at, block in enumerate(job.blocks, job.first):
            for offset in range(BLOCK):
                position = at * BLOCK + offset
                is_right = position < len(right) and not fails
                self.cells[block * BLOCK + offset] = right[position] if is_right else WRONG

    # What a reader in another engine does

    def read(self, segment: str, first: int, last: int, right: list[int]) -> Read | None:
        grant = self.tables.grant(segment, first, last, 0.0)
        if grant is None:
            return None
        self.settle()
        return Read(grant, first, right)

    def end_read(self, read: Read) -> None:
        """The copy is made as late as it may be; its reader trusts it if its grant still holds."""
        found = [self.cells.get(b * BLOCK + at) for b in read.grant.blocks for at in range(BLOCK)]
        right = read.right[read.first * BLOCK :][: len(found)]
        if self.tables.holds(read.grant) and found[: len(right)] != right:
            bad = next(at for at, cell in enumerate(right) if found[at] != cell) + read.first * BLOCK
            self.mistakes.append(f"a reader got wrong KV of {read.grant.segment} from position {bad} on")

    # The GPU

    def settle(self) -> None:
        """Run what was launched before the last step's orders were known."""
        for step in self._launched[: self._safe]:
            self._run(step)

    def tick(self) -> None:
        """Run the oldest step that has not run."""
        for step in self._launched:
            if not step.is_done:
                self._run(step)
                return

    def _run(self, step: Launched) -> None:
        while self._launched and not step.is_done:
            oldest = self._launched.pop(0)
            self._safe = max(0, self._safe - 1)
            for name, row in oldest.rows.items():
                oldest.sampled[name] = self._compute(*row)
            oldest.is_done = True

    def _compute(self, slot: Slot, begin: int, count: int) -> list[int]:
        right = chain(slot.tokens[: begin + count])
        places = [slot.blocks[p // BLOCK] * BLOCK + p % BLOCK for p in range(begin + count)]
        is_right = [self.cells.get(place) for place in places[:begin]] == right[:begin]
        for place, cell in zip(places[begin:], right[begin:], strict=True):
            self.cells[place] = cell if is_right else WRONG
        if begin + count < len(slot.tokens):
            return []
        slot.tokens.append(next_token(right) if is_right else 1)
        return [slot.tokens[-1]]

    # At the end

    def drain(self) -> None:
        """Let all that is there end, with loads that arrive, and leases and holds at their deadlines."""
        for _ in range(400):
            while self.loading:
                self.end_load(0, fails=False)
            if not self._queue and not self.scheduler.has_requests():
                break
            self.turn()
            self.now_s += 1.0
        while self._queue:
            self.turn()

    def left_over(self) -> list[str]:
        """What is still taken when nothing should be."""
        ours, pool = self.scheduler.connector, self.scheduler.kv_cache_manager.block_pool
        taken = {
            "blocks": BLOCKS - 1 - pool.get_num_free_blocks(),
            "requests": len(self.scheduler.requests),
            "running": len(ours._running),
            "loaders": len(ours._loaders) + ours._holds.loaders,
            "begun": len(ours._begun),
            "leases": len(list(ours._holds.leased())),
        }
        silent = [name for name, client in self.clients.items() if not client.finish]
        kept = [f"{n} {what} left" for what, n in taken.items() if n]
        return kept + [f"{name} has no end" for name in silent]
