"""Factors on the terms of a profile: the one model by which measurements correct step times.

p_j is what term j of the profile adds to what was measured (base, prefill, sequences, context, …). y is the
measured time and w the weight of the measurement. The factors a_j on the profile's coefficients minimise

    Σ w · (Σ_j a_j·p_j/y - 1)²  +  Σ_j ((a_j - s) / d_j)²  +  ((s - believed) / doubt)²    in their bounds

s is the common factor on the whole profile. What measurements cannot tell apart follows s, in the profile's
own proportions. d_j is the uncertainty of a term on its own, `doubt` that of the common factor. A term that
the profile has at 0 stays at 0.

    measurement                                         weight                            by
    one step of a worker that serves                    1, less by the age                refit.py
    what an engine counts between two scrapes           gaps / (gaps + 20), over noise²   calibration.py

All measurements are kept in the two sums of the normal equations. An engine that serves is refitted at each
step. There s is the factor that fits best where all terms have the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from controlplane.errors import BadInput
from controlplane.perfmodel import step
from controlplane.perfmodel.profile import Profile

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class FittedFactor:
    """A factor on a part of a profile, its standard deviation, and whether the traffic `told` it."""

    name: str
    factor: float
    error: float
    told: bool


class Terms:
    """The terms that a profile has, in the order of its coefficients and hinges."""

    def __init__(self, profile: Profile) -> None:
        self._step = profile.step
        self._prior = step.coefficients_with_hinges(profile.step)
        self._known = self._prior > 0
        if not self._known.any():
            raise BadInput(f"{profile.label}: step: every coefficient is 0; there is nothing to refit")

    def __len__(self) -> int:
        return int(self._known.sum())

    @property
    def names(self) -> list[str]:
        names = [term.name for term in step.STEP_TERMS]
        names += [f"hinge of {h.of} from {h.start:g}" for h in self._step.hinges]
        return [name for name, known in zip(names, self._known, strict=True) if known]

    def seconds(self, batch: step.Batch) -> Floats:
        """What each term adds to a step, shape [terms]."""
        return np.asarray((step.regressors(self._step, batch) * self._prior)[self._known])

    def times(self, factors: Floats) -> step.StepModel:
        """The profile's step model, each term multiplied by its factor."""
        values = self._prior.copy()
        values[self._known] *= factors
        return step.with_coefficients(self._step, values)


class NormalEquations(NamedTuple):
    """The sums of the normal equations: Σ w·row·rowᵀ and Σ w·row·target."""

    information: Floats
    moment: Floats

    @classmethod
    def none(cls, terms: int) -> NormalEquations:
        return cls(np.zeros((terms, terms)), np.zeros(terms))

    @classmethod
    def of(cls, rows: Floats, weight: Floats) -> NormalEquations:
        """Of rows [measurements, terms] whose target is 1."""
        weighed = rows * weight[:, None]
        return cls(weighed.T @ rows, weighed.sum(axis=0))

    def faded(self, keep: float, row: Floats, target: float) -> NormalEquations:
        """With one measurement more, and those before worth less."""
        return NormalEquations(
            keep * self.information + np.outer(row, row), keep * self.moment + row * target
        )

    def at(self, factors: Floats) -> NormalEquations:
        """NormalEquations for these factors that tells nothing of the common one, only of the proportions.

        What it says along the common direction is taken out: the Schur complement of it.
        """
        along = self.information.sum(axis=1)
        information = self.information - np.outer(along, along) / max(float(along.sum()), 1e-300)
        return NormalEquations(information, information @ factors)

    def common(self, trust: float, believed: float) -> float:
        """The factor that all terms have, if they have the same; a believed one is worth `trust` steps."""
        return float((self.moment.sum() + trust * believed) / (self.information.sum() + trust))

    def drawn_to(self, scale: float, doubt: float, low: float, high: float) -> Floats:
        """The factors where the common one is known."""
        terms = len(self.moment)
        matrix = self.information + np.eye(terms) / doubt**2
        return _bounded(matrix, self.moment + scale / doubt**2, np.full(terms, low), np.full(terms, high))

    def with_common(
        self, doubt: Floats, believed: float, scale_doubt: float, low: float, high: float
    ) -> Floats:
        """The factors with the common one behind them, which has no lower bound but 0."""
        lows, highs = np.full(len(doubt) + 1, low), np.full(len(doubt) + 1, high)
        lows[-1] = 0.0
        wanted = np.append(self.moment, believed / scale_doubt**2)
        return _bounded(self._joint(doubt, scale_doubt), wanted, lows, highs)

    def covariance(self, doubt: Floats, scale_doubt: float) -> Floats:
        """The covariance of the factors, where the common one is uncertain itself."""
        return np.asarray(np.linalg.inv(self._joint(doubt, scale_doubt))[:-1, :-1])

    def _joint(self, doubt: Floats, scale_doubt: float) -> Floats:
        """The matrix of the normal equations of the factors and the common one."""
        alike = np.column_stack([np.eye(len(doubt)), -np.ones(len(doubt))]) / doubt[:, None]
        joint = np.asarray(alike.T @ alike)
        joint[:-1, :-1] += self.information
        joint[-1, -1] += 1.0 / scale_doubt**2
        return joint


def _bounded(matrix: Floats, wanted: Floats, low: Floats, high: Floats) -> Floats:
    """Solve normal equations; what leaves its bounds is set to them, the rest solved again."""
    solution, free = np.zeros(len(wanted)), np.ones(len(wanted), np.bool_)
    for _ in range(len(wanted)):
        fixed = matrix[np.ix_(free, ~free)] @ solution[~free]
        solution[free] = np.linalg.solve(matrix[np.ix_(free, free)], wanted[free] - fixed)
        outside = (solution < low) | (solution > high)
        if not (outside & free).any():
            break
        free &= ~outside
        solution = np.clip(solution, low, high)
    return np.clip(solution, low, high)
