"""A profile drawn as it might really be, by the errors of profiles on other engines than its own.

A composed profile was never compared with the engine that a plan is for. It is taken to be off as composed
profiles of dense models were on other engines. One that requests calibrated is taken to be off as such ones
were at higher rates. `experiments/profiling/intervals.py` prints their errors, DENSE and CALIBRATED, as
quantiles at AT. They are not symmetric: first tokens come late more often than early. Drawn are

* decode: the logarithm of measured over predicted step times.
* first: the same of a first token's prefill, of the steps that it waits for, and of the rest.
* late_steps: of two requests alike one waits longer, and a simulated engine knows no such chance. So each
  request reaches its client late by an exponential time of its own, with this mean. Engines and
  placement do not see it. What was calibrated has that mean in its rest, which shrinks by it.

A profile that states a larger error than those did (`Residuals.unseen_relative`) is drawn wider. Let m be the
median and q the quantile at a standard normal z's place. Let o be what the stated error is beyond theirs. A
factor's logarithm is m + sign(z) · hypot(q - m, o·z). Prefill alone has `unseen_prefill_relative` on top.

Mixtures and windowed models are drawn by the errors of dense ones, too: they state larger ones, and two
stacks of them teach too little. A profile fitted to steps of its own engine, or to its metrics, is drawn by
its residuals. So is one that states nothing unseen.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import NormalDist
from typing import Literal, NamedTuple

import numpy as np

from controlplane.perfmodel.profile import Frontend, Profile, with_times

AT = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)


class ErrorsElsewhere(NamedTuple):
    """Quantiles at AT of each number, and the error that those profiles stated, the median.

    `traded`: what a calibration gave decode for one of `first`; `decode` has the quantiles of the remainder.
    """

    decode: tuple[float, ...]
    first: tuple[float, ...]
    late_steps: tuple[float, ...]
    unseen: float
    traded: float


# experiments/profiling/intervals.py --write puts these here.
DENSE = ErrorsElsewhere(
    decode=(-0.051, -0.039, 0.006, 0.025, 0.084, 0.186, 0.211),
    first=(-0.534, -0.456, -0.146, -0.012, 0.085, 0.253, 0.295),
    late_steps=(0.0, 0.0, 0.0, 0.125, 0.762, 1.702, 1.937),
    unseen=0.1,
    traded=0.0,
)
CALIBRATED = ErrorsElsewhere(
    decode=(-0.085, -0.07, -0.014, 0.003, 0.018, 0.097, 0.117),
    first=(-0.266, -0.223, -0.052, -0.024, 0.066, 0.497, 0.605),
    late_steps=(0.0, 0.0, 0.0, 0.188, 0.947, 2.263, 2.592),
    unseen=0.022,
    traded=-0.244,
)


def draw_profile(profile: Profile, rng: np.random.Generator, known: ErrorsElsewhere | None = None) -> Profile:
    """A profile as it might really be: decode and first tokens faster or slower by one factor each.

    One factor per phase rather than per coefficient: errors of neighbouring batches go together, and
    coefficients fitted jointly trade off against each other. What a first token takes outside steps is drawn
    apart. `known`: errors to draw by instead of those that this module has for such a profile.
    """
    z, own, front = rng.standard_normal(5).tolist(), profile.residuals, profile.frontend
    rest_s = max(front.per_request_s + front.doubt_s * z[2], 0.0)
    alone = math.exp(own.unseen_prefill_relative * z[4])
    drawn = with_times(replace(profile, frontend=replace(front, per_request_s=rest_s)), 1.0, alone)
    known = known or errors_elsewhere(profile)
    if known is None:
        return with_times(drawn, math.exp(own.spread * z[0]), math.exp(own.spread * z[1]))
    beyond = math.sqrt(max(own.unseen_relative**2 - known.unseen**2, 0.0))
    first = _at(known.first, z[1], beyond)
    decode = _at(known.decode, z[0], beyond) + known.traded * first
    return with_errors(drawn, math.exp(decode), math.exp(first), _at(known.late_steps, z[3]))


def errors_elsewhere(profile: Profile) -> ErrorsElsewhere | None:
    """The errors that a profile is drawn by; None: its own residuals."""
    if not profile.residuals.unseen_relative:
        return None
    if is_calibrated(profile):
        return CALIBRATED
    return DENSE if profile.source.kind == "composed" else None


def calibrating_narrows(number: Literal["decode", "first"]) -> bool:
    """Whether calibrated profiles are off by less above the median, where targets are missed."""
    composed, calibrated = getattr(DENSE, number), getattr(CALIBRATED, number)
    return bool(calibrated[-2] - calibrated[3] < composed[-2] - composed[3])


def is_calibrated(profile: Profile) -> bool:
    """Whether requests calibrated it: they alone say how sure they are of the time outside steps."""
    return profile.source.kind == "measured" and profile.frontend.doubt_s > 0


def with_errors(profile: Profile, decode: float, first: float, late_steps: float) -> Profile:
    """The profile with factors on decode and on all that a first token takes, and tokens late by chance."""
    front, base_s = profile.frontend, profile.step.base_s
    late_s = late_steps * base_s
    rest_s = first * front.per_request_s + (first - 1.0) * profile.engine.first_steps * base_s
    rest_s -= late_s * is_calibrated(profile)
    token_s = first * front.per_prompt_token_s
    front = Frontend(max(rest_s, 0.0), token_s, front.doubt_s, front.late_s + late_s)
    return replace(with_times(profile, decode, first), frontend=front)


def _at(quantiles: tuple[float, ...], z: float, beyond: float = 0.0) -> float:
    """The number at a standard normal, further from the median by an independent error."""
    middle = quantiles[len(AT) // 2]
    off = float(np.interp(NormalDist().cdf(z), AT, quantiles)) - middle
    return middle + math.copysign(math.hypot(off, beyond * z), z)
