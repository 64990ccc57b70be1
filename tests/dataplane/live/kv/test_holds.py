"""Leases and holds: whatever happens to a move, blocks are kept when promised and freed exactly once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataplane.live.engine_api.kv_messages import (
    Control,
    CopyRate,
    KvLoad,
    Transfer,
    message_from,
    params_from,
)
from dataplane.live.kv.holds import Holds

LOADER = Transfer(KvLoad(("somewhere",), "source", 64), hold=True)
PLAIN = Transfer()


def ended(holds, segment, transfer=PLAIN, blocks=(1, 2), *, aborted=False, failed=False, now_s=0.0):
    return holds.ended(segment, transfer, blocks, aborted=aborted, failed=failed, now_s=now_s)


def begin(holds, segment="s", now_s=0.0):
    assert holds.begin(segment, True, now_s)


def test_without_a_move_no_block_outlives_its_segment():
    holds = Holds(16)
    assert not ended(holds, "s")
    assert holds.orders({}, (), 0.0).freed == []


@pytest.mark.parametrize("aborted", [False, True])
def test_a_leased_segment_leaves_its_blocks_until_they_are_released(aborted):
    holds = Holds(16)
    begin(holds)
    assert holds.orders({"s": [4, 5]}, (), 0.0).offered == {"s": [4, 5]}
    assert ended(holds, "s", blocks=[4, 5, 6], aborted=aborted)
    assert holds.orders({}, (), 0.0).offered == {"s": [4, 5, 6]}
    holds.release("s")
    orders = holds.orders({}, (), 0.0)
    assert (orders.freed, orders.withdrawn) == (["s"], ["s"])
    assert holds.orders({}, (), 0.0).freed == []


def test_a_failed_segment_leaves_nothing():
    holds = Holds(16)
    begin(holds)
    assert not ended(holds, "s", failed=True)
    assert holds.orders({}, (), 0.0).withdrawn == ["s"]


def test_a_loader_holds_what_it_brought_until_a_later_request_drops_it():
    holds = Holds(16)
    assert ended(holds, "loader", LOADER)
    holds.admitted("next", Transfer(drop=("loader",)), range(4), 0)
    assert holds.orders({}, (), 0.0).freed == ["loader"]


def pinned(holds, now_s=0.0):
    """A loader whose KV has arrived."""
    holds.admitted("loader", LOADER, range(4), holds.tokens_to_load("loader", LOADER, 0))
    holds.orders({}, (), now_s)
    assert holds.arrived("loader", now_s)


def test_a_loader_that_has_arrived_rests_until_it_is_dropped_and_is_then_ended_by_its_engine():
    holds = Holds(16)
    pinned(holds)
    assert holds.loaders == 1
    holds.admitted("next", Transfer(drop=("loader",)), range(4), 0)
    orders = holds.orders({}, (), 0.0)
    assert (orders.dropped, orders.freed, holds.loaders) == (["loader"], [], 0)
    assert not ended(holds, "loader", LOADER, failed=True)
    assert holds.orders({}, (), 0.0).dropped == []


def test_a_resting_loader_ends_at_its_deadline_too():
    holds = Holds(16, hold_s=10.0)
    pinned(holds, 5.0)
    assert holds.orders({}, (), 14.9).dropped == []
    assert holds.orders({}, (), 15.1).dropped == ["loader"]


def test_a_resting_loader_that_is_aborted_frees_its_blocks_once():
    holds = Holds(16)
    pinned(holds)
    assert not ended(holds, "loader", LOADER, aborted=True)
    holds.release("loader")
    assert holds.orders({}, (), 0.0).dropped == ["loader"]


def test_only_a_loader_rests_and_only_once():
    holds = Holds(16)
    plain = Transfer(KvLoad(("a",), "source", 64))
    holds.admitted("plain", plain, range(4), 64)
    assert not holds.arrived("plain", 0.0)
    pinned(holds)
    assert not holds.arrived("loader", 0.0)


def test_a_loader_that_failed_or_was_aborted_while_it_loaded_does_not_rest():
    for kind in ({"failed": True}, {"aborted": True}):
        holds = Holds(16)
        holds.admitted("loader", LOADER, range(4), 64)
        assert not ended(holds, "loader", LOADER, **kind)
        assert not holds.arrived("loader", 0.0)


def test_an_aborted_loader_holds_nothing():
    assert not ended(Holds(16), "loader", LOADER, aborted=True)


def test_a_hold_that_nobody_releases_ends_at_its_deadline():
    holds = Holds(16, hold_s=10.0)
    begin(holds)
    assert ended(holds, "s", now_s=5.0)
    assert holds.orders({}, (), 14.9).freed == []
    assert holds.orders({}, (), 15.1).freed == ["s"]


def test_a_lease_that_nobody_releases_ends_at_its_deadline():
    holds = Holds(16, lease_s=60.0)
    begin(holds)
    assert holds.orders({"s": [1]}, (), 61.0).withdrawn == ["s"]
    assert not ended(holds, "s", now_s=62.0)


def test_a_preempted_segment_is_withdrawn_and_offered_again_when_it_is_back():
    holds = Holds(16)
    begin(holds)
    holds.orders({"s": [1, 2]}, (), 0.0)
    assert holds.orders({}, ("s",), 0.0).withdrawn == ["s"]
    assert holds.orders({"s": [7, 8]}, (), 0.0).offered == {"s": [7, 8]}


def test_a_begin_for_a_segment_that_has_ended_tells_readers_at_once():
    holds = Holds(16)
    assert not holds.begin("s", False, 0.0)
    assert holds.orders({}, (), 0.0).withdrawn == ["s"]


def test_a_table_is_told_again_only_when_it_has_grown():
    holds = Holds(16)
    begin(holds)
    holds.orders({"s": [1, 2]}, (), 0.0)
    assert holds.orders({"s": [1, 2]}, (), 0.0).offered == {}
    assert holds.orders({"s": [1, 2, 3]}, (), 0.0).offered == {"s": [1, 2, 3]}


@pytest.mark.parametrize(
    ("cached", "first", "blocks"), [(0, 0, [0, 1, 2, 3, 4]), (32, 2, [2, 3, 4]), (64, 4, [4])]
)
def test_only_what_the_cache_lacks_is_loaded(cached, first, blocks):
    holds = Holds(16)
    transfer = Transfer(KvLoad(("a",), "source", 70))
    tokens = holds.tokens_to_load("s", transfer, cached)
    assert tokens == 70 - cached
    holds.admitted("s", transfer, range(5), tokens)
    (job,) = holds.orders({}, (), 0.0).jobs
    assert (job.first, job.blocks) == (first, blocks)


def test_a_segment_loads_once_and_recomputes_after_a_preemption():
    holds = Holds(16)
    transfer = Transfer(KvLoad(("a",), "source", 64))
    holds.admitted("s", transfer, range(4), holds.tokens_to_load("s", transfer, 0))
    assert holds.tokens_to_load("s", transfer, 0) == 0


NAMES = st.sampled_from("abc")
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), NAMES),
        st.tuples(st.just("release"), NAMES),
        st.tuples(st.just("start"), NAMES),
        st.tuples(st.just("end"), NAMES, st.booleans(), st.booleans(), st.booleans()),
        st.tuples(st.just("step"), st.floats(0, 30)),
    ),
    max_size=40,
)


@given(EVENTS)
def test_blocks_used_and_free_always_add_up(events):
    """A toy engine over Holds: every block is free, running, or held; and nothing is held for ever."""
    holds, running, held, free, now_s = Holds(16, lease_s=20, hold_s=10), {}, {}, 100, 0.0
    counter = 0
    for event in events:
        if event[0] in ("begin", "release"):
            name = next((s for s in (*running, *held) if s.startswith(event[1])), event[1])
            if event[0] == "begin":
                holds.begin(name, name in running, now_s)
            else:
                holds.release(name)
        elif event[0] == "start" and free >= 2:
            counter += 1
            running[f"{event[1]}{counter}"] = 2
            free -= 2
        elif event[0] == "end":
            name = next((s for s in running if s.startswith(event[1])), None)
            if name is not None:
                blocks = running.pop(name)
                transfer = LOADER if event[2] else PLAIN
                kept = ended(
                    holds, name, transfer, range(blocks), aborted=event[3], failed=event[4], now_s=now_s
                )
                if kept:
                    held[name] = blocks
                else:
                    free += blocks
        elif event[0] == "step":
            now_s += event[1]
            for name in holds.orders({s: [1, 2] for s in holds.leased() if s in running}, (), now_s).freed:
                free += held.pop(name)
        assert free + sum(running.values()) + sum(held.values()) == 100
    for name in list(running):
        free += running.pop(name)
        ended(holds, name, failed=True, now_s=now_s)
    for name in holds.orders({}, (), now_s + 100).freed:
        free += held.pop(name)
    assert free == 100


@given(
    st.one_of(
        st.builds(Control, st.sampled_from(["begin", "release"]), st.text()),
        st.builds(
            Transfer,
            st.one_of(
                st.none(),
                st.builds(
                    KvLoad,
                    st.lists(st.text()).map(tuple),
                    st.text(),
                    st.integers(0, 10**6),
                    st.booleans(),
                    st.builds(CopyRate, st.floats(0, 1e9), st.floats(0.01, 1), st.floats(0, 1e9)),
                ),
            ),
            st.booleans(),
            st.lists(st.text()).map(tuple),
        ),
    )
)
def test_messages_survive_the_way_through_request_parameters(message):
    assert message_from(params_from(message)) == message


def test_a_request_without_a_message_asks_for_nothing():
    assert message_from(None) == message_from({"other": 1}) == Transfer()
