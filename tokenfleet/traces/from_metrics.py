"""A trace drawn from metrics: rates over time, and histograms of prompt and output lengths.

Metrics count requests and do not list them. Three things are therefore assumed, and `Assumed` states each:

* arrivals within a step are Poisson
* lengths within a bucket follow one curve for all buckets, with the mean that the metrics give
* prompts and outputs are independent

Prefixes that requests share are not drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controlplane.errors import BadInput
from controlplane.figures import duration_text
from controlplane.workload import Workload
from tokenfleet.traces.synth import MOST_REQUESTS
from tokenfleet.traces.trace import Assumed, Trace

OF_RATE, OF_LENGTHS = 0.0, 0.05  # standard deviations of logarithms: rates are counted, tails are not
BEYOND = 2.5  # the end of the last bucket, over its beginning: vLLM's edges are 1, 2, 5, 10, ...
BENT = 0.02, 0.98  # the least and the most of a bucket's mean, as a share of its width


@dataclass(frozen=True, slots=True)
class LengthHistogram:
    """Requests by length. `requests[i]` have more than `edges[i-1]` (0) and at most `edges[i]` tokens.

    `mean_tokens`: over all requests; None where no metric has it. The last edge may be infinite.
    Raises BadInput for a histogram that counts nothing.
    """

    edges: tuple[float, ...]
    requests: tuple[float, ...]
    mean_tokens: float | None = None
    name: str = "lengths"

    def __post_init__(self) -> None:
        total = sum(self.requests)
        if len(self.edges) != len(self.requests) or not math.isfinite(total) or total <= 0:
            raise BadInput(f"{self.name}: the histogram counts no request")
        if min(self.requests) < 0 or [0.0, *self.edges] != sorted({0.0, *self.edges}):
            raise BadInput(f"{self.name}: not a histogram: expected rising edges and counts of 0 or more")

    @classmethod
    def of_buckets(
        cls, up_to: Mapping[float, float], mean_tokens: float | None = None, name: str = "lengths"
    ) -> LengthHistogram:
        """From Prometheus' buckets: the requests up to each edge. A count that falls is taken as no rise."""
        edges = tuple(sorted(up_to))
        counts = np.maximum.accumulate([up_to[edge] for edge in edges]) if edges else np.zeros(0)
        return cls(edges, tuple(np.diff(counts, prepend=0.0).tolist()), mean_tokens, name)

    def draw(self, requests: int, rng: np.random.RandomState) -> NDArray[np.int64]:
        """Lengths [requests] in tokens, each at least 1."""
        low = np.array([0.0, *self.edges[:-1]])
        high = np.array([*self.edges[:-1], min(self.edges[-1], max(low[-1] * BEYOND, 1.0))])
        share = np.array(self.requests) / sum(self.requests)
        bucket = np.minimum(
            np.searchsorted(np.cumsum(share), rng.uniform(0.0, 1.0, requests)), len(share) - 1
        )
        width = high - low
        power = 1.0 / _bend(share, low, width, self.mean_tokens) - 1.0
        within = rng.uniform(0.0, 1.0, requests) ** power
        tokens: NDArray[np.float64] = np.maximum(np.ceil(low[bucket] + width[bucket] * within), 1.0)
        return tokens.astype(np.int64)


@dataclass(frozen=True, slots=True)
class CountedTraffic:
    """What metrics say about a fleet's traffic.

    `times_s` [n + 1]: the edges of the steps, rising; Unix time. `rates_rps` [n]: requests
    per second in each step, NaN where nothing was counted. `source`: for a person, where the counts are from.
    """

    times_s: Sequence[float]
    rates_rps: Sequence[float]
    prompts: LengthHistogram
    outputs: LengthHistogram
    source: str = "vLLM's metrics"

    def __post_init__(self) -> None:
        times, rates = np.asarray(self.times_s, np.float64), np.asarray(self.rates_rps, np.float64)
        if len(rates) == 0 or len(times) != len(rates) + 1:
            raise BadInput(f"{self.source}: expected a rate for each step, got {len(rates)} rates")
        if not np.isfinite(times).all() or (np.diff(times) <= 0).any():
            raise BadInput(f"{self.source}: expected times that rise")
        if (rates < 0).any() or np.isinf(rates).any():
            raise BadInput(f"{self.source}: expected rates of 0 or more, got {np.nanmin(rates):g}")
        if not (rates > 0).any():
            raise BadInput(
                f"{self.source}: counted no request in {duration_text(float(times[-1] - times[0]))}"
            )


