"""Profiles made for a test: its own step times, KV and limits, and nothing else to tell of."""

from __future__ import annotations

from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.profile import FittedRange, Profile, Residuals, Source
from controlplane.perfmodel.step import PrefillModel, StepModel

EXACT = Residuals(0.0, 0.0, 0.0, 0)
SOURCE = Source("composed", "made up", "none", "2026-01-01")


def made_profile(
    step: StepModel,
    kv: KvModel,
    engine: EngineLimits | None = None,
    prefill: PrefillModel | None = None,
    *,
    gpu: str = "made",
    tp_degree: int = 1,
    residuals: Residuals = EXACT,
    fitted: FittedRange | None = None,
) -> Profile:
    """A profile whose times are known exactly, unless `residuals` say otherwise."""
    limits = EngineLimits() if engine is None else engine
    return Profile("made", gpu, tp_degree, step, kv, limits, residuals, SOURCE, prefill, fitted=fitted)
