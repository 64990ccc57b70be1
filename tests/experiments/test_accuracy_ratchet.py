"""No row of the accuracy matrix gets worse by more than its noise, and no interval holds less.

The rows are frozen in experiments/profiling: accuracy.json, intervals.json.
"""

import json
from pathlib import Path

import numpy as np
import pytest

from controlplane.perfmodel import uncertainty
from experiments.profiling import intervals
from experiments.profiling.accuracy import DEVELOPMENT, FROZEN, JUDGED, digest, of_ladder, worse

NAMES = (*DEVELOPMENT, *JUDGED)
INTERVALS = json.loads(intervals.FROZEN.read_text(encoding="utf-8"))
FAST = "apr29-root-short"
KNOWN = json.loads(FROZEN.read_text(encoding="utf-8"))


def test_every_sweep_has_its_rows() -> None:
    for rows in (KNOWN["as it is"], KNOWN["calibrated"]):
        assert set(rows) == set(NAMES)
        assert all(error >= 0 and noise >= 0 for row in rows.values() for error, noise in row.values())


@pytest.mark.parametrize("name", NAMES)
def test_no_error_of_a_library_profile_is_past_its_frozen_one(bench_data: Path, name: str) -> None:
    assert digest(bench_data, name) == KNOWN["data"][name], "other measurements: the rows are not of these"
    assert not list(worse(of_ladder(name, bench_data, False), KNOWN))


@pytest.mark.nightly
@pytest.mark.parametrize("name", NAMES)
def test_no_error_of_a_calibrated_profile_is_past_its_frozen_one(bench_data: Path, name: str) -> None:
    assert not list(worse(of_ladder(name, bench_data, True), KNOWN))


def test_an_error_that_rises_past_its_noise_is_named() -> None:
    rate = {"hits": None, "errors": {"e2e": {"mean": 0.1}, "tpot": {"mean": 0.1}}}
    rate["errors"]["ttft"] = {"mean": 0.1, "p99": 0.1}
    found = {"runs": "mine", "calibrated": False, "judged": 1, "rates": [rate], "knee": {"rates_apart": -1}}
    row = {name: [0.099, 0.002] for name in ("e2e mean", "tpot mean", "ttft mean")}
    row |= {"ttft p99": [0.05, 0.01], "rates from the saturation point": [1.0, 0.0]}
    row |= {"points of hits": [0.0, 0.01]}
    assert list(worse(found, {"as it is": {"mine": row}})) == ["mine: ttft p99: 0.1, at most 0.05 + 0.01"]


def test_plans_draw_the_errors_of_the_frozen_rates() -> None:
    seen = INTERVALS["seen"]
    assert intervals.learned(seen, intervals.COMPOSED) == uncertainty.DENSE
    assert intervals.learned(seen, intervals.CALIBRATED) == uncertainty.CALIBRATED


def test_calibrated_intervals_hold_what_they_say_and_only_those_of_tails_are_wider() -> None:
    """On the same rates. Chance differs from stack to stack, and a calibration does not see it."""
    composed, calibrated = (
        INTERVALS["held"][f"{kind}, dense"]["all"] for kind in (intervals.LATER, intervals.CALIBRATED)
    )
    assert all(0.86 <= share <= 0.94 for share, _ in calibrated.values())
    wider = {name: width / composed[name][1] for name, (_, width) in calibrated.items()}
    assert wider.pop("TTFT p99") == pytest.approx(1.34, abs=0.01)  # docs/figures/intervals.md
    assert max(wider.values()) <= 1.0


def test_short_prompts_have_the_widest_tails_of_first_tokens_and_llm_d_the_most_misses() -> None:
    held = INTERVALS["held"][f"{intervals.CALIBRATED}, dense"]
    tails = {name: sweep["TTFT p99"] for name, sweep in held.items() if name != "all"}
    kinds = (("short", 2.90), ("sharegpt", 1.75), ("long", 1.36))
    for kind, width in kinds:
        assert np.median([of[1] for name, of in tails.items() if kind in name]) == pytest.approx(
            width, abs=0.01
        )
    behind, direct = (
        np.mean([of[0] for name, of in tails.items() if ("llmd" in name) == gateway])
        for gateway in (True, False)
    )
    assert behind <= 0.5 < 0.9 < direct


@pytest.mark.parametrize("kind", [intervals.COMPOSED, intervals.CALIBRATED])
@pytest.mark.parametrize(
    "name", [FAST, *(pytest.param(name, marks=pytest.mark.nightly) for name in NAMES if name != FAST)]
)
def test_no_interval_holds_fewer_rates_of_a_sweep_or_is_wider(bench_data: Path, name: str, kind: str) -> None:
    frozen = INTERVALS["held"][f"{kind}, dense"].get(name)
    known = intervals.learned(INTERVALS["seen"], kind, intervals.stack_of(name))
    rates = intervals.intervals(name, bench_data, kind, known)
    assert bool(rates) == bool(frozen), "a calibration is refused now, or no longer"
    for figure, (share, width) in intervals.shares(rates).items() if rates else ():
        assert share >= frozen[figure][0], figure
        assert width <= 1.02 * frozen[figure][1], figure
