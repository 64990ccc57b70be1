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
from controlplane.migration.usage import WorkerView
from controlplane.perfmodel import coefficients as speed
from controlplane.perfmodel.step import StepModel
from controlplane.placement import batch, hits
from controlplane.placement import ledger as state
from controlplane.placement.ledger import Ledger
from controlplane.placement.outlook import kv_peak, remaining
from controlplane.placement.table import cached_blocks, most_hits
from controlplane.snapshot import NOT_CACHED, SERVING, Cached, Load, RunningRequest, WorkerLoad
from controlplane.types import RequestId, WorkerId

Table = NDArray[np.float64]
RUNNING, HELD, WAITING, HEAD, WAITING_TOKENS, HIGH, GROWTH, TPOT, PEAK, SHARED = range(10)
RowOf = Callable[[WorkerId], int]  # a worker's row in the ledger


@compiled
def loads(ledger: Ledger) -> Table:
    """One row a worker: the fields of a Load. Those in prefill run, and hold all they will.

    Those whose KV is loaded from host memory wait.
    """
    out = np.zeros((len(ledger.workers), 10))
    for w in range(len(ledger.workers)):
        out[w, TPOT] = np.inf
        for i in range(ledger.workers[w].running_n):
            r = ledger.running[w, i]
            out[w, RUNNING] += 1
            out[w, HELD] += ledger.requests[r].prompt + state.generated(ledger, r)
            out[w, HIGH] += ledger.requests[r].priority
            out[w, GROWTH] += remaining(ledger, w, r)
            out[w, TPOT] = min(out[w, TPOT], ledger.requests[r].tpot_s)
        first = batch.queue_first(ledger, w)
        if first != state.NONE:
            out[w, HEAD] = ledger.requests[first].prompt + ledger.requests[first].key
        for p in range(len(ledger.queue_head)):
            r = ledger.queue_head[p, w]
            while r != state.NONE:
                out[w, WAITING] += 1
                out[w, WAITING_TOKENS] += ledger.requests[r].prompt + ledger.requests[r].key
                out[w, GROWTH] += max(ledger.requests[r].predicted - ledger.requests[r].key, 1)
                out[w, TPOT] = min(out[w, TPOT], ledger.requests[r].tpot_s)
                r = ledger.requests[r].next
        out[w, PEAK] = kv_peak(ledger, w, state.NONE, np.inf)
        out[w, SHARED] = hits.shared_tokens(ledger, w)
    return out


@compiled
def kept_at(ledger: Ledger, w: int, r: int) -> tuple[int, int]:
    """Tokens of a request, wherever it is, that worker `w` has cached now, and those of them in use there.

    As many as a move there would find: all but the last token, in whole blocks.
    """
    if ledger.caches.tokens == 0 or ledger.caches.workers[w].keeps == 0:
        return 0, 0
    block = int(ledger.coefficients[ledger.workers[w].variant][speed.BLOCK_TOKENS])
    most, tokens = most_hits(ledger.caches, ledger.requests[r].prompt + state.generated(ledger, r), block)
    cached = cached_blocks(ledger.caches, w, r, most, 0, False)
    in_use = cached_blocks(ledger.caches, w, r, cached, cached, True)
    return min(cached * ledger.caches.tokens, tokens), min(in_use * ledger.caches.tokens, tokens)


@compiled
def kept_everywhere(ledger: Ledger, r: int) -> NDArray[np.int64]:
    """By worker, the tokens of a request that it has cached now."""
    kept = np.zeros(len(ledger.workers), np.int64)
    for w in range(len(ledger.workers)):
        kept[w] = kept_at(ledger, w, r)[0]
    return kept


def cached_at(ledger: Ledger, r: int, row_of: RowOf, worker: WorkerId) -> Cached:
    """What a worker has cached of a request now."""
    if ledger.caches.tokens == 0:
        return NOT_CACHED
    return Cached(*(int(tokens) for tokens in kept_at(ledger, row_of(worker), r)))


@compiled
def running_at(ledger: Ledger, w: int) -> Table:
    """One row a running request, as admitted: number, tokens, generated (0 in prefill), remaining."""
    out = np.empty((ledger.workers[w].running_n, 4))
    for n in range(ledger.workers[w].running_n):
        r = ledger.running[w, n]
        out[n, 0] = r
        out[n, 1] = ledger.requests[r].prompt + state.generated(ledger, r)
        out[n, 2] = state.generated(ledger, r) if ledger.requests[r].phase == state.DECODING else 0
        out[n, 3] = remaining(ledger, w, r)
    return out


@compiled
def queue_at(ledger: Ledger, w: int) -> Table:
    """One row a request that waits at a worker, the next one first: number, tokens, generated, remaining."""
    count = 0
    for p in range(len(ledger.queue_head)):
        r = ledger.queue_head[p, w]
        while r != state.NONE:
            count += 1
            r = ledger.requests[r].next
    out = np.empty((count, 4))
    n = 0
    for p in range(len(ledger.queue_head) - 1, -1, -1):
        r = ledger.queue_head[p, w]
        while r != state.NONE:
            out[n, 0] = r
            out[n, 1] = ledger.requests[r].prompt + ledger.requests[r].key
            out[n, 2] = ledger.requests[r].key
            out[n, 3] = max(ledger.requests[r].predicted - ledger.requests[r].key, 1)
            n += 1
            r = ledger.requests[r].next
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

    def __init__(self, ledger: Ledger, w: int, waiting: bool, count: int, row_of: RowOf = int) -> None:
        self._led, self._w, self._waiting, self._count = ledger, w, waiting, count
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


def request_at(ledger: Ledger, r: int, row_of: RowOf = int) -> RunningRequest:
    """A request that is on a worker."""
    row = ledger.requests[r]
    made, still = int(state.generated(ledger, r)), int(remaining(ledger, row["worker"], r))
    tokens, tpot_s = int(row["prompt"]) + made, float(row["tpot_s"])
    cached = partial(cached_at, ledger, r, row_of)
    return RunningRequest(RequestId(str(r)), tokens, int(row["priority"]), made, still, tpot_s, cached)


def views_of(
    ledger: Ledger,
    workers: Mapping[int, tuple[WorkerId, str, StepModel | None]],
    coming: Iterable[tuple[int, int]],
) -> list[WorkerView]:
    """These serving workers of the ledger, by name, kind and speed; `coming`: requests (row, worker) on their
    way to them."""
    table, views = loads(ledger), []
    rows = {name: w for w, (name, _, _) in workers.items()}
    for w, (name, kind, step) in workers.items():
        load, k = load_of(table[w].tolist()), ledger.coefficients[ledger.workers[w]["variant"]]
        running: Sequence[RunningRequest] = Listed(ledger, w, False, load.running, rows.__getitem__)
        for r in (r for r, to in coming if to == w):
            request = request_at(ledger, r, rows.__getitem__)
            load, running = load.with_request(request, name), (*running, request)
        queue = Listed(ledger, w, True, load.waiting, rows.__getitem__)
        tokens = int(k[speed.KV_BLOCKS] * k[speed.BLOCK_TOKENS])
        worker = WorkerLoad(name, SERVING, tokens, running, queue, step, int(k[speed.MAX_SEQS]), load, kind)
        views.append(WorkerView(worker, load, 0.0))
    return views
