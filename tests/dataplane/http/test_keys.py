import hypothesis.strategies as st
import pytest
from hypothesis import given

from controlplane.errors import BadInput
from controlplane.types import Slo
from dataplane.http.keys import ANYONE, ApiKey, KeyRing, SloBounds, key_from_mapping


def test_without_keys_anyone_may_call():
    assert KeyRing([]).find("") is ANYONE


@pytest.mark.parametrize("header", ["", "Bearer", "Bearer wrong", "Basic right", "right"])
def test_only_a_bearer_of_the_right_key_is_let_in(header):
    ring = KeyRing([ApiKey("one", "right")])
    assert ring.find(header) is None
    assert ring.find("bearer right").name == "one"


def test_a_burst_is_let_through_and_then_the_pace_holds():
    ring = KeyRing([ApiKey("one", "k", requests_per_minute=60, burst=2)])
    key = ring.keys[0]
    assert [ring.seconds_until_allowed(key, 0.0) for _ in range(3)] == [0.0, 0.0, 1.0]
    assert ring.seconds_until_allowed(key, 1.0) == 0.0
    assert ring.seconds_until_allowed(key, 1.5) == pytest.approx(0.5)


@given(st.lists(st.floats(0, 300), min_size=1, max_size=200), st.floats(1, 600), st.integers(1, 10))
def test_over_any_time_no_more_pass_than_burst_and_rate_allow(times, per_minute, burst):
    ring = KeyRing([ApiKey("one", "k", requests_per_minute=per_minute, burst=burst)])
    times.sort()
    passed = sum(ring.seconds_until_allowed(ring.keys[0], t) == 0.0 for t in times)
    assert passed <= burst + (times[-1] - times[0]) * per_minute / 60 + 1e-6


@given(st.floats(1e-6, 1e6), st.floats(1e-6, 1e6))
def test_a_target_is_bounded_on_both_sides(ttft_s, tpot_s):
    bounds = SloBounds(min_ttft_s=0.1, max_ttft_s=10, min_tpot_s=0.01, max_tpot_s=1)
    got = bounds.bounded(Slo(ttft_s, tpot_s))
    assert 0.1 <= got.ttft_s <= 10
    assert 0.01 <= got.tpot_s <= 1


def test_a_files_entry_becomes_a_key():
    key = key_from_mapping(
        "keys.yaml: 0", {"name": "a", "key": "s", "min_ttft_ms": 250, "priority": "normal"}
    )
    assert (key.bounds.min_ttft_s, key.max_priority) == (0.25, 0)


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"name": "a"}, "key"),
        ({"name": "a", "key": "s", "limit": 3}, "limit"),
        ({"name": "a", "key": "s", "burst": -1}, "burst"),
        ({"name": "a", "key": "s", "burst": True}, "burst"),
        ({"name": "a", "key": "s", "priority": "top"}, "priority"),
        ({"name": "a", "key": "s", "min_ttft_ms": 9e9}, "min"),
    ],
)
def test_a_wrong_entry_is_named(entry, says):
    with pytest.raises(BadInput, match=says):
        key_from_mapping("keys.yaml: 0", entry)


def test_two_keys_of_one_name_and_empty_keys_are_refused():
    with pytest.raises(BadInput):
        KeyRing([ApiKey("a", "x"), ApiKey("a", "y")])
    with pytest.raises(BadInput):
        KeyRing([ApiKey("a", "")])
