"""Samples of engine steps as columns: the composition of each step and its duration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controlplane.errors import BadInput
from controlplane.perfmodel.step import Batch

_COLUMNS = ("prefill_tokens", "sequences", "context_tokens", "step_s")


@dataclass(frozen=True)
class StepSamples:
    """Measured steps; every column has shape [samples].

    `prefill_tokens` prefilled in the step, `sequences` that decoded in it and the `context_tokens` they held
    at its start, `step_s` seconds it took, `prefill_sum_sq` Σ (end² - start²) over the prefill chunks, or
    None when that was not recorded (then no length² term can be fitted).
    """

    prefill_tokens: NDArray[np.float64]
    sequences: NDArray[np.float64]
    context_tokens: NDArray[np.float64]
    step_s: NDArray[np.float64]
    prefill_sum_sq: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        names = _COLUMNS if self.prefill_sum_sq is None else (*_COLUMNS, "prefill_sum_sq")
        n = len(self.step_s)
        for name in names:
            column = np.ascontiguousarray(getattr(self, name), dtype=np.float64)
            if column.shape != (n,):
                raise BadInput(f"measurements: {name}: {column.size} rows, step_s has {n}")
            bad = ~(np.isfinite(column) & (column >= 0))
            if name == "step_s":
                bad |= column == 0
            if bad.any():
                row = int(np.argmax(bad))
                least = "more than 0" if name == "step_s" else "at least 0"
                raise BadInput(
                    f"measurements: row {row + 1}: {name}: must be a number of {least}, got {column[row]:g}"
                )
            object.__setattr__(self, name, column)
        idle = (self.prefill_tokens == 0) & (self.sequences == 0)
        if idle.any():
            raise BadInput(
                f"measurements: row {int(np.argmax(idle)) + 1}: a step with neither prefill nor decode"
            )

    def __len__(self) -> int:
        return len(self.step_s)

    def take(self, rows: NDArray[np.bool_] | NDArray[np.int64]) -> StepSamples:
        """Some of the samples."""
        sum_sq = None if self.prefill_sum_sq is None else self.prefill_sum_sq[rows]
        return StepSamples(
            self.prefill_tokens[rows],
            self.sequences[rows],
            self.context_tokens[rows],
            self.step_s[rows],
            sum_sq,
        )

    @property
    def batch(self) -> Batch:
        """What the steps carried, as the model's terms read it; a Σ length² that was not recorded is 0."""
        sum_sq = np.zeros(len(self)) if self.prefill_sum_sq is None else self.prefill_sum_sq
        return Batch(self.prefill_tokens, self.sequences, self.context_tokens, sum_sq)

    @property
    def points(self) -> NDArray[np.int64]:
        """Which distinct batch each sample repeats, numbered in order of (prefill, sequences, context)."""
        _, point = np.unique(np.column_stack(self.batch), axis=0, return_inverse=True)
        return np.asarray(point, np.int64).reshape(-1)


def concatenated(parts: list[StepSamples]) -> StepSamples:
    """All samples of several tables; Σ length² is kept only where every table has it."""
    sums = [p.prefill_sum_sq for p in parts]
    known = [s for s in sums if s is not None]
    return StepSamples(
        np.concatenate([p.prefill_tokens for p in parts]),
        np.concatenate([p.sequences for p in parts]),
        np.concatenate([p.context_tokens for p in parts]),
        np.concatenate([p.step_s for p in parts]),
        np.concatenate(known) if len(known) == len(parts) else None,
    )
