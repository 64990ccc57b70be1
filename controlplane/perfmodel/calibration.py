"""The calibration of a profile by what an engine in service counts: factors on its step times, with errors.

An engine that counts for Prometheus tells of no single step. Between two scrapes it tells how many gaps
between tokens there were and their sum, how many first tokens came and what prompt tokens were computed. Let
an interval of T seconds have G gaps of mean y, and K chunks of prompts. Let p(batch)_j be what term j of the
profile adds to a step. The factors a_j of `factors.py` are then those of

    y ≈ Σ_j a_j · ((1 - q) · p(0, b, C)_j + q · p(P/n, b, C)_j)        n = N·(1 - exp(-K/N)),  N = T/y

n steps prefill, and q = n·y/T of the gaps have such a step in them (arrivals see time averages). The batch
that a gap meets is b = L + φ. Here L = G·y/T sequences decode at a time. φ is the variance of the running
requests over their mean, from scrape to scrape (1 of Poisson arrivals, 0 of a closed loop). The engine may
also count the time from a request's start to its first token. That gives a second equation: this time is that
of the request's own steps, with all that shares them. It tells prefill where few gaps have any in them.

The uncertainty of a term is TERM times its factor or TERM times the common one, whichever is larger. So a
machine may be twice as slow in one term and fifty times in another. Errors are standard deviations of the
posterior, widened by how alike the residuals of neighbouring intervals are.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from controlplane.errors import BadInput
from controlplane.perfmodel.factors import FittedFactor, Floats, NormalEquations, Terms
from controlplane.perfmodel.profile import FittedRange, Profile, Residuals
from controlplane.perfmodel.step import Batch, PrefillModel, coefficients_with_hinges
from controlplane.types import EngineMode

TERM = 0.5  # uncertainty of a term relative to the others
SCALE = 3.0  # and of all together
FEWEST_GAPS, FEWEST_INTERVALS = 300, 6
ENOUGH = 20  # gaps of an interval that tell half as much as any number
APART = 1.35  # prompts in a step, as each meets it, at most, where first steps are those of few prompts
MISFIT = 0.5  # mean residual past which no factors explain the traffic; a busy CPU host has 0.3
CLIP = 2.5  # residuals past this many standard deviations count linearly
ROUNDS = 6
BLOCKS = 5  # consecutive parts of the time, each judged by the others
LEAST_SPREAD = 0.005
PART = 0.02  # of the common factor, at least, and at most 1 / PART times it
TOLD = 0.6  # a term that the traffic determines keeps at most this share of its uncertainty


class Interval(NamedTuple):
    """What one engine did between two scrapes; sums over the interval, gauges as means of its two ends."""

    seconds: float
    gaps: float  # between tokens of one request
    gaps_s: float
    first_tokens: float
    first_tokens_s: float  # since arrival
    prefill_tokens: float  # computed, not cached
    running: float
    running_change: float
    context_tokens: float
    finished: float = 0.0
    finished_prefill_s: float = 0.0  # of the requests that finished: from their start to the first token
    finished_prefill_tokens: float = 0.0
    finished_queue_s: float = 0.0


class _Equations(NamedTuple):
    """What each term of the profile adds, over what was seen, and weights: shapes [rows, terms], [rows]."""

    parts: Floats
    weight: Floats


def calibrated_by(intervals: Sequence[Interval], around: Profile) -> tuple[Profile, list[FittedFactor]]:
    """`around` with the step times of an engine, whose intervals are in order of time, and its corrections.

    The profile's residuals are of intervals, each block of them judged by the others. Its `unseen_relative`
    is the uncertainty of the factors themselves. Raises BadInput for too little traffic.
    """
    busy = _with_traffic(intervals)
    if around.engine.mode != EngineMode.CHUNKED:
        raise BadInput(
            f"calibration: {around.label}: its engine mode is {around.engine.mode}, expected chunked"
        )
    if not coefficients_with_hinges(around.step).any():
        raise BadInput(f"calibration: {around.label}: step: every coefficient is 0")
    terms = Terms(around)
    equations = _equations(busy, around, terms)
    factors, scale, covariance = _solved(equations)
    step = terms.times(factors)
    residual = np.abs(equations.parts @ factors - 1.0)
    counted = np.average(residual, weights=equations.weight)
    if counted > MISFIT:
        raise BadInput(
            f"calibration: does not fit: intervals are {100 * counted:.0f} % off after calibration, at most"
            f" {100 * MISFIT:.0f} % is accepted; check that {around.label} is of this model, GPU and engine"
        )
    doubt = np.sqrt(np.einsum("ij,jk,ik->i", equations.parts, covariance, equations.parts))
    prefill_doubt = _prefill_doubt(busy, terms, factors, covariance)
    errors = np.sqrt(np.diag(covariance))
    corrections = [
        FittedFactor(name, float(factor), float(error), bool(error < TOLD * TERM * scale))
        for name, factor, error in zip(terms.names, factors, errors, strict=True)
    ]
    made = replace(
        around,
        step=step,
        prefill=PrefillModel.of_step(step),
        residuals=Residuals(
            mean_relative=float(counted),
            p95_relative=float(np.quantile(residual, 0.95)),
            max_relative=float(residual.max()),
            samples=len(residual),
            held_out_mean=_held_out(equations),
            unseen_relative=float(np.median(doubt)),
            unseen_prefill_relative=prefill_doubt,
        ),
        fitted=FittedRange(
            float(max(one.prefill_tokens / max(_prefilling(one, around), 1.0) for one in busy)),
            float(max(max(one.running, _decoding(one)) for one in busy)),
            float(max(one.context_tokens for one in busy)),
        ),
    )
    return _with_frontend(made, busy, around), corrections


def _with_traffic(intervals: Sequence[Interval]) -> list[Interval]:
    """Those in which the engine decoded. Raises BadInput for too few."""
    busy = [one for one in intervals if one.gaps > 0 and one.gaps_s > 0 and one.seconds > 0]
    gaps = sum(one.gaps for one in busy)
    if gaps < FEWEST_GAPS or len(busy) < FEWEST_INTERVALS:
        raise BadInput(
            f"calibration: {gaps:.0f} tokens in {len(busy)} intervals with traffic;"
            f" {FEWEST_GAPS} in {FEWEST_INTERVALS} are needed"
        )
    return busy


def _decoding(one: Interval) -> float:
    """L: sequences that decode at a time, by Little's law."""
    return one.gaps_s / one.seconds


