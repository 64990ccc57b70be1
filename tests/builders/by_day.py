"""Fewer random examples by day, where `--part` is given, and all of them by night."""

from typing import Any

from hypothesis import settings

ALL = 100  # of a test that asks for no number
SHARE = 5
FEWEST = 5


def load(*, all_of_them: bool) -> None:
    """Set the number of examples, and make them the same in each run.

    Hypothesis' deadline reads the wall clock and fails correct tests on a busy machine.
    """
    number = ALL if all_of_them else ALL // SHARE
    settings.register_profile("repeatable", max_examples=number, deadline=None, derandomize=True)
    settings.load_profile("repeatable")


def examples(number: int, **more: Any) -> settings:
    """The settings of a test of `number` examples. By day it has a fifth of them, and at least five."""
    share = ALL // settings().max_examples
    return settings(max_examples=max(-(-number // share), min(number, FEWEST)), **more)
