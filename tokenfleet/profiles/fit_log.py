"""The fit of a step model to a request log that records no steps: simulate the log, compare, adjust.

One worker serves the log's requests in the simulator. The four plain coefficients, that of length² and the
constant of a first token are those for which

    Σ ρ(log e2e / e2e') + ρ(log tpot / tpot') + ρ(log (ttft + FLOOR_S) / (ttft' + FLOOR_S))

is least over the requests learned from (primes are the log's, ρ grows linearly for outliers). A TTFT far
below FLOOR_S is mostly the wait for the running step to end, whose phase no model can know.

The sum has many local minima, for one changed admission moves everything after it: several starts, then
simplex searches that need no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import OptimizeResult, least_squares, minimize

from controlplane.errors import BadInput
from controlplane.perfmodel.calibration import TOLD
from controlplane.perfmodel.factors import FittedFactor
from controlplane.perfmodel.profile import FittedRange, Frontend, Profile, Residuals, with_times
from controlplane.perfmodel.step import StepModel
from controlplane.prefixes import Prefixes
from controlplane.types import Slo
from controlplane.workload import Workload
from dataplane.simulated.simulate import Outcome, WorkerSpec, simulate
from tokenfleet.profiles.goodness import Goodness, goodness_of
from tokenfleet.profiles.measurements import RequestLog

FLOOR_S = 0.15
OUTLIER = 0.01  # errors past a hundredth count linearly
STARTS, FOLLOWED = 12, 3
STEPS = (3e-2, 1e-2)  # of a logarithm, for the gradient: one changed admission must not hide the slope
SIMPLEX = (0.8, -0.4, 0.4, -0.2, 0.1, 0.03)  # sides of the simplex searches that follow, of a logarithm
FEWEST_REQUESTS = 30
REST_S = 60.0
# Where the searches for the last two begin. Attention within a prompt costs as much as its tokens' other work
# at some 40,000 tokens. An engine's own log has next to no frontend overhead.
SUM_SQ, PER_REQUEST_S = -10.6, 0.001
# Standard deviations of a calibration's corrections (of the logarithms of decode and prefill, and seconds),
# and of a mean latency of the log.
CALIBRATION_DOUBT, CALIBRATION_NOISE = (0.2, 0.3, 0.02), 0.02
_NO_TARGET = Slo(1e9, 1e9)

Columns = NDArray[np.float64]


def replay(
    log: RequestLog,
    profile: Profile,
    workers: int = 1,
    prefix_caching: bool = True,
    policy: str = "round-robin",
) -> Outcome:
    """The log's requests on simulated workers, placed as they were: in turn unless said otherwise."""
    specs = [WorkerSpec(profile)] * workers
    return simulate(log.workload, specs, _NO_TARGET, policy, prefix_caching=prefix_caching)


def joined(logs: Sequence[RequestLog]) -> RequestLog:
    """Logs one after the other on one engine, with rests of a minute; none shares blocks with another."""
    begins, ids, since_s, since_id = [], [], 0.0, 0
    for log in logs:
        begins.append(since_s)
        since_s += float(np.nanmax(log.last_token_s)) + REST_S
        if log.workload.prefixes is not None:
            ids.append(log.workload.prefixes.ids + since_id)
            since_id += int(log.workload.prefixes.ids.max(initial=-1)) + 1
    works = [log.workload for log in logs]
    prefixes = None
    if works[0].prefixes is not None:
        lengths = [np.diff(work.prefixes.offsets) for work in works if work.prefixes is not None]
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
        prefixes = Prefixes(works[0].prefixes.block_tokens, offsets, np.concatenate(ids))
    work = Workload(
        np.concatenate([b + w.arrival_s for b, w in zip(begins, works, strict=True)]),
        np.concatenate([w.prompt_tokens for w in works]),
        np.concatenate([w.output_tokens for w in works]),
        prefixes=prefixes,
    )
    first_s = np.concatenate([b + log.first_token_s for b, log in zip(begins, logs, strict=True)])
    last_s = np.concatenate([b + log.last_token_s for b, log in zip(begins, logs, strict=True)])
    return RequestLog(work, first_s, last_s)


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
    return judged(log, _with(around, best), rows)