def _chunks(one: Interval, profile: Profile) -> float:
    """K: chunks of prompts that were computed."""
    per_prompt = one.prefill_tokens / max(one.first_tokens, 1.0)
    return one.first_tokens * max(1.0, math.ceil(per_prompt / profile.engine.max_batched_tokens))


def _prefilling(one: Interval, profile: Profile) -> float:
    """n: steps that prefilled; chunks that came in one step share it."""
    slots = one.seconds * one.gaps / one.gaps_s
    return float(-slots * np.expm1(-_chunks(one, profile) / slots))


def _equations(busy: Sequence[Interval], around: Profile, terms: Terms) -> _Equations:
    varied = sum(one.running_change**2 / 2 for one in busy) / max(sum(one.running for one in busy), 1e-9)
    rows, seen, weight = [], [], []
    for one in busy:
        beside = max(1.0, _decoding(one) + min(varied, 2.0))
        steps, mean_s = _prefilling(one, around), one.gaps_s / one.gaps
        share = min(steps * mean_s / one.seconds, 1.0)
        context = one.context_tokens * beside / max(one.running, beside)
        row = (1.0 - share) * terms.seconds(Batch(0.0, beside, context))
        if steps > 0:
            tokens = one.prefill_tokens / steps
            squares = (one.prefill_tokens / max(one.first_tokens, 1.0)) * tokens
            row = row + share * terms.seconds(Batch(tokens, beside, context, squares))
        rows.append(row)
        seen.append(mean_s)
        weight.append(one.gaps / (one.gaps + ENOUGH))
        if one.finished > 0 and one.finished_prefill_s > 0 and _met(one, around) < APART:
            rows.append(_first_steps(one, around, terms))
            seen.append(one.finished_prefill_s / one.finished)
            weight.append(one.finished / (one.finished + ENOUGH))
    return _Equations(np.array(rows) / np.array(seen)[:, None], np.array(weight))


def _first_steps(one: Interval, around: Profile, terms: Terms) -> Floats:
    """What terms add up to from a request's start to its first token: its own steps and what shares them."""
    prompt = one.finished_prefill_tokens / one.finished
    chunks = max(1.0, math.ceil(prompt / around.engine.max_batched_tokens))
    met = _met(one, around)
    beside = _decoding(one)
    context = one.context_tokens * beside / max(one.running, 1.0)
    batch = Batch(met * prompt / chunks, beside, context, met * prompt**2 / chunks)
    ahead = around.engine.steps_ahead * min(beside, 1.0) * terms.seconds(Batch(0.0, beside, context))
    return chunks * terms.seconds(batch) + ahead


