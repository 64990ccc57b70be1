"""Kubernetes' HPA: its documented rule, its tolerance, its windows, and replicas that start."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.scaler.hpa import HpaMemory, HpaRule, by_mean, by_total, stabilized

RULE = HpaRule(0.5, 1, 100)


@pytest.mark.parametrize(
    ("metrics", "wanted"),
    [([1.0] * 4, 8), ([0.25] * 4, 2), ([0.55] * 4, 4), ([0.56] * 4, 5), ([0.45] * 4, 4), ([0.44] * 4, 4)],
)
def test_the_ratio_is_rounded_up_and_a_tenth_is_let_pass(metrics, wanted):
    assert by_mean(RULE, metrics, 0) == wanted


def test_replicas_that_start_are_idle_in_a_rise_and_at_the_target_in_a_fall():
    assert by_mean(RULE, [1.0] * 4, 4) == 8  # they are what is asked for already
    assert by_mean(RULE, [1.0] * 4, 2) == 8
    assert by_mean(RULE, [0.0] * 4, 2) == 2
    assert by_mean(RULE, [0.6] * 4, 4) == 8  # as idle ones they would turn the rise into a fall
    assert by_mean(RULE, [], 3) == 3


@given(st.integers(1, 300), st.integers(1, 300))
def test_a_total_at_a_target_of_one_is_the_number_itself_unless_a_tenth_swallows_it(replicas, total):
    exact = by_total(HpaRule(1.0, 1, 300, tolerance=0.0), total, replicas)
    default = by_total(HpaRule(1.0, 1, 300), total, replicas)
    assert exact == total
    assert default == (replicas if abs(total / replicas - 1.0) <= 0.1 + 1e-9 else total)


def test_a_fall_waits_for_its_window_and_a_rise_for_none():
    memory, n = HpaMemory(), 4
    seen = []
    for look, asked in enumerate([4, 8, 2, 2, 2]):
        memory, n = stabilized(RULE, memory, look * 15.0, n, asked)
        seen.append(n)
    assert seen == [4, 8, 8, 8, 8]
    memory, n = stabilized(RULE, memory, 300.0, n, 2)
    assert n == 8  # the look at 15 s still counts
    memory, n = stabilized(RULE, memory, 315.0, n, 2)
    assert n == 2
    assert not memory.is_due(329.0)
    assert memory.is_due(330.0)


def test_a_look_doubles_at_most_or_adds_four_and_keeps_to_the_bounds():
    assert stabilized(RULE, HpaMemory(), 0.0, 1, 50)[1] == 5
    assert stabilized(RULE, HpaMemory(), 0.0, 10, 50)[1] == 20
    assert stabilized(HpaRule(1.0, 3, 12, added=0), HpaMemory(), 0.0, 1, 50)[1] == 2
    assert stabilized(HpaRule(1.0, 3, 12), HpaMemory(), 0.0, 10, 50)[1] == 12
    assert stabilized(HpaRule(1.0, 3, 12), HpaMemory(), 0.0, 10, 0)[1] == 3