def calibrated(
    log: RequestLog,
    around: Profile,
    measured: NDArray[np.bool_],
    workers: int = 1,
    prefix_caching: bool = True,
    policy: str = "round-robin",
) -> tuple[Profile, list[FittedFactor], Goodness]:
    """`around` corrected by a short log: factors on decode and prefill, and the first token's rest.

    A few minutes can tell these three numbers; each is drawn to what it was by CALIBRATION_DOUBT. A log whose
    prompts tell nothing of prefill leaves it as it was. The four coefficients of `fit_log` need a log in
    which they all matter. The misfit that remains is returned, and joins the profile's uncertainty. What the
    log leaves open of prefill is stated apart, for it is no error of decode.
    """
    many = measured & (log.workload.output_tokens > 1)
    if not many.any():
        raise BadInput("calibration: no request with two or more output tokens")

    def made(x: Columns) -> Profile:
        times = with_times(around, float(np.exp(x[0] - 1.0)), float(np.exp(x[1] - 1.0)))
        rest_s = around.frontend.per_request_s + CALIBRATION_DOUBT[2] * (float(x[2]) - 1.0)
        return replace(times, frontend=replace(around.frontend, per_request_s=max(rest_s, 0.0)))

    def errors(x: Columns, free: NDArray[np.bool_]) -> Columns:
        outcome = replay(log, made(np.where(free, x, 1.0)), workers, prefix_caching, policy)
        e2e_s = outcome.finish_s - outcome.arrival_s
        said = _moments(outcome.ttft_s[measured], outcome.tpot_s[many], e2e_s[measured])
        return np.concatenate([said - seen, (x - 1.0) / prior * CALIBRATION_NOISE])

    def least(free: NDArray[np.bool_]) -> OptimizeResult:
        # Around 1, since a gradient's steps are shares of a number; wide, past what one changed step does.
        starts, steps = (np.ones(3), np.array([0.9, 1.2, 1.5])), [0.01, 0.03, 0.05]
        found = [least_squares(errors, x, diff_step=steps, max_nfev=25, args=(free,)) for x in starts]
        return min(found, key=lambda one: one.cost)

    prior = np.array([*CALIBRATION_DOUBT[:2], 1.0])
    seen = _moments(log.ttft_s[measured], log.tpot_s[many], log.e2e_s[measured])
    best = least(np.ones(3, np.bool_))
    slopes = np.asarray(best.jac, float)
    error = CALIBRATION_NOISE * np.sqrt(np.diag(np.linalg.inv(slopes.T @ slopes)))
    told = error < TOLD * prior
    free = np.array([True, told[1], True])
    found = best.x if told[1] else np.where(free, least(free).x, 1.0)
    factors, profile = np.exp(found - 1.0), made(found)
    corrections = [
        FittedFactor(name, float(factors[k]), float(factors[k] * error[k]), bool(told[k]))
        for k, name in enumerate(("decode", "prefill"))
    ]
    fit = goodness_of(log, replay(log, profile, workers, prefix_caching, policy), measured)
    doubt = float(np.hypot(max(float(error[0]), CALIBRATION_NOISE), fit.doubt))
    residuals = replace(profile.residuals, unseen_relative=doubt, unseen_prefill_relative=float(error[1]))
    profile = replace(profile, residuals=residuals)
    front = replace(profile.frontend, doubt_s=CALIBRATION_DOUBT[2] * float(error[2]))
    return replace(profile, frontend=front, source=replace(profile.source, kind="measured")), corrections, fit


def _moments(ttft_s: Columns, tpot_s: Columns, e2e_s: Columns) -> Columns:
    """Logarithms of what a log is judged by: a single request's phase within a step is chance."""
    ttfts = [ttft_s.mean(), *np.quantile(ttft_s, (0.5, 0.9))]
    return np.asarray(np.log([*ttfts, tpot_s.mean(), np.median(tpot_s), e2e_s.mean()]), float)


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
    best = [_descended(cost, x) for _, _, x in sorted(minima, key=lambda row: row[:2])[:FOLLOWED]]
    return min(best, key=cost)


def _descended(cost: Callable[[Columns], float], x: Columns) -> Columns:
    """From the plain four coefficients down to a minimum of all six.

    Attention within prompts and the frontend can be told apart from the four only once those are near.
    """
    for more in ([], [x[1] + SUM_SQ, np.log(PER_REQUEST_S)]):
        x = np.append(x, more)
        for size in SIMPLEX:
            corners = np.vstack([x, x + size * np.eye(len(x))])
            x = minimize(
                cost,
                x,
                method="Nelder-Mead",
                options={"initial_simplex": corners, "maxfev": 600, "xatol": 1e-4, "fatol": 1e-6},
            ).x
    return np.asarray(x, float)


def _with(profile: Profile, x: Columns) -> Profile:
    """A profile with the coefficients whose logarithms are `x`: the plain four, or all six."""
    base, prefill, sequence, context, *more = (float(v) for v in np.exp(x))
    sum_sq, request_s = more or (0.0, 0.0)
    step = StepModel(base, prefill, sequence, context, sum_sq)
    return replace(profile, step=step, frontend=Frontend(request_s))


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


def judged(log: RequestLog, profile: Profile, rows: NDArray[np.bool_], workers: int = 1) -> Profile:
    """The profile with the errors of its requests' TPOT: a log has no steps to judge singly."""
    outcome = replay(log, profile, workers)
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
        unseen_prefill_relative=profile.residuals.unseen_prefill_relative,
    )
    longest = float((log.workload.prompt_tokens + log.workload.output_tokens).max())
    engine = profile.engine
    fitted = FittedRange(engine.max_batched_tokens, engine.max_seqs, longest * engine.max_seqs)
    return replace(profile, residuals=residuals, fitted=fitted)
