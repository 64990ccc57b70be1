"""The identity of a trace's requests: what their sequences share, and the turns of sessions.

Prefixes come from `hash_ids`, or from lengths. With lengths, a turn's prompt begins with the prompt and
answer of the turn before, where it is that long, else with its declared system prompt alone, if any.

Formats with ids of prompts only do not say which blocks an answer filled. The answer of a prompt shows where
a later prompt begins with all its full blocks and is long enough for the answer too. The earlier one must
have brought the last of them into the trace. The blocks that follow and that no request had before are its
answer: they are added to its list. Blocks of one request alone are left out, as they are its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controlplane.errors import BadInput
from controlplane.prefixes import Prefixes, Sessions
from tokenfleet.traces.sessions import Floats, Ints, Links, RequestRows, codes_of, links_of

BLOCK_TOKENS = 16  # the unit of what follows from lengths


@dataclass(frozen=True)
class SystemPrompts:
    """System prompts by declared length: `names`, `tokens` [names], and `of` [requests], -1 for none."""

    names: tuple[str, ...]
    tokens: Ints
    of: Ints


@dataclass(frozen=True)
class Identity:
    """What was found: the rows' order of arrival, their times in that order, and what they share.

    `from_lengths`: the prefixes follow from sessions, lengths and `systems`.
    """

    order: Ints
    arrival_s: Floats
    prefixes: Prefixes | None = None
    sessions: Sessions | None = None
    systems: SystemPrompts | None = None
    from_lengths: bool = False


def identify(rows: RequestRows) -> Identity:
    """What the requests of a file share and wait for. Raises BadInput for what contradicts itself."""
    links = links_of(rows) if rows.has("session") else None
    arrival_s = rows.arrival_s if links is None else links.arrival_s
    order = np.argsort(arrival_s, kind="stable")
    if not rows.form.shared:
        return Identity(order, arrival_s[order])
    if links is not None:
        place = np.argsort(order)
        if (place[links.before] >= place[links.owner]).any():
            order = np.lexsort((links.rank, arrival_s))
    prompt, output = (rows.table[name].to_numpy().astype(np.int64)[order] for name in ("prompt", "output"))
    systems = _systems(rows, order)
    parent = np.full(len(order), -1, np.int64)
    sessions = None
    if links is not None:
        sessions, parent = _sessions(links, order)
    prefixes, from_lengths = None, False
    if rows.has("hash_ids") or ("hash_ids" in rows.form.shared and rows.has("block_tokens")):
        hashed = _hashed(rows, links).pick(order)
        prompts_only = rows.form.format.block_tokens > 0
        prefixes = _shared(_with_answers(hashed, prompt, output) if prompts_only else hashed)
    elif links is not None or systems is not None:
        prefixes, from_lengths = follow_lengths(prompt, output, parent, systems), True
    return Identity(order, arrival_s[order], prefixes, sessions, systems, from_lengths)


def _sessions(links: Links, order: Ints) -> tuple[Sessions, Ints]:
    """Links in order of arrival, and each request's predecessor whose sequence it continues, or -1."""
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    owner, before = place[links.owner], place[links.before]
    parent = np.full(len(order), -1, np.int64)
    parent[owner[::-1]] = before[::-1]  # the first of them
    think_s = links.think_s[order]
    by_owner = np.argsort(owner, kind="stable")
    by_owner = by_owner[~np.isnan(think_s[owner[by_owner]])]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owner[by_owner], minlength=len(order)))])
    return Sessions(links.session[order], offsets, before[by_owner], np.nan_to_num(think_s)), parent


