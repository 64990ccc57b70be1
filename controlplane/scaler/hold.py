"""A target must last before the fleet follows it: quickly up, slowly down, and never for want of news."""

from __future__ import annotations

import math
from dataclasses import dataclass

from controlplane.errors import BadInput


@dataclass(frozen=True, slots=True)
class HoldSettings:
    """How long a target must stand above (`up_s`) or below (`down_s`) the wanted number without a break."""

    up_s: float = 0.0
    down_s: float = 80.0

    def __post_init__(self) -> None:
        if not (0 <= self.up_s < math.inf and 0 <= self.down_s < math.inf):
            raise BadInput(f"hold: up_s and down_s must be durations, got {self.up_s:g} and {self.down_s:g}")


@dataclass(frozen=True, slots=True)
class Held:
    """The number of workers wanted, and since when the target has been off it.

    `least_above` and `most_below`: the target nearest to `wanted` that each spell has seen.
    """

    wanted: int
    above_since_s: float | None = None
    least_above: int = 0
    below_since_s: float | None = None
    most_below: int = 0


def hold(settings: HoldSettings, held: Held, target: int | None, now_s: float) -> Held:
    """What is wanted now. A target of None (no news) keeps the number, and ends any spell.

    After a spell the number goes to the target nearest to it that the spell saw, so one dip is not followed.
    """
    if target is None or target == held.wanted:
        return Held(held.wanted)
    if target > held.wanted:
        since_s = now_s if held.above_since_s is None else held.above_since_s
        least = target if held.above_since_s is None else min(held.least_above, target)
        if now_s - since_s >= settings.up_s:
            return Held(least)
        return Held(held.wanted, above_since_s=since_s, least_above=least)
    since_s = now_s if held.below_since_s is None else held.below_since_s
    most = target if held.below_since_s is None else max(held.most_below, target)
    if now_s - since_s >= settings.down_s:
        return Held(most)
    return Held(held.wanted, below_since_s=since_s, most_below=most)
