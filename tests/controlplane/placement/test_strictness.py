"""A level by name, or values; whatever else is refused in one line."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import BadInput
from controlplane.placement.strictness import LEVELS, NORMAL, Strictness, read_strictness

share = st.floats(0.001, 1.0)


@given(share, share, st.floats(0.0, 9.0))
def test_values_are_read_back_and_those_left_out_are_normal(theta, gamma, tolerance):
    asked = Strictness(theta, gamma, tolerance)
    text = ",".join(f"{name}={getattr(asked, name)!r}" for name in ("tolerance", "gamma", "theta"))
    assert read_strictness(text) == asked
    assert read_strictness(f"theta={theta!r}") == Strictness(theta, NORMAL.gamma, NORMAL.tolerance)


def test_each_level_promises_less_than_the_one_before_it():
    loose, normal, strict = (read_strictness(name) for name in LEVELS)
    assert loose.theta < normal.theta < strict.theta
    assert loose.gamma > normal.gamma > strict.gamma
    assert loose.tolerance > normal.tolerance > strict.tolerance == 0
    assert normal == Strictness() == NORMAL


@given(st.text(max_size=30))
def test_any_text_is_a_strictness_or_one_line(text):
    with suppress(BadInput):
        assert isinstance(read_strictness(text), Strictness)


@pytest.mark.parametrize("text", ["theta=nan", "gamma=0", "tolerance=inf", "theta=1,theta=1", "theta", ""])
def test_values_out_of_bounds_are_refused(text):
    with pytest.raises(BadInput):
        read_strictness(text)
