"""Eq 7's line from a worker's profile, the traffic it is for, and a profile learned from steps."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_types import profile_of

from controlplane.errors import BadInput
from controlplane.perfmodel.step import PrefillModel, StepModel
from controlplane.scaler.line import (
    HEADROOM,
    SPARE,
    Line,
    capacity_rps,
    carried_over,
    line_of,
)
from controlplane.scaler.traffic import MOST_CLASSES, Traffic, blend
from controlplane.types import ClassArrivals, EngineMode, Slo

SLO = Slo(1.0, 0.05)
STEP = StepModel(0.02, 1e-4, 1e-3, 0.0)
PROFILE = profile_of(STEP, 100_000, 256)


def arrivals(requests=10.0, prompt=100.0, output=50.0, slo=SLO):
    return ClassArrivals(slo, requests, requests * prompt, requests * output)


def test_a_worker_carries_what_its_step_allows_within_tpot():
    # t = 0.02 + (1e-4 · 100/50 + 1e-3) · b = 0.05 at b = 25: 25 / (50 · 0.05) requests a second.
    assert capacity_rps(PROFILE, arrivals()) == pytest.approx(10.0, rel=1e-3)
    line = line_of(PROFILE, Traffic((arrivals(),), 0.0))
    assert line.workers_per_rps == pytest.approx(HEADROOM / 10.0, rel=1e-3)
    assert line.intercept == SPARE


def test_memory_and_seats_bound_the_batch():
    few = capacity_rps(profile_of(STEP, 100_000, 5), arrivals())
    assert few == pytest.approx(5 / (50 * (0.02 + 5 * 1.2e-3)))
    small = capacity_rps(profile_of(STEP, 1000, 256), arrivals())
    assert small < capacity_rps(PROFILE, arrivals())


def test_prefill_in_steps_of_its_own_is_paid_for():
    apart = capacity_rps(
        profile_of(STEP, 100_000, 256, prefill=PrefillModel(0.01, 1e-4), mode=EngineMode.PREFILL_FIRST),
        arrivals(),
    )
    # Each request's 0.02 s of prefill come on top of a batch's steps: t = 0.02 + b·1e-3 + b/50·0.02.
    assert apart == pytest.approx((0.03 / 1.4e-3) / (50 * 0.05), rel=1e-3)


def test_a_target_that_no_request_alone_can_meet_asks_for_no_fleet_of_workers():
    hopeless = capacity_rps(PROFILE, arrivals(slo=Slo(1.0, 0.001)))
    assert hopeless == pytest.approx(1 / (50 * (0.02 + 1.2e-3)))


@given(st.floats(10, 2000), st.floats(2, 2000), st.floats(0.03, 1.0), st.floats(1.0, 3.0))
def test_longer_requests_and_stricter_targets_need_more(prompt, output, tpot_s, factor):
    here = capacity_rps(PROFILE, arrivals(prompt=prompt, output=output, slo=Slo(1.0, tpot_s)))
    assert here > 0
    tight = capacity_rps(PROFILE, arrivals(prompt=prompt, output=output, slo=Slo(1.0, tpot_s / factor)))
    longer = capacity_rps(PROFILE, arrivals(prompt=prompt * factor, output=output, slo=Slo(1.0, tpot_s)))
    assert tight <= here * 1.001
    assert longer <= here * 1.001


def test_classes_weigh_by_their_share():
    loose, strict = arrivals(30.0), arrivals(10.0, slo=Slo(1.0, 0.03))
    both = line_of(PROFILE, Traffic((loose, strict), 0.0)).workers_per_rps
    apart = [line_of(PROFILE, Traffic((c,), 0.0)).workers_per_rps for c in (loose, strict)]
    assert both == pytest.approx(0.75 * apart[0] + 0.25 * apart[1])
    assert line_of(PROFILE, Traffic((arrivals(2.0),), 0.0)) is None


def test_the_mix_follows_lengths_that_drift_and_forgets_nothing_in_silence():
    traffic = blend(Traffic(), (arrivals(100.0, output=50.0),), 0.0)
    assert blend(traffic, (), 9e9) == traffic
    later = blend(traffic, (arrivals(100.0, output=500.0),), 3000.0, half_life_s=300.0)
    (one,) = later.classes
    assert one.mean_output_tokens == pytest.approx(500.0, rel=0.01)


def test_classes_that_clients_invent_do_not_add_up_for_ever():
    traffic = Traffic()
    for n in range(100):
        traffic = blend(traffic, (arrivals(1.0 + n, slo=Slo(1.0, 0.01 + n * 1e-4)),), float(n))
    assert len(traffic.classes) == MOST_CLASSES


@pytest.mark.parametrize("learned", [arrivals(), None])
def test_a_learned_line_follows_the_step_times_that_a_refit_finds(learned):
    profile = profile_of(STEP, 50_000, 64)
    slower = replace(profile, step=STEP.scaled(1.3, 1.3))
    seen = blend(Traffic(), (arrivals(),), 0.0)
    dearer = carried_over(Line(0.5, 0.7), learned, profile, slower, seen)
    at = arrivals()
    assert dearer.workers_per_rps == pytest.approx(0.5 * capacity_rps(profile, at) / capacity_rps(slower, at))
    assert dearer.workers_per_rps > 0.5


def test_a_learned_line_follows_the_lengths_that_arrive():
    profile, learned = profile_of(STEP, 50_000, 64), arrivals()
    given = Line(0.5, 0.7)
    same = carried_over(given, learned, profile, profile, blend(Traffic(), (learned,), 0.0))
    assert same.workers_per_rps == pytest.approx(0.5)
    longer = replace(learned, output_tokens=2.0 * learned.output_tokens)
    heavier = carried_over(given, learned, profile, profile, blend(Traffic(), (longer,), 0.0))
    lighter = capacity_rps(profile, learned) / capacity_rps(profile, longer)
    assert heavier.workers_per_rps == pytest.approx(0.5 * lighter)
    assert heavier.workers_per_rps > 0.5
    assert heavier.intercept / heavier.workers_per_rps == pytest.approx(0.7 / 0.5)  # a rate to spare
    assert carried_over(given, learned, profile, profile, Traffic()) == given


@pytest.mark.parametrize(
    "make",
    [
        lambda: profile_of(STEP, 0, 1),
        lambda: ClassArrivals(SLO, -1.0, 0.0, 0.0),
        lambda: blend(Traffic(), (arrivals(),), 0.0, half_life_s=0.0),
    ],
)
def test_what_makes_no_sense_is_refused(make):
    with pytest.raises(BadInput):
        make()
