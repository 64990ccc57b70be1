"""Prefixes and sessions: part of a workload keeps what its requests share and wait for."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import BadInput
from controlplane.prefixes import Prefixes, Sessions
from controlplane.workload import Workload


def rows_of(lists):
    return np.concatenate([[0], np.cumsum([len(x) for x in lists])]), np.array([y for x in lists for y in x])


def prefixes(lists, block_tokens=16):
    return Prefixes(block_tokens, *rows_of(lists))


def sessions(before, think_s=None):
    n = len(before)
    return Sessions(np.zeros(n), *rows_of(before), np.zeros(n) if think_s is None else think_s)


@given(st.lists(st.lists(st.integers(0, 50), max_size=6), min_size=1, max_size=12), st.data())
def test_picked_requests_keep_their_ids(lists, data):
    rows = data.draw(st.lists(st.integers(0, len(lists) - 1), max_size=12))
    picked = prefixes(lists).pick(np.array(rows, np.int64))
    assert [list(picked.of(i)) for i in range(len(rows))] == [lists[r] for r in rows]


def test_a_part_of_a_workload_waits_only_for_requests_of_that_part():
    whole = Workload(
        np.arange(4.0),
        np.full(4, 20),
        np.full(4, 5),
        prefixes=prefixes([[0], [0, 1], [2], [0, 1, 3]]),
        sessions=sessions([[], [0], [], [0, 1]], np.array([0, 1.5, 0, 2.5])),
    )
    part = whole.window(1.0, 4.0)
    assert [list(part.prefixes.of(i)) for i in range(3)] == [[0, 1], [2], [0, 1, 3]]
    assert list(part.sessions.offsets) == [0, 0, 0, 1]
    assert list(part.sessions.before) == [0]
    assert list(part.sessions.think_s) == [1.5, 0, 2.5]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: prefixes([[-1]]), "ids: must not be negative"),
        (lambda: prefixes([[1]], block_tokens=0), "block_tokens: must be at least 1"),
        (lambda: Prefixes(16, np.array([0, 2, 1]), np.array([5])), "offsets: must not decrease"),
        (
            lambda: Prefixes(16, np.array([0, 2]), np.array([5])),
            "offsets: must begin at 0 and end at the 1 ids",
        ),
        (lambda: sessions([[], [1]]), "can wait only for requests of earlier rows"),
        (lambda: sessions([[], [0]], np.array([0, -1.0])), "think_s: must be finite and not negative"),
        (lambda: sessions([[]], np.array([np.nan])), "think_s: must be finite and not negative"),
    ],
)
def test_columns_that_contradict_each_other_are_refused(make, said):
    with pytest.raises(BadInput, match=said):
        make()


def test_rows_must_be_as_many_as_requests():
    with pytest.raises(BadInput, match="prefixes: 1 rows, arrival_s has 2"):
        Workload(np.arange(2.0), np.ones(2), np.ones(2), prefixes=prefixes([[]]))


@given(st.lists(st.lists(st.integers(0, 50), max_size=12), min_size=1, max_size=6), st.integers(1, 5))
def test_a_larger_block_is_the_same_where_the_last_one_in_it_is(lists, times):
    coarse = prefixes(lists, 16).coarser(times)
    assert coarse.block_tokens == 16 * times
    kept = [ids[times - 1 :: times] for ids in lists]
    named = {
        old: new
        for ids, a in zip(kept, range(len(lists)), strict=True)
        for old, new in zip(ids, coarse.of(a).tolist(), strict=True)
    }
    assert [[named[i] for i in ids] for ids in kept] == [coarse.of(a).tolist() for a in range(len(lists))]
    assert len(set(named.values())) == len(named)
