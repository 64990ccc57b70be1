"""The sample by which a long trace is judged: the windows that bind whole, a random choice of the others.

A trace of more than `LONG` requests is cut into windows. The load of a window is what its requests ask of
workers: prompts and outputs, each over the trace's mean. Misses come with load, so windows are taken by it.

**What binds**: the busiest windows, as many as hold `BINDING` times the requests that may miss, are replayed
whole. Where they are more than `MOST_BINDING` of a sample, that much of them is drawn. A fleet that is about
right misses most of what it misses there.

**The rest** is cut into `STRATA` strata by load. The busiest is the smallest; each is twice as large as the
one before. There are fewer where `FEWEST` windows of each would be more requests than a sample may have.
Each gives windows with about as many requests, at equal distances in the order of their mean prompts. So the
rate and the mix of lengths are as in the trace. A request of a drawn window stands for as many as its stratum
has for each that was drawn (`Workload.weight`).

A window is replayed with a lead-in before it and more arrivals after it, and neither counts. Each lasts as
long as a long answer takes. Windows that meet are replayed as one. Requests keep their times, so a sample is
a workload with gaps. A sample is drawn from a resampled trace's own traffic. What a fleet misses in the
sample is what it misses in the resampled trace, except for the chance of the draw. That chance adds to the
scatter of resampled traces, and so to a plan's uncertainty.

**Its cost**: on the recorded trace, the share met is below the sample's by at most `reach`, with the
confidence asked for. `reach` joins the scatter of windows within strata with Jeffreys' bound on each
stratum's share. Each stratum is taken to scatter at least 1/`CALMER` as much as the busier one before it.

**A resampled trace** of a long trace is held as pieces, not row by row. A piece is consecutive rows that come
the same number of seconds later.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray
from scipy import special

from controlplane.workload import Workload
from tokenfleet.planning.traffic.draws import block_starts

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

LONG = 1_000_000  # requests; all of fewer are replayed each time
SAMPLED = 500_000  # requests of a sample, lead-ins aside;
ROUGHLY = 100_000  # and of one that explains
WINDOWS = 2000
FEWEST_WINDOWS = 50  # of a sample, where they are not too short for that
SHORTEST_S = 60.0
BINDING = 3.0
MOST_BINDING = 0.65  # of a sample
STRATA = 6
CALMER = 4.0
FEWEST = 4  # windows of a stratum
LEAD_S = (30.0, 600.0)
CURVE = 1_000_000  # points of the curves of load


@dataclass(frozen=True)
class Pieces:
    """A draw of a trace in order: rows [low, high) come `shift_s` later than in it, from `begin_s` on."""

    begin_s: Floats
    low: Ints
    high: Ints
    shift_s: Floats

    def cut(self, arrival_s: Floats, start_s: Floats, end_s: Floats) -> tuple[Ints, Pieces]:
        """What comes within each span [start, end), times unchanged, and which span each piece is of."""
        # From one piece before: its last row may stand on the edge where the next begins.
        first = np.maximum(np.searchsorted(self.begin_s, start_s, side="right") - 2, 0)
        last = np.maximum(np.searchsorted(self.begin_s, end_s, side="left") - 1, first)
        count = last - first + 1
        span = np.repeat(np.arange(len(start_s)), count)
        at = np.arange(len(span)) - np.repeat(np.cumsum(count) - count, count) + first[span]
        shift_s, low, high = self.shift_s[at], self.low[at], self.high[at]
        low = np.clip(np.searchsorted(arrival_s, start_s[span] - shift_s), low, high)
        high = np.clip(np.searchsorted(arrival_s, end_s[span] - shift_s), low, high)
        holds = high > low
        begin_s = np.maximum(self.begin_s[at], start_s[span])
        return span[holds], Pieces(begin_s[holds], low[holds], high[holds], shift_s[holds])

    def rows(self, arrival_s: Floats) -> tuple[Ints, Floats]:
        """The rows in order of time, and when they come."""
        count = self.high - self.low
        row = np.arange(count.sum()) + np.repeat(self.low - (np.cumsum(count) - count), count)
        when_s = arrival_s[row] + np.repeat(self.shift_s, count)
        order = np.argsort(when_s, kind="stable")  # rounding may put a row a hair before the one before it
        return row[order], np.maximum(when_s[order], 0.0)

    def span_s(self, arrival_s: Floats) -> tuple[float, float]:
        """When the first row comes, and the last."""
        ends_s = arrival_s[self.high - 1] + self.shift_s
        return float(arrival_s[self.low[0]] + self.shift_s[0]), float(ends_s.max())


def whole(arrival_s: Floats) -> Pieces:
    """The recorded trace, as one piece."""
    return Pieces(np.array([0.0]), np.array([0]), np.array([len(arrival_s)]), np.array([0.0]))


def drawn_anew(arrival_s: Floats, pieces: Pieces, rng: np.random.Generator) -> Pieces:
    """Other starts, as `draws` draws them: each block of time replaced by one nearby."""
    first_s, last_s = pieces.span_s(arrival_s)
    block_s, starts_s = block_starts(last_s - first_s, rng)
    # The very last row stands on the closing edge of the last block and belongs to it.
    is_last = starts_s + block_s >= last_s - first_s
    starts_s = starts_s + first_s
    ends_s = np.where(is_last, np.inf, starts_s + block_s)
    span, cut = pieces.cut(arrival_s, starts_s, ends_s)
    later_s = (np.arange(len(starts_s)) * block_s - starts_s)[span]
    return Pieces(cut.begin_s + later_s, cut.low, cut.high, cut.shift_s + later_s)


@dataclass(frozen=True)
class Sample:
    """A sample of a recorded or resampled trace: the requests, `window` [requests] of each, and the strata.

    `window` is -1 for requests that do not count. `stratum` [windows] is -1 for windows that were not drawn,
    and 0 for those that bind. `held` and `windows` [strata]: the requests and windows that each stratum has
    in that trace.
    """

    workload: Workload
    window: Ints
    stratum: Ints
    held: Floats
    windows: Ints

    def reach(self, met: NDArray[np.bool_], confidence: float) -> float:
        """How far the share met in the whole may be below the sample's, at a confidence."""
        counts = self.window >= 0
        of = self.window[counts]
        requests = np.bincount(of, minlength=len(self.stratum)).astype(float)
        missed = np.bincount(of, weights=~met[counts], minlength=len(self.stratum))
        variance = chance = spread = 0.0
        for h in range(len(self.held)):
            drawn = np.flatnonzero(self.stratum == h)
            if requests[drawn].sum() == 0:
                continue
            share = missed[drawn].sum() / requests[drawn].sum()
            departs = missed[drawn] - share * requests[drawn]
            spread = max(float((departs**2).sum()) / max(len(drawn) - 1, 1), spread / CALMER**2)
            if len(drawn) == self.windows[h]:
                continue
            variance += self.windows[h] * (self.windows[h] - len(drawn)) * spread / len(drawn)
            n, bad = float(requests[drawn].sum()), float(missed[drawn].sum())
            chance += self.held[h] ** 2 * (_jeffreys(bad, n, confidence) - share) ** 2
        by_windows = float(special.ndtri(confidence)) ** 2 * variance
        return float(np.sqrt(by_windows + chance) / self.held.sum())


