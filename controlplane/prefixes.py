"""The prefixes that requests share, and the sessions in which they wait for each other.

A block is a fixed number of tokens of a request's sequence: its prompt and what is generated after it. A
block's id stands for the block *and all before it*: two requests have the same id at a place exactly where
their sequences agree up to the block's end. Only full blocks have ids. A list of ids may run past the prompt:
then it names generated text, which a later turn of the same session may send again. What lies past the list
is the request's own.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from controlplane.errors import BadInput


@dataclass(frozen=True)
class Prefixes:
    """Ids of the full blocks of requests, one list after the other.

    `block_tokens`: tokens of a block. `offsets` [requests + 1]: where each request's list begins in `ids`,
    and where the last one ends. `ids` [blocks]: from 0, without large gaps.
    """

    block_tokens: int
    offsets: NDArray[np.int64]
    ids: NDArray[np.int64]

    def __post_init__(self) -> None:
        object.__setattr__(self, "offsets", np.ascontiguousarray(self.offsets, np.int64))
        object.__setattr__(self, "ids", np.ascontiguousarray(self.ids, np.int64))
        if self.block_tokens < 1:
            raise BadInput(f"prefixes: block_tokens: must be at least 1, got {self.block_tokens}")
        if len(self.offsets) == 0 or self.offsets[0] != 0 or self.offsets[-1] != len(self.ids):
            raise BadInput(f"prefixes: offsets: must begin at 0 and end at the {len(self.ids)} ids")
        if (np.diff(self.offsets) < 0).any():
            raise BadInput("prefixes: offsets: must not decrease")
        if len(self.ids) and self.ids.min() < 0:
            raise BadInput(f"prefixes: ids: must not be negative, got {self.ids.min()}")

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def of(self, request: int) -> NDArray[np.int64]:
        """The ids of one request's blocks."""
        return self.ids[self.offsets[request] : self.offsets[request + 1]]

    def pick(self, rows: NDArray[np.int64]) -> Prefixes:
        """Those of the given requests, in the given order."""
        begins, ends = self.offsets[:-1][rows], self.offsets[1:][rows]
        lists = [self.ids[a:b] for a, b in zip(begins.tolist(), ends.tolist(), strict=True)]
        offsets = np.concatenate([[0], np.cumsum(ends - begins)])
        return replace(self, offsets=offsets, ids=np.concatenate([self.ids[:0], *lists]))

    def seen_before(self) -> NDArray[np.int64]:
        """Of each request's blocks, how many a request before it has in its list."""
        whose = np.repeat(np.arange(len(self)), np.diff(self.offsets))
        first = np.zeros(int(self.ids.max(initial=-1)) + 1, np.int64)
        first[self.ids[::-1]] = whose[::-1]
        seen = first[self.ids] < whose
        return np.bincount(whose[seen], minlength=len(self))

    def coarser(self, times: int) -> Prefixes:
        """The same lists in blocks `times` as large; what fills none of them is the request's own."""
        lengths = np.diff(self.offsets)
        place = np.arange(len(self.ids)) - np.repeat(self.offsets[:-1], lengths)
        ids = np.unique(self.ids[(place + 1) % times == 0], return_inverse=True)[1]
        return Prefixes(self.block_tokens * times, np.concatenate([[0], np.cumsum(lengths // times)]), ids)

    def stretched(self, factor: float) -> Prefixes:
        """The lists `factor` times as long: each block becomes as many as fall into its place."""
        lengths = np.diff(self.offsets)
        place = np.arange(len(self.ids)) - np.repeat(self.offsets[:-1], lengths)
        begin = np.ceil(place * factor).astype(np.int64)
        pieces = np.ceil((place + 1) * factor).astype(np.int64) - begin
        per_id = np.zeros(int(self.ids.max(initial=-1)) + 1, np.int64)
        per_id[self.ids] = pieces  # an id has its place in every list
        named = np.repeat((np.cumsum(per_id) - per_id)[self.ids], pieces)
        piece = np.arange(len(named)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
        offsets = np.concatenate([[0], np.cumsum(pieces)])[self.offsets]
        return replace(self, offsets=offsets, ids=named + piece)


@dataclass(frozen=True)
class Sessions:
    """Which requests are turns of one session, and what each waits for before it is sent.

    A request with predecessors is sent `think_s` seconds after the last of their answers is complete,
    whatever its arrival time says; one without is sent at its arrival time. `session` [requests]: a number
    from 0, or -1 for a request of no session. `offsets` [requests + 1] and `before`: each request's
    predecessors, as rows that come earlier. `think_s` [requests]: not negative.
    """

    session: NDArray[np.int64]
    offsets: NDArray[np.int64]
    before: NDArray[np.int64]
    think_s: NDArray[np.float64]

    def __post_init__(self) -> None:
        for name, kind in (
            ("session", np.int64),
            ("offsets", np.int64),
            ("before", np.int64),
            ("think_s", np.float64),
        ):
            object.__setattr__(self, name, np.ascontiguousarray(getattr(self, name), kind))
        n = len(self.session)
        if self.offsets.shape != (n + 1,) or self.think_s.shape != (n,):
            raise BadInput(f"sessions: offsets and think_s: {n + 1} and {n} rows wanted, for {n} requests")
        if self.offsets[0] != 0 or self.offsets[-1] != len(self.before) or (np.diff(self.offsets) < 0).any():
            raise BadInput(f"sessions: offsets: must rise from 0 to {len(self.before)} predecessors")
        owner = np.repeat(np.arange(n), np.diff(self.offsets))
        if len(owner) and ((self.before >= owner) | (self.before < 0)).any():
            raise BadInput("sessions: before: a request can wait only for requests of earlier rows")
        if not (np.isfinite(self.think_s) & (self.think_s >= 0)).all():
            raise BadInput("sessions: think_s: must be finite and not negative")

    def __len__(self) -> int:
        return len(self.session)

    def spans(
        self,
        begin_s: NDArray[np.float64],
        end_s: NDArray[np.float64],
        counted: NDArray[np.bool_] | bool = True,
    ) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """[sessions] when the first `counted` request begins and the last ends; NaN: one does not."""
        rows = np.flatnonzero((self.session >= 0) & counted)
        names, which = np.unique(self.session[rows], return_inverse=True)
        first_s, last_s = np.full(len(names), np.inf), np.full(len(names), -np.inf)
        with np.errstate(invalid="ignore"):  # NaN wins
            np.minimum.at(first_s, which, begin_s[rows])
            np.maximum.at(last_s, which, end_s[rows])
        return first_s, last_s

    def pick(self, rows: NDArray[np.int64]) -> Sessions:
        """Those of the given requests, in rising order; those left out are waited for no more."""
        row_of = np.full(len(self), -1, np.int64)
        row_of[rows] = np.arange(len(rows))
        counts = np.diff(self.offsets)
        owner = row_of[np.repeat(np.arange(len(self)), counts)]
        before = row_of[self.before]
        kept = (owner >= 0) & (before >= 0)
        per_row = np.bincount(owner[kept], minlength=len(rows))
        return Sessions(
            self.session[rows], np.concatenate([[0], np.cumsum(per_row)]), before[kept], self.think_s[rows]
        )
