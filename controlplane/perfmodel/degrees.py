"""The profile of another TP degree, from those of two degrees (Aladdin Eq 5).

Computing takes k/N on each of N GPUs, and an all-reduce (N-1)/N of its own: their sum is a/N + c, which two
degrees determine, coefficient by coefficient. KV memory is N GPUs' less the weights, M(N) = N·m - w.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import numpy as np

from controlplane.errors import BadInput
from controlplane.perfmodel.engine import KvModel
from controlplane.perfmodel.profile import OF_EVERY_DEGREE, Profile
from controlplane.perfmodel.step import Hinge, HingeOf, Model, coefficients

# Standard deviations of step times, from degrees of the library left out (profiling/perf_models.py).
BETWEEN, ABOVE = 0.1, 0.22


def at_degree(profiles: tuple[Profile, Profile], degree: int) -> Profile:
    """The profile of workers of `degree` GPUs; `profiles` are of two other degrees, in any order.

    Its residuals count what a degree between, or above, is usually off. Raises BadInput where the two are
    not of one model, GPU and engine mode, and for a degree below both: there prefill was 36 % off.
    """
    small, large = sorted(profiles, key=lambda profile: profile.tp_degree)
    _comparable(small, large, degree)
    between = partial(_at, small.tp_degree, large.tp_degree, degree)
    prefill = small.prefill
    if prefill is not None and large.prefill is not None:
        prefill = _model(prefill, large.prefill, between)
    worse = max(small.residuals, large.residuals, key=lambda residuals: residuals.spread)
    unseen = BETWEEN if degree < large.tp_degree else ABOVE
    return replace(
        large,
        tp_degree=degree,
        step=_model(small.step, large.step, between),
        prefill=prefill,
        kv=_kv(small.kv, large.kv, (small.tp_degree, large.tp_degree, degree)),
        residuals=replace(worse, unseen_relative=float(np.hypot(worse.unseen_relative, unseen))),
        source=replace(
            large.source,
            kind="composed",
            what=f"a/N + c (Aladdin Eq 5) of TP{small.tp_degree} and TP{large.tp_degree}, the latter:"
            f" {large.source.what}",
            date=min(small.source.date, large.source.date),
        ),
    )


def _comparable(small: Profile, large: Profile, degree: int) -> None:
    for what in OF_EVERY_DEGREE:
        of = getattr(small, what), getattr(large, what)
        if of[0] != of[1]:
            raise BadInput(f"--from: two profiles that differ in TP degree alone; {what}: {of[0]}, {of[1]}")
    if small.engine.mode != large.engine.mode or (small.prefill is None) != (large.prefill is None):
        raise BadInput(f"--from: two profiles of one engine mode; {small.engine.mode}, {large.engine.mode}")
    if small.tp_degree == large.tp_degree:
        raise BadInput(f"--from: two profiles of different TP degrees; both are TP{small.tp_degree}")
    if degree in (small.tp_degree, large.tp_degree):
        raise BadInput(f"--tp: {degree}: a profile of that degree was given")
    if degree < small.tp_degree:
        raise BadInput(
            f"--tp: {degree}: is below TP{small.tp_degree} and TP{large.tp_degree}; only degrees between and"
            " above are close enough"
        )


def _at(small: int, large: int, degree: int, of_small: float, of_large: float) -> float:
    """a/N + c at `degree`, at least 0."""
    shared = (of_small - of_large) / (1 / small - 1 / large)
    return max(of_large + shared * (1 / degree - 1 / large), 0.0)


def _model(small: Model, large: Model, between: partial[float]) -> Model:
    ours, theirs = coefficients(small), coefficients(large)
    of_small: dict[tuple[HingeOf, float], float] = {(h.of, h.start): h.per_unit_s for h in small.hinges}
    of_large: dict[tuple[HingeOf, float], float] = {(h.of, h.start): h.per_unit_s for h in large.hinges}
    hinges = tuple(
        Hinge(of, start, between(of_small.get((of, start), 0.0), of_large.get((of, start), 0.0)))
        for of, start in dict.fromkeys([*of_small, *of_large])
    )
    return replace(large, **{name: between(ours[name], theirs[name]) for name in ours}, hinges=hinges)


def _kv(small: KvModel, large: KvModel, degrees: tuple[int, int, int]) -> KvModel:
    low, high, degree = degrees
    a_gpu = (large.capacity_tokens - small.capacity_tokens) / (high - low)
    blocks = int(large.capacity_tokens + a_gpu * (degree - high)) // large.block_tokens
    return replace(large, capacity_tokens=max(blocks, 1) * large.block_tokens)
