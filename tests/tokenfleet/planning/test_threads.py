"""Threads whose tasks may use it themselves."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tokenfleet.planning.threads import open_threads

TREES = st.recursive(st.integers(), lambda inner: st.lists(inner, max_size=4), max_leaves=40)


def doubled(tree):
    return [doubled(one) for one in tree] if isinstance(tree, list) else 2 * tree


@given(TREES, st.integers(1, 3))
def test_maps_within_maps_end_in_order_on_any_number_of_threads(tree, count):
    def does(one):
        return threads.map(does, one) if isinstance(one, list) else 2 * one

    with open_threads(count) as threads:
        assert threads.map(does, [tree]) == [doubled(tree)]


def test_a_thread_that_is_free_takes_the_items_of_one_that_is_not():
    meet = threading.Barrier(2, timeout=30)  # passed by two threads only

    with open_threads(2) as threads:
        assert threads.map(lambda _: threads.map(lambda _: meet.wait() >= 0, range(2)), range(1)) == [
            [True, True]
        ]


def test_what_is_begun_is_done_once_and_its_error_is_raised_where_it_is_asked_for():
    done = []

    def fails():
        done.append(1)
        raise ValueError("a test")

    with open_threads(1) as threads:
        begun = threads.begin(fails)
        with pytest.raises(ValueError, match="a test"):
            begun()
        with pytest.raises(ValueError, match="a test"):
            threads.map(lambda _: threads.begin(fails)(), range(1))
    assert len(done) == 2
