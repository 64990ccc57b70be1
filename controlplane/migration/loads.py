"""The loads of a ledger's workers, and the requests on them, as the rules of migration read them.

Loads are counted in compiled code; requests are listed on first use, since the rules need those of few
workers only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import overload

import numpy as np
from numpy.typing import NDArray

from controlplane.compiled import compiled
from controlplane.migration.usage import WorkerView, with_request
from controlplane.perfmodel.coefficients import BLOCK_TOKENS, KV_BLOCKS, MAX_SEQS
from controlplane.perfmodel.step import StepModel
from controlplane.placement.caches import cached_blocks, most_hits
from controlplane.placement.constraints import kv_peak, remaining
from controlplane.placement.ledger import DECODING, NONE, Ledger, generated, queue_first, shared_tokens
from controlplane.snapshot import NOT_CACHED, SERVING, Cached, Load, RunningRequest, WorkerLoad
from controlplane.types import RequestId, WorkerId

Table = NDArray[np.float64]
RUNNING, HELD, WAITING, HEAD, WAITING_TOKENS, HIGH, GROWTH, TPOT, PEAK, SHARED = range(10)
RowOf = Callable[[WorkerId], int]  # a worker's row in the ledger


@compiled
def loads(led: Ledger) -> Table:
    """One row a worker: the fields of a Load. Those in prefill run, and hold all they will.

    Those whose KV is loaded from host memory wait.
    """
    out = np.zeros((len(led.workers), 10))
    for w in range(len(led.workers)):
        out[w, TPOT] = np.inf
        for i in range(led.workers[w].running_n):
            r = led.running[w, i]
            out[w, RUNNING] += 1
            out[w, HELD] += led.requests[r].prompt + generated(led, r)
            out[w, HIGH] += led.requests[r].priority
            out[w, GROWTH] += remaining(led, w, r)
            out[w, TPOT] = min(out[w, TPOT], led.requests[r].tpot_s)
        first = queue_first(led, w)
        if first != NONE:
            out[w, HEAD] = led.requests[first].prompt + led.requests[first].key
        for p in range(len(led.queue_head)):
            r = led.queue_head[p, w]
            while r != NONE:
                out[w, WAITING] += 1
                out[w, WAITING_TOKENS] += led.requests[r].prompt + led.requests[r].key
                out[w, GROWTH] += max(led.requests[r].predicted - led.requests[r].key, 1)
                out[w, TPOT] = min(out[w, TPOT], led.requests[r].tpot_s)
                r = led.requests[r].next
        out[w, PEAK] = kv_peak(led, w, NONE)
        out[w, SHARED] = shared_tokens(led, w)
    return out


@compiled
def kept_at(led: Ledger, w: int, r: int) -> tuple[int, int]:
    """Tokens of a request, wherever it is, that worker `w` has cached now, and those of them in use there.

    As many as a move there would find: all but the last token, in whole blocks.
    """
    if led.caches.tokens == 0 or led.caches.workers[w].keeps == 0:
        return 0, 0
    block = int(led.coefficients[led.workers[w].variant][BLOCK_TOKENS])
    most, tokens = most_hits(led.caches, led.requests[r].prompt + generated(led, r), block)
    cached = cached_blocks(led.caches, w, r, 0, most, 0, False)
    in_use = cached_blocks(led.caches, w, r, 0, cached, cached, True)
    return min(cached * led.caches.tokens, tokens), min(in_use * led.caches.tokens, tokens)


@compiled
def kept_everywhere(led: Ledger, r: int) -> NDArray[np.int64]:
    """By worker, the tokens of a request that it has cached now."""
    kept = np.zeros(len(led.workers), np.int64)
    for w in range(len(led.workers)):
        kept[w] = kept_at(led, w, r)[0]
    return kept


def cached_at(led: Ledger, r: int, row_of: RowOf, worker: WorkerId) -> Cached:
    """What a worker has cached of a request now."""
    if led.caches.tokens == 0:
        return NOT_CACHED
    return Cached(*(int(tokens) for tokens in kept_at(led, row_of(worker), r)))


@compiled
def running_at(led: Ledger, w: int) -> Table:
    """One row a running request, as admitted: number, tokens, generated (0 in prefill), remaining."""
    out = np.empty((led.workers[w].running_n, 4))
    for n in range(led.workers[w].running_n):
        r = led.running[w, n]
        out[n, 0] = r
        out[n, 1] = led.requests[r].prompt + generated(led, r)
        out[n, 2] = generated(led, r) if led.requests[r].phase == DECODING else 0
        out[n, 3] = remaining(led, w, r)
    return out


@compiled
def queue_at(led: Ledger, w: int) -> Table:
    """One row a request that waits at a worker, the next one first: number, tokens, generated, remaining."""
    count = 0
    for p in range(len(led.queue_head)):
        r = led.queue_head[p, w]
        while r != NONE:
            count += 1
            r = led.requests[r].next
    out = np.empty((count, 4))
    n = 0
    for p in range(len(led.queue_head) - 1, -1, -1):
        r = led.queue_head[p, w]
        while r != NONE:
            out[n, 0] = r
            out[n, 1] = led.requests[r].prompt + led.requests[r].key
            out[n, 2] = led.requests[r].key
            out[n, 3] = max(led.requests[r].predicted - led.requests[r].key, 1)
            n += 1
            r = led.requests[r].next
    return out


def load_of(row: Sequence[float]) -> Load:
    """A row of `loads` as the rules read it."""
    running, held, waiting, head, waiting_tokens, high, growth, tpot_s, peak, shared = row
    return Load(
        int(running),
        int(held),
        int(waiting),
        int(head),
        int(waiting_tokens),
        int(high),
        int(growth),
        tpot_s,
        int(peak),
        int(shared),
    )


class Listed(Sequence[RunningRequest]):
    """A worker's requests, listed on first use: tick needs those of few workers only.

    `row_of`: how workers are named; by their rows, unless told otherwise.
    """

    def __init__(self, led: Ledger, w: int, waiting: bool, count: int, row_of: RowOf = int) -> None:
        self._led, self._w, self._waiting, self._count = led, w, waiting, count
        self._row_of = row_of
        self._rows: list[RunningRequest] | None = None

    def __len__(self) -> int:
        return self._count

    @overload
    def __getitem__(self, i: int) -> RunningRequest: ...
    @overload
    def __getitem__(self, i: slice) -> Sequence[RunningRequest]: ...
    def __getitem__(self, i: int | slice) -> RunningRequest | Sequence[RunningRequest]:
        return self._list()[i]

    def __iter__(self) -> Iterator[RunningRequest]:
        return iter(self._list())

    def _list(self) -> list[RunningRequest]:
        if self._rows is None:
            table = queue_at(self._led, self._w) if self._waiting else running_at(self._led, self._w)
            rows = self._led.requests
            self._rows = [
                RunningRequest(
                    RequestId(str(int(r))),
                    int(tokens),
                    int(rows["priority"][int(r)]),
                    int(done),
                    int(still),
                    float(rows["tpot_s"][int(r)]),
                    partial(cached_at, self._led, int(r), self._row_of),
                )
                for r, tokens, done, still in table.tolist()
            ]
        return self._rows


def request_at(led: Ledger, r: int, row_of: RowOf = int) -> RunningRequest:
    """A request that is on a worker."""
    row = led.requests[r]
    made, still = int(generated(led, r)), int(remaining(led, row["worker"], r))
    tokens, tpot_s = int(row["prompt"]) + made, float(row["tpot_s"])
    cached = partial(cached_at, led, r, row_of)
    return RunningRequest(RequestId(str(r)), tokens, int(row["priority"]), made, still, tpot_s, cached)


def views_of(
    led: Ledger,
    workers: Mapping[int, tuple[WorkerId, str, StepModel | None]],
    coming: Iterable[tuple[int, int]],
) -> list[WorkerView]:
    """These serving workers of the ledger, by name, kind and speed; `coming`: requests (row, worker) on their
    way to them."""
    table, views = loads(led), []
    rows = {name: w for w, (name, _, _) in workers.items()}
    for w, (name, kind, step) in workers.items():
        load, k = load_of(table[w].tolist()), led.coefficients[led.workers[w]["variant"]]
        running: Sequence[RunningRequest] = Listed(led, w, False, load.running, rows.__getitem__)
        for r in (r for r, to in coming if to == w):
            request = request_at(led, r, rows.__getitem__)
            load, running = with_request(load, request, name), (*running, request)
        queue = Listed(led, w, True, load.waiting, rows.__getitem__)
        tokens = int(k[KV_BLOCKS] * k[BLOCK_TOKENS])
        worker = WorkerLoad(name, SERVING, tokens, running, queue, step, int(k[MAX_SEQS]), load, kind)
        views.append(WorkerView(worker, load, 0.0))
    return views
