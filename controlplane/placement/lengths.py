"""Length prediction: an answer's expected length, by history, its prompt and its tokens so far.

    E[output | prompt bin, output > generated]

One table holds the paper's predictor (§2.3: "the most naive", but unbiased, so that errors cancel in a batch)
and a re-prediction. The latter is the conditional one of Algorithm 2, for a request that outlives its
prediction. Thin cells shrink toward a common mean M: the mean m_b of a cell's n_b samples becomes
w_b·m_b + (1 - w_b)·M, with w_b = n_b / (n_b + k). M is such that the predictions of the whole history still
add up to the history, at every `generated` of the grid.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from controlplane.compiled import by_reference, compiled
from controlplane.errors import BadInput

_DENSE = 64  # the grid holds every value below this, then grows by _GROWTH
_GROWTH = 1.05
_LEAN = 20.0  # k above: samples that the common mean counts for in each cell
_NO_END = np.iinfo(np.int64).max
SIZES = 18  # of predictions, in octaves
ERROR, PREDICTED, ERROR_SQ, CROSS, PREDICTED_SQ = range(5)


@by_reference
class LengthErrors(NamedTuple):
    """How far outputs were from their predictions, by the predictions' size (see misprediction)."""

    sums: NDArray[np.float64]  # [SIZES, 5] of errors, predictions, and their squares and products
    factor: NDArray[np.float64]  # [SIZES] by which predictions are corrected, at most 1
    counts: NDArray[np.int64]  # [4] requests: begun; begun at the last look; ended since; that decoded then


def no_length_errors() -> LengthErrors:
    """Nothing known of errors."""
    return LengthErrors(np.zeros((SIZES, 5)), np.ones(SIZES), np.zeros(4, np.int64))


@dataclass(frozen=True)
class LengthTable:
    """Expected output tokens by prompt bin and tokens generated so far.

    `bin_edges` [B + 1], increasing: bin k holds prompts in [edges[k], edges[k+1]). `grid` [G], increasing
    from 0: values of "generated so far". `expected_total` [B, G]: E[output | bin, output > grid], always
    above `grid`; linear in between, and past the last grid value the expected rest stays what it is there.
    """

    bin_edges: NDArray[np.int64]
    grid: NDArray[np.int64]
    expected_total: NDArray[np.float64]

    def __post_init__(self) -> None:
        shape = (len(self.bin_edges) - 1, len(self.grid))
        if self.expected_total.shape != shape:
            raise BadInput(f"length table: expected_total: shape {self.expected_total.shape}, not {shape}")
        if min(shape) < 1 or (np.diff(self.bin_edges) <= 0).any() or (np.diff(self.grid) <= 0).any():
            raise BadInput("length table: bin_edges and grid must be increasing and not empty")
        if self.grid[0] != 0 or not (self.expected_total > self.grid).all():
            raise BadInput("length table: expected_total must exceed grid, and grid begin with 0")

    @classmethod
    def from_history(
        cls, prompt_tokens: ArrayLike, output_tokens: ArrayLike, bins: int = 12, thin: int = 100
    ) -> LengthTable:
        """Learn from finished requests; columns of shape [requests], tokens at least 1.

        At most `bins` bins with about the same number of requests each; a bin of fewer than `thin` joins its
        neighbour. Raises BadInput on an empty or unusable history.
        """
        prompt, output = (_tokens(*c) for c in (("prompt", prompt_tokens), ("output", output_tokens)))
        if len(prompt) == 0 or len(prompt) != len(output):
            raise BadInput(
                f"length history: {len(prompt)} prompts and {len(output)} outputs; need one of each"
            )
        if bins < 1:
            raise BadInput(f"length history: bins: must be at least 1, got {bins}")
        edges = _bin_edges(prompt, bins, thin)
        grid = _grid(int(output.max()))
        which = np.searchsorted(edges, prompt, side="right") - 1
        count = np.empty((len(edges) - 1, len(grid)))
        total = np.empty_like(count)
        for b in range(len(count)):
            ordered = np.sort(output[which == b])
            first = np.searchsorted(ordered, grid, side="right")  # the first output past each grid value
            count[b] = len(ordered) - first
            total[b] = ordered.sum() - np.concatenate(([0], np.cumsum(ordered)))[first]
        return cls(edges, grid, _leaning(count, total))

    @classmethod
    def constant(cls, mean_tokens: float) -> LengthTable:
        """The same expectation for every prompt; one token more for a request that has reached it."""
        if not 1 <= mean_tokens < float("inf"):
            raise BadInput(f"length table: mean: must be at least 1 token, got {mean_tokens}")
        last = int(mean_tokens) - 1
        grid = np.array([0, last] if last > 0 else [0], np.int64)
        return cls(np.array([0, _NO_END]), grid, np.full((1, len(grid)), float(mean_tokens)))

    def predict(self, prompt_tokens: ArrayLike, generated: ArrayLike = 0) -> NDArray[np.float64]:
        """Expected total output tokens, always above `generated`; arguments broadcast."""
        prompt, done = np.broadcast_arrays(
            np.asarray(prompt_tokens, np.int64), np.asarray(generated, np.int64)
        )
        # flatten() copies: a broadcast array is read-only, which would be another kernel signature.
        flat = _expected_outputs(
            self.bin_edges, self.grid, self.expected_total, prompt.flatten(), done.flatten()
        )
        return flat.reshape(prompt.shape)


