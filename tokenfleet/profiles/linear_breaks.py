"""Detection of batches that the linear step model misses by more than its own scatter.

Samples are sorted into cells, by phase (prefill alone, decode alone, both) and by size in powers of two
(prefill tokens, else sequences). A cell breaks when the median of predicted / measured - 1 in it is beyond
LEAST, and beyond twice the median size of all errors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from controlplane.perfmodel.fit import fit_step
from controlplane.perfmodel.samples import StepSamples
from controlplane.perfmodel.step import STEP_TERMS, StepModel, coefficients

LEAST = 0.10
FEWEST = 3  # samples of a cell


@dataclass(frozen=True, slots=True)
class Break:
    """A cell: batches of `low` to `high` prefill tokens or sequences, which the form misses by `error`."""

    phase: str
    low: int
    high: int
    samples: int
    error: float

    @property
    def text(self) -> str:
        of = "sequences" if self.phase == "decode" else "prefill tokens"
        way = "too fast" if self.error < 0 else "too slow"
        return (
            f"{self.phase}, {self.low}-{self.high} {of}: predicted {abs(self.error):.0%} {way}"
            f" ({self.samples} batches)"
        )


def linear_breaks(samples: StepSamples, robust: bool) -> list[Break]:
    """The cells that a fit without further terms misses, worst first."""
    plain = fit_step(samples, robust, extra_terms=False).model
    columns = (samples.prefill_tokens, samples.sequences, samples.context_tokens)
    error = plain.step_s(*columns) / samples.step_s - 1.0
    limit = max(LEAST, 2 * float(np.median(np.abs(error))))
    prefills, decodes = samples.prefill_tokens > 0, samples.sequences > 0
    phases = {
        "prefill": (prefills & ~decodes, samples.prefill_tokens),
        "decode": (~prefills & decodes, samples.sequences),
        "mixed": (prefills & decodes, samples.prefill_tokens),
    }
    breaks = []
    for phase, (rows, size) in phases.items():
        power = np.floor(np.log2(np.maximum(size, 1)))
        for cell in np.unique(power[rows]):
            here = rows & (power == cell)
            middle = float(np.median(error[here]))
            if here.sum() >= FEWEST and abs(middle) > limit:
                low, high = int(size[here].min()), int(size[here].max())
                breaks.append(Break(phase, low, high, int(here.sum()), middle))
    return sorted(breaks, key=lambda b: -abs(b.error))


def form_of(model: StepModel) -> list[str]:
    """The terms that cross-validation has put beside the plain four, in words."""
    terms = [term.words for term in STEP_TERMS if term.words and coefficients(model)[term.name]]
    return terms + [f"hinge at {h.start:g} {h.of.replace('_', ' ')}" for h in model.hinges]
