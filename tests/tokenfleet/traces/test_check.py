"""The trace doctor: each finding warns where it should and nowhere else."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from controlplane.workload import Workload
from tokenfleet.cli.trace import sparkline
from tokenfleet.traces import Trace, read_trace
from tokenfleet.traces.check import as_json, check, doctor_warnings
from tokenfleet.traces.shape import half_width, requests_needed, shape_of
from tokenfleet.traces.synth import synthesise


def healthy(requests: int = 6000) -> Trace:
    return Trace("healthy", "plain", synthesise("poisson:5", "azure-conv", requests, seed=1))


def with_arrivals(arrival_s: NDArray[np.float64]) -> Trace:
    trace = healthy(len(arrival_s))
    return replace(trace, workload=replace(trace.workload, arrival_s=arrival_s))


def warned(trace: Trace) -> set[str]:
    return {finding.name for finding in check(trace).findings if finding.warns}


def test_healthy_traffic_has_no_warning() -> None:
    assert warned(healthy()) == set()


def longer(trace: Trace, **columns: int) -> Trace:
    workload = trace.workload
    changed = {name: getattr(workload, name).copy() for name in columns}
    for name, tokens in columns.items():
        changed[name][0] = tokens
    return replace(trace, workload=replace(workload, **changed))


def interrupted() -> Trace:
    arrival_s = healthy().workload.arrival_s.copy()
    arrival_s[3000:] += 600
    return with_arrivals(arrival_s)


def doubled() -> Trace:
    workload = healthy(3000).workload
    twice = np.repeat(np.arange(3000), 2)
    return Trace(
        "doubled",
        "plain",
        Workload(workload.arrival_s[twice], workload.prompt_tokens[twice], workload.output_tokens[twice]),
    )


def drifting() -> Trace:
    trace = healthy()
    grown = trace.workload.prompt_tokens * np.linspace(1, 3, len(trace))
    return replace(trace, workload=replace(trace.workload, prompt_tokens=grown.astype(np.int64)))


SICK = {
    "order": lambda: replace(healthy(), out_of_order=3),
    "empty outputs": lambda: replace(healthy(), empty_outputs=3),
    "duplicates": doubled,
    "units": lambda: with_arrivals(healthy().workload.arrival_s * 1000),
    "resolution": lambda: with_arrivals(np.floor(healthy().workload.arrival_s)),
    "lengths": lambda: longer(healthy(), prompt_tokens=2_000_000),
    "gaps": interrupted,
    "bursts": lambda: Trace("bursty", "plain", synthesise("gamma:5:4", "azure-conv", 6000, seed=1)),
    "drift": drifting,
    "enough for p99": lambda: healthy(1000),
}


@pytest.mark.parametrize("name", SICK)
def test_each_fault_is_found_by_its_name(name: str) -> None:
    assert name in warned(SICK[name]())


def test_seconds_read_as_milliseconds_are_suspected() -> None:
    assert "units" in warned(with_arrivals(healthy().workload.arrival_s / 1000))


def test_requests_at_one_instant_have_no_rate() -> None:
    assert {"units", "enough for p99"} <= warned(with_arrivals(np.zeros(50)))


@pytest.mark.parametrize("arrival_s", [np.zeros(1), np.zeros(50), np.array([0.0, 5e-324])])
def test_what_is_not_defined_is_said_in_words_and_is_null_in_json(arrival_s: NDArray[np.float64]) -> None:
    checkup = check(with_arrivals(arrival_s))
    assert not [f.words for f in checkup.findings if "nan" in f.words]
    json.dumps(as_json(checkup, {}), allow_nan=False)


def test_milliseconds_since_1970_read_as_seconds_are_suspected_at_any_rate(tmp_path: Path) -> None:
    arrivals_ms = 1_700_000_000_000 + 20 * np.arange(200)  # 50 a second
    rows = "\n".join(f"{ms},100,10" for ms in arrivals_ms)
    (tmp_path / "ms.csv").write_text(f"arrival_s,prompt_tokens,output_tokens\n{rows}\n")
    trace = read_trace(tmp_path / "ms.csv")
    assert [
        warning for warning in doctor_warnings(trace) if "as milliseconds" in warning and "50/s" in warning
    ]


@pytest.mark.parametrize("requests", [1, 2, 3, 12])
def test_the_shortest_traces_can_be_looked_at(requests: int) -> None:
    checkup = check(healthy(requests))
    assert "enough for p99" in warned(healthy(requests))
    assert as_json(checkup, {})["requests"] == requests


def test_fifteen_hundred_requests_judge_ninety_nine_percent_to_half_a_point() -> None:
    assert requests_needed() == 1522
    assert half_width(1522) <= 0.005 < half_width(1521)
    # The rule against the binomial itself: the share judged strays further in about 5 % of trials.
    judged = np.random.default_rng(1).binomial(1522, 0.99, 100_000) / 1522
    assert np.mean(np.abs(judged - 0.99) > 0.005) == pytest.approx(0.05, abs=0.02)


@given(st.lists(st.floats(0, 3000), min_size=2, max_size=300))
def test_the_fano_index_is_that_of_counting_every_window(times: list[float]) -> None:
    arrival_s = np.sort(np.array(times))
    shape = shape_of(with_arrivals(arrival_s).workload)
    for window_s, fano in shape.fano.items():
        windows = int((arrival_s[-1] - arrival_s[0]) // window_s)
        if windows < 10:
            assert math.isnan(fano)
            continue
        cell = ((arrival_s - arrival_s[0]) // window_s).astype(int)
        counts = np.bincount(cell, minlength=windows)[:windows]
        assert fano == pytest.approx(counts.var() / counts.mean(), rel=1e-9, abs=1e-9)


def test_poisson_arrivals_have_cv_and_fano_of_one() -> None:
    shape = shape_of(synthesise("poisson:20", "fixed:1", 200_000, seed=2))
    assert shape.gap_cv == pytest.approx(1, abs=0.02)
    assert all(fano == pytest.approx(1, abs=0.25) for fano in shape.fano.values())


def test_a_trace_of_one_request_a_year_costs_no_memory() -> None:
    shape = shape_of(with_arrivals(np.array([0.0, 1e9])).workload)
    assert shape.fano[1.0] == pytest.approx(1)


def test_drift_compares_the_last_third_of_the_time_with_the_first() -> None:
    workload = Workload(
        np.array([0.0, 1.0, 5.0, 7.0, 8.0, 9.0]), np.array([10, 10, 99, 30, 30, 30]), np.full(6, 5)
    )
    drift = shape_of(workload).drift
    assert (drift.rate, drift.prompt_tokens, drift.output_tokens) == (1.5, 3.0, 1.0)


def test_a_sparkline_runs_from_zero_to_the_highest() -> None:
    assert sparkline(np.array([0.0, 1.0, 4.0, 8.0])) == " ▂▅█"
    assert sparkline(np.zeros(3)) == ""


def test_the_public_azure_hour_is_fit_to_plan_from(bench_data: Path) -> None:
    trace = read_trace(bench_data / "azure" / "AzureLLMInferenceTrace_conv_2023.csv")
    shape = check(trace).shape
    assert warned(trace) == set()
    assert shape.gap_cv == pytest.approx(1.09, abs=0.01)
    assert shape.fano[60.0] == pytest.approx(16.1, abs=0.1)
