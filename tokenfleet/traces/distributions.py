"""Distributions of request lengths and arrival times: published laws, measured percentiles, plain shapes.

A mix has a prompt side and an output side, drawn independently, prompts first. Independence is close to
the truth in the two measured mixes: rank correlation of prompt and output 0.07 (azure-conv), 0.05 (sharegpt).

`S`, `M`, `L` are the generated workloads of Llumnix (OSDI '24, Table 1), to the token. Over a legacy
RandomState seeded with 0xCADE, 10,000 prompts and then 10,000 outputs are the paper's S-S, M-M and L-L.

Arrivals are Poisson, Gamma renewals with a chosen burstiness, or a daily swing. The first request arrives at
0 and each next one a gap later. `rng` is a numpy Generator, or the legacy RandomState, whose stream never
changes. From the latter, the gaps are those of the published Llumnix workloads (one `exponential(1/rate)` or
`gamma(1/cv², cv²/rate)` a request).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controlplane.errors import BadInput

PUBLISHED_SEED = 0xCADE


@dataclass(frozen=True, slots=True)
class PowerLaw:
    """p(rank) ∝ rank^-alpha over ranks 1 to 2·mean - 1, rescaled so that the sample's mean is `mean_tokens`.

    Rescaling by the sample (not by the law's own mean) is what the published generator does: lengths
    depend on how many are drawn.
    """

    mean_tokens: int
    alpha: float
    most_tokens: int = 6144

    def draw(self, requests: int, rng: Randomness) -> NDArray[np.int64]:
        """Lengths [requests] in tokens."""
        if requests == 0:
            return np.zeros(0, np.int64)
        ranks = np.arange(1, 2 * self.mean_tokens)
        weight = ranks ** (-self.alpha)
        drawn = np.asarray(rng.choice(ranks, requests, p=weight / weight.sum()))
        scaled: NDArray[np.float64] = np.ceil(drawn * self.mean_tokens / drawn.mean())
        lengths: NDArray[np.float64] = np.minimum(scaled, self.most_tokens)
        return lengths.astype(np.int64)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Measured percentiles, joined by straight lines. `percent` and `tokens` rise together, 0 to 100."""

    percent: tuple[float, ...]
    tokens: tuple[int, ...]

    def draw(self, requests: int, rng: Randomness) -> NDArray[np.int64]:
        """Lengths [requests] in tokens."""
        at: NDArray[np.float64] = np.interp(rng.uniform(0.0, 100.0, requests), self.percent, self.tokens)
        return np.maximum(np.rint(at).astype(np.int64), 1)


@dataclass(frozen=True, slots=True)
class Lognormal:
    """A lognormal law of this mean and coefficient of variation, rounded, from 1 to `most_tokens`."""

    mean_tokens: float
    cv: float
    most_tokens: int = 131_072

    def __post_init__(self) -> None:
        most = f"above 0, up to {self.most_tokens} tokens"
        _require(0 < self.mean_tokens <= self.most_tokens, "mean", self.mean_tokens, most)
        _require(0 < self.cv <= 100, "CV", self.cv, "above 0, at most 100")

    def draw(self, requests: int, rng: Randomness) -> NDArray[np.int64]:
        """Lengths [requests] in tokens."""
        sigma2 = math.log1p(self.cv**2)
        drawn = rng.lognormal(math.log(self.mean_tokens) - sigma2 / 2, math.sqrt(sigma2), requests)
        return np.clip(np.rint(drawn), 1, self.most_tokens).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Uniform:
    """Every length from `least_tokens` to `most_tokens` alike; equal ends give a fixed length."""

    least_tokens: int
    most_tokens: int

    def __post_init__(self) -> None:
        at_all, most = "at least 1 token, at most 100000000", 100_000_000
        _require(1 <= self.least_tokens <= most, "length", self.least_tokens, at_all)
        in_order = f"{self.least_tokens} to {most} tokens"
        _require(self.least_tokens <= self.most_tokens <= most, "longest", self.most_tokens, in_order)

    def draw(self, requests: int, rng: Randomness) -> NDArray[np.int64]:
        """Lengths [requests] in tokens."""
        if self.least_tokens == self.most_tokens:
            return np.full(requests, self.least_tokens, np.int64)
        width = self.most_tokens - self.least_tokens + 1
        return self.least_tokens + np.floor(rng.uniform(0.0, width, requests)).astype(np.int64)


Side = PowerLaw | Percentiles | Lognormal | Uniform  # of a mix: prompts or outputs


@dataclass(frozen=True, slots=True)
class LengthMix:
    """A law for prompts and one for outputs."""

    prompt: Side
    output: Side

    def draw(self, requests: int, rng: Randomness) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Prompt and output lengths, [requests] each, in tokens; prompts are drawn first."""
        prompts = self.prompt.draw(requests, rng)
        return prompts, self.output.draw(requests, rng)


def _require(holds: bool, what: str, value: float, expected: str) -> None:
    if not holds:
        raise BadInput(f"lengths: {what}: {value:g}, expected {expected}")


def _percentiles(*tokens: int) -> Percentiles:
    return Percentiles(PERCENT, tokens)


# fmt: off
PERCENT = (
    0, .1, 1, 2, 5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 55, 60, 65, 70, 75, 80, 85, 90, 95, 97, 98,
    99, 99.5, 99.9, 100,
)
# Azure's public conversation hour of November 2023 (19,366 requests, CC-BY-4.0). Means of the joined
# percentiles: 1147 and 210 tokens, against 1155 and 211 in the trace.
AZURE_CONV = LengthMix(
    prompt=_percentiles(
        2, 8, 29, 91, 181, 207, 372, 387, 396, 403, 414, 703, 984, 1020, 1045, 1071, 1097, 1130,
        1189, 1315, 1876, 2734, 4083, 4090, 4098, 4142, 4831, 6212, 14050),
    output=_percentiles(
        7, 12, 16, 24, 41, 54, 67, 77, 85, 91, 96, 103, 113, 129, 151, 177, 217, 384, 395, 400, 411,
        424, 451, 509, 540, 601, 643, 954, 1000),
)
# ShareGPT with earlier turns in the prompt, Llama-2 tokens, at most 8k in all (30,731 pairs published with
# etalon, Apache-2.0). Means of the joined percentiles: 2345 and 439 tokens, against 2340 and 439.
SHAREGPT = LengthMix(
    prompt=_percentiles(
        1, 5, 12, 16, 29, 74, 180, 382, 580, 777, 973, 1203, 1457, 1730, 2060, 2401, 2799, 3235,
        3734, 4278, 4918, 5696, 6563, 6950, 7164, 7434, 7622, 7853, 8141),
    output=_percentiles(
        2, 2, 6, 19, 44, 84, 130, 181, 228, 271, 312, 346, 381, 415, 453, 493, 534, 581, 628, 683,
        754, 834, 920, 957, 975, 998, 1009, 1021, 1024),
)
# fmt: on
SHORT, MEDIUM, LONG = PowerLaw(128, 2.0), PowerLaw(256, 1.5), PowerLaw(512, 1.15)
NAMED = {
    "S": LengthMix(SHORT, SHORT),
    "M": LengthMix(MEDIUM, MEDIUM),
    "L": LengthMix(LONG, LONG),
    "azure-conv": AZURE_CONV,
    "sharegpt": SHAREGPT,
}


Randomness = np.random.Generator | np.random.RandomState
MOST_STEPS = 60  # of Newton within a bracket; a handful is usual, halving alone would need as many


def poisson(rate_rps: float, requests: int, rng: Randomness) -> NDArray[np.float64]:
    """Arrivals [requests] in seconds, exponential gaps (CV 1) at a mean of `rate_rps`."""
    _require_rate(rate_rps > 0, "rate", rate_rps, "a positive number of requests per second")
    return _from_gaps(rng.exponential(1.0 / rate_rps, requests))


def gamma(rate_rps: float, cv: float, requests: int, rng: Randomness) -> NDArray[np.float64]:
    """Arrivals [requests] in seconds, Gamma gaps of coefficient of variation `cv` (1 is Poisson)."""
    _require_rate(rate_rps > 0, "rate", rate_rps, "a positive number of requests per second")
    return _from_gaps(_gamma_gaps(cv, 1.0 / rate_rps, requests, rng))


def diurnal(
    low_rps: float, high_rps: float, period_s: float, requests: int, rng: Randomness, cv: float = 1.0
) -> NDArray[np.float64]:
    """Arrivals [requests] in seconds whose rate swings: `low_rps` at 0, `high_rps` half a period on.

    Unit-mean Gamma gaps are laid out in operational time u = Λ(t), the mean count by t, and carried back:
    Λ(t) = m·t - (a·period/2π)·sin(2πt/period), m = (low + high)/2, a = (high - low)/2. With `cv` 1 this is
    the inhomogeneous Poisson process itself, without thinning.
    """
    _require_rate(low_rps >= 0, "low rate", low_rps, "not negative")
    _require_rate(
        high_rps > 0 and high_rps >= low_rps, "high rate", high_rps, f"positive and at least {low_rps:g}"
    )
    _require_rate(period_s > 0, "period", period_s, "a positive number of seconds")
    count = _from_gaps(_gamma_gaps(cv, 1.0, requests, rng))
    mean_rps, swing_rps = (low_rps + high_rps) / 2, (high_rps - low_rps) / 2
    turn = 2 * math.pi / period_s
    slack = swing_rps / turn
    early, late = (count - slack) / mean_rps, (count + slack) / mean_rps
    time_s = count / mean_rps
    for _ in range(MOST_STEPS):
        excess = mean_rps * time_s - slack * np.sin(turn * time_s) - count
        if (np.abs(excess) <= 8 * np.spacing(count + slack)).all():
            break
        early, late = np.where(excess < 0, time_s, early), np.where(excess < 0, late, time_s)
        rate_rps = mean_rps - swing_rps * np.cos(turn * time_s)
        newton = time_s - excess / np.maximum(rate_rps, 1e-300)
        inside = (newton >= early) & (newton <= late)
        time_s = np.where(inside, newton, (early + late) / 2)
    # Each time is solved for by itself: neighbours may come out an ulp out of order.
    return np.maximum.accumulate(np.maximum(time_s - time_s[:1], 0.0))


def _gamma_gaps(cv: float, mean_s: float, requests: int, rng: Randomness) -> NDArray[np.float64]:
    _require_rate(0 < cv <= 100, "CV", cv, "a coefficient of variation above 0, at most 100")
    return np.asarray(rng.gamma(1.0 / cv**2, mean_s * cv**2, requests), np.float64)


def _from_gaps(gaps_s: NDArray[np.float64]) -> NDArray[np.float64]:
    return np.concatenate([[0.0], np.cumsum(gaps_s)])[: len(gaps_s)]


def _require_rate(holds: bool, what: str, value: float, expected: str) -> None:
    if not holds or not math.isfinite(value):
        raise BadInput(f"arrivals: {what}: {value:g}, expected {expected}")
