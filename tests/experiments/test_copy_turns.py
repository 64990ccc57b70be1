"""What copies cost others is found from turns with and without: no more, no less, and nothing in a sham."""

import numpy as np
import pytest
from made_clock import Clock

pytest.importorskip("torch", reason="torch is not installed (requirements/live-cpu.txt)")

from dataplane.live.engine_api.kv_messages import CopyRate
from dataplane.live.kv import direct
from dataplane.live.kv.direct import Share
from experiments.lib import copy_turns
from experiments.lib.copy_turns import (
    TURN_S,
    TurnPacer,
    extra_s,
    growth,
    idle_pair,
    is_turn,
    middle_mean,
    pairs,
    slower,
    steps,
    working_s,
)


def tokens(rng, seconds, cost, grows=0.0, event_s=None, event_cost_s=0.0):
    """When tokens come from an engine whose host has spells and whose steps grow; pieces every 34 ms cost."""
    times, now_s, spell, next_piece_s = [0.0], 0.0, 0.0, 0.0
    while now_s < seconds:
        spell = 0.95 * spell + 0.01 * rng.standard_normal()
        step_s = 0.02 * (1 + grows * now_s) * np.exp(spell + 0.03 * rng.standard_normal())
        end_s = now_s + step_s
        while next_piece_s < end_s:
            if is_turn(next_piece_s, TURN_S):
                end_s += cost * 0.034
            next_piece_s += 0.034
        if event_s is not None and now_s <= event_s < end_s:
            end_s += event_cost_s
        now_s = end_s
        times.append(now_s)
    return np.array(times)


@pytest.mark.parametrize("cost", [0.0, 0.02, 0.1])
def test_the_cost_of_copying_is_found_through_spells_and_growth(cost):
    found = []
    for seed in range(20):  # rounds, as in the experiment
        times = tokens(np.random.default_rng(seed), 20.0, cost, grows=0.02)
        found += [slower(times, at, TURN_S, 0.02 / (1 + 0.02 * at)) for at in pairs(1, 19, TURN_S)]
    error = np.std(found) / len(found) ** 0.5
    # Steps across the ends of turns blur a twentieth of it.
    assert middle_mean(np.array(found)) == pytest.approx(np.log1p(cost), abs=3 * error + 0.08 * cost)
    assert error < 0.002


def test_growth_is_not_taken_for_copying_where_one_order_of_turns_prevails():
    times = tokens(np.random.default_rng(0), 100.0, 0.0, grows=0.5)
    one_order = [at for at in pairs(2, 95, TURN_S) if is_turn(at + TURN_S / 2, TURN_S)]
    plain = np.mean([slower(times, at, TURN_S, 0.0) for at in one_order])
    mended = np.mean([slower(times, at, TURN_S, growth(times, at - 1, at + 1.4)) for at in one_order])
    assert abs(mended) < 0.005 < abs(plain)


def test_what_a_message_costs_once_is_found():
    found = []
    for seed in range(300):
        times = tokens(np.random.default_rng(seed), 2.0, 0.0, event_s=1.0, event_cost_s=0.003)
        found.append(extra_s(times, 1.0))
    assert np.mean(found) == pytest.approx(0.003, abs=3 * np.std(found) / 300**0.5 + 0.0003)


def test_turns_are_counted_and_found():
    assert steps(np.array([0.0, 1.0, 2.0, 4.0]), 0.5, 3.0) == pytest.approx(2.0)
    idle_s = idle_pair(17.03, TURN_S)
    assert idle_s > 17.03
    assert working_s(idle_s, idle_s + 2 * TURN_S, TURN_S) == pytest.approx(0.0, abs=1e-6)
    assert working_s(0.0, 160 * TURN_S, TURN_S) == pytest.approx(80 * TURN_S, abs=1e-6)
    for at in pairs(3.0, 9.0, TURN_S):
        assert working_s(at, at + 2 * TURN_S, TURN_S) == pytest.approx(TURN_S, abs=1e-6)


@pytest.mark.parametrize("pace", [CopyRate(10e6), CopyRate(share=0.01), CopyRate(1e5, 0.001, 20e6)])
def test_a_copy_that_takes_turns_works_in_those_only_and_at_its_pace(monkeypatch, pace):
    clock = Clock()
    monkeypatch.setattr(direct, "time", clock)
    monkeypatch.setattr(copy_turns, "time", clock)

    def copied_s(pacer):
        began_s, when = clock.now_s, []
        pacer.wait(0)
        for piece in range(400):
            when.append(clock.now_s)
            clock.work(0.001)
            pacer.wait((piece + 1) * 1e6)
        return clock.now_s - began_s, when

    whole_s, _ = copied_s(direct.Pacer(pace, Share()))
    in_turns_s, when = copied_s(TurnPacer(pace, Share()))
    assert all(is_turn(at, TURN_S) for at in when)
    assert in_turns_s == pytest.approx(2 * whole_s, rel=0.15)


def test_every_two_turns_hold_one_of_each_kind_in_no_regular_order():
    kinds = [is_turn(0.2 * (turn + 0.5), 0.2) for turn in range(64)]
    assert all(a != b for a, b in zip(kinds[::2], kinds[1::2], strict=True))
    assert 0 < sum(kinds[::2]) < 32
