"""A worker's speed from its own steps, where nobody has given a profile."""

from __future__ import annotations

from controlplane.errors import BadInput
from controlplane.perfmodel.fit import fit_step
from controlplane.perfmodel.samples import StepSamples
from controlplane.perfmodel.step import StepModel
from controlplane.scaler.line import Speed

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
