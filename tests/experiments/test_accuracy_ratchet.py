"""No row of the accuracy matrix gets worse by more than its noise (experiments/profiling/accuracy.json)."""

import json
from pathlib import Path

import pytest

from experiments.profiling.accuracy import DEVELOPMENT, FROZEN, JUDGED, digest, of_ladder, worse

NAMES = (*DEVELOPMENT, *JUDGED)
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
