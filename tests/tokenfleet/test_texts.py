"""Durations, targets and windows as people write them."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import BadInput
from controlplane.figures import duration_text
from controlplane.types import Slo
from tokenfleet.texts import parse_duration_s, parse_slo, parse_slo_class, parse_window_s


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("1.6s", 1.6), ("75ms", 0.075), ("10m", 600.0), ("2h", 7200.0), (" 3 min ", 180.0), (".5s", 0.5)],
)
def test_a_duration_reads_as_seconds(text: str, seconds: float) -> None:
    assert parse_duration_s(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "s", "1.6 parsecs", "-1s", "nan", "1e999s", "ms75", "1s2"])
def test_anything_else_is_refused_by_name(text: str) -> None:
    with pytest.raises(BadInput, match="--slo"):
        parse_duration_s(text, "--slo")


def test_a_latency_without_a_unit_is_refused_with_both_readings() -> None:
    with pytest.raises(BadInput, match="75ms or 75s"):
        parse_duration_s("75")


def test_targets_come_in_any_order_and_atgt_means_tpot() -> None:
    assert parse_slo("atgt=75ms, ttft=1.6s") == Slo(1.6, 0.075)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("ttft=1s", "tpot is missing"),
        ("ttft=1s,ttft=2s,tpot=1s", "twice"),
        ("ttft=0s,tpot=1s", "positive"),
        ("e2e=1s,tpot=1s", "expected ttft"),
        ("1.6s", "expected ttft"),
    ],
)
def test_a_wrong_target_says_what_is_wrong(text: str, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        parse_slo(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("gold", "expected NAME:ttft=…,tpot=… or NAME:deadline=…, got 'gold'"),
        ("gold:", "expected NAME:ttft=…,tpot=… or NAME:deadline=…, got 'gold:'"),
        ("gold:ttft=1s", "--slo: gold: tpot is missing"),
        ("gold:ttft=1,tpot=1s", "--slo: gold: ttft: 1 has no unit"),
    ],
)
def test_a_wrong_target_of_a_class_names_the_class(text: str, why: str) -> None:
    with pytest.raises(BadInput) as refused:
        parse_slo_class(text, 0.99)
    assert why in str(refused.value)


def test_a_window_may_leave_either_end_open() -> None:
    assert parse_window_s("10m..20m") == (600.0, 1200.0)
    assert parse_window_s("..90") == (0.0, 90.0)
    assert parse_window_s("90..") == (90.0, math.inf)


@pytest.mark.parametrize("text", ["10m", "20m..10m", "5..5", "a..b"])
def test_a_window_that_holds_nothing_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="--window"):
        parse_window_s(text)


@given(st.floats(1e-4, 1e6))
def test_a_duration_written_for_a_person_reads_back_to_three_figures(seconds: float) -> None:
    assert parse_duration_s(duration_text(seconds)) == pytest.approx(seconds, rel=5.1e-3)
