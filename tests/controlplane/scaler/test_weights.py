"""Weights: the worth of a worker of each type, the workers that a mix can count on, and impossible types."""

import math

import numpy as np
import pytest
from made_types import BIG, SMALL, made_type, profile_of, seen

from controlplane.errors import BadInput
from controlplane.scaler.line import Weights, capacity_rps, even, weigh
from controlplane.scaler.mix import MixNeed, MixSettings
from controlplane.scaler.state import ScalingSettings
from controlplane.scaler.target import TargetSettings
from controlplane.scaler.traffic import Traffic


def test_a_weight_is_what_one_carries_over_what_the_lightest_carries():
    types = made_type("big", profile=BIG), made_type("small")
    weights = weigh(types, {}, seen(), None)
    (c,) = seen().classes
    assert weights.reference == "small TP1"
    assert weights.of["small TP1"] == 1.0
    assert weights.of["big TP1"] == pytest.approx(capacity_rps(BIG, c) / capacity_rps(SMALL, c), abs=1e-3)


def test_weights_stay_while_lengths_drift_a_little():
    tight = profile_of(BIG.step, 4_000, 128)  # as fast as the big one, with little memory
    types = made_type("tight", profile=tight), made_type("small")
    first = weigh(types, {}, seen(prompt=50.0), None)
    assert weigh(types, {}, seen(prompt=51.0), first) is first
    assert weigh(types, {}, seen(prompt=3000.0), first).reference == "tight TP1"


def test_types_without_a_profile_hold_the_mix_only_where_there_are_any():
    types = made_type("small"), made_type("new", profile=None)
    assert weigh(types, {}, seen(), None).of == {"small TP1": 1.0}
    assert weigh(types, {"new TP1": 1}, seen(), None) is None
    assert weigh((made_type("small"), made_type("new", profile=None, low=1)), {}, seen(), None) is None
    assert weigh(types, {}, Traffic(), None) is None
    assert even(types).of == {"small TP1": 1.0}


@pytest.mark.parametrize(
    "make",
    [
        lambda: made_type("a", -1.0),
        lambda: made_type("a", tp_degree=0),
        lambda: made_type("a", low=2, limit=1),
        lambda: made_type("a", reclaims_per_h=math.inf),
        lambda: MixSettings(horizon_s=0.0),
        lambda: MixSettings(budget_usd_per_h=-1.0),
        lambda: ScalingSettings(TargetSettings(None, None), worker_types=(made_type("a"), made_type("a"))),
        lambda: ScalingSettings(
            TargetSettings(None, None, low=0, high=1), worker_types=(made_type("a", low=2),)
        ),
        lambda: ScalingSettings(TargetSettings(None, None, low=3), worker_types=(made_type("a", limit=2),)),
        lambda: ScalingSettings(
            TargetSettings(None, None),
            worker_types=(made_type("a", None),),
            mix=MixSettings(budget_usd_per_h=1.0),
        ),
        lambda: ScalingSettings(
            TargetSettings(None, None),
            worker_types=(made_type("a", low=2),),
            mix=MixSettings(budget_usd_per_h=1.0),
        ),
    ],
)
def test_types_that_cannot_be_are_refused(make):
    with pytest.raises(BadInput):
        make()


def test_what_is_counted_on_is_what_stands():
    types = made_type("a"), made_type("s", reclaims_per_h=6.0)
    weights = Weights("a TP1", {"a TP1": 1.0, "s TP1": 2.0})
    need = MixNeed(types, weights, 1.0, cold_start_s=600.0)
    sums = [need.carries({"a TP1": 2, "s TP1": n}) for n in range(12)]
    assert sums[0] == 2.0
    assert np.all(np.diff(sums) >= 0)
    assert sums[-1] < 2.0 + 22.0
