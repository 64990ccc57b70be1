"""Draws of a workload: its sessions taken whole, once or several times or not at all, each from a start.

A *unit* is what a draw keeps whole: a session; where sessions are not known, the requests that continue one
another; else a single request. A unit's requests keep their lengths, what they wait for, and the time between
them. Each copy of a unit is a session of its own. Copies share what several units of the trace share (a
system prompt), and nothing that one unit alone has.

**Redrawing** (`drawn_anew`) is a local block bootstrap of the units' starts. The time of the starts is cut
into blocks. Each is replaced by one that begins nearby, gaps untouched, also across a change point
(docs/figures/cheapest.md has why). Blocks keep what makes a fleet miss (bursts, runs of long prompts) whole.
Drawing them nearby keeps the shape of the day (Dowla, Paparoditis and Politis, 2003). Sessions that begin in
the first tenth are drawn one by one in one another's places, since many of them had begun before the trace.
Drawn as blocks, a crowd at the edge would come twice or not at all. Future traffic differs from the trace
twice: the trace is itself a draw from its traffic, and so is the next one. One draw makes up for the second
alone. A plan for other traffic than the trace needs both.

**Busier** traffic has more sessions, not faster ones. For x times as much, each session comes as often as
the whole part of x. A share of them, even over short and long ones, comes once more. What x draws, a larger x
draws too. A copy starts within a minute of its original. Requests that share nothing come x times as fast
instead.

**Continuations.** A request continues an earlier one whose full blocks all begin its list. A prompt that
more than `TEMPLATE` others continue or repeat is a template, not a conversation's, and joins none of them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from controlplane.compiled import compiled
from controlplane.errors import BadInput
from controlplane.prefixes import Prefixes, Sessions
from controlplane.workload import INSTANT_S, Workload

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

BLOCK_S = 60.0
FEWEST_BLOCKS = 20  # a short trace gets shorter blocks, or every draw would be the trace itself
MOST_BLOCKS = 100_000  # ten weeks of minutes; a time in the wrong unit must not fill the memory
NEARBY = 0.1  # of the trace's duration, to either side,
NEARBY_S = 1800.0  # at most: the day's shape stays what it is
TEMPLATE = 8
NOBODYS, SEVERAL = -1, -2  # a block that no list has, and one that several units have
# Fractions of their multiples are spread evenly whatever their number: the golden ratio, and the root of 2.
_EVEN, _APART = (np.sqrt(5.0) - 1.0) / 2.0, np.sqrt(2.0) - 1.0


@compiled
def renamed(offsets: Ints, ids: Ints, own: Ints, rows: Ints, begins: Ints, found: Ints) -> None:
    """Fill `found` with the lists of `rows`, own blocks numbered from `begins` where that is not -1."""
    n = 0
    for k in range(len(rows)):
        for at in range(offsets[rows[k]], offsets[rows[k] + 1]):
            of = own[ids[at]] if begins[k] >= 0 else -1
            found[n] = ids[at] if of < 0 else begins[k] + of
            n += 1


@compiled
def find_owners(offsets: Ints, ids: Ints, unit: Ints, of: Ints) -> None:
    """Fill `of`, all NOBODYS before, with the unit that alone has each id in its lists, or SEVERAL."""
    for r in range(len(unit)):
        for at in range(offsets[r], offsets[r + 1]):
            if of[ids[at]] == NOBODYS:
                of[ids[at]] = unit[r]
            elif of[ids[at]] != unit[r]:
                of[ids[at]] = SEVERAL


@dataclass(frozen=True)
class Draw:
    """Units by number, a unit as often as it was drawn, in the order of their starts."""

    unit: Ints
    start_s: Floats


@dataclass(frozen=True)
class Units:
    """The units of a workload in order of start: `rows[offsets[u] : offsets[u + 1]]` are unit u's requests.

    Both are empty where each request is a unit that shares nothing.
    `own` [ids]: the number of a block among those that its unit alone has, -1 for one that several have;
    None where what is shared is not known. `counts` [units]: how many such blocks each has.
    """

    workload: Workload
    rows: Ints
    offsets: Ints
    own: Ints | None = None
    counts: Ints | None = None

    @property
    def whole(self) -> Draw:
        """The draw of the workload itself, unchanged."""
        if self.is_plain:
            return Draw(np.arange(len(self.workload)), self.workload.arrival_s)
        return Draw(np.arange(len(self.offsets) - 1), self.workload.arrival_s[self.rows[self.offsets[:-1]]])

    @property
    def is_plain(self) -> bool:
        """Whether every request is a unit and shares nothing."""
        return self.workload.prefixes is None and self.workload.sessions is None

    def busier(self, scale: float) -> Workload:
        """`scale` times the traffic: more sessions, or requests that come faster where they share nothing."""
        if self.is_plain:
            return self.workload.scaled(scale)
        return self.made(busier_draw(self, self.whole, scale))

    def made(self, draw: Draw) -> Workload:
        """The workload of a draw; the trace itself for the draw of it whole."""
        workload = self.workload
        if self.is_plain:
            rows = copy = draw.unit
            arrival_s, offsets = draw.start_s, draw.unit
        else:
            first, lengths = self.offsets[draw.unit], np.diff(self.offsets)[draw.unit]
            offsets = np.concatenate([[0], np.cumsum(lengths)])
            copy = np.repeat(np.arange(len(draw.unit)), lengths)
            rows = self.rows[first[copy] + np.arange(offsets[-1]) - offsets[copy]]
            since_s = workload.arrival_s[rows] - workload.arrival_s[self.rows[first]][copy]
            arrival_s = draw.start_s[copy] + since_s
        order = np.argsort(arrival_s, kind="stable")
        rows, copy = rows[order], copy[order]
        arrival_s = np.maximum(arrival_s[order], 0.0)
        if np.array_equal(rows, np.arange(len(workload))) and (arrival_s == workload.arrival_s).all():
            return workload
        return Workload(
            arrival_s=arrival_s,
            prompt_tokens=workload.prompt_tokens[rows],
            output_tokens=workload.output_tokens[rows],
            priority=workload.priority[rows],
            slo_class=workload.slo_class[rows],
            slo_classes=workload.slo_classes,
            prefixes=self._prefixes(draw, rows, copy),
            sessions=self._sessions(rows, copy, order, offsets),
        )

    def _prefixes(self, draw: Draw, rows: Ints, copy: Ints) -> Prefixes | None:
        """The lists of the drawn requests, each copy of a unit but its first with its own blocks renamed."""
        prefixes = self.workload.prefixes
        if prefixes is None or self.own is None or self.counts is None:
            return None
        by_unit = np.argsort(draw.unit, kind="stable")
        is_again = np.zeros(len(draw.unit), bool)
        is_again[by_unit[1:]] = draw.unit[by_unit[1:]] == draw.unit[by_unit[:-1]]
        news = np.where(is_again, self.counts[draw.unit], 0)
        begins = np.where(is_again, len(self.own) + np.cumsum(news) - news, -1)
        offsets = np.concatenate([[0], np.cumsum(np.diff(prefixes.offsets)[rows])])
        ids = np.empty(offsets[-1], np.int64)
        renamed(prefixes.offsets, prefixes.ids, self.own, rows, begins[copy], ids)
        return replace(prefixes, offsets=offsets, ids=ids)

    def _sessions(self, rows: Ints, copy: Ints, order: Ints, offsets: Ints) -> Sessions | None:
        sessions = self.workload.sessions
        if sessions is None:
            return None
        within = np.empty(len(self.rows), np.int64)  # a request's place among its unit's
        within[self.rows] = np.arange(len(self.rows)) - np.repeat(self.offsets[:-1], np.diff(self.offsets))
        place = np.empty(len(order), np.int64)
        place[order] = np.arange(len(order))
        waits = np.diff(sessions.offsets)[rows]
        ends = np.concatenate([[0], np.cumsum(waits)])
        who = np.repeat(np.arange(len(rows)), waits)
        before = sessions.before[sessions.offsets[rows][who] + np.arange(ends[-1]) - ends[who]]
        return Sessions(
            np.where(sessions.session[rows] >= 0, copy, -1),
            ends,
            place[offsets[copy[who]] + within[before]],
            sessions.think_s[rows],
        )


def units_of(workload: Workload) -> Units:
    """The units of a workload. Raises BadInput for a request that waits for another session's."""
    n, sessions = len(workload), workload.sessions
    if workload.prefixes is None and sessions is None:
        return Units(workload, np.zeros(0, np.int64), np.zeros(0, np.int64))
    are_known = workload.prefixes is None or (sessions is not None and bool((sessions.session >= 0).all()))
    label = np.arange(n) if are_known else families(workload)
    if sessions is not None:
        label = np.where(sessions.session >= 0, n + sessions.session, label)
        who = np.repeat(np.arange(n), np.diff(sessions.offsets))
        across = who[label[who] != label[sessions.before]]
        if len(across):
            raise BadInput(f"sessions: before: request {across[0]} waits for a request of another session")
    # Numbered by first appearance, which is by start.
    _, first, found = np.unique(label, return_index=True, return_inverse=True)
    unit = np.argsort(np.argsort(first))[found]
    rows = np.argsort(unit, kind="stable")
    offsets = np.concatenate([[0], np.cumsum(np.bincount(unit))])
    if (prefixes := workload.prefixes) is None:
        return Units(workload, rows, offsets)
    own, counts = _own(prefixes, unit, len(first))
    return Units(workload, rows, offsets, own, counts)


