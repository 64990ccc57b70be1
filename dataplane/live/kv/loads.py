"""A rank's side of moves: serve the blocks that are offered, and fetch those it was ordered to load.

A load between steps runs on a small pool of threads, and the request waits. A load inside a step (short
tails) runs on the engine's thread, which waits for it. A load that fails is reported and not retried: the
scheduler fails the request, and the coordinator of the move decides what follows.
"""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from dataplane.live.engine_api.kv_messages import UNBOUND
from dataplane.live.kv.holds import LoadJob, StepOrders
from dataplane.live.kv.memory import BlockTables, KvMemory
from dataplane.live.kv.transport import Fetch, FetchFailed, SocketTransport

log = logging.getLogger(__name__)
PARALLEL_LOADS = 8  # a gateway's streams take half of them
STREAM_BLOCKS = 16  # of a prefill in progress that are taken at once
STREAM_S = 60.0  # for which a prefill may keep its reader waiting
TIMEOUT_S = 10.0  # between steps: a copy may be paced, but each piece of it must arrive
INLINE_TIMEOUT_S = 2.0  # every request of the worker waits with it


class KvLoads:
    """Offers, loads and their results of one rank."""

    def __init__(self, memory: KvMemory, transport: SocketTransport, address: str, rank: int) -> None:
        self._memory = memory
        self._tables = BlockTables()
        self._transport = transport
        self._rank = rank
        self._pool = ThreadPoolExecutor(
            PARALLEL_LOADS, thread_name_prefix="kv-load", initializer=self._memory.enter_thread
        )
        self._lock = threading.Lock()
        self._orders = StepOrders()
        self._received: set[str] = set()
        self._failed: set[str] = set()
        self._failed_blocks: set[int] = set()
        self._freed: set[str] = set()
        self._fetched: Counter[str] = Counter()
        self._stop: Callable[[], None] = transport.serve(address, self._tables, self._memory)

    def take_orders(self, orders: StepOrders) -> None:
        """Before anything of the step is written: end the grants that must not outlive it."""
        self._memory.step_begins()
        self._tables.update(orders.offered, orders.withdrawn)
        self._orders = orders

    def start(self) -> None:
        """Start this step's loads; those inside the step are done on return."""
        orders, self._orders = self._orders, StepOrders()
        with self._lock:
            self._freed.update(orders.freed)
            # The scheduler ends a loader whose load is reported as failed, and frees its blocks.
            self._received.update(orders.dropped)
            self._failed.update(orders.dropped)
        for job in orders.jobs:
            if job.load.inline:
                self._load(job)
            else:
                self._pool.submit(self._load, job)

    def results(self) -> tuple[set[str], set[str], set[str], set[int]]:
        """Since the last call: segments freed, received, of these failed; blocks of inline failures."""
        with self._lock:
            taken = self._freed, self._received, self._failed, self._failed_blocks
            self._freed, self._received, self._failed, self._failed_blocks = set(), set(), set(), set()
        return taken

    def fetched(self) -> dict[str, int]:
        """Bytes fetched by each way since the last call."""
        with self._lock:
            fetched, self._fetched = self._fetched, Counter()
        return dict(fetched)

    def close(self) -> None:
        """Stop serving, without waiting for open transfers."""
        self._stop()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _load(self, job: LoadJob) -> None:
        load = job.load
        ok = False
        piece = STREAM_BLOCKS if load.stream else max(len(job.blocks), 1)
        wait_s = STREAM_S if load.stream else INLINE_TIMEOUT_S / 2
        timeout_s = INLINE_TIMEOUT_S if load.inline else TIMEOUT_S
        timeout_s += STREAM_S if load.stream else 0.0
        try:
            for at in range(0, len(job.blocks), piece):
                blocks = job.blocks[at : at + piece]
                first = job.first + at
                pace = UNBOUND if load.inline else load.pace
                fetch = Fetch(load.secret, load.segment, first, first + len(blocks), wait_s, pace)
                size, way = self._transport.fetch(
                    load.addresses[self._rank], fetch, self._memory, blocks, timeout_s
                )
                with self._lock:
                    self._fetched[way] += size
            ok = True
        except FetchFailed as error:
            log.warning("load of %s for %s failed: %s", load.segment, job.segment, error)
        except Exception:  # the segment must be reported whatever happened, or it waits for ever
            log.exception("load of %s for %s failed", load.segment, job.segment)
        with self._lock:
            if load.inline:
                if not ok:
                    self._failed_blocks.update(job.blocks)
            else:
                self._received.add(job.segment)
                if not ok:
                    self._failed.add(job.segment)
