"""Steps to another fleet: rolling ones, and changes of role in place of starts and drains."""

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from controlplane.scaler.reconcile import RollingStep, Standing, role_changes, rolling_steps, steps_to
from controlplane.snapshot import SERVING, STARTING
from controlplane.types import WorkerId

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


ROLES = ("prefill", "decode", "any")
COUNTS = st.tuples(*[st.integers(0, 5)] * 3)


@given(COUNTS, COUNTS, COUNTS, st.tuples(*[st.sampled_from(["h100", "a100"])] * 3))
def test_a_role_is_changed_only_where_that_saves_a_start_and_a_drain(serving, starting, wanted, gpus):
    standing = {
        role: [
            *(Standing(WorkerId(f"{role} {i}"), SERVING, 0.0, requests=9 - i) for i in range(serving[k])),
            *(Standing(WorkerId(f"{role} new {i}"), STARTING, 0.0) for i in range(starting[k])),
        ]
        for k, role in enumerate(ROLES)
    }
    asked, hardware = dict(zip(ROLES, wanted, strict=True)), dict(zip(ROLES, gpus, strict=True))
    changes = role_changes(asked, standing, hardware)
    was = {s.worker: role for role, of in standing.items() for s in of}
    left = {role: list(of) for role, of in standing.items()}
    for worker, role in changes:
        one = next(s for s in left[was[worker]] if s.worker == worker)
        assert one.state == SERVING
        assert one.requests == min(s.requests for s in left[was[worker]] if s.state == SERVING)
        assert hardware[role] == hardware[was[worker]]
        left[was[worker]].remove(one)
        left[role].append(one)
    steps = [len(steps_to(asked[role], of, 0.0, 60.0, "")) for role, of in left.items()]
    before = [len(steps_to(asked[role], of, 0.0, 60.0, "")) for role, of in standing.items()]
    assert sum(steps) <= sum(before)
    for k, role in enumerate(ROLES):
        here, had = len(left[role]), serving[k] + starting[k]
        assert min(had, wanted[k]) <= here <= max(had, wanted[k])
        assert not serving[k] or any(s.state == SERVING for s in left[role])
        # What could still change lacks a giver, or would be its type's last that serves.
        for k2, other in enumerate(ROLES):
            if here < wanted[k] and len(left[other]) > wanted[k2] and hardware[role] == hardware[other]:
                assert sum(s.state == SERVING for s in left[other]) <= 1
