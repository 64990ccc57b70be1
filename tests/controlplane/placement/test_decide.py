"""Requests that are placed although they harm others, on made-up fleets."""

from dataclasses import replace
from math import nan

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_ledgers import NOW_S, At, Held, ledger_of, requests, workers
from made_profiles import made_profile

from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.step import PrefillModel, StepModel
from controlplane.placement.assign import ASK, decide
from controlplane.placement.constraints import harm
from controlplane.placement.ledger import ANY_PHASE, NONE
from controlplane.placement.outlook import hopeless
from controlplane.placement.policies import PATIENCE, POLICY_CODE, PlacementSettings, Policy
from controlplane.types import EngineMode

KNOBS = PlacementSettings().row()
RETRY_S, TPOT_S, TTFT_S = 0.01, 0.03, 0.6
PROFILE = made_profile(
    StepModel(0.018, 1e-4, 1e-4, 5e-7),
    KvModel(60_000),
    EngineLimits(mode=EngineMode.PREFILL_FIRST, max_batched_tokens=4096),
    PrefillModel(0.01, 1e-4),
)
LONG = Held(2000, 400, tpot_s=TPOT_S)  # its prefill takes 0.21 s


def decided(fleet: list[At], arrival_s: float) -> int:
    led, r = ledger_of(fleet, LONG, arrival_s, TTFT_S)
    code, draw = POLICY_CODE[Policy.SPREAD], np.zeros(2)
    return int(decide(led, code, KNOBS, r, NOW_S, RETRY_S, PATIENCE, ANY_PHASE, draw, ASK))


def busy(boundary_s: float, *started_ago_s: float) -> At:
    """A worker amid a step; those that run there made a token every 25 ms and have 600 to make."""
    tokens = [max(round(ago_s / 0.025), 1) for ago_s in started_ago_s]
    held = [
        Held(100, 600, made, True, NOW_S - ago_s, TPOT_S)
        for ago_s, made in zip(started_ago_s, tokens, strict=True)
    ]
    return At(PROFILE, held, NOW_S + boundary_s)


def test_the_last_chance_comes_while_workers_amid_a_step_can_still_be_chosen():
    # Everywhere somebody has just begun; the one whose step ends first has most of them.
    fleet = [busy(0.002, *[0.1] * 8), busy(0.02, 0.1, 4.0), busy(0.02, *[0.1] * 4)]
    prefill_s = 0.01 + 2000e-4
    left_s = [TPOT_S + RETRY_S + more for more in (0.001, -0.001)]
    early, late = (decided(fleet, NOW_S - (TTFT_S - prefill_s - left)) for left in left_s)
    assert early == NONE  # a worker amid a step would do at the next try, too
    assert late == 1  # where it harms one request, not eight
    # A moment before only an idle worker would do it is too late for that choice.
    assert decided(fleet, NOW_S - (TTFT_S - prefill_s - 0.003)) != 1


def test_nobody_is_harmed_for_a_request_that_has_time():
    assert decided([busy(0.0, 0.1)], NOW_S) == NONE
    assert decided([busy(0.0, 4.0)], NOW_S) == 0  # where all have saved enough it goes at once


@pytest.mark.parametrize(("waited", "wanted"), [(PATIENCE - 0.01, NONE), (PATIENCE + 0.01, 0)])
def test_who_has_lost_its_ttft_harms_nobody_until_patience_ends(waited, wanted):
    assert decided([busy(0.0, 0.1)], NOW_S - waited * TTFT_S) == wanted


def test_patience_ends_at_no_worker_whose_seats_are_taken():
    full = replace(PROFILE, engine=replace(PROFILE.engine, max_seqs=1))
    fleet = [At(full, busy(0.0, 0.1).held, NOW_S)]
    assert decided(fleet, NOW_S - (PATIENCE + 1) * TTFT_S) == NONE


def test_patience_ends_at_no_worker_whose_memory_is_full():
    """A small worker has seats for many more, and memory for none: there the request would only queue."""
    small = replace(PROFILE, kv=KvModel(2_050))
    held = busy(0.0, 0.1).held
    full, larger = At(small, held, NOW_S), busy(0.0, 0.1, 0.1, 0.1)
    waited_s = NOW_S - (PATIENCE + 1) * TTFT_S
    assert decided([full, larger], waited_s) == 1
    assert decided([full], waited_s) == 0  # one may wait there, for what is never free at once
    assert decided([At(small, [*held, replace(LONG, tpot_s=1.0)], NOW_S)], waited_s) == NONE


@given(st.lists(workers(), min_size=1, max_size=4), requests(decoding=False), st.floats(0, 3))
def test_a_busy_worker_is_too_late_before_an_idle_one_is(fleet, asked, waited_s):
    led, r = ledger_of(fleet, asked, NOW_S - waited_s, 1.0)
    assert hopeless(led, r, NOW_S, True) >= hopeless(led, r, NOW_S, False)


@given(st.lists(workers(), min_size=1, max_size=4), requests(decoding=False), st.floats(0, 1))
def test_what_only_busy_workers_are_too_late_for_is_placed_where_it_harms_least(fleet, asked, waited_s):
    led, r = ledger_of(fleet, asked, NOW_S - waited_s, 1.0)
    led.requests["first_s"][r] = nan
    code, draw = POLICY_CODE[Policy.SPREAD], np.zeros(2)
    w = int(decide(led, code, KNOBS, r, NOW_S, RETRY_S, 1e9, ANY_PHASE, draw, ASK))
    urgent = hopeless(led, r, NOW_S + RETRY_S, True) and not hopeless(led, r, NOW_S, False)
    harms = [harm(led, KNOBS, v, r, 0, NOW_S, False, 1e9) for v in range(len(fleet))]
    if urgent:
        assert (w == NONE) == (min(harms) >= 0.5)  # PlacementSettings.tolerance
        assert w == NONE or harms[w] == min(harms)
    elif not hopeless(led, r, NOW_S, False):
        assert (w == NONE) == (min(harms) > 0)
