"""Kernels: named tuples that are handed on by reference, and constants that cost no second kernel."""

from __future__ import annotations

import sys
from typing import Any, NamedTuple

import numpy as np

from controlplane.compiled import by_reference, compiled


@by_reference
class Inner(NamedTuple):
    """Held by another."""

    counts: Any


@by_reference
class Outer(NamedTuple):
    """An array, a number, and records of their own."""

    values: Any
    factor: float
    inner: Inner


@compiled
def scaled(outer: Outer, i: int) -> float:
    """Write to both arrays, and read one."""
    outer.values[i] *= outer.factor
    outer.inner.counts[0] += 1
    return float(outer.values[i])


@compiled
def twice(outer: Outer, i: int) -> float:
    """Hand the records on, with a constant and without."""
    return scaled(outer, i) + scaled(outer, 0)


@compiled
def tail(outer: Outer) -> Any:
    """Hand back a copy of a part of a field."""
    return outer.values[1:].copy()


def records() -> Outer:
    return Outer(np.array([1.0, 2.0, 3.0]), 10.0, Inner(np.zeros(1, np.int64)))


def test_kernels_write_through_records_that_they_hand_on() -> None:
    outer = records()
    assert twice(outer, 1) == 20.0 + 10.0
    assert outer.values.tolist() == [10.0, 20.0, 3.0]
    assert outer.inner.counts[0] == 2


def test_a_call_keeps_no_reference_to_what_it_was_given() -> None:
    outer = records()
    twice(outer, 1)
    before = [sys.getrefcount(held) for held in (outer.values, outer.inner, outer.inner.counts)]
    for _ in range(10):
        twice(outer, 1)
    assert [sys.getrefcount(held) for held in (outer.values, outer.inner, outer.inner.counts)] == before


def test_what_a_kernel_hands_back_outlives_the_records() -> None:
    handed_back = tail(records())
    assert handed_back.base is not None  # it owns its memory
    assert handed_back.tolist() == [2.0, 3.0]


def test_records_of_other_types_are_another_kernel() -> None:
    whole = Outer(np.array([1, 2, 3]), 2.0, Inner(np.zeros(1, np.int64)))
    assert twice(whole, 2) == 6.0 + 2.0


def test_constants_are_no_kernels_of_their_own() -> None:
    twice(records(), 1)
    assert all("Literal" not in str(kinds) for kinds in scaled.overloads)  # type: ignore[attr-defined]
