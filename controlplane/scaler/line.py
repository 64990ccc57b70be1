"""Eq 7's line where no simulation has drawn one: from a worker's speed and the lengths that arrive.

Of requests with L prompt and D output tokens a worker with b of them in its batch does, in the mean,

    t(b) = step(b·L/D prefill tokens, b sequences, b·(L + D/2) tokens of context)      chunked
    t(b) = step(0, b, b·(L + D/2)) + b/D · prefill(L)                                  prefill in steps apart
    x    = b / (D · t(b))                                                              requests a second

at the largest b with t(b) <= TPOT that memory and seats allow: a fleet without noise. The slope of the line
is HEADROOM · Σ share / x over the SLO classes, its intercept SPARE. Where one request alone is slower than
its target, b = 1: more workers cannot mend that, so no more are asked for.

A line that was drawn by simulation holds for the lengths it was drawn at. Where those that arrive drift from
them, its slope is taken times x there over x here: what is known of noise stays, a request's weight follows.

A worker's speed from its own steps, where nobody has given a profile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from controlplane.errors import BadInput
from controlplane.perfmodel.fit import fit_step
from controlplane.perfmodel.samples import StepSamples
from controlplane.perfmodel.step import PrefillModel, StepModel
from controlplane.scaler.traffic import Mix
from controlplane.types import ClassArrivals

HEADROOM = 1.2  # traffic is not even: the planner's own first guess is as much above the noiseless fleet
SPARE = 0.5
GAMMA = 0.95  # of KV memory: the share that placement promises
LEAST_REQUESTS = 5.0  # before lengths are believed


@dataclass(frozen=True, slots=True)
class Speed:
    """What a worker can do. `prefill`: of engines that prefill in steps apart. `source`: who says so."""

    step: StepModel
    kv_capacity_tokens: int
    max_seqs: int
    prefill: PrefillModel | None = None
    source: str = "the profile"

    def __post_init__(self) -> None:
        if self.kv_capacity_tokens < 1 or self.max_seqs < 1:
            raise BadInput(f"speed: KV capacity and max_seqs must be at least 1, got {self}")


@dataclass(frozen=True, slots=True)
class Line:
    """N = workers_per_rps · rate + intercept, and where it comes from."""

    workers_per_rps: float
    intercept: float
    source: str


def line_of(speed: Speed, mix: Mix) -> Line | None:
    """The line for this traffic; None before enough of it has been seen."""
    if mix.requests < LEAST_REQUESTS:
        return None
    workers = sum(c.requests / capacity_rps(speed, c) for c in mix.classes) / mix.requests
    return Line(HEADROOM * workers, SPARE, f"{speed.source} at the lengths seen")


def at_lengths(line: Line, learned: ClassArrivals, speed: Speed, mix: Mix) -> Line:
    """The line, learned at the lengths of `learned`, at the mix's; as it is before enough were seen."""
    if mix.requests < LEAST_REQUESTS or learned.requests <= 0:
        return line
    heavier = sum(
        c.requests * capacity_rps(speed, replace(learned, slo=c.slo)) / capacity_rps(speed, c)
        for c in mix.classes
    )
    slope = line.workers_per_rps * heavier / mix.requests
    return Line(slope, line.intercept, f"{line.source}, at the lengths seen")


def capacity_rps(speed: Speed, arrivals: ClassArrivals) -> float:
    """Requests a second that one worker carries of a class within its TPOT target."""
    prompt = max(arrivals.mean_prompt_tokens, 1.0)
    output = max(arrivals.mean_output_tokens, 1.0)
    context = prompt + output / 2.0
    seats = max(min(float(speed.max_seqs), GAMMA * speed.kv_capacity_tokens / context), 1.0)
    tpot_s = arrivals.slo.tpot_s
    batch = seats
    if _step_s(speed, seats, prompt, output) > tpot_s:
        fits, breaks = 1.0, seats
        for _ in range(30):  # a thousandth of a request is close enough
            batch = (fits + breaks) / 2.0
            if _step_s(speed, batch, prompt, output) <= tpot_s:
                fits = batch
            else:
                breaks = batch
        batch = fits
    return batch / (output * max(_step_s(speed, batch, prompt, output), 1e-9))


def _step_s(speed: Speed, batch: float, prompt: float, output: float) -> float:
    context = batch * (prompt + output / 2.0)
    if speed.prefill is None:
        step, prompts = speed.step, batch / output
        rare_s = step.per_prefill_step_s * max(1.0 - prompts, 0.0)  # not every step prefills
        return float(step.step_s(prompts * prompt, batch, context)) - rare_s
    return float(speed.step.step_s(0.0, batch, context)) + batch / output * float(
        speed.prefill.prefill_s(prompt)
    )


LEAST_STEPS = 30
LEAST_BATCHES = 3  # different ones: steps that are all alike say nothing about another batch


def speed_seen(samples: StepSamples, kv_capacity_tokens: int, max_seqs: int) -> Speed | None:
    """The speed that explains these steps; None where they are too few or too alike.

    The full step model where the steps can tell its terms apart, else base and sequences alone, the time of
    prefill counted with the sequences it came with: dearer than it is, never cheaper.
    """
    if len(samples) < LEAST_STEPS or kv_capacity_tokens < 1 or max_seqs < 1:
        return None
    try:
        model = fit_step(samples, robust=True, extra_terms=False).model
    except BadInput:
        b, t = samples.sequences + (samples.prefill_tokens > 0), samples.step_s
        if len(set(b.tolist())) < LEAST_BATCHES:
            return None
        centred = b - b.mean()
        slope = max(float((centred * (t - t.mean())).sum() / (centred**2).sum()), 0.0)
        model = StepModel(max(float(t.mean() - slope * b.mean()), 0.0), 0.0, slope, 0.0)
    return Speed(model, kv_capacity_tokens, max_seqs, source=f"{len(samples)} steps seen")