def trace_of_metrics(traffic: CountedTraffic, seed: int = 0, name: str = "metrics") -> Trace:
    """Requests as the metrics count them; the same seed draws the same. Raises BadInput.

    Every step has the requests that it counted, to one. A step without counts has the rate between its
    neighbours, as absence is no idleness, and a warning says so.
    """
    times_s = np.asarray(traffic.times_s, np.float64)
    rates_rps, missing = _whole(np.asarray(traffic.rates_rps, np.float64), times_s)
    rng = np.random.RandomState(seed)
    arrival_s = _arrivals(times_s - times_s[0], rates_rps, rng)
    prompts = traffic.prompts.draw(len(arrival_s), rng)
    outputs = traffic.outputs.draw(len(arrival_s), rng)
    first_s = float(arrival_s[0])
    load = Workload(arrival_s - first_s, prompts, outputs)
    told = f"{name}: {missing} of {len(rates_rps)} steps have no counts; filled from those around"
    return Trace(
        name,
        "metrics",
        load,
        [told] if missing else [],
        float(times_s[0]) + first_s,
        assumed=Assumed((OF_RATE, OF_LENGTHS, OF_LENGTHS), tuple(_rows(traffic, load, times_s, rates_rps))),
    )


def _bend(
    share: NDArray[np.float64], low: NDArray[np.float64], width: NDArray[np.float64], mean: float | None
) -> float:
    """A bucket's mean as a share of its width, so that all buckets together have the mean; else a half."""
    if mean is None or not math.isfinite(mean):
        return 0.5
    # A length is the next whole number: half a token more than its place on the curve.
    bend = (mean - 0.5 - float(share @ low)) / float(share @ width)
    return min(max(bend, BENT[0]), BENT[1])


def _whole(rates_rps: NDArray[np.float64], times_s: NDArray[np.float64]) -> tuple[NDArray[np.float64], int]:
    """The rates with those that are missing filled in, and how many were."""
    missing = np.isnan(rates_rps)
    middles = (times_s[1:] + times_s[:-1]) / 2.0
    return np.interp(middles, middles[~missing], rates_rps[~missing]), int(missing.sum())


def _arrivals(
    times_s: NDArray[np.float64], rates_rps: NDArray[np.float64], rng: np.random.RandomState
) -> NDArray[np.float64]:
    """Arrival times of as many requests as each step counted: Poisson, given the number."""
    width_s = np.diff(times_s)
    counts = np.diff(np.rint(np.cumsum(rates_rps * width_s)), prepend=0.0).astype(np.int64)
    if not 1 <= (total := int(counts.sum())) <= MOST_REQUESTS:
        raise BadInput(f"metrics: {total:,} requests counted, expected 1 to {MOST_REQUESTS:,}")
    begins_s, each_s = np.repeat(times_s[:-1], counts), np.repeat(width_s, counts)
    return np.sort(begins_s + rng.uniform(0.0, 1.0, total) * each_s)


def _rows(
    traffic: CountedTraffic, load: Workload, times_s: NDArray[np.float64], rates_rps: NDArray[np.float64]
) -> Iterator[tuple[str, str, str]]:
    """What a person should check: (name, value, where from)."""
    width_s, span_s = np.diff(times_s), float(times_s[-1] - times_s[0])
    mean, most = float(rates_rps @ width_s) / span_s, float(rates_rps.max())
    value = f"{mean:.3g} req/s for {duration_text(span_s)}, at most {most:.3g}"
    yield "Rate", value, f"counted: {traffic.source}"
    step = duration_text(float(np.median(width_s)))
    yield "Arrivals", f"Poisson within each {step}", "assumed; metrics have no single arrivals"
    for what, lengths, drawn in (
        ("Prompts", traffic.prompts, load.prompt_tokens),
        ("Outputs", traffic.outputs, load.output_tokens),
    ):
        p99 = float(np.percentile(drawn, 99))
        of = f"counted in {len(lengths.edges)} buckets, {sum(lengths.requests):,.0f} requests"
        yield what, f"{drawn.mean():,.0f} tokens on average, p99 {p99:,.0f}", of
    yield "Prompt with output", "independent", "assumed; an access log has both"
    yield "Shared prefixes", "none", "assumed; an access log with hashes has them"
    yield "Uncertainty", f"lengths {100 * OF_LENGTHS:.0f} %", "assumed; an access log narrows it"