def _own(prefixes: Prefixes, unit: Ints, units: int) -> tuple[Ints, Ints]:
    """`own` and `counts` of Units."""
    of = np.full(int(prefixes.ids.max(initial=-1)) + 1, NOBODYS, np.int64)
    find_owners(prefixes.offsets, prefixes.ids, unit, of)
    mine = np.flatnonzero(of >= 0)
    mine = mine[np.argsort(of[mine], kind="stable")]
    counts = np.bincount(of[mine], minlength=units)
    own = np.full(len(of), -1, np.int64)
    own[mine] = np.arange(len(mine)) - np.repeat(np.cumsum(counts) - counts, counts)
    return own, counts


def families(workload: Workload) -> Ints:
    """For each request the first of those that it continues, itself where it continues none."""
    n, prefixes = len(workload), workload.prefixes
    assert prefixes is not None
    lengths = np.diff(prefixes.offsets)
    full = workload.prompt_tokens // prefixes.block_tokens  # blocks of the prompt
    is_told = (full > 0) & (lengths >= full)  # else its last blocks are its own, and no request continues it
    told = np.flatnonzero(is_told)[::-1]
    opener = np.full(int(prefixes.ids.max(initial=-1)) + 1, n, np.int64)  # first whose prompt a block ends
    opener[prefixes.ids[prefixes.offsets[told] + full[told] - 1]] = told
    # The deepest block of each list that ends an earlier request's prompt.
    whose = np.repeat(np.arange(n), lengths)
    at = np.arange(len(whose)) - prefixes.offsets[whose]
    hit = np.flatnonzero((opener[prefixes.ids] < whose) & (at < full[whose]))
    deepest = np.full(n, -1, np.int64)
    deepest[whose[hit]] = hit  # of equal rows the last, which is the deepest
    parent = np.arange(n)
    joins = deepest >= 0
    parent[joins] = opener[prefixes.ids[deepest[joins]]]
    continued = np.bincount(parent[joins], minlength=n)
    parent = np.where(joins & (continued[parent] <= TEMPLATE), parent, np.arange(n))
    while not np.array_equal(root := parent[parent], parent):
        parent = root
    return parent


