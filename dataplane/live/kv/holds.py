"""The scheduler's side of moves: the segments that may be read, and the blocks that outlive their segments.

A *lease* begins when a move does: the segment's block table is offered to readers. When the segment ends, for
any reason but an error, its blocks stay. A *hold* is that stay, in which they may be read. Both end by
`release`, or by themselves at a deadline, so that a gateway that dies in mid-move costs memory for seconds
only. A loader asks for a hold on itself, which ends when a later request drops it. Where the engine can leave
a loaded request uncomputed (`arrived`), the loader is not computed. One token of it would take as long as one
of the moved request, and every request on the target would wait for it.

This module does not know vLLM: the connector (connector.py) reports what the scheduler did and passes on the
answers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field

from dataplane.live.engine_api.kv_messages import KvLoad, Transfer


@dataclass(slots=True)
class LoadJob:
    """A load with its blocks allocated: `blocks` are the target's, from block `first` on."""

    segment: str
    load: KvLoad
    first: int
    blocks: list[int]


@dataclass(slots=True)
class StepOrders:
    """The scheduler's orders to the ranks at the start of a step."""

    offered: dict[str, list[int]] = field(default_factory=dict)
    withdrawn: list[str] = field(default_factory=list)
    jobs: list[LoadJob] = field(default_factory=list)
    freed: list[str] = field(default_factory=list)
    dropped: list[str] = field(default_factory=list)  # loaders that never ran, to be ended and freed


