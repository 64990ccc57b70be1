"""A trace drawn from rates and histograms: what it keeps of a recorded one, and what is refused."""

import math

import numpy as np
import pytest
from checkout import ROOT

from controlplane.errors import BadInput
from tokenfleet.traces import read_traces
from tokenfleet.traces.from_metrics import CountedTraffic, LengthHistogram, trace_of_metrics
from tokenfleet.traces.usage import SHAPES, Usage, trace_of_usage

EDGES = [factor * 10.0**power for power in range(5) for factor in (1, 2, 5)] + [math.inf]  # vLLM's


def histogram(tokens, name="prompts"):
    """The lengths as vLLM counts them."""
    up_to = {edge: float((tokens <= edge).sum()) for edge in EDGES}
    return LengthHistogram.of_buckets(up_to, float(tokens.mean()), name)


def counted(load, step_s=15.0, start_s=1_700_000_000.0):
    """A recorded workload as metrics show it."""
    steps = math.ceil(load.duration_s / step_s)
    counts, edges_s = np.histogram(load.arrival_s, steps, (0.0, steps * step_s))
    return CountedTraffic(
        tuple(start_s + edges_s),
        tuple(counts / step_s),
        histogram(load.prompt_tokens),
        histogram(load.output_tokens, "outputs"),
    )


def small(**more):
    lengths = LengthHistogram((10.0,), (5.0,))
    return CountedTraffic(
        **({"times_s": (0.0, 10.0), "rates_rps": (2.0,)} | more), prompts=lengths, outputs=lengths
    )


def test_every_step_of_a_recorded_hour_has_its_requests_again():
    load = read_traces([ROOT / "examples/sample_trace.csv"]).workload
    traffic = counted(load)
    drawn = trace_of_metrics(traffic, seed=3)
    assert len(drawn) == len(load)
    assert drawn.clock_start_s is not None
    at_s = drawn.workload.arrival_s + drawn.clock_start_s
    again, _ = np.histogram(at_s, np.asarray(traffic.times_s))
    assert np.abs(again - np.asarray(traffic.rates_rps) * 15.0).max() <= 1.0
    assert (np.diff(drawn.workload.arrival_s) >= 0).all()
    assert drawn.assumed is not None
    assert [row[0] for row in drawn.assumed.rows][:4] == ["Rate", "Arrivals", "Prompts", "Outputs"]


@pytest.mark.parametrize("shape", SHAPES)
def test_lengths_keep_their_mean_and_nearly_their_spread(shape):
    load = trace_of_usage(Usage(requests_per_day=100_000, shape=shape)).workload
    for tokens in (load.prompt_tokens, load.output_tokens):
        drawn = histogram(tokens).draw(200_000, np.random.RandomState(0))
        assert drawn.mean() == pytest.approx(tokens.mean(), rel=0.01)
        power = (drawn.astype(float) ** 2).mean() / (tokens.astype(float) ** 2).mean()
        assert math.sqrt(power) == pytest.approx(1.0, abs=0.25)


def test_lengths_stay_within_their_buckets_and_the_last_ends_at_2_5_times_its_beginning():
    lengths = LengthHistogram((100.0, 200.0, math.inf), (0.0, 30.0, 10.0), None)
    drawn = lengths.draw(4000, np.random.RandomState(0))
    assert drawn.min() >= 101
    assert 490 <= drawn.max() <= 500
    assert (drawn > 200).mean() == pytest.approx(0.25, abs=0.03)


def test_missing_counts_are_filled_from_those_around_and_said():
    traffic = small(times_s=(0.0, 10.0, 20.0, 30.0), rates_rps=(2.0, math.nan, 4.0))
    drawn = trace_of_metrics(traffic)
    assert len(drawn) == 90
    assert drawn.warnings == ["metrics: 1 of 3 steps have no counts; filled from those around"]


def test_the_same_seed_draws_the_same_trace():
    one, same, other = (trace_of_metrics(small(rates_rps=(50.0,)), seed).workload for seed in (1, 1, 2))
    assert (one.arrival_s == same.arrival_s).all()
    assert (one.arrival_s != other.arrival_s).any()


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"rates_rps": ()}, "vLLM's metrics: expected a rate for each step, got 0 rates"),
        ({"times_s": (10.0, 0.0)}, "vLLM's metrics: expected times that rise"),
        ({"rates_rps": (-1.0,)}, "vLLM's metrics: expected rates of 0 or more, got -1"),
        ({"rates_rps": (0.0,)}, "vLLM's metrics: counted no request in 10 s"),
        ({"rates_rps": (math.nan,)}, "vLLM's metrics: counted no request in 10 s"),
        ({"rates_rps": (0.01,)}, "metrics: 0 requests counted, expected 1 to 50,000,000"),
    ],
)
def test_counts_that_cannot_be_are_refused_in_a_line(given, told):
    with pytest.raises(BadInput) as refused:
        trace_of_metrics(small(**given))
    assert str(refused.value) == told


@pytest.mark.parametrize(
    ("edges", "requests", "told"),
    [
        ((), (), "prompts: the histogram counts no request"),
        ((10.0,), (0.0,), "prompts: the histogram counts no request"),
        ((10.0, 5.0), (1.0, 1.0), "prompts: not a histogram: expected rising edges and counts of 0 or more"),
        (
            (10.0, 20.0),
            (3.0, -1.0),
            "prompts: not a histogram: expected rising edges and counts of 0 or more",
        ),
    ],
)
def test_a_histogram_that_cannot_be_is_refused_in_a_line(edges, requests, told):
    with pytest.raises(BadInput) as refused:
        LengthHistogram(edges, requests, name="prompts")
    assert str(refused.value) == told