def _hashed(rows: RequestRows, links: Links | None) -> Prefixes:
    """The lists of `hash_ids`, checked, as ids from 0; those of partly filled blocks are left out."""
    lists = rows.table["hash_ids"]
    counts = lists.list.len().fill_null(0).to_numpy().astype(np.int64)
    block_tokens = _block_tokens(rows)
    full = _full_blocks(rows, counts, lists.is_not_null().to_numpy(), block_tokens)
    offsets = np.concatenate([[0], np.cumsum(counts)])
    raw = lists.explode(empty_as_null=False, keep_nulls=False).to_numpy()
    ids = _dense(raw)
    owner = np.repeat(np.arange(len(counts)), counts)
    if rows.form.format.name == "weka" and links is not None:  # the ids of a session are its own
        ids = _dense((links.session[owner] + 1) * (ids.max(initial=0) + 1) + ids)
    inside = np.arange(len(ids)) - offsets[owner] < full[owner]
    prefixes = Prefixes(block_tokens, np.concatenate([[0], np.cumsum(np.minimum(counts, full))]), ids[inside])
    _check_cumulative(rows, prefixes)
    return prefixes


def _block_tokens(rows: RequestRows) -> int:
    """The unit of a file's ids."""
    if rows.form.format.block_tokens:
        return rows.form.format.block_tokens
    if not rows.has("block_tokens"):
        raise BadInput(f"{rows.where}: hash_ids: expected block_tokens too, the tokens of a block")
    units = rows.whole("block_tokens")
    named = np.flatnonzero(rows.table["hash_ids"].is_not_null().to_numpy())
    odd = (
        named[(units[named] != units[named[0]]) | (units[named] < 16) | (units[named] % 16 != 0)]
        if len(named)
        else named
    )
    if len(odd):
        rows.refuse(
            odd[0], "block_tokens", f"{units[odd[0]]}, expected a multiple of 16, the same in every row"
        )
    return int(units[named[0]]) if len(named) else BLOCK_TOKENS


