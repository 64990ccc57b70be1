"""The online refit of a worker type's step model: recursive least squares on relative error.

Each step is a measurement of the factors in `factors.py`. Let t be its measured time and t̂ what the present
model predicts: its row is p/t̂, its target 1 + ψ(t/t̂ - 1), its weight λ^age. ψ clips at CLIP robust standard
deviations (Huber), so a garbage collection moves nothing. What similar steps cannot tell apart follows the
common factor s, within PART·s <= a_j <= s/PART. That also is why forgetting does not wind up.

λ follows slow change, and remembers long enough to have seen the worker both busy and idle. Sudden changes
are detected by `Cusum`. At an alarm the model goes back to what it was when the change seems to have
begun. It is scaled by the median of t/t̂ since then, and learns those steps again. The scale's history is
dropped then; the proportions stay, since an alarm says nothing against them.

What is learned is in force only where it predicted the last steps better than the *incumbent*: the profile,
and after an alarm what was in force before it. Their losses |ln t/t̂|, clipped as above, are compared over
about COMPARED steps; at an alarm, over those since the change. So a host's slow spell that passed for a
change is given up once it is over. Nor does noise of another shape than the profile's spoil a profile that is
right.

**`Cusum`**, change detection: a two-sided CUSUM on relative residuals, its threshold derived from its
false-alarm rate. Residuals e are clipped to ±c and averaged over blocks of BLOCK steps, since a busy host
slows neighbouring steps together. With u a block's mean, v its variance and k half the shift to be noticed,

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
from collections import deque
from dataclasses import dataclass

import numpy as np

from controlplane.errors import BadInput
from controlplane.perfmodel.factors import Floats, NormalEquations, Terms
from controlplane.perfmodel.profile import NORMAL_MEAN_ABS, Profile
from controlplane.perfmodel.step import Batch, StepModel

BLOCK = 5
SHIFT = 0.10  # smaller changes are followed, not announced
PROMISED_STEPS = 10_000
FALSE_ALARM = 0.01  # probability of a false alarm in PROMISED_STEPS
VARIANCE_BLOCKS = 200  # memory of the variance
MEMORY_STEPS = 2000
TERM = 1.0  # uncertainty of a term relative to the others
TRUST_STEPS = 20  # what a scale is worth that is only believed: the profile's, or an alarm's
PART = 0.25
SCALE = (0.05, 20.0)  # of s
CLIP = 3.0
LEAST_SPREAD = 0.01
COMPARED = 200
NOISE_STEPS = 100  # memory of the errors that are reported, and of the spread
RECENT = 400  # steps kept for an alarm


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


@dataclass(frozen=True, slots=True)
class StepTimeChange:
    """A sudden change: since about step `since`, steps take `ratio` times what was predicted."""

    step: int
    since: int
    ratio: float


class Refit:
    """The step model of one worker type, as its steps have been lately."""

    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self._terms = Terms(profile)
        self._factors = np.ones(len(self._terms))
        self._incumbent, self._incumbent_scale = self._factors, 1.0
        self._lead = 0.0  # by how much the learned factors' loss has lately been less than the incumbent's
        self._evidence = NormalEquations.none(len(self._terms))
        self._trust, self._trusted = float(TRUST_STEPS), 1.0  # in which scale, before steps say more
        spread = max(profile.residuals.spread, LEAST_SPREAD)
        self._mean_abs = spread * NORMAL_MEAN_ABS
        self._cusum = Cusum(spread)
        self._recent: deque[tuple[Floats, float]] = deque(maxlen=RECENT)
        self._keep()
        self.steps = 0
        self.drifts: list[StepTimeChange] = []
        self.error = self.profile_error = 0.0

    @property
    def slowdown(self) -> float:
        """s: how many times as long as the profile says steps take, all in all."""
        return self._learned_scale if self._lead >= 0 else self._incumbent_scale

    @property
    def _learned_scale(self) -> float:
        return float(np.clip(self._evidence.common(self._trust, self._trusted), *SCALE))

    @property
    def spread(self) -> float:
        """Robust standard deviation of the steps' relative errors."""
        return max(self._mean_abs / NORMAL_MEAN_ABS, LEAST_SPREAD)

    @property
    def model(self) -> StepModel:
        """The step model in force, with the profile's terms."""
        return self._terms.times(self._in_force)

    def take(
        self,
        prefill_tokens: float,
        sequences: float,
        context_tokens: float,
        step_s: float,
        prefill_sum_sq: float = 0.0,
    ) -> StepTimeChange | None:
        """Learn from one executed step; the drift if it shows one. Raises BadInput for what is no step."""
        counts = Batch(prefill_tokens, sequences, context_tokens, prefill_sum_sq)
        if not (0 < step_s < float("inf")) or not all(0 <= x < float("inf") for x in counts):
            raise BadInput(
                f"step: needs a positive time and counts of at least 0, got {step_s} s for {tuple(counts)}"
            )
        parts = self._terms.seconds(counts)
        predicted_s, profile_s = float(parts @ self._factors), float(parts.sum())
        if predicted_s <= 0:
            return None  # a step of nothing but terms that the profile does not have
        self.steps += 1
        residual = step_s / predicted_s - 1.0
        self._recent.append((parts, step_s))
        self._note(residual, step_s / float(parts @ self._in_force) - 1.0, step_s / profile_s - 1.0)
        self._lead += self._better(parts, step_s) - self._lead / COMPARED
        since = self._cusum.take(residual, CLIP * self.spread)
        if since is not None:
            return self._jump(since)
        self._learn(parts, step_s)
        if self._cusum.is_quiet:
            self._keep()
        return None

    @property
    def _in_force(self) -> Floats:
        return self._factors if self._lead >= 0 else self._incumbent

    def _better(self, parts: Floats, step_s: float) -> float:
        """By how much the learned factors' loss in a step is less than the incumbent's."""
        clip = CLIP * self.spread
        learned, incumbent = (
            min(abs(math.log(step_s / float(parts @ factors))), clip)
            for factors in (self._factors, self._incumbent)
        )
        return incumbent - learned

    def _note(self, residual: float, in_force: float, of_profile: float) -> None:
        """Keep the errors' running means; early ones are plain means."""
        weight = 1.0 / min(self.steps, NOISE_STEPS)
        self.error += weight * (abs(in_force) - self.error)
        self.profile_error += weight * (abs(of_profile) - self.profile_error)
        limit = CLIP * self.spread
        self._mean_abs += (min(abs(residual), limit) - self._mean_abs) / NOISE_STEPS

    def _learn(self, parts: Floats, step_s: float) -> None:
        predicted_s = float(parts @ self._factors)
        clip = CLIP * self.spread
        row, target = parts / predicted_s, 1.0 + min(max(step_s / predicted_s - 1.0, -clip), clip)
        keep = 1.0 - 1.0 / MEMORY_STEPS
        self._evidence = self._evidence.faded(keep, row, target)
        self._trust *= keep
        scale = self._learned_scale
        self._factors = self._evidence.drawn_to(scale, TERM, PART * scale, scale / PART)

    def _jump(self, steps: int) -> StepTimeChange:
        """Go back to the model before the change, scale it to the steps since, and learn those again."""
        since = list(self._recent)[-max(steps, BLOCK) :]
        was_learned = self._lead >= 0
        self._evidence, self._factors, self._trust = self._before
        if was_learned:
            self._incumbent, self._incumbent_scale = self._factors, self._learned_scale
        ratios = np.array([step_s / float(parts @ self._factors) for parts, step_s in since])
        ratio = float(np.median(ratios))
        # The change itself has passed for noise so far.
        self._mean_abs = 1.4826 * NORMAL_MEAN_ABS * float(np.median(np.abs(ratios / ratio - 1.0)))
        scale = float(np.clip(self._learned_scale * ratio, *SCALE))
        self._factors = np.clip(self._factors * ratio, PART * scale, scale / PART)
        self._evidence = self._evidence.at(self._factors)
        self._trust, self._trusted = float(TRUST_STEPS), scale
        self._recent.clear()
        for parts, step_s in since:
            self._learn(parts, step_s)
        self._lead = sum(self._better(parts, step_s) for parts, step_s in since)
        self._keep()
        drift = StepTimeChange(self.steps, self.steps - len(since), ratio)
        self.drifts.append(drift)
        return drift

    def _keep(self) -> None:
        self._before = (self._evidence, self._factors, self._trust)
