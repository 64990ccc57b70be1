"""Diagnostics of measurements: the host's speed while they ran, and batches that the linear model misses.

**Host speed.** A shared host is faster or slower for seconds or minutes at a time. Everything that is
measured meanwhile is off by about the same factor. Grid points are visited again and again in random order,
so that factor can be estimated from the points' own times:

    log t = batch + slowness(visit) + noise

A batch's term is its median over visits. The slowness of a visit is read off the *other* visits near it in
time. Each counts by what its steps took beyond their batches' terms. Slowness is their mean with weights
exp(-gap / window_s), shrunk towards 0 by the weight of PRIOR visits. The visit itself does not count. So a
step that was slow alone stays slow, and only what neighbours share is taken out. The window is the one that
predicts visits best. Where none predicts them better than a constant speed by LEAST_GAIN, nothing is taken
out.

**Linear breaks** are batches that the linear step model misses by more than its own scatter.
Samples are sorted into cells, by phase (prefill alone, decode alone, both) and by size in powers of two
(prefill tokens, else sequences). A cell breaks when the median of predicted / measured - 1 in it is beyond
LEAST, and beyond twice the median size of all errors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import ndimage

from controlplane.errors import BadInput
from controlplane.perfmodel.fit import fit_step
from controlplane.perfmodel.samples import StepSamples
from controlplane.perfmodel.step import STEP_TERMS, StepModel, coefficients

WINDOWS_S = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
PRIOR = 1.0  # visits
LEAST_GAIN = 0.05  # of the mean size of what visits are off by
MOST = 0.7  # a visit's own part in the mean, on the logarithm: past a factor of two it met something else
ROUNDS = 8
FEWEST_VISITS = 3  # of a batch, for it to say anything about the machine

Columns = NDArray[np.float64]
Labels = NDArray[np.int64]
LEAST = 0.10
FEWEST = 3  # samples of a cell


@dataclass(frozen=True)
class HostSpeed:
    """Steps take `slowness` times as long as at the run's mean speed, shape [steps].

    `window_s` is how long the machine keeps its speed, None where no common change was found (slowness is 1
    then). `off`, `off_left`: by how much a visit's steps are off their batches' usual time, in the mean and
    as a share, before the machine's slowness is taken out and after.
    """

    slowness: Columns
    window_s: float | None
    off: float
    off_left: float

    @property
    def range(self) -> tuple[float, float]:
        """Its 5th and 95th percentile over the steps."""
        low, high = np.quantile(self.slowness, (0.05, 0.95))
        return float(low), float(high)


def host_speed(batch: Labels, visit: Labels, at_s: Columns, step_s: Columns) -> HostSpeed:
    """The machine's slowness at each step.

    `batch` numbers steps of the same work from 0 on, `visit` the visits; `at_s` is when a step ran, on any
    clock. All of shape [steps]. Raises BadInput for times that are no numbers.
    """
    if not np.isfinite(at_s).all():
        raise BadInput(f"measurements: row {int(np.argmin(np.isfinite(at_s))) + 1}: at_s: must be a number")
    log_s = np.log(step_s)
    pairs = np.unique(np.column_stack([batch, visit]), axis=0)
    visits_of = np.bincount(pairs[:, 0], minlength=int(batch.max()) + 1)
    repeated = visits_of[batch] >= FEWEST_VISITS
    same = HostSpeed(np.ones(len(step_s)), None, 0.0, 0.0)
    if len(np.unique(visit[repeated])) < FEWEST_VISITS:
        return same
    # Seconds between the end of one visit and the beginning of another, shape [visits, visits].
    visits = int(visit.max()) + 1
    begin, end = np.full(visits, np.inf), np.full(visits, -np.inf)
    np.minimum.at(begin, visit, at_s)
    np.maximum.at(end, visit, at_s)
    gaps = np.maximum(np.maximum(begin[None, :] - end[:, None], begin[:, None] - end[None, :]), 0.0)
    none = np.zeros(len(gaps))
    off = float(np.abs(_residual(batch, visit, log_s, repeated, none)[1]).mean())
    tried = []
    for window_s in WINDOWS_S:
        slow, error = _slowness(batch, visit, log_s, repeated, np.exp(-gaps / window_s))
        tried.append((error, window_s, slow))
    error, window_s, slow = min(tried, key=lambda t: t[0])
    if error > off * (1.0 - LEAST_GAIN):
        return HostSpeed(same.slowness, None, off, off)
    return HostSpeed(np.exp((slow - slow.mean())[visit]), window_s, off, error)


def _slowness(
    batch: Labels, visit: Labels, log_s: Columns, repeated: NDArray[np.bool_], weight: Columns
) -> tuple[Columns, float]:
    """Each visit's slowness as a logarithm, shape [visits], and the mean size of what it leaves over."""
    np.fill_diagonal(weight, 0.0)
    slow: Columns = np.zeros(len(weight))
    error = np.inf
    for _ in range(ROUNDS):
        rows, off = _residual(batch, visit, log_s, repeated, slow)
        # A visit's whole deviation from its batches' terms: what the slowness leaves over, and the slowness.
        whole = np.clip(off + slow[rows], -MOST, MOST)
        slow = weight[:, rows] @ whole / (weight[:, rows].sum(axis=1) + PRIOR)
        error = float(np.abs(whole - slow[rows]).mean())
    return slow, error


def _residual(
    batch: Labels, visit: Labels, log_s: Columns, repeated: NDArray[np.bool_], slow: Columns
) -> tuple[Labels, Columns]:
    """Visits that say something, and how far each is off: the median over its steps, slowness taken out."""
    steady = log_s - slow[visit]
    term = ndimage.median(steady, batch, np.arange(int(batch.max()) + 1))
    rows = np.unique(visit[repeated])
    return rows, ndimage.median((steady - term[batch])[repeated], visit[repeated], rows)


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
            f"{self.phase} steps of {self.low} to {self.high} {of} ({self.samples} batches):"
            f" predicted {100 * abs(self.error):.0f} % {way}"
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
    """The terms that cross-validation has added to the plain four, in words."""
    terms = [term.words for term in STEP_TERMS if term.words and coefficients(model)[term.name]]
    return terms + [f"hinge at {h.start:g} {h.of.replace('_', ' ')}" for h in model.hinges]
