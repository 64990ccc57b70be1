"""Prefill and decode workers sized apart: each by its own work, together within the fleet's bounds."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_types import BIG, SLO

from controlplane.control import State, scaling_of, together, within
from controlplane.scaler.line import decode_rps, prefill_rps
from controlplane.scaler.state import Scaling, ScalingSettings
from controlplane.scaler.target import Stabilized, TargetSettings
from controlplane.snapshot import Scale, Snapshot
from controlplane.types import ClassArrivals, Slo
from controlplane.worker_type import WorkerType


@given(
    st.dictionaries(st.sampled_from(["prefill", "decode"]), st.integers(1, 50), min_size=2),
    st.integers(2, 40),
    st.integers(0, 40),
)
def test_counts_keep_to_the_bounds_and_to_their_proportions(wanted, low, more):
    counts = within(wanted, low, low + more)
    total = sum(wanted.values())
    assert sum(counts.values()) == min(max(total, low), low + more)
    assert min(counts.values()) >= 1
    if low <= total <= low + more:
        assert counts == wanted
    for name in counts:
        assert abs(counts[name] - wanted[name] * sum(counts.values()) / total) <= 1.0 or 1 in counts.values()


def test_longer_prompts_take_prefill_workers_and_longer_answers_decode_workers():
    plain = ClassArrivals(SLO, 1.0, 500.0, 100.0)
    long_prompts, long_answers = replace(plain, prompt_tokens=2000.0), replace(plain, output_tokens=400.0)
    assert prefill_rps(BIG, long_prompts) < prefill_rps(BIG, plain) / 2
    assert prefill_rps(BIG, long_answers) == prefill_rps(BIG, plain)
    assert decode_rps(BIG, long_answers) < decode_rps(BIG, plain) / 2


def test_neither_pool_gives_back_while_requests_wait_for_one_of_them():
    changes = {"prefill": Scale(1, "few prompts"), "decode": Scale(4, "long answers")}
    seen = Snapshot(0.0, (), 5, wanted_kinds={"prefill": 3, "decode": 2})
    settings = ScalingSettings(TargetSettings(None, None))
    for waiting, kinds in ((0, {"prefill": 1, "decode": 4}), (1, {"prefill": 3, "decode": 4})):
        together_now = together(settings, replace(seen, waiting_requests=waiting), changes, {})
        assert together_now is not None
        assert together_now.kinds == kinds


def test_a_tight_ttft_leaves_a_prefill_worker_less_to_do_and_none_too_tight_asks_for_more_than_one_each():
    service_s = BIG.alone_ttft_s(500)
    near, far, beyond = (
        prefill_rps(BIG, ClassArrivals(Slo(ttft_s, 0.1), 1.0, 500.0, 100.0))
        for ttft_s in (2 * service_s, 20 * service_s, service_s / 2)
    )
    assert near < 0.4 / service_s < 0.8 / service_s < far < 1 / service_s
    assert beyond == pytest.approx(1 / service_s)


def pools(*limits: int | None, gpus: tuple[str, str] = ("h100", "h100")) -> tuple[WorkerType, ...]:
    return tuple(
        WorkerType(gpu, limit=limit, role=role)
        for role, limit, gpu in zip(("prefill", "decode"), limits, gpus, strict=True)
    )


@pytest.mark.parametrize(
    ("below_since_s", "most_below", "gpus", "kinds"),
    [
        (80.0, 1, ("h100", "h100"), (2, 2)),  # one of two that are spare: no more are asked for
        (80.0, 3, ("h100", "h100"), (2, 3)),  # all were needed within these seconds
        (81.0, 1, ("h100", "h100"), (2, 3)),  # not one whole bin of 10 s is known
        (None, 1, ("h100", "h100"), (2, 3)),
        (80.0, 1, ("h100", "a100"), (2, 3)),  # that would be another worker
    ],
)
@pytest.mark.parametrize("waiting", [0, 5])
def test_a_pool_that_grows_takes_what_the_other_has_not_needed_without_a_start(
    below_since_s, most_below, gpus, kinds, waiting
):
    prefill, decode = types = pools(None, None, gpus=gpus)
    seen = Snapshot(100.0, (), 4, wanted_kinds={prefill.name: 1, decode.name: 3}, waiting_requests=waiting)
    stable = Stabilized(3, below_since_s=below_since_s, most_below=most_below)
    states = {prefill.name: State(), decode.name: State(scaling=Scaling(stabilized=stable))}
    facts = {"seen": {"rate_rps": 1.0}, "cost": {"workers": 1.0, "usd_per_h": 2.0}}
    changes = {prefill.name: Scale(2, "long prompts", facts), decode.name: None}
    settings = ScalingSettings(TargetSettings(None, None), worker_types=types)
    change = together(settings, seen, changes, states)
    assert change is not None
    assert tuple(change.kinds.values()) == kinds
    assert ("cost" in change.facts) == (change.workers > 4)


def test_a_plan_bounds_both_roles_together_where_their_hardware_is_the_same():
    """2 prefill and 1 decode workers may become 1 and 2, never 4, and all 3 stay where demand wants them."""
    types = pools(2, 1)
    settings = ScalingSettings(TargetSettings(None, None, high=3), worker_types=types)
    assert [scaling_of(settings, pool).worker_types[0].limit for pool in types] == [2, 2]
    apart = ScalingSettings(
        TargetSettings(None, None, high=3), worker_types=pools(2, 1, gpus=("h100", "a100"))
    )
    assert [scaling_of(apart, pool).worker_types[0].limit for pool in apart.worker_types] == [2, 1]
    prefill, decode = (pool.name for pool in types)
    states = {prefill: State(), decode: State()}
    three = Snapshot(0.0, (), 3, wanted_kinds={prefill: 2, decode: 1})
    assert together(settings, three, {prefill: None, decode: None}, states) is None
    two = replace(three, wanted_kinds={prefill: 1, decode: 1})
    change = together(settings, two, {prefill: Scale(2, "long prompts"), decode: None}, states)
    assert change is not None
    assert change.kinds == {prefill: 2, decode: 1}
