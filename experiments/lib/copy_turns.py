"""Copies that work in turns, and step times in turns with copying against turns without.

An engine that is started with `worker_extension_cls=EXTENSION` copies KV in about half of all turns of TURN_S
seconds, and waits in the others, so that what copying costs can be told from the turns without.

Tokens come at `times`, one a step. The steps of a turn are counted with fractions, by time, so that a step
across its end counts in both turns: counted whole, long steps would be likelier to be counted, wherever a
turn ends. Every two turns hold one of each kind and make one figure: the log time per step of the one with
copying, less that of the one without, and less what contexts have grown between them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from dataplane.live.kv.direct import Pacer

Times = NDArray[np.float64]
LEAD_S = 0.03  # the step that a message falls into began before it
EVENT_S = 0.16  # from there to the end of the steps that it may make longer
BESIDE_S = 0.27  # of undisturbed steps, on either side


TURN_S = 0.2
CLOCK_S = 1e-6  # more than the clock may be off by when a turn begins
EXTENSION = "experiments.lib.worker_in_turns.InTurns"


def is_turn(now_s: float, turn_s: float) -> bool:
    """Whether copies work now, by the clock that all processes of a machine share.

    Turns with copying and without follow each other as in the Thue-Morse sequence: each four (eight, ...)
    of them are balanced against whatever grows steadily (or bends) meanwhile, and none of it is periodic.
    """
    return int(now_s // turn_s).bit_count() % 2 == 1


class TurnPacer(Pacer):
    """The rests of one copy, and its waits for turns."""

    def wait(self, done: int) -> None:
        super().wait(done)
        while not is_turn(now_s := time.monotonic(), TURN_S):
            time.sleep((now_s // TURN_S + 1) * TURN_S - now_s + CLOCK_S)
            self._began_s += time.monotonic() - now_s


def steps(times: Times, start_s: float, end_s: float) -> float:
    """How many steps, and fractions of steps, lie in [start, end]."""
    first, last = np.interp([start_s, end_s], times, np.arange(len(times), dtype=float))
    return float(last - first)


def pairs(start_s: float, end_s: float, turn_s: float) -> Iterator[float]:
    """The beginnings of all pairs of turns within [start, end]."""
    at = int(np.ceil(start_s / (2 * turn_s)))
    while (at + 1) * 2 * turn_s <= end_s:
        yield at * 2 * turn_s
        at += 1


def slower(times: Times, pair_begins_s: float, turn_s: float, growth: float) -> float:
    """log(time per step in the turn with copying / in the one without), of a pair of turns.

    `growth` is that of a step's time per second, relative.
    """
    half_s = pair_begins_s + turn_s
    first, second = steps(times, pair_begins_s, half_s), steps(times, half_s, half_s + turn_s)
    longer = float(np.log(first / second)) - growth * turn_s
    return -longer if is_turn(pair_begins_s + turn_s / 2, turn_s) else longer


def idle_pair(now_s: float, turn_s: float) -> float:
    """When the next two turns in a row without copying begin."""
    turn = int(now_s // turn_s) + 1
    while is_turn((turn + 0.5) * turn_s, turn_s) or is_turn((turn + 1.5) * turn_s, turn_s):
        turn += 1
    return turn * turn_s


def extra_s(times: Times, event_s: float) -> float:
    """By how much the steps after an event are longer than those before and after them, in all."""
    begins_s = event_s - LEAD_S
    ends_s = begins_s + EVENT_S
    beside = [(begins_s - BESIDE_S, begins_s), (ends_s, ends_s + BESIDE_S)]
    usual_s = float(np.mean([BESIDE_S / steps(times, *one) for one in beside]))
    return EVENT_S - steps(times, begins_s, ends_s) * usual_s


def growth(times: Times, start_s: float, end_s: float) -> float:
    """The relative growth of a step's time per second over [start, end], from its halves."""
    half_s = (end_s - start_s) / 2
    halves = [steps(times, at, at + half_s) for at in (start_s, start_s + half_s)]
    return float(np.log(halves[0] / halves[1]) / half_s)


def working_s(start_s: float, end_s: float, turn_s: float) -> float:
    """How much of [start, end] lies in turns with copying."""
    found, at = 0.0, start_s
    while at < end_s:
        next_s = min(end_s, (int(at // turn_s) + 1) * turn_s)
        if next_s <= at:  # rounding
            next_s = at + 1e-9
        found += (next_s - at) * is_turn((at + next_s) / 2, turn_s)
        at = next_s
    return found


def middle_mean(figures: NDArray[np.float64], axis: int = -1) -> NDArray[np.float64]:
    """The mean of the middle half: hosts stand still now and then, and their figures have long tails."""
    cut = figures.shape[axis] // 4
    ordered = np.sort(figures, axis=axis)
    return np.asarray(ordered[..., cut : figures.shape[axis] - cut].mean(axis=axis))