def next_like(units: Units, rng: np.random.Generator) -> Workload:
    """Other traffic like the units': a draw of them, and then a draw of that."""
    return units.made(drawn_anew(units, drawn_anew(units, units.whole, rng), rng))


def drawn_anew(units: Units, draw: Draw, rng: np.random.Generator) -> Draw:
    """Other starts, of about the same number over the same time."""
    if units.is_plain:
        return _by_blocks(draw, rng)
    first_s, span_s = draw.start_s[0], float(draw.start_s[-1] - draw.start_s[0])
    begun = int(np.searchsorted(draw.start_s, first_s + max(NEARBY * span_s, INSTANT_S)))
    unit = draw.unit[np.sort(rng.integers(begun, size=begun))]
    if begun == len(draw.unit):
        return Draw(unit, draw.start_s)
    edge_s = draw.start_s[begun]
    rest = _by_blocks(Draw(draw.unit[begun:], draw.start_s[begun:] - edge_s), rng)
    start_s = np.concatenate([draw.start_s[:begun], rest.start_s + edge_s])
    return Draw(np.concatenate([unit, rest.unit]), start_s)


def _by_blocks(draw: Draw, rng: np.random.Generator) -> Draw:
    """The draw with each block of time replaced by one nearby, times counted from the first start."""
    duration_s = float(draw.start_s[-1] - draw.start_s[0])
    if duration_s <= INSTANT_S:
        return draw
    block_s, starts = block_starts(duration_s, rng)
    places = np.arange(len(starts)) * block_s
    start_s = draw.start_s - float(draw.start_s[0])
    low = np.searchsorted(start_s, starts, side="left")
    # The very last unit sits on the closing edge of the last block and belongs to it.
    ends = starts + block_s
    high = np.where(ends >= duration_s, len(start_s), np.searchsorted(start_s, ends, side="left"))
    counts = high - low
    if counts.sum() == 0:
        return draw
    which = np.repeat(low - np.concatenate(([0], np.cumsum(counts)[:-1])), counts) + np.arange(counts.sum())
    moved_s = start_s[which] - np.repeat(starts, counts) + np.repeat(places, counts)
    # Rounding may put a unit a hair before the block's edge, and the next block's first after it.
    order = np.argsort(moved_s, kind="stable")
    return Draw(draw.unit[which[order]], np.maximum(moved_s[order], 0.0))


