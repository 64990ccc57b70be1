"""The block tables of running segments, shared between the engine's thread and the transfer threads.

The engine's thread learns the tables at the start of each step, before anything is written in it. A reader
takes a `Grant`, reads the blocks, and then asks whether the grant still holds. A grant ends when the segment
is preempted or freed. That is learnt before the step that could hand its blocks to another request writes, so
a grant that still holds after the read means that the bytes are the segment's own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count

REMEMBERED_ENDS = 1024  # segments known to be gone, so that a late reader is told at once


@dataclass(frozen=True, slots=True)
class Grant:
    """Blocks [first, last) of a segment, good for as long as `BlockTables.holds` says so."""

    segment: str
    blocks: tuple[int, ...]
    generation: int


class BlockTables:
    """Block tables of the segments that may be read; safe to use from several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tables: dict[str, tuple[Sequence[int], int]] = {}
        self._ended: deque[str] = deque(maxlen=REMEMBERED_ENDS)
        self._generations = count()

    def update(self, offered: Mapping[str, Sequence[int]], withdrawn: Iterable[str]) -> None:
        """Withdraw segments, then offer others; an offer for a known segment extends its table."""
        with self._changed:
            for segment in withdrawn:
                self._tables.pop(segment, None)
                self._ended.append(segment)
            for segment, blocks in offered.items():
                current = self._tables.get(segment)
                generation = next(self._generations) if current is None else current[1]
                self._tables[segment] = (blocks, generation)
            self._changed.notify_all()

    def grant(self, segment: str, first: int, last: int, wait_s: float) -> Grant | None:
        """Blocks [first, last) of a segment, waiting up to `wait_s` for it to be offered; None if it is not.

        A segment may be asked for a moment before its engine's next step offers it. One that has ended is
        refused at once.
        """

        def ready() -> bool:
            table = self._tables.get(segment)
            return (table is not None and len(table[0]) >= last) or (table is None and segment in self._ended)

        with self._changed:
            if not self._changed.wait_for(ready, wait_s):
                return None
            table = self._tables.get(segment)
            if table is None:
                return None
            blocks, generation = table
            return Grant(segment, tuple(blocks[first:last]), generation)

    def holds(self, grant: Grant) -> bool:
        """Whether the blocks of a grant have been the segment's own all along."""
        with self._changed:
            table = self._tables.get(grant.segment)
            return table is not None and table[1] == grant.generation