def _full_blocks(rows: RequestRows, counts: Ints, told: NDArray[np.bool_], block_tokens: int) -> Ints:
    """How many of each row's ids are of full blocks; refuse more or fewer than its lengths allow."""
    prompt, output = (rows.table[name].to_numpy().astype(np.int64) for name in ("prompt", "output"))
    full = prompt // block_tokens
    if rows.form.format.name == "plain":
        full = least = most = (prompt + output) // block_tokens
        least = np.zeros_like(full)
    else:
        least, most = full, full if rows.form.format.name == "weka" else -(-prompt // block_tokens)
    for row in np.flatnonzero(told & ((counts < least) | (counts > most)))[:1]:
        wanted = f"{most[row]}" if least[row] == most[row] else f"{least[row]} to {most[row]}"
        length = f"{prompt[row]} prompt tokens" + (
            f" and {output[row]} output tokens" if least is not full else ""
        )
        rows.refuse(
            row, "hash_ids", f"{counts[row]} ids, expected {wanted} blocks of {block_tokens} for {length}"
        )
    return full


def _check_cumulative(rows: RequestRows, prefixes: Prefixes) -> None:
    """Refuse an id that stands after different ids: it does not stand for all before it."""
    ids = prefixes.ids
    previous = np.concatenate([[-1], ids[:-1]]) if len(ids) else ids
    starts = prefixes.offsets[:-1][np.diff(prefixes.offsets) > 0]
    previous[starts] = -1
    first = np.empty(ids.max(initial=-1) + 1, np.int64)
    first[ids[::-1]] = previous[::-1]
    for at in np.flatnonzero(first[ids] != previous)[:1]:
        row = int(np.searchsorted(prefixes.offsets, at, side="right")) - 1
        place = at - prefixes.offsets[row] + 1
        rows.refuse(
            row,
            "hash_ids",
            f"the id at place {place} follows another one elsewhere; an id stands for all before it",
        )


def _with_answers(prefixes: Prefixes, prompt: Ints, output: Ints) -> Prefixes:
    """The lists with the blocks of answers that later prompts show; see the module's heading."""
    seen, ends = (np.full(prefixes.ids.max(initial=-1) + 1, -1, np.int64) for _ in range(2))
    continued: dict[int, tuple[int, int]] = {}
    for r in range(len(prefixes)):
        ids = prefixes.of(r)
        if len(ids) == 0:
            continue
        known = np.flatnonzero(ends[ids] >= 0)
        if len(known) and known[-1] + 1 < len(ids):
            count = int(known[-1]) + 1
            earlier = int(ends[ids[count - 1]])
            whole = int(prompt[earlier] + output[earlier])
            if earlier not in continued and seen[ids[count]] < 0 and prompt[r] >= whole:
                continued[earlier] = (r, min(whole // prefixes.block_tokens, len(ids)))
        if seen[ids[-1]] < 0:
            ends[ids[-1]] = r
        seen[ids] = r
    lists = [prefixes.of(r) for r in range(len(prefixes))]
    for earlier, (later, blocks) in continued.items():
        lists[earlier] = prefixes.of(later)[:blocks]
    return _of_lists(prefixes.block_tokens, lists)


def _shared(prefixes: Prefixes) -> Prefixes:
    """The blocks that stand in two lists or more."""
    twice = np.bincount(prefixes.ids) > 1 if len(prefixes.ids) else np.zeros(0, bool)
    kept = twice[prefixes.ids]
    counts = np.concatenate([[0], np.cumsum(kept)])[prefixes.offsets]
    return Prefixes(prefixes.block_tokens, counts, (np.cumsum(twice) - 1)[prefixes.ids[kept]])


def follow_lengths(prompt: Ints, output: Ints, parent: Ints, systems: SystemPrompts | None) -> Prefixes:
    """What requests share by their lengths; `parent` [requests]: the request each prompt continues, or -1."""
    continues = (parent >= 0) & (prompt >= prompt[parent] + output[parent])
    grown = np.zeros(len(prompt), bool)
    grown[parent[continues]] = True
    begun: list[Ints] = []
    named = 0
    for tokens in systems.tokens.tolist() if systems is not None else ():
        begun.append(np.arange(named, named + tokens // BLOCK_TOKENS))
        named += tokens // BLOCK_TOKENS
    nothing = np.zeros(0, np.int64)
    lists: list[Ints] = []
    for r in range(len(prompt)):
        ids = nothing
        if continues[r]:
            ids = lists[parent[r]]
        elif systems is not None and systems.of[r] >= 0:
            ids = begun[systems.of[r]]
        more = int(prompt[r] + output[r]) // BLOCK_TOKENS - len(ids) if grown[r] else 0
        if more > 0:
            ids = np.concatenate([ids, np.arange(named, named + more)])
            named += more
        lists.append(ids)
    return _of_lists(BLOCK_TOKENS, lists)


def _of_lists(block_tokens: int, lists: Sequence[Ints]) -> Prefixes:
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids in lists], dtype=np.int64)])
    return Prefixes(block_tokens, offsets, np.concatenate([*lists, np.zeros(0, np.int64)]))


def _systems(rows: RequestRows, order: Ints) -> SystemPrompts | None:
    """The declared system prompts, in order of arrival."""
    if not rows.has("system"):
        return None
    if not rows.has("system_tokens"):
        raise BadInput(f"{rows.where}: system: expected system_tokens too, the length of each system prompt")
    names = rows.table["system"]
    codes, known = codes_of(names)
    tokens, prompt = rows.whole("system_tokens"), rows.table["prompt"].to_numpy()
    declared = np.zeros(len(known), np.int64)
    declared[codes[::-1][codes[::-1] >= 0]] = tokens[::-1][codes[::-1] >= 0]
    named = codes >= 0
    for row in np.flatnonzero(named & (tokens != declared[codes] if len(declared) else named))[:1]:
        rows.refuse(
            row, "system_tokens", f"{tokens[row]}, {names[int(row)]!r} had {declared[codes[row]]} above"
        )
    for row in np.flatnonzero(named & ((tokens < 0) | (tokens > prompt)))[:1]:
        rows.refuse(
            row, "system_tokens", f"{tokens[row]}, expected at most the {prompt[row]:.0f} of the prompt"
        )
    return SystemPrompts(known, declared, codes[order])


def _dense(ids: NDArray[np.generic]) -> Ints:
    """Ids from 0, without large gaps."""
    if len(ids) == 0:
        return np.zeros(0, np.int64)
    if ids.min() >= 0 and ids.max() < 4 * len(ids):
        return ids.astype(np.int64)
    return np.asarray(np.unique(ids, return_inverse=True)[1], np.int64)