def block_starts(duration_s: float, rng: np.random.Generator) -> tuple[float, Floats]:
    """The length of a block, and where the one begins that is put in the place of each."""
    block_s = _block_s(duration_s)
    places = np.arange(int(np.ceil(duration_s / block_s))) * block_s
    reach_s = max(min(NEARBY * duration_s, NEARBY_S), block_s)
    return block_s, np.clip(places + rng.uniform(-reach_s, reach_s, len(places)), 0.0, duration_s - block_s)


def _block_s(duration_s: float) -> float:
    return max(min(BLOCK_S, duration_s / FEWEST_BLOCKS), duration_s / MOST_BLOCKS)


def busier_draw(units: Units, draw: Draw, scale: float) -> Draw:
    """`scale` times as many units, the same ones whatever else is drawn of `draw`."""
    if not scale > 0:
        raise BadInput(f"rate scale: must be positive, got {scale:g}")
    n = len(draw.unit)
    tokens = np.add.reduceat(units.workload.prompt_tokens[units.rows], units.offsets[:-1])
    place = np.empty(n, np.int64)
    place[np.argsort(tokens[draw.unit], kind="stable")] = np.arange(n)
    copies = np.maximum(np.ceil(scale - (place + 0.5) * _EVEN % 1.0), 0).astype(np.int64)
    if copies.sum() == 0:
        copies[0] = 1  # a workload of nothing is none
    which = np.repeat(np.arange(n), copies)
    nth = np.arange(len(which)) - np.repeat(np.cumsum(copies) - copies, copies)
    low_s, high_s = draw.start_s[0], draw.start_s[-1]
    aside = 2.0 * (((which + 1.0) * _APART + nth * _EVEN) % 1.0) - 1.0
    start_s = draw.start_s[which] + np.where(nth > 0, aside * _block_s(float(high_s - low_s)), 0.0)
    start_s = np.clip(start_s, low_s, high_s)
    order = np.argsort(start_s, kind="stable")
    return Draw(draw.unit[which[order]], start_s[order])


def in_sessions(workload: Workload) -> Workload:
    """The workload with its requests in sessions, where it says only what they share."""
    if workload.prefixes is None or workload.sessions is not None:
        return workload
    n = len(workload)
    nobody = np.zeros(0, np.int64)
    return replace(
        workload, sessions=Sessions(families(workload), np.zeros(n + 1, np.int64), nobody, np.zeros(n))
    )


def busier(workload: Workload, scale: float) -> Workload:
    """`scale` times the traffic: more sessions, or requests that come faster where they share nothing."""
    return units_of(workload).busier(scale)


def time_scale(workload: Workload, scale: float) -> float:
    """The seconds of the trace that pass in one second of its busier self."""
    return scale if workload.prefixes is None and workload.sessions is None else 1.0
