"""Rolling steps end at the plan, and the fleet's capacity stays between those of the two plans."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from controlplane.scaler.reconcile import RollingStep, rolling_steps

FLEETS = st.dictionaries(st.sampled_from("abcd"), st.integers(0, 9))


def test_four_small_workers_become_two_large_ones():
    assert rolling_steps({"tp1": 4, "tp2": 0}, {"tp1": 0, "tp2": 2}) == (
        RollingStep("tp2", ("tp1", "tp1")),
        RollingStep("tp2", ("tp1", "tp1")),
    )


def test_workers_that_only_go_or_only_come_are_steps_too():
    assert rolling_steps({"a": 3}, {"a": 1}) == (RollingStep(None, ("a",)), RollingStep(None, ("a",)))
    assert rolling_steps({"a": 1}, {"a": 2}) == (RollingStep("a"),)
    assert rolling_steps({"a": 1, "b": 0}, {"a": 1}) == ()


@given(FLEETS, FLEETS)
def test_steps_end_at_the_plan_and_never_have_stopped_more_than_their_share(before, after):
    steps, now = rolling_steps(before, after), Counter(before)
    starts = sum(step.start is not None for step in steps)
    stops = sum(len(step.stops) for step in steps)
    started = stopped = 0
    for step in steps:
        now.update([step.start] if step.start else [])
        now.subtract(step.stops)
        started, stopped = started + (step.start is not None), stopped + len(step.stops)
        assert not starts or stopped * starts <= stops * started
        assert min(now.values()) >= 0
    assert +now == +Counter(after)