def _jeffreys(missed: float, requests: float, confidence: float) -> float:
    return float(special.betaincinv(missed + 0.5, requests - missed + 0.5, confidence))


@dataclass(frozen=True)
class Sampler:
    """Draws samples of a long trace and of its resampled traces.

    `may_miss`: the share of requests that may miss.
    """

    workload: Workload
    may_miss: float
    tpot_s: float
    seed: int = 0
    requests: int = SAMPLED

    @cached_property
    def as_it_is(self) -> Sample:
        """A sample of the trace itself."""
        return self.sample(0)

    def sample(self, replicate: int, start_s: float | None = None, end_s: float | None = None) -> Sample:
        """A sample of a resampled trace, 0 being the recorded one; or of a part of its time."""
        arrival_s = self.workload.arrival_s
        pieces = whole(arrival_s)
        if replicate:
            rng = np.random.default_rng([self.seed, replicate, 1])
            pieces = drawn_anew(arrival_s, drawn_anew(arrival_s, pieces, rng), rng)
        first_s, last_s = pieces.span_s(arrival_s)
        each_s = self.requests / FEWEST_WINDOWS * (last_s - first_s) / float((pieces.high - pieces.low).sum())
        first_s, last_s = start_s or first_s, end_s or np.nextafter(last_s, np.inf)
        width_s = min((last_s - first_s) / WINDOWS, each_s)
        width_s = max(width_s, min(SHORTEST_S, (last_s - first_s) / 4))
        edges_s = np.append(np.arange(first_s, last_s, width_s), last_s)
        stratum, held, windows = self._chosen(
            pieces, edges_s, np.random.default_rng([self.seed, replicate, 4])
        )
        begin_s, end_of_s = self._runs(edges_s, stratum >= 0)
        rows, when_s = pieces.cut(arrival_s, begin_s, end_of_s)[1].rows(arrival_s)
        window = np.clip(np.searchsorted(edges_s, when_s, side="right") - 1, 0, len(stratum) - 1)
        counts = (stratum[window] >= 0) & (when_s >= first_s) & (when_s < last_s)
        of = np.where(counts, stratum[window], len(held))
        weight = np.append(held / np.maximum(np.bincount(of, minlength=len(held) + 1)[:-1], 1), 0.0)[of]
        names = ("prompt_tokens", "output_tokens", "priority", "slo_class")
        columns = {name: getattr(self.workload, name)[rows].astype(np.int64) for name in names}
        workload = Workload(when_s, **columns, slo_classes=self.workload.slo_classes, weight=weight)
        return Sample(workload, np.where(counts, window, -1), stratum, held, windows)

    @cached_property
    def _curves(self) -> tuple[Floats, Floats, Floats]:
        """Rows, and the load and the prompt tokens of all before each."""
        every = max(len(self.workload) // CURVE, 1)
        at = np.append(np.arange(0, len(self.workload), every), len(self.workload))
        prompts, outputs = (
            np.concatenate([[0.0], np.cumsum(np.add.reduceat(tokens, at[:-1], dtype=np.int64))])
            for tokens in (self.workload.prompt_tokens, self.workload.output_tokens)
        )
        return at.astype(float), prompts / prompts[-1] + outputs / outputs[-1], prompts

    def _chosen(self, pieces: Pieces, edges_s: Floats, rng: np.random.Generator) -> tuple[Ints, Floats, Ints]:
        """Of each window its stratum, -1 where it is not drawn; and each stratum's requests and windows."""
        span, cut = pieces.cut(self.workload.arrival_s, edges_s[:-1], edges_s[1:])
        of = len(edges_s) - 1
        count = np.bincount(span, weights=cut.high - cut.low, minlength=of)
        at, *curves = self._curves
        load, prompts = (
            np.bincount(span, np.interp(cut.high, at, c) - np.interp(cut.low, at, c), of) for c in curves
        )
        order = np.argsort(-load, kind="stable")
        order = order[count[order] > 0]
        upto = np.cumsum(count[order])
        most, binds = BINDING * self.may_miss * upto[-1], MOST_BINDING * self.requests
        binding = int(np.searchsorted(upto, most)) + 1
        left, rest = max(self.requests - min(upto[binding - 1], binds), 0.0), order[binding:]
        each = FEWEST * float(count[rest].mean()) if len(rest) else 1.0
        edges = _edges(len(rest), min(max(int(left / each), 1), STRATA))
        groups = [order[:binding], *np.split(rest, edges)]
        stratum = np.full(of, -1, np.int64)
        for h, group in enumerate(groups):
            if len(group) == 0:
                continue
            if h == 0 and most <= binds:
                stratum[group] = 0
                continue
            share = left / (len(groups) - h) if h else binds
            drawn = min(max(int(share / count[group].mean()), FEWEST), len(group))
            ordered = group[np.argsort(prompts[group] / count[group], kind="stable")]
            places = ((rng.random() + np.arange(drawn)) * len(group) / drawn).astype(np.int64)
            stratum[ordered[places]] = h
            if h:
                left = max(left - count[ordered[places]].sum(), 0.0)
        held = np.array([count[group].sum() for group in groups])
        return stratum, held, np.array([len(group) for group in groups])

    def _runs(self, edges_s: Floats, drawn: NDArray[np.bool_]) -> tuple[Floats, Floats]:
        """The spans to replay: drawn windows with what goes before and behind, those that meet as one."""
        long = float(np.quantile(self.workload.thinned(CURVE // 10).output_tokens, 0.95))
        aside_s = float(np.clip(long * self.tpot_s, *LEAD_S))
        begin_s, end_s = edges_s[:-1][drawn] - aside_s, edges_s[1:][drawn] + aside_s
        apart = np.append(True, begin_s[1:] > end_s[:-1])
        return begin_s[apart], end_s[np.append(np.flatnonzero(apart)[1:] - 1, len(end_s) - 1)]


def _edges(windows: int, strata: int) -> Ints:
    """Where the strata of the windows begin, the first left out: each is twice as large as the last."""
    return np.round(windows * (2.0 ** np.arange(1, strata) - 1.0) / (2.0**strata - 1.0)).astype(np.int64)
