"""The fit of a step model to a request log that records no steps: simulate the log, compare, adjust.

One worker serves the log's requests in the simulator; the four coefficients are those for which

    Σ ρ(log e2e / e2e') + ρ(log tpot / tpot') + ρ(log (ttft + FLOOR_S) / (ttft' + FLOOR_S))

is least over the requests learned from (primes are the log's, ρ grows linearly for outliers). A TTFT far
below FLOOR_S is mostly the wait for the running step to end, whose phase no model can know.

The sum has many local minima, for one changed admission moves everything after it: several starts, then
simplex searches that need no gradient.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares, minimize

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import FittedRange, Profile, Residuals
from controlplane.perfmodel.step import StepModel
from controlplane.types import Slo
from dataplane.simulated.simulate import Outcome, WorkerSpec, simulate
from tokenfleet.profiles.measurements import RequestLog

FLOOR_S = 0.25
OUTLIER = 0.01  # errors past a hundredth count linearly
STARTS = 12
STEPS = (3e-2, 1e-2)  # of a logarithm, for the gradient: one changed admission must not hide the slope
SIMPLEX = (0.4, -0.2, 0.05)  # sides of the simplex searches that follow, of a logarithm
FEWEST_REQUESTS = 30
_NO_TARGET = Slo(1e9, 1e9)

Columns = NDArray[np.float64]


def replay(log: RequestLog, profile: Profile) -> Outcome:
    """The log's requests on one simulated worker."""
    # Any policy will do: there is one worker, and round-robin never holds a request back.
    return simulate(log.workload, [WorkerSpec(profile)], _NO_TARGET, "round-robin")


def fit_log(
    log: RequestLog, around: Profile, learn: NDArray[np.bool_] | None = None, seed: int = 0
) -> Profile:
    """`around` with coefficients and residuals fitted to the log; its engine limits and KV are taken as true.

    `learn` marks the requests learned from (all by default); the others give the held-out error, where their
    times are known (not NaN). Every request is simulated. Raises BadInput for a log too short, or one that
    this worker cannot serve.
    """
    requests = len(log.workload)
    if requests < FEWEST_REQUESTS:
        raise BadInput(f"request log: {requests} requests, at least {FEWEST_REQUESTS} are needed for a fit")
    largest = int((log.workload.prompt_tokens + log.workload.output_tokens).max())
    if largest > around.kv.capacity_tokens:
        raise BadInput(
            f"request log: a request of {largest} tokens is larger than the KV of {around.kv.capacity_tokens}"
        )
    rows = np.ones(requests, np.bool_) if learn is None else learn
    many = rows & (log.workload.output_tokens > 1)
    if many.sum() < FEWEST_REQUESTS // 2:
        raise BadInput("request log: too few requests with two or more output tokens")

    def errors(x: Columns) -> Columns:
        outcome = replay(log, _with(around, x))
        e2e = outcome.finish_s - log.workload.arrival_s
        return np.concatenate(
            [
                np.log((outcome.ttft_s + FLOOR_S) / (log.ttft_s + FLOOR_S))[rows],
                np.log(e2e / log.e2e_s)[rows],
                np.log(outcome.tpot_s[many] / log.tpot_s[many]),
            ]
        )

    best = _least(errors, _first_guess(log), np.random.default_rng(seed))
    return _judged(log, _with(around, best), rows)


def _least(errors: Callable[[Columns], Columns], first: Columns, rng: np.random.Generator) -> Columns:
    """Where the errors are least: gradient searches from several starts, then simplexes around the best."""

    def cost(x: Columns) -> float:
        return float(np.sum(np.sqrt(1 + (errors(x) / OUTLIER) ** 2) - 1))

    minima = []
    for k in range(STARTS):
        x = first + (rng.normal(0, 0.5, 4) if k else 0.0)
        for step in STEPS:
            x = least_squares(
                errors,
                x,
                diff_step=list(step / np.maximum(np.abs(x), 1)),
                loss="soft_l1",
                f_scale=OUTLIER,
                max_nfev=40,
            ).x
        minima.append((cost(x), k, x))
    best = min(minima, key=lambda row: row[:2])[2]
    for size in SIMPLEX:
        corners = np.vstack([best, best + size * np.eye(4)])
        best = minimize(
            cost,
            best,
            method="Nelder-Mead",
            options={"initial_simplex": corners, "maxfev": 300, "xatol": 1e-4, "fatol": 1e-6},
        ).x
    return np.asarray(best, float)


def _with(profile: Profile, x: Columns) -> Profile:
    """A profile with the coefficients whose logarithms are `x`."""
    base, prefill, sequence, context = (float(v) for v in np.exp(x))
    return replace(profile, step=StepModel(base, prefill, sequence, context))


def _first_guess(log: RequestLog) -> Columns:
    """Logarithms of rough coefficients: the fastest request shows the base, the shortest wait the prefill."""
    tpot = log.tpot_s[log.workload.output_tokens > 1]
    fastest = max(float(np.nanmin(tpot)), 1e-6)
    crowding = max(float(np.nanmedian(tpot)) - fastest, 0.1 * fastest)
    prefill = float(np.nanquantile(log.ttft_s / log.workload.prompt_tokens, 0.05))
    context = float(np.mean(log.workload.prompt_tokens + log.workload.output_tokens / 2))
    batch = 100.0  # an order of magnitude is enough
    guess = [
        0.7 * fastest,
        max(0.7 * prefill, 1e-9),
        0.3 * crowding / batch,
        0.3 * crowding / (batch * context),
    ]
    return np.log(guess)


def _judged(log: RequestLog, profile: Profile, rows: NDArray[np.bool_]) -> Profile:
    """The profile with the errors of its requests' TPOT: a log has no steps to judge singly."""
    outcome = replay(log, profile)
    error = np.abs(outcome.tpot_s / log.tpot_s - 1)
    finite = ~np.isnan(error)
    in_sample, held_out = error[finite & rows], error[finite & ~rows]
    residuals = Residuals(
        mean_relative=float(in_sample.mean()),
        p95_relative=float(np.quantile(in_sample, 0.95)),
        max_relative=float(in_sample.max()),
        samples=len(in_sample),
        held_out_mean=float(held_out.mean()) if len(held_out) else None,
        held_out_max=float(held_out.max()) if len(held_out) else None,
        unseen_relative=profile.residuals.unseen_relative,
    )
    longest = float((log.workload.prompt_tokens + log.workload.output_tokens).max())
    engine = profile.engine
    fitted = FittedRange(engine.max_batched_tokens, engine.max_seqs, longest * engine.max_seqs)
    return replace(profile, residuals=residuals, fitted=fitted)
