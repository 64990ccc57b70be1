"""Kinds of worker: what each is worth, what of them stands, and which cannot be."""

import math

import numpy as np
import pytest
from made_kinds import BIG, SMALL, kind, seen

from controlplane.errors import BadInput
from controlplane.scaler.line import Speed, capacity_rps
from controlplane.scaler.state import ScalingSettings
from controlplane.scaler.target import TargetSettings
from controlplane.scaler.traffic import Mix
from controlplane.scaler.worker_types import MixingSettings, Weights, carried, even, weigh


def test_a_weight_is_what_one_carries_over_what_the_lightest_carries():
    kinds = kind("big", speed=BIG), kind("small")
    weights = weigh(kinds, {}, seen(), None)
    (c,) = seen().classes
    assert weights.reference == "small"
    assert weights.of["small"] == 1.0
    assert weights.of["big"] == pytest.approx(capacity_rps(BIG, c) / capacity_rps(SMALL, c), abs=1e-3)


def test_weights_stay_while_lengths_drift_a_little():
    tight = Speed(BIG.step, 4_000, 128)  # as fast as the big one, with little memory
    kinds = kind("tight", speed=tight), kind("small")
    first = weigh(kinds, {}, seen(prompt=50.0), None)
    assert weigh(kinds, {}, seen(prompt=51.0), first) is first
    assert weigh(kinds, {}, seen(prompt=3000.0), first).reference == "tight"


def test_kinds_of_unknown_speed_hold_the_mix_only_where_there_are_any():
    kinds = kind("small"), kind("new", speed=None)
    assert weigh(kinds, {}, seen(), None).of == {"small": 1.0}
    assert weigh(kinds, {"new": 1}, seen(), None) is None
    assert weigh((kind("small"), kind("new", speed=None, low=1)), {}, seen(), None) is None
    assert weigh(kinds, {}, Mix(), None) is None
    assert even(kinds).of == {"small": 1.0}


@pytest.mark.parametrize(
    "make",
    [
        lambda: kind(""),
        lambda: kind("a", -1.0),
        lambda: kind("a", gpus=0),
        lambda: kind("a", low=2, high=1),
        lambda: kind("a", reclaims_per_h=math.inf),
        lambda: MixingSettings(horizon_s=0.0),
        lambda: MixingSettings(survive=1.0),
        lambda: MixingSettings(budget_usd_per_h=-1.0),
        lambda: ScalingSettings(TargetSettings(None, None), kinds=(kind("a"), kind("a"))),
        lambda: ScalingSettings(TargetSettings(None, None), kinds=(kind("a"),), line_kind="b"),
        lambda: ScalingSettings(TargetSettings(None, None, low=0, high=1), kinds=(kind("a", low=2),)),
        lambda: ScalingSettings(TargetSettings(None, None, low=3), kinds=(kind("a", high=2),)),
        lambda: ScalingSettings(
            TargetSettings(None, None), kinds=(kind("a", None),), mixing=MixingSettings(budget_usd_per_h=1.0)
        ),
        lambda: ScalingSettings(
            TargetSettings(None, None), kinds=(kind("a", low=2),), mixing=MixingSettings(budget_usd_per_h=1.0)
        ),
        lambda: ScalingSettings(
            TargetSettings(None, None, usd_per_worker_h=1.0, budget_usd_per_h=9.0), kinds=(kind("a"),)
        ),
    ],
)
def test_kinds_that_cannot_be_are_refused(make):
    with pytest.raises(BadInput):
        make()


def test_what_is_counted_on_is_what_stands():
    kinds = kind("a"), kind("s", reclaims_per_h=6.0)
    weights = Weights("a", {"a": 1.0, "s": 2.0})
    sums = [carried(kinds, MixingSettings(), weights, {"a": 2, "s": n}, 600.0) for n in range(12)]
    assert sums[0] == 2.0
    assert np.all(np.diff(sums) >= 0)
    assert sums[-1] < 2.0 + 22.0