@compiled
def expected_output(
    bin_edges: NDArray[np.int64],
    grid: NDArray[np.int64],
    expected_total: NDArray[np.float64],
    prompt_tokens: int,
    generated: float,
) -> float:
    """E[output | prompt, output > generated] from a LengthTable's arrays, for other compiled code."""
    b = int(np.searchsorted(bin_edges, prompt_tokens, side="right")) - 1
    b = min(max(b, 0), len(bin_edges) - 2)
    k = max(int(np.searchsorted(grid, generated, side="right")) - 1, 0)
    if k == len(grid) - 1:
        return float(expected_total[b, k] + (generated - grid[k]))
    part = (generated - grid[k]) / (grid[k + 1] - grid[k])
    return float((1.0 - part) * expected_total[b, k] + part * expected_total[b, k + 1])


@compiled
def _expected_outputs(
    bin_edges: NDArray[np.int64],
    grid: NDArray[np.int64],
    expected_total: NDArray[np.float64],
    prompt_tokens: NDArray[np.int64],
    generated: NDArray[np.int64],
) -> NDArray[np.float64]:
    out = np.empty(len(prompt_tokens))
    for i in range(len(prompt_tokens)):
        out[i] = expected_output(bin_edges, grid, expected_total, prompt_tokens[i], generated[i])
    return out


def _tokens(name: str, column: ArrayLike) -> NDArray[np.int64]:
    values = np.asarray(column)
    if values.ndim != 1:
        raise BadInput(f"length history: {name}_tokens: must be one column, got shape {values.shape}")
    if len(values) and not (np.isfinite(values).all() and values.min() >= 1):
        raise BadInput(f"length history: {name}_tokens: must be finite and at least 1")
    return values.astype(np.int64)


def _bin_edges(prompt: NDArray[np.int64], bins: int, thin: int) -> NDArray[np.int64]:
    """Edges between quantiles of the prompts; the first bin begins at 0, the last has no end."""
    ordered = np.sort(prompt)
    edges, begun = [0], 0  # `begun`: prompts below the newest edge
    for k in range(1, bins):
        edge = int(ordered[len(ordered) * k // bins])
        below = int(np.searchsorted(ordered, edge))
        if below - begun >= max(thin, 1) and len(ordered) - below >= max(thin, 1):
            edges.append(edge)
            begun = below
    return np.array([*edges, _NO_END], np.int64)


def _grid(longest: int) -> NDArray[np.int64]:
    """Values of "generated so far" that a request of the history has passed."""
    grid = list(range(min(_DENSE, longest)))
    while grid[-1] < longest - 1:
        grid.append(min(int(grid[-1] * _GROWTH) + 1, longest - 1))
    return np.array(grid, np.int64)


def _leaning(count: NDArray[np.float64], total: NDArray[np.float64]) -> NDArray[np.float64]:
    """Cell means [B, G], thin ones leaning on the column's common mean M (see the module's head)."""
    mean = np.divide(total, count, out=np.zeros_like(total), where=count > 0)
    # Σ n_b (1 - w_b)(m_b - M) = 0, what is taken from one bin is given to another.
    give = count * _LEAN / (count + _LEAN)
    common = (give * mean).sum(axis=0) / give.sum(axis=0)
    own = count / (count + _LEAN)
    return np.asarray(own * mean + (1.0 - own) * common)
