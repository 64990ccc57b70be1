"""Keys of an HTTP server: who is let in, limits on requests and tokens, and the file of keys."""

import hypothesis.strategies as st
import pytest
from hypothesis import given

from controlplane.errors import BadInput
from controlplane.types import Slo
from dataplane.http.keys import ANYONE, ApiKey, KeyRing, SloBounds, key_from_mapping, read_keys


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


def test_tokens_are_charged_as_they_come_and_a_debt_is_waited_for():
    ring = KeyRing([ApiKey("one", "k", tokens_per_minute=600), ApiKey("two", "q")])
    one, two = ring.keys
    assert ring.seconds_until_allowed(one, 0.0) == 0.0
    ring.charge("one", 500, 0.0)
    assert ring.seconds_until_allowed(one, 0.0) == 0.0  # what it will take is not known yet
    ring.charge("one", 300, 0.0)
    assert ring.seconds_until_allowed(one, 0.0) == pytest.approx(
        20.1
    )  # to 1 from 200 in debt, at 10 a second
    ring.charge("one", -300, 0.0)
    assert ring.seconds_until_allowed(one, 0.0) == 0.0
    ring.charge("two", 10**9, 0.0)
    ring.charge("gone", 10**9, 0.0)
    assert ring.seconds_until_allowed(two, 0.0) == 0.0


@given(
    st.lists(st.tuples(st.floats(0, 600), st.integers(1, 5000)), min_size=1, max_size=100), st.floats(60, 6e5)
)
def test_over_any_time_tokens_stay_within_a_minutes_and_the_last_request(requests, per_minute):
    ring, spent = KeyRing([ApiKey("one", "k", tokens_per_minute=per_minute)]), []
    requests.sort()
    for at_s, tokens in requests:
        if ring.seconds_until_allowed(ring.keys[0], at_s) == 0.0:
            ring.charge("one", tokens, at_s)
            spent.append(tokens)
    span_s = requests[-1][0] - requests[0][0]
    assert sum(spent[:-1]) <= per_minute * (1 + span_s / 60) + 1e-6


def keys_file(tmp_path, text):
    file = tmp_path / "keys.yaml"
    file.write_text(text)
    return file


def test_a_file_read_anew_lets_new_keys_in_and_old_ones_out_and_forgives_nobody(tmp_path):
    file = keys_file(tmp_path, "- {name: a, key: s, requests_per_minute: 1, burst: 1}\n- {name: b, key: t}\n")
    ring = KeyRing([ApiKey("given", "g"), *read_keys(file)])
    assert ring.seconds_until_allowed(ring.find("Bearer s"), 0.0) == 0.0
    keys_file(tmp_path, "- {name: a, key: new, requests_per_minute: 1, burst: 1}\n- {name: c, key: u}\n")
    ring.reload(file)
    found = {secret: ring.find(f"Bearer {secret}") for secret in ("g", "s", "t", "new", "u")}
    assert [secret for secret, key in found.items() if key is None] == ["s", "t"]
    assert ring.seconds_until_allowed(found["new"], 0.0) == 60.0  # the same caller, with another key
    keys_file(tmp_path, "- {name: a, key: new, requests_per_minute: 600, burst: 1}\n")
    ring.reload(file)
    assert ring.seconds_until_allowed(ring.find("Bearer new"), 0.0) == 0.0  # with other limits


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "expected a list of keys"),
        ("", "expected a list of keys"),
        ("- {name: a, key: my-secret", "is not YAML, in line 1$"),
        ("- {name: a, key: s}\n- {name: given, key: t}", "share a name"),
        ("- {name: a, key: s, tokens_per_minute: lots}", "0: tokens_per_minute: must be a number"),
    ],
)
def test_a_faulty_file_changes_nothing_and_no_key_is_told(tmp_path, text, says):
    ring = KeyRing([ApiKey("given", "g")])
    with pytest.raises(BadInput, match=says) as refusal:
        ring.reload(keys_file(tmp_path, text))
    assert "secret" not in str(refusal.value)
    assert [key.name for key in ring.keys] == ["given"]
    with pytest.raises(BadInput, match="cannot be read"):
        ring.reload(tmp_path / "gone.yaml")


def test_a_key_says_its_limits_but_never_itself():
    key = ApiKey("a", "my-secret", requests_per_minute=6, tokens_per_minute=50_000)
    assert key.limits_text == "6 requests and 50000 tokens a minute"
    assert "secret'" not in repr(key)
    assert "my-secret" not in repr(KeyRing([key]).keys)


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
