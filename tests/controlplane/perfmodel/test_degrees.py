"""Aladdin's Eq 5: another TP degree from two, exactly where both terms of it hold."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import BadInput
from controlplane.perfmodel.degrees import ABOVE, BETWEEN, at_degree
from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.step import Hinge, StepModel
from controlplane.types import EngineMode
from tokenfleet.profiles.library import find_profiles

seconds = st.floats(0.0, 1.0)
BASE = find_profiles("llama-3.1-8b", ["h100"], [1])[0]


def of(degree: int, divided: list[float], fixed: list[float], per_gpu: int, weights: int) -> Profile:
    base, prefill, sequence, context, hinge = (a / degree + c for a, c in zip(divided, fixed, strict=True))
    step = StepModel(base, prefill, sequence, context, hinges=(Hinge("sequences", 64.0, hinge),))
    kv = replace(BASE.kv, capacity_tokens=16 * (per_gpu * degree - weights), block_tokens=16)
    return replace(BASE, tp_degree=degree, step=step, prefill=None, kv=kv)


@given(
    st.permutations([1, 2, 4, 8]),
    st.lists(seconds, min_size=5, max_size=5),
    st.lists(seconds, min_size=5, max_size=5),
)
def test_what_is_a_n_and_c_is_found_at_any_degree(degrees, divided, fixed):
    low, high, wanted = degrees[:3]
    if wanted < min(low, high):
        return
    pair = (of(low, divided, fixed, 1000, 400), of(high, divided, fixed, 1000, 400))
    made, real = at_degree(pair, wanted), of(wanted, divided, fixed, 1000, 400)
    batch = (0, 100, 50_000)
    assert float(made.step.step_s(*batch)) == pytest.approx(float(real.step.step_s(*batch)), abs=1e-9)
    assert float(made.step.step_s(900, 0, 0)) == pytest.approx(float(real.step.step_s(900, 0, 0)), abs=1e-9)
    assert (made.kv.capacity_tokens, made.tp_degree) == (real.kv.capacity_tokens, wanted)
    assert made.source.kind == "composed"
    unseen = BETWEEN if wanted < max(low, high) else ABOVE
    assert made.residuals.unseen_relative >= unseen


def test_a_coefficient_that_grows_with_the_degree_is_never_below_zero():
    one, two = of(1, [0] * 5, [0.001] * 5, 1000, 400), of(2, [0] * 5, [0.004] * 5, 1000, 400)
    assert at_degree((two, one), 4).step.base_s == pytest.approx(0.0055)
    falls = at_degree((of(1, [0.9] * 5, [0] * 5, 1000, 400), of(2, [0] * 5, [0] * 5, 1000, 400)), 8)
    assert falls.step.base_s == 0.0


@pytest.mark.parametrize(
    ("change", "degree", "says"),
    [
        ({"model": "other"}, 4, "--from: two profiles that differ in TP degree alone; model: "),
        ({"tp_degree": 1}, 4, "--from: two profiles of different TP degrees; both are TP1"),
        ({}, 2, "--tp: 2: a profile of that degree was given"),
        ({"tp_degree": 4}, 0, "--tp: 0: is below TP1 and TP4"),
        ({"engine": replace(BASE.engine, mode=EngineMode.SPLIT)}, 4, "--from: two profiles of one engine"),
    ],
)
def test_two_profiles_that_do_not_belong_together_are_refused(change, degree, says):
    one, two = of(1, [1] * 5, [0] * 5, 1000, 400), of(2, [1] * 5, [0] * 5, 1000, 400)
    with pytest.raises(BadInput, match=says):
        at_degree((one, replace(two, **change)), degree)


def test_degrees_of_the_library_left_out_are_close():
    one, two, four = (find_profiles("llama-3.1-70b", ["h200"], [n])[0] for n in (2, 4, 8))
    made = at_degree((one, two), 8)
    for batch in ((0, 1, 512), (0, 64, 64_000)):
        assert float(made.step.step_s(*batch)) == pytest.approx(float(four.step.step_s(*batch)), rel=0.2)
    assert made.kv.capacity_tokens == pytest.approx(four.kv.capacity_tokens, rel=0.01)
