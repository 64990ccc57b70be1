"""`Account`: the gateway's ledger of what every worker holds, by the gateway's own counts.

Every change is counted here (a request put on a worker, its tokens, its end), so ten requests that arrive
between two telemetry messages are spread over the workers. The ledger counts a worker's decode steps; here a
step is a batch of outputs in which decoding requests got a token. A request that got none (preempted, or its
chunk was left out of the step) is set back by one, so generated = key + step stays exact. Engines report the
prompt tokens that each step computed. The ledger's own rule gives those of the step in progress, and its end.
Of a worker whose step times are not known, only its KV and its seats bound what it takes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from controlplane.compiled import compile_now
from controlplane.perfmodel import coefficients as speed
from controlplane.perfmodel.profile import Profile
from controlplane.placement import batch, misprediction
from controlplane.placement import ledger as state
from controlplane.placement.constraints import yields_to
from controlplane.placement.ledger import Ints, Ledger, Records
from controlplane.placement.lengths import LengthTable
from controlplane.types import RequestId, Role, Slo, WorkerId
from dataplane.live.engine_api.cache_events import CacheChange
from dataplane.live.engine_api.link import Telemetry, WorkerInfo
from dataplane.live.ledger.kinds import WorkerKinds
from dataplane.live.ledger.mirrors import Found, Hits, Mirrors
from dataplane.live.ledger.request import Tracked

ROWS, SLOTS = 1024, 256  # requests in the ledger, and that decode on a worker, to begin with
# What a worker's record counts; 0 for one that is gone.
QUEUE = ("queued", "queued_tokens", "queued_context", "queued_shared")
LOADS = ("step", "decoding", "context", "running_n", *QUEUE)


class Account:
    """The holdings of every worker.

    `profiles`: by kind, where step times are known. `workers` bounds how many it can hold at once.
    """

    def __init__(self, profiles: Mapping[str, Profile], workers: int, lengths: LengthTable) -> None:
        self.ledger = state.new_ledger(
            np.zeros((workers, speed.WIDTH)), np.arange(workers), ROWS, SLOTS, lengths
        )
        self.kinds = WorkerKinds(profiles, self.ledger.coefficients)
        self.worker_rows: dict[WorkerId, int] = {}
        self._workers: dict[int, WorkerId] = {}
        self._weights: dict[int, str] = {}
        self.request_rows: dict[RequestId, int] = {}
        self._expected: dict[RequestId, tuple[int, int]] = {}  # row of the worker it will come to, tokens
        # Of each prefill in progress: tokens that are computed, and those that the step in progress computes.
        self._computed, self._chunks = np.zeros(ROWS, np.int64), np.zeros(ROWS, np.int64)
        self._free = list(range(ROWS))
        self._mirrors = Mirrors(workers)
        self.slos: tuple[Slo, ...] = ()  # of the fleet's SLO classes, to which others may yield
        compile_account(self.ledger, self._computed, self._chunks)
        self._mirrors.compile(self.ledger.caches)

    @property
    def has_workers(self) -> bool:
        """Whether any worker is attached, open or draining."""
        return bool(self._workers)

    def prefix_hits(self, worker: WorkerId) -> Hits:
        """The prompt tokens that a worker had cached, and those expected."""
        return self._mirrors.hits.get(self.worker_rows.get(worker, state.NONE), Hits())

    def tells_cached(self, worker: WorkerId) -> bool:
        """Whether what a worker has cached is known from its engine, and not predicted."""
        return self._mirrors.is_told(self.worker_rows.get(worker, state.NONE))

    def take_cached(self, worker: WorkerId, change: CacheChange) -> str:
        """A worker tells what it has cached; return why it must be asked for all of it, or nothing."""
        return self._mirrors.take(self.ledger, self.worker_rows[worker], change)

    def take_loads(self, info: WorkerInfo, told: Telemetry) -> None:
        """The rate of a worker's loads of KV from CPU memory, if it has loaded any."""
        if told.host_loaded_bytes and told.host_loading_s and info.worker in self.worker_rows:
            per_byte_s = told.host_loading_s / told.host_loaded_bytes / info.tp_degree
            self._load_at(self.worker_rows[info.worker], info.block_bytes * per_byte_s)

    def _load_at(self, w: int, block_s: float) -> None:
        """Loading a block from host memory takes a worker so long."""
        if self.ledger.host.chunks.tokens:
            self.ledger.host.links[w]["copy_s"] = block_s

    def learn(self, lengths: LengthTable) -> None:
        """Use another table for requests that outlive their prediction."""
        self.ledger = self.ledger._replace(
            length_edges=np.ascontiguousarray(lengths.bin_edges, np.int64),
            length_grid=np.ascontiguousarray(lengths.grid, np.int64),
            length_expected=np.ascontiguousarray(lengths.expected_total, np.float64),
        )

    # Workers.

    def attach(self, info: WorkerInfo, kind: str, role: Role = "any") -> None:
        """A worker of a kind takes requests from now on."""
        w = next(i for i in range(len(self.ledger.workers)) if i not in self._workers)
        self.worker_rows[info.worker], self._workers[w] = w, info.worker
        self._weights[w] = info.weights
        self.ledger = self._mirrors.attach(self.ledger, w, info)
        self.become(info, kind, role)
        profile = self.kinds.profiles.get(kind)
        if profile is not None and (load_s := profile.load_s(info.block_bytes, info.tp_degree)) is not None:
            self._load_at(w, load_s)
        self.ledger.workers[w]["status"] = state.SERVING

    def become(self, info: WorkerInfo, kind: str, role: Role) -> None:
        """A worker is of that kind from now on, and has that role."""
        w = self.worker_rows[info.worker]
        self.kinds.become(w, kind, info)
        self.ledger.workers[w]["role"] = state.ROLES.index(role)

    def detach(self, worker: WorkerId) -> None:
        """A worker is gone; its requests must be put elsewhere or ended."""
        w = self.worker_rows.pop(worker, None)
        if w is None:
            return
        for r in [r for r in self.request_rows.values() if self.ledger.requests[r]["worker"] == w]:
            self._leave(r)
        self._mirrors.detach(self.ledger, w)
        self._expected = {r: at for r, at in self._expected.items() if at[0] != w}
        del self._workers[w], self._weights[w]
        self.kinds.leave(w)
        blank = self.ledger.workers[w]
        for name in LOADS:
            blank[name] = 0
        blank["status"], blank["boundary_s"] = state.OFF, -1.0

    def set_open(self, worker: WorkerId, is_open: bool) -> None:
        """Whether new requests may go to a worker (a draining one is closed)."""
        self.ledger.workers[self.worker_rows[worker]]["status"] = state.SERVING if is_open else state.DRAINING

    # Requests on workers.

    def put(self, request: Tracked, worker: WorkerId, has_kv: bool, now_s: float) -> None:
        """A request is on a worker (again); `has_kv` when it brings its KV and needs no prefill there."""
        self.expect(request, None)
        r = self.row(request)
        self._leave(r)
        w = self.worker_rows[worker]
        row = self.ledger.requests[r]
        row["key"] = len(request.output_token_ids)
        if row["key"] > 0:
            row["predicted"] = max(request.predicted_tokens, int(row["key"]) + 1)
        was_idle = is_idle(self.ledger, w)
        batch.enqueue(self.ledger, w, r, False)
        if has_kv and row["key"] > 0:
            self._begin_decoding(w, r, int(row["key"]))
        if was_idle:
            self.begin_step(worker, now_s)

    def expect(self, request: Tracked, worker: WorkerId | None) -> None:
        """Count a request on the worker that it is on its way to, and still where it is; None: no more."""
        w, tokens = self._expected.pop(request.id, (state.NONE, 0))
        if w != state.NONE:
            self.ledger.workers[w]["queued"] -= 1
            self.ledger.workers[w]["queued_context"] -= tokens
        if worker is not None and worker in self.worker_rows:
            w, tokens = self.worker_rows[worker], request.context_tokens
            self._expected[request.id] = w, tokens
            self.ledger.workers[w]["queued"] += 1
            self.ledger.workers[w]["queued_context"] += tokens

    def advance(
        self,
        worker: WorkerId,
        got: Sequence[tuple[Tracked, int]],
        now_s: float,
        found: Mapping[RequestId, Found] | None = None,
        prefilled: int | None = None,
        steps: int = 1,
    ) -> bool:
        """A worker's step is over: told before its tokens join the requests' own lists. `begin_step` follows.

        `got`: the tokens it made, by request. `found`: those that the engine had cached of requests whose
        first it was. `prefilled`: tokens of prompts that it computed; where the engine does not say, those
        it was expected to. False for what made no token and says nothing: it was no step.
        `steps`: more than one, where all only decode.
        """
        w = self.worker_rows.get(worker)
        if w is None or (prefilled is None and not got):
            return False
        if self.ledger.workers[w]["queued"] > 0:
            batch.end_step(
                self.ledger, w, self._computed, self._chunks, -1 if prefilled is None else prefilled
            )
        led, counts = self.ledger, {}
        fresh: list[tuple[int, int, Found | None]] = []
        for request, tokens in got:
            r = self.request_rows.get(request.id)
            if r is None or tokens == 0:
                continue
            if led.requests[r]["phase"] == state.DECODING:
                counts[r] = tokens
            elif led.requests[r]["phase"] in (state.QUEUED, state.PREFILLING):
                had = None if found is None else found.get(request.id)
                fresh.append((r, len(request.output_token_ids) + tokens, had))
                if math.isnan(led.requests[r]["first_s"]):
                    led.requests[r]["first_s"] = now_s
        if counts:
            advance_all(led, w, counts, steps)
        for r, tokens, had in fresh:
            self._begin_decoding(w, r, tokens, had)
        return True

    def begin_step(self, worker: WorkerId, now_s: float) -> None:
        """A worker's next step begins, with those that are on it now."""
        w = self.worker_rows[worker]
        at = self.ledger.workers[w]
        while at["running_n"] + at["queued"] > self.ledger.running.shape[1]:
            self._widen()
        batch.begin_step(self.ledger, w, self._computed, self._chunks, now_s)

    def take(self, request: Tracked) -> None:
        """A request is on no worker any more."""
        r = self.request_rows.get(request.id)
        if r is not None:
            self._leave(r)

    def forget(self, request: Tracked, has_finished: bool = False) -> None:
        """A request is over; one that has finished teaches how long answers are."""
        r = self.request_rows.pop(request.id, None)
        if r is not None:
            if has_finished:
                misprediction.note_end(self.ledger, r, len(request.output_token_ids))
            self._leave(r)
            misprediction.keep_up(self.ledger, 0.0)
            self._mirrors.leave(self.ledger.caches, r)
            self.ledger.requests[r]["phase"] = state.DONE
            self._free.append(r)

    def is_decoding(self, request: Tracked) -> bool:
        """Whether its present segment has made a token."""
        r = self.request_rows.get(request.id)
        return r is not None and bool(self.ledger.requests[r]["phase"] == state.DECODING)

    def is_begun(self, request: Tracked) -> bool:
        """Whether its worker's engine computes it, or has begun to."""
        return bool(
            self.ledger.requests[self.request_rows[request.id]]["phase"] in (state.PREFILLING, state.DECODING)
        )

    def hands_over(self, request: Tracked) -> bool:
        """Whether a request is on a worker that only prefills."""
        r = self.request_rows.get(request.id)
        w = state.NONE if r is None else int(self.ledger.requests[r]["worker"])
        return w != state.NONE and bool(self.ledger.workers[w]["role"] == state.PREFILL_ONLY)

    def chunks(self, request: Tracked) -> int:
        """The steps that its prefill takes, if nothing else is in them."""
        w = int(self.ledger.requests[self.request_rows[request.id]]["worker"])
        return -(-request.context_tokens // max(int(self.ledger.coefficients[w, speed.MAX_BATCHED]), 1))

    # The ledger's rows.

    def row(self, request: Tracked) -> int:
        """The request's row in the ledger, made when it is first asked for."""
        r = self.request_rows.get(request.id)
        if r is None:
            if not self._free:
                self._grow()
            r = self.request_rows[request.id] = self._free.pop()
            request.kept_tpot_s = self.kinds.kept_tpot_s(request.slo.tpot_s, request.prompt_tokens)
            enter(self.ledger.requests[r], request, self.slos)
            self._mirrors.enter(self.ledger.caches, r, request)
        return r

    def _grow(self) -> None:
        """Make room for twice as many requests."""
        n = len(self.ledger.requests)
        caches, host = self._mirrors.widen(self.ledger)
        requests = np.concatenate((self.ledger.requests, self.ledger.requests))
        self.ledger = self.ledger._replace(requests=requests, caches=caches, host=host)
        self._computed, self._chunks = np.tile(self._computed, 2), np.tile(self._chunks, 2)
        self._free = list(range(n, 2 * n))

    def _widen(self) -> None:
        """Make room for twice as many requests on a worker."""
        running = self.ledger.running
        self.ledger = self.ledger._replace(running=np.concatenate((running, np.zeros_like(running)), axis=1))

    def _begin_decoding(self, w: int, r: int, tokens: int, found: Found | None = None) -> None:
        at, row = self.ledger.workers[w], self.ledger.requests[r]
        at["queued_tokens"] -= self._left(r)
        if row["phase"] == state.QUEUED:
            batch.dequeue(self.ledger, w, r)
            if at["running_n"] == self.ledger.running.shape[1]:
                self._widen()
            self.ledger.running[w, at["running_n"]] = r
            at["running_n"] += 1
        self._mirrors.begin(self.ledger, w, r, int(row["prompt"] + min(row["key"], tokens - 1)), found)
        batch.begin_decoding(self.ledger, w, r, tokens)

    def _left(self, r: int) -> int:
        """Tokens of a prefill that are neither computed nor in the step in progress."""
        begun = 0 if self.ledger.requests[r]["phase"] == state.QUEUED else self._computed[r] + self._chunks[r]
        return int(batch.to_compute(self.ledger, r) - begun)

    def _leave(self, r: int) -> None:
        row = self.ledger.requests[r]
        w = int(row["worker"])
        if row["phase"] == state.QUEUED:
            batch.leave_queue(self.ledger, w, r)
        elif row["phase"] in (state.PREFILLING, state.DECODING):
            at, running = self.ledger.workers[w], self.ledger.running[w]
            if row["phase"] == state.DECODING:
                self._mirrors.end(self.ledger, w, r)
                batch.stop_decoding(self.ledger, w, r, state.HELD)
            else:
                at["queued"] -= 1
                at["queued_tokens"] -= self._left(r)
                at["queued_context"] -= row["prompt"] + row["key"]
                row["phase"] = state.HELD
            n = int(at["running_n"])
            kept = running[:n][running[:n] != r]
            running[: len(kept)] = kept
            at["running_n"] = len(kept)
            row["worker"] = state.NONE
        if w != state.NONE and is_idle(self.ledger, w):
            self.ledger.workers[w]["boundary_s"] = -1.0  # no step is in progress


def enter(row: Records, request: Tracked, slos: Sequence[Slo]) -> None:
    """Write a request that is on no worker into its row of the ledger. `slos`: of classes it may yield to."""
    row["worker"] = row["next"] = state.NONE
    row["phase"], row["priority"] = state.HELD, request.ticket.priority
    row["prompt"], row["key"] = max(request.prompt_tokens, 1), len(request.output_token_ids)
    row["guess"] = row["predicted"] = max(request.predicted_tokens, 1)
    row["turn"] = 0
    row["arrival_s"] = request.arrival_s
    row["first_s"] = math.nan if request.first_token_s is None else request.first_token_s
    row["ttft_s"], row["tpot_s"] = request.slo.ttft_s, request.kept_tpot_s
    row["yields_tpot_s"], row["yields_most_tpot_s"] = yields_to(request.slo, slos)


def is_idle(led: Ledger, w: int) -> bool:
    """Whether a worker has no request to compute."""
    return bool(led.workers[w]["running_n"] == 0 and batch.queue_first(led, w) == state.NONE)


def advance_all(led: Ledger, w: int, counts: Mapping[int, int], steps: int = 1) -> None:
    """Decode steps: all requests advance by a token each, then those with another number are set right."""
    at = led.workers[w]
    at["step"] += steps
    at["context"] += sum(counts.values())
    running = led.running[w, : at["running_n"]]
    if len(counts) != at["decoding"]:
        for r in running:
            if int(r) not in counts and led.requests[r]["phase"] == state.DECODING:
                led.requests[r]["key"] -= steps
    for r, tokens in counts.items():
        if tokens != steps:
            led.requests[r]["key"] += tokens - steps


def compile_account(led: Ledger, computed: Ints, chunks: Ints) -> None:
    """Compile all that requests go through, rather than under the first client's."""
    compile_now(batch.begin_step, led, 0, computed, chunks, -1.0)
    compile_now(batch.end_step, led, 0, computed, chunks, 0)
    compile_now(batch.enqueue, led, 0, 0, False)
    compile_now(batch.begin_decoding, led, 0, 0, 1)
    compile_now(batch.stop_decoding, led, 0, 0, state.HELD)
    compile_now(batch.dequeue, led, 0, 0)
    compile_now(batch.leave_queue, led, 0, 0)
    compile_now(batch.queue_first, led, 0)
    compile_now(batch.to_compute, led, 0)
    compile_now(misprediction.note_end, led, 0, 1)
    compile_now(misprediction.keep_up, led, 0.0)
    compile_now(speed.decode_base_s, led.coefficients[0], 1.0)