def _met(one: Interval, around: Profile) -> float:
    """Prompts in a step that prefills, as one of them meets it: itself, and others that came meanwhile."""
    return 1.0 + _chunks(one, around) * one.gaps_s / (one.gaps * one.seconds)


def _solved(equations: _Equations) -> tuple[Floats, float, Floats]:
    """The factors, the common one, and the covariance of the factors."""
    parts, weight = equations
    start = float(np.median(1.0 / parts.sum(axis=1)))
    factors, scale, spread, robust = np.full(parts.shape[1], start), start, 0.1, np.ones(len(parts))
    for _ in range(ROUNDS):
        doubt = TERM * np.maximum(factors, start)
        evidence = NormalEquations.of(parts, weight * robust / spread**2)
        *each, scale = evidence.with_common(doubt, start, SCALE * start, PART * start, start / PART)
        factors = np.array(each)
        residual = parts @ factors - 1.0
        size = np.abs(residual) * np.sqrt(weight)
        spread = max(1.4826 * float(np.median(size)), LEAST_SPREAD)
        robust = np.minimum(1.0, CLIP * spread / np.maximum(size, 1e-12))
    together = 0.0
    if len(residual) > 2 and min(residual[:-1].std(), residual[1:].std()) > 1e-12:
        together = float(np.clip(np.corrcoef(residual[:-1], residual[1:])[0, 1], 0.0, 0.9))
    apart = (1.0 - together) / (1.0 + together)
    known = NormalEquations(evidence.information * apart, evidence.moment * apart)
    return factors, float(scale), known.covariance(doubt, SCALE * start)


def _held_out(equations: _Equations) -> float:
    """The mean relative error of the intervals of each block under a calibration by the others."""
    parts, weight = equations
    block = np.arange(len(parts)) * BLOCKS // len(parts)
    error = np.empty(len(parts))
    for k in range(BLOCKS):
        test = block == k
        factors = _solved(_Equations(parts[~test], weight[~test]))[0]
        error[test] = np.abs(parts[test] @ factors - 1.0)
    return float(np.average(error, weights=weight))


def _prefill_doubt(busy: Sequence[Interval], terms: Terms, factors: Floats, covariance: Floats) -> float:
    """The relative standard deviation of the time of a usual prompt alone; 0 where none came."""
    prompts = sum(one.first_tokens for one in busy)
    tokens = sum(one.prefill_tokens for one in busy) / max(prompts, 1.0)
    if tokens <= 0:
        return 0.0
    parts = terms.seconds(Batch(tokens, 0.0, 0.0, tokens**2))
    return float(np.sqrt(parts @ covariance @ parts) / (parts @ factors))


def _with_frontend(made: Profile, busy: Sequence[Interval], around: Profile) -> Profile:
    """With what first tokens took outside their wait and own steps, where the engine told their wait."""
    first, finished = sum(one.first_tokens for one in busy), sum(one.finished for one in busy)
    queue_s = sum(one.finished_queue_s for one in busy) / max(finished, 1.0)
    if finished < ENOUGH or first < ENOUGH or queue_s <= 0:
        return made
    prompt = sum(one.prefill_tokens for one in busy) / first
    own_s = sum(_own_s(one, made) for one in busy) / first
    rest_s = sum(one.first_tokens_s for one in busy) / first - queue_s - own_s
    rest_s -= around.frontend.per_prompt_token_s * prompt
    return replace(made, frontend=replace(around.frontend, per_request_s=float(max(rest_s, 0.0))))


def _own_s(one: Interval, made: Profile) -> float:
    """Seconds of the steps that made the interval's first tokens, those of other prompts in them too."""
    chunks = _chunks(one, made)
    if chunks == 0:
        return 0.0
    tokens = _met(one, made) * one.prefill_tokens / chunks
    squares = tokens * one.prefill_tokens / one.first_tokens
    beside, context = _decoding(one), one.context_tokens
    ahead_s = made.engine.steps_ahead * min(beside, 1.0) * float(made.step.step_s(0.0, beside, context))
    return chunks * float(made.step.step_s(tokens, beside, context, squares)) + one.first_tokens * ahead_s
