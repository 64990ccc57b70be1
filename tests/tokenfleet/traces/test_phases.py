"""Phases of a trace: a change of the rate is found where it is, and steady traffic has none."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.workload import Workload
from tokenfleet.cli.main import main
from tokenfleet.traces.shape import BIN_S, LEAST_S, OF_LONG, OF_SHORT, phases_of


def traffic(rates_rps: list[float], each_s: float, seed: int = 0) -> Workload:
    """Poisson arrivals at one rate after the other; prompts are 100 tokens times the turn."""
    rng = np.random.default_rng(seed)
    arrival_s, prompt_tokens = [], []
    for turn, rps in enumerate(rates_rps):
        n = rng.poisson(rps * each_s)
        arrival_s.append(np.sort(rng.uniform(0.0, each_s, n)) + turn * each_s)
        prompt_tokens.append(np.full(n, 100 * (turn + 1)))
    times_s = np.concatenate(arrival_s)
    return Workload(times_s, np.concatenate(prompt_tokens), np.full(len(times_s), 50))


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("before_rps", "after_rps"), [(4.0, 8.0), (8.0, 4.0), (10.0, 15.0), (3.0, 30.0)])
def test_a_change_of_rate_is_found_within_three_bins(before_rps: float, after_rps: float, seed: int) -> None:
    calm, busy = phases_of(traffic([before_rps, after_rps], 1800.0, seed))
    assert busy.start_s == pytest.approx(1800.0, abs=3 * BIN_S)
    assert calm.end_s == busy.start_s
    assert calm.rate_rps == pytest.approx(before_rps, rel=0.1)
    assert busy.rate_rps == pytest.approx(after_rps, rel=0.1)
    assert calm.prompt_tokens == pytest.approx(100.0, abs=3.0)
    assert busy.prompt_tokens == pytest.approx(200.0, abs=3.0)
    assert busy.output_tokens == 50.0


@pytest.mark.parametrize("rps", [0.05, 1.0, 10.0, 100.0])
def test_a_steady_rate_is_one_phase(rps: float) -> None:
    for seed in range(10):
        assert len(phases_of(traffic([rps], 3600.0, seed))) == 1


@given(st.lists(st.floats(0.0, 20.0), min_size=1, max_size=8), st.floats(60.0, 6000.0), st.integers(0, 9))
def test_phases_cover_the_trace_in_order_and_count_every_request(
    rates_rps: list[float], each_s: float, seed: int
) -> None:
    workload = traffic([*rates_rps, 1.0], each_s, seed)
    phases, duration_s = phases_of(workload), workload.duration_s
    if len(workload) < 2:
        return
    assert phases[0].start_s == workload.arrival_s[0]
    assert phases[-1].end_s == workload.arrival_s[-1]
    assert all(one.end_s == other.start_s for one, other in pairwise(phases))
    assert sum(phase.requests for phase in phases) == len(workload)
    least_s = max(min(LEAST_S, OF_SHORT * duration_s), OF_LONG * duration_s)
    assert all(phase.end_s - phase.start_s >= 0.9 * least_s for phase in phases)


def test_requests_at_one_instant_have_no_phases() -> None:
    assert phases_of(Workload(np.zeros(5), *np.full((2, 5), 10))) == ()


def test_trace_check_prints_the_phases(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    workload = traffic([4.0, 12.0], 1200.0)
    columns = np.column_stack((workload.arrival_s, workload.prompt_tokens, workload.output_tokens))
    head = "arrival_s,prompt_tokens,output_tokens"
    np.savetxt(tmp_path / "two.csv", columns, "%.6f,%d,%d", header=head, comments="")
    assert main(["trace", "check", f"{tmp_path}/two.csv"]) == 0
    printed = capsys.readouterr().out
    assert "Traffic phase from" in printed
    assert "req/s" in printed
    assert main(["trace", "check", f"{tmp_path}/two.csv", "--format", "json"]) == 0
    first, second = json.loads(capsys.readouterr().out)["phases"]
    assert first["rate_rps"] == pytest.approx(4.0, rel=0.1)
    assert second["rate_rps"] == pytest.approx(12.0, rel=0.1)
    assert first["end_s"] == second["start_s"]
