"""The machine's own speed, told from a grid's times and taken out of them."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from controlplane.errors import BadInput
from dataplane.live.engine_api.link import Step
from tokenfleet.cli.fit import speed_text
from tokenfleet.profiles.diagnostics import HostSpeed, host_speed
from tokenfleet.profiles.measurements import MeasurementFile, read_measurements

BATCHES, VISITS = 30, 6
Columns = NDArray[np.float64]


def rounds(rng: np.random.Generator) -> tuple[NDArray[np.int64], NDArray[np.int64], Columns]:
    """Batch, visit and time of one step a visit: every batch once a round, a second apart."""
    batch = np.concatenate([rng.permutation(BATCHES) for _ in range(VISITS)])
    return batch, np.arange(len(batch)), np.arange(len(batch), dtype=float)


def slow_spells(at_s: Columns) -> Columns:
    """A third slower for fifteen seconds of every sixty."""
    return np.where(at_s % 60 < 15, 1.35, 1.0)


def true_s(batch: NDArray[np.int64]) -> Columns:
    return 0.004 * 1.2**batch


def test_slow_spells_are_found_and_what_is_left_is_the_batches_own_time() -> None:
    rng = np.random.default_rng(0)
    batch, visit, at_s = rounds(rng)
    slow = slow_spells(at_s)
    step_s = true_s(batch) * slow * np.exp(rng.normal(0, 0.03, len(batch)))
    found = host_speed(batch, visit, at_s, step_s)
    assert found.window_s is not None
    assert np.corrcoef(np.log(found.slowness), np.log(slow))[0, 1] > 0.9
    assert found.off_left < 0.6 * found.off
    error = np.abs(step_s / found.slowness / (true_s(batch) * np.exp(np.log(slow).mean())) - 1)
    assert np.median(error) < 0.05
    low, high = found.range
    assert low < 1.0 < high


@pytest.mark.parametrize("seed", range(5))
def test_of_noise_that_neighbours_do_not_share_nothing_is_taken_out(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch, visit, at_s = rounds(rng)
    step_s = true_s(batch) * np.exp(rng.normal(0, 0.1, len(batch)))
    found = host_speed(batch, visit, at_s, step_s)
    assert found.window_s is None
    assert (found.slowness == 1.0).all()
    assert found.range == (1.0, 1.0)


def test_a_visit_that_was_slow_alone_stays_slow() -> None:
    rng = np.random.default_rng(1)
    batch, visit, at_s = rounds(rng)
    step_s = true_s(batch) * slow_spells(at_s)
    step_s[95] *= 5.0
    found = host_speed(batch, visit, at_s, step_s)
    assert found.slowness[95] < 1.5


def test_a_slow_second_half_is_not_taken_for_the_batches_own() -> None:
    rng = np.random.default_rng(2)
    batch, visit, at_s = rounds(rng)
    slow = np.where(at_s < at_s.mean(), 0.9, 1.1)
    found = host_speed(batch, visit, at_s, true_s(batch) * slow * np.exp(rng.normal(0, 0.02, len(batch))))
    halves = found.slowness[at_s < at_s.mean()].mean(), found.slowness[at_s > at_s.mean()].mean()
    assert halves[1] / halves[0] == pytest.approx(1.1 / 0.9, rel=0.05)


def test_one_visit_of_each_batch_says_nothing_about_the_machine() -> None:
    batch = np.arange(10)
    found = host_speed(batch, batch, batch.astype(float), np.linspace(0.01, 0.1, 10))
    assert found.window_s is None
    assert (found.slowness == 1.0).all()


def test_times_that_are_no_numbers_are_refused() -> None:
    batch = np.repeat(np.arange(3), 4)
    at_s = np.arange(12.0)
    at_s[4] = np.nan
    with pytest.raises(BadInput, match="row 5: at_s"):
        host_speed(batch, np.arange(12), at_s, np.ones(12))


def grid_file(path: Path) -> None:
    """A measured grid: two steps a visit, in slow spells."""
    batch, visit, at_s = rounds(np.random.default_rng(3))
    slow = slow_spells(at_s)
    file = MeasurementFile(path, {"clock": "wall"})
    for b, v in zip(batch, visit, strict=True):
        took_s = float(true_s(b) * slow[v])
        step = Step(0, int(b) + 1, 100, took_s, 0, 0)
        file.add(f"{b + 1}x100", [step, step], float(at_s[v]))


def test_a_grid_with_its_times_is_read_as_at_the_machine_s_mean_speed(tmp_path: Path) -> None:
    grid_file(tmp_path / "m.csv")
    told: list[HostSpeed] = []
    steady, measured = (
        read_measurements(tmp_path / "m.csv", told.append),
        read_measurements(tmp_path / "m.csv"),
    )
    assert len(told) == 1
    assert told[0].off_left < told[0].off
    order = np.argsort(steady.sequences)
    growth = np.log(steady.step_s[order] / true_s(np.arange(BATCHES)))
    as_it_was = np.log(measured.step_s[order] / true_s(np.arange(BATCHES)))
    assert growth.std() <= as_it_was.std()
    assert "times the usual" in speed_text(told[0])
    assert "without slow spells" in speed_text(HostSpeed(np.ones(1), None, 0.1, 0.1))