class Holds:
    """Leases, holds and loads of one engine. `now_s` is the caller's monotonic clock."""

    def __init__(self, block_tokens: int, lease_s: float = 60.0, hold_s: float = 30.0) -> None:
        self._block_tokens = block_tokens
        self._lease_s = lease_s
        self._hold_s = hold_s
        self._leases: dict[str, float] = {}
        self._holds_until: dict[str, float] = {}
        self._loaded: set[str] = set()
        self._loading: set[str] = set()  # segments with a load between steps under way
        self._coming: set[str] = set()  # loaders among them
        self._pinned: set[str] = set()  # loaders that have arrived, held without having ended
        self._offered_blocks: dict[str, int] = {}
        self._orders = StepOrders()

    @property
    def loaders(self) -> int:
        """Number of segments that are in the engine only to load; it counts them as waiting requests."""
        return len(self._coming) + len(self._pinned)

    def is_leased(self, segment: str) -> bool:
        """Whether a move has begun on a segment that has not ended."""
        return segment in self._leases

    def is_pinned(self, segment: str) -> bool:
        """Whether a loader's KV has arrived and is pinned, the loader itself not to be computed."""
        return segment in self._pinned

    def take_freed(self) -> list[str]:
        """The segments let go since the last orders, for an engine whose ranks need not be told first."""
        freed = self._orders.freed + self._orders.dropped
        self._orders.freed, self._orders.dropped = [], []
        return freed

    def begin(self, segment: str, is_running: bool, now_s: float) -> bool:
        """Lease a segment; False if the scheduler does not have it, or it has ended."""
        if is_running:
            self._leases[segment] = now_s + self._lease_s
        else:
            self._orders.withdrawn.append(segment)  # readers learn it at once
        return is_running

    def release(self, segment: str) -> None:
        """End a lease or a hold; nothing happens for a segment that has neither."""
        if self._leases.pop(segment, None) is not None:
            self._withdraw(segment)
        if self._holds_until.pop(segment, None) is not None:
            self._withdraw(segment)
            where = self._orders.dropped if segment in self._pinned else self._orders.freed
            self._pinned.discard(segment)
            where.append(segment)

    def arrived(self, segment: str, now_s: float) -> bool:
        """A load between steps is complete; True if the segment stays pinned until it is released."""
        self._loading.discard(segment)
        if segment not in self._coming:
            return False
        self._coming.discard(segment)
        self._pinned.add(segment)
        self._holds_until[segment] = now_s + self._hold_s
        return True

    def tokens_to_load(self, segment: str, transfer: Transfer, cached_tokens: int) -> int:
        """Tokens to take from elsewhere past those in the local cache; 0 once a load was planned.

        A segment loads once: if it is preempted later it recomputes, since its source is gone by then.
        """
        if transfer.load is None or segment in self._loaded:
            return 0
        return max(0, transfer.load.tokens - cached_tokens)

    def admitted(self, segment: str, transfer: Transfer, blocks: Sequence[int], load_tokens: int) -> None:
        """A segment owns `blocks` now; plan its load, and let go of the loaders it takes over from."""
        if transfer.load is not None and segment not in self._loaded:
            self._loaded.add(segment)
            if load_tokens > 0:
                tokens = transfer.load.tokens
                first = (tokens - load_tokens) // self._block_tokens
                last = -(-tokens // self._block_tokens)
                self._orders.jobs.append(LoadJob(segment, transfer.load, first, list(blocks[first:last])))
                if not transfer.load.inline:
                    self.loads(segment)
                    if transfer.hold:
                        self._coming.add(segment)
        for loader in transfer.drop:
            self.release(loader)

    def loads(self, segment: str) -> None:
        """A load between steps begins; until it has arrived the engine does not free the segment's blocks."""
        self._loading.add(segment)

    def ended(
        self,
        segment: str,
        transfer: Transfer,
        blocks: Sequence[int],
        *,
        aborted: bool,
        failed: bool,
        now_s: float,
    ) -> bool:
        """Whether the blocks of a segment that ends now are kept."""
        self._loaded.discard(segment)
        self._coming.discard(segment)
        if segment in self._loading:  # the engine frees its blocks once they have arrived: not ours to keep
            self._loading.discard(segment)
            failed = True
        if segment in self._pinned:  # aborted: the engine waits to hear that nothing is written there
            self.release(segment)
            return False
        leased = self._leases.pop(segment, None) is not None
        holds_itself = transfer.hold and not aborted
        if (leased or holds_itself) and not failed and blocks:
            self._holds_until[segment] = now_s + self._hold_s
            self._orders.offered[segment] = list(blocks)
            return True
        if leased:
            self._withdraw(segment)
        return False

    def orders(
        self,
        tables: Mapping[str, Sequence[int]],
        preempted: Iterable[str],
        now_s: float,
        unsure: Set[int] = frozenset(),
    ) -> StepOrders:
        """What to tell the ranks for the step that was just scheduled.

        `tables` holds the block tables of this step's leased segments (see `leased`). `unsure` are blocks of
        loads inside earlier steps that may yet fail: segments with such blocks are offered later.
        """
        tables = {s: blocks for s, blocks in tables.items() if unsure.isdisjoint(blocks)}
        for segment in preempted:
            if segment in self._offered_blocks:
                self._withdraw(segment)
        for segment, blocks in tables.items():
            if self._offered_blocks.get(segment) != len(blocks):
                self._offered_blocks[segment] = len(blocks)
                self._orders.offered[segment] = list(blocks)
        for segment in [s for s, deadline in self._leases.items() if deadline < now_s]:
            del self._leases[segment]
            self._withdraw(segment)
        for segment in [s for s, deadline in self._holds_until.items() if deadline < now_s]:
            self.release(segment)
        offered = self._orders.offered
        waiting = {s: offered.pop(s) for s in tuple(offered) if not unsure.isdisjoint(offered[s])}
        orders, self._orders = self._orders, StepOrders(offered=waiting)
        return orders

    def leased(self) -> Iterable[str]:
        """Segments whose tables `orders` wants."""
        return self._leases.keys()

    def _withdraw(self, segment: str) -> None:
        self._offered_blocks.pop(segment, None)
        self._orders.offered.pop(segment, None)
        self._orders.withdrawn.append(segment)


def inline_blocks(jobs: Iterable[LoadJob]) -> set[int]:
    """The blocks that are loaded inside the step."""
    return {block for job in jobs if job.load.inline for block in job.blocks}
