"""The turns of a trace's sessions: which row follows which, and what each waits for.

A turn waits for the turns before it where its think time is known. That is `think_s`, or, in a history, the
time to its arrival from the answer of its session that had ended last. Elsewhere it comes at its recorded
time.

In Weka traces a sub-agent starts after the turn of its parent that is before `parent_turn`, which waits for
it. Recorded starts that contradict this are moved: turns that wait start when the last answer they wait for
is complete, and their agent's later turns as much later. Waits other than an agent's for its own last answer
are taken from these starts. So are those for an answer without `api_s`: there the recorded `think_s` counts
from an earlier answer, whose end was known.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NoReturn

import numpy as np
import polars as pl
from numpy.typing import NDArray

from controlplane.errors import BadInput
from tokenfleet.traces.container import ROW
from tokenfleet.traces.formats import Match

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class RequestRows:
    """The rows of a file that hold requests, in its own order, and how to name one of them."""

    where: str
    form: Match
    table: pl.DataFrame
    arrival_s: Floats

    def has(self, *names: str) -> bool:
        """Whether the file has all these columns, with something in each."""
        told = self.form.shared
        return all(name in told and self.table[name].is_not_null().any() for name in names)

    def whole(self, name: str) -> Ints:
        """A column of whole numbers; -1 where there is none."""
        return self.table[name].fill_null(-1).to_numpy().astype(np.int64)

    def seconds(self, name: str) -> Floats:
        """A column of seconds; NaN where there is none."""
        return self.table[name].cast(pl.Float64).fill_null(np.nan).to_numpy().astype(np.float64)

    def refuse(self, row: int, name: str, words: str) -> NoReturn:
        """Raise BadInput about a row's value."""
        column = self.form.shared.get(name, name)
        raise BadInput(f"{self.where}: row {self.table[ROW][int(row)] + 1}: {column}: {words}")


def codes_of(names: pl.Series) -> tuple[Ints, tuple[str, ...]]:
    """Each name as a place among the distinct ones, which are in order of first appearance; -1: null."""
    known = names.unique(maintain_order=True).drop_nulls()
    places = pl.DataFrame({"name": known, "place": np.arange(len(known), dtype=np.int64)})
    joined = names.alias("name").to_frame().join(places, on="name", how="left", maintain_order="left")
    codes = joined["place"].fill_null(-1).to_numpy().astype(np.int64)
    return codes, tuple(known.cast(pl.String).to_list())


@dataclass(frozen=True)
class Links:
    """Turns of sessions, by rows of the file. `before` [links] precede `owner` [links], first the one that
    its prompt continues. `think_s` [rows]: NaN if it waits for nothing. `rank` [rows] breaks ties of time.
    """

    session: Ints
    owner: Ints
    before: Ints
    think_s: Floats
    rank: Ints
    arrival_s: Floats


def links_of(rows: RequestRows) -> Links:
    """The turns of each session and what they wait for."""
    session, _ = codes_of(rows.table["session"])
    if rows.form.format.name == "weka":
        return _agents(rows, session)
    n = len(session)
    in_session = np.flatnonzero(session >= 0)
    turn = rows.whole("turn") if rows.has("turn") else np.zeros(n, np.int64)
    think_s = rows.seconds("think_s") if rows.has("think_s") else np.full(n, np.nan)
    line = in_session[
        np.lexsort((in_session, rows.arrival_s[in_session], turn[in_session], session[in_session]))
    ]
    before, owner = line[:-1], line[1:]
    same = session[before] == session[owner]
    before, owner = before[same], owner[same]
    if rows.has("turn"):
        _check_turns(rows, turn, before, owner)
    if rows.has("turn", "after"):
        owner, before = _after(rows, session, turn)
    elif not rows.has("turn") and not rows.has("think_s") and (end_s := _answers_s(rows)) is not None:
        owner, before = _ended_last(session, rows.arrival_s, end_s)
        think_s[owner] = rows.arrival_s[owner] - end_s[before]
    heads = np.ones(n, bool)
    heads[owner] = False
    return Links(session, owner, before, np.where(heads, np.nan, think_s), turn, rows.arrival_s)


def _check_turns(rows: RequestRows, turn: Ints, before: Ints, owner: Ints) -> None:
    """Refuse turns without a number, that stand twice, or that come before the one they follow."""
    lost = np.flatnonzero((turn < 0) & rows.table["session"].is_not_null().to_numpy())
    if len(lost):
        rows.refuse(lost[0], "turn", "no value, expected a whole number, not negative")
    for fault in np.flatnonzero(
        (turn[before] == turn[owner]) | (rows.arrival_s[owner] < rows.arrival_s[before])
    ):
        first, second = before[fault], owner[fault]
        name = rows.table["session"][int(second)]
        if turn[first] == turn[second]:
            rows.refuse(max(first, second), "turn", f"{turn[second]}, which session {name!r} has already")
        sent = f"sent {rows.arrival_s[first] - rows.arrival_s[second]:.6g} s before turn {turn[first]}"
        rows.refuse(second, "turn", f"{turn[second]} of session {name!r} was {sent}")


def _after(rows: RequestRows, session: Ints, turn: Ints) -> tuple[Ints, Ints]:
    """The turns that the column `after` names; where it is empty, none."""
    row_of = {key: row for row, key in enumerate(zip(session.tolist(), turn.tolist(), strict=True))}
    owner, before = [], []
    for row, named in enumerate(rows.table["after"].to_list()):
        for earlier in named or () if session[row] >= 0 else ():
            found = row_of.get((int(session[row]), earlier), -1)
            if found < 0 or earlier >= turn[row]:
                rows.refuse(
                    row, "after", f"{earlier}, expected an earlier turn of its session than {turn[row]}"
                )
            if rows.arrival_s[found] > rows.arrival_s[row]:
                rows.refuse(row, "after", f"{earlier}, which was sent later")
            owner.append(row)
            before.append(found)
    return np.array(owner, np.int64), np.array(before, np.int64)


