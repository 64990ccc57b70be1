"""Change detection: a two-sided CUSUM on relative residuals, its threshold derived from its false-alarm rate.

Residuals e are clipped to ±c and averaged over blocks of BLOCK steps, since a busy host slows neighbouring
steps together. With u a block's mean, v its variance and k half the shift to be noticed,

    S⁺ = max(0, S⁺ + u - k),   S⁻ = max(0, S⁻ - u - k),   alarm when either is above h

While nothing has changed u has mean 0, |u| <= c, and Bernstein's inequality gives E exp(θ(u - k)) <= 1 for

    θ = 2k / (v + 2kc/3)

so exp(θ Σ(u - k)) from any block on is a supermartingale, passes exp(θh) with probability at most exp(-θh)
(Ville), and over m blocks and two sides P(false alarm) <= 2m·exp(-θh). Hence

    h = ln(2m / p) / θ      for at most probability p of a false alarm in m blocks

The derivation takes blocks as independent; v is measured on blocks, so it includes the correlation within
one.
"""

from __future__ import annotations

import math

BLOCK = 5
SHIFT = 0.10  # smaller changes are followed, not announced
PROMISED_STEPS = 10_000
FALSE_ALARM = 0.01  # probability of a false alarm in PROMISED_STEPS
VARIANCE_BLOCKS = 200  # memory of the variance


class Cusum:
    """The detector's sums. `spread` is a first guess of a residual's standard deviation."""

    def __init__(self, spread: float) -> None:
        # Of single steps, not of block means: a model's own misfit does not average out.
        self._variance = spread**2
        self.restart()

    def restart(self) -> None:
        """Start over after a change; the noise's estimate stays."""
        self._sums = [0.0, 0.0]
        self._ages = [0, 0]  # steps since each sum left 0
        self._block: list[float] = []

    @property
    def is_quiet(self) -> bool:
        """Whether both sums are at zero."""
        return not any(self._sums)

    def take(self, residual: float, clip: float) -> int | None:
        """Take one step's relative residual in, clipped to ±`clip`.

        Where that ends in an alarm, how many steps ago the shift seems to have begun.
        """
        clip = max(clip, SHIFT)  # a clip below k could never raise an alarm
        self._block.append(min(max(residual, -clip), clip))
        if len(self._block) < BLOCK:
            return None
        mean = sum(self._block) / BLOCK
        self._block = []
        h = threshold(self._variance, clip)
        for side, sign in enumerate((1, -1)):
            self._sums[side] = max(0.0, self._sums[side] + sign * mean - SHIFT / 2)
            self._ages[side] = self._ages[side] + BLOCK if self._sums[side] > 0 else 0
            if self._sums[side] > h:
                since = self._ages[side]
                self.restart()
                return since
        # Not while a sum is well on its way: the change itself would pass for noise, and raise the threshold.
        if max(self._sums) < h / 2:
            self._variance += (mean**2 - self._variance) / VARIANCE_BLOCKS
        return None


def threshold(variance: float, clip: float) -> float:
    """h of the module's docstring, for block means of this variance within ±clip."""
    k = SHIFT / 2
    theta = 2 * k / (variance + 2 * k * clip / 3)
    return math.log(2 * (PROMISED_STEPS / BLOCK) / FALSE_ALARM) / theta