def _answers_s(rows: RequestRows) -> Floats | None:
    """When each answer was complete, on the arrivals' clock; None where the file does not say."""
    if not rows.has("ttft_s", "tpot_s"):
        return None
    gaps = rows.table["output"].to_numpy().astype(np.float64) - 1.0
    rest_s = np.where(gaps > 0, gaps * rows.seconds("tpot_s"), 0.0)
    return np.asarray(rows.arrival_s + rows.seconds("ttft_s") + rest_s, np.float64)


def _ended_last(session: Ints, arrival_s: Floats, end_s: Floats) -> tuple[Ints, Ints]:
    """For each request, that of its session whose answer had ended last when it was sent."""
    owner, before = [], []
    line = np.flatnonzero((session >= 0) & np.isfinite(end_s))
    line = line[np.lexsort((end_s[line], session[line]))]
    bounds = np.searchsorted(session[line], np.arange(session.max(initial=-1) + 2))
    members = np.argsort(session, kind="stable")
    spans = np.searchsorted(session[members], np.arange(session.max(initial=-1) + 2))
    for s, (start, stop) in enumerate(pairwise(bounds.tolist())):
        ended, sent = line[start:stop], members[spans[s] : spans[s + 1]]
        last = np.searchsorted(end_s[ended], arrival_s[sent], side="right") - 1
        usable = last >= 0
        found = ended[last[usable]]
        apart = (found != sent[usable]) & (arrival_s[found] < arrival_s[sent[usable]])
        owner.append(sent[usable][apart])
        before.append(found[apart])
    return np.concatenate([*owner, np.zeros(0, np.int64)]), np.concatenate([*before, np.zeros(0, np.int64)])


def _agents(rows: RequestRows, session: Ints) -> Links:
    """The turns of agents and sub-agents."""
    columns = ("agent", "turn", "parent_agent", "parent_turn")
    agent, turn, parent_agent, parent_turn = (rows.whole(name) for name in columns)
    at: dict[tuple[int, int, int], int] = {}
    for row, key in enumerate(zip(session.tolist(), agent.tolist(), turn.tolist(), strict=True)):
        if key in at:
            rows.refuse(row, "turn", f"{key[2]}, which agent {key[1]} of session {key[0]} has already")
        at[key] = row
    line = np.lexsort((turn, agent, session))
    own = {}
    before: list[list[int]] = [[] for _ in line]
    for first, second in pairwise(line.tolist()):
        if session[first] == session[second] and agent[first] == agent[second]:
            own[second] = first
            before[second].append(first)
            if rows.arrival_s[second] < rows.arrival_s[first]:
                late = rows.arrival_s[first] - rows.arrival_s[second]
                rows.refuse(second, "turn", f"{turn[second]} was sent {late:.6g} s before turn {turn[first]}")
    last_of = {(int(session[row]), int(agent[row])): row for row in line.tolist()}
    for row in line.tolist():
        if row in own or parent_agent[row] < 0:
            continue
        s, parent, joined = int(session[row]), int(parent_agent[row]), int(parent_turn[row])
        starts, joins = at.get((s, parent, joined - 1)), at.get((s, parent, joined))
        if starts is not None:
            before[row].append(starts)
        if joins is not None:
            before[joins].append(last_of[s, int(agent[row])])
    return _recorded(rows, session, own, before)


def _recorded(rows: RequestRows, session: Ints, own: dict[int, int], before: list[list[int]]) -> Links:
    """Starts that agree with what waits for what, and the waits that they and `think_s` give."""
    n = len(before)
    lasts_s = rows.seconds("api_s") if rows.has("api_s") else np.zeros(n)
    has_end, lasts_s = ~np.isnan(lasts_s), np.nan_to_num(lasts_s)
    thought_s, sent_s = rows.seconds("think_s"), rows.arrival_s.copy()
    think_s, rank = np.full(n, np.nan), np.zeros(n, np.int64)
    for place, row in enumerate(_in_turn(rows, before)):
        rank[row] = place
        earlier = before[row]
        if not earlier:
            continue
        end_s = (sent_s[earlier] + lasts_s[earlier]).max()
        moved_s = max(sent_s[earlier[0]] - rows.arrival_s[earlier[0]], 0.0)
        sent_s[row] = max(sent_s[row] + moved_s, sent_s[earlier].max(), end_s if len(earlier) > 1 else 0.0)
        recorded = row in own and len(earlier) == 1 and has_end[earlier[0]] and not np.isnan(thought_s[row])
        think_s[row] = thought_s[row] if recorded else max(sent_s[row] - end_s, 0.0)
    owner = np.repeat(np.arange(n), [len(earlier) for earlier in before])
    links = np.array([each for earlier in before for each in earlier], np.int64)
    return Links(session, owner, links, think_s, rank, sent_s)


def _in_turn(rows: RequestRows, before: list[list[int]]) -> list[int]:
    """The rows, each after those that it waits for; refuse rows that wait for each other."""
    after: list[list[int]] = [[] for _ in before]
    for row, earlier in enumerate(before):
        for each in earlier:
            after[each].append(row)
    left = [len(earlier) for earlier in before]
    line = [row for row, count in enumerate(left) if count == 0]
    for row in line:  # which grows
        for each in after[row]:
            left[each] -= 1
            if left[each] == 0:
                line.append(each)
    if len(line) < len(before):
        first = next(row for row, count in enumerate(left) if count)
        rows.refuse(first, "parent_turn", "sub-agents that wait for each other")
    return line
