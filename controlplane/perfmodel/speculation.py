"""Speculative decoding: drafts that a step verifies, as a profile whose decode steps make one token each.

K tokens are drafted for each sequence, the i-th accepted in a share a_i of the steps. All before it were
accepted too, so a_i never rises with i. A step makes E = 1 + Σ a_i tokens of a sequence and takes

    t = base + R + D·K + f((1 + K)·b) + k2·C      D: seconds to draft a token for the batch
                                                  R: the round's own, however many are drafted

f is what tokens of decode cost: the sequence terms as far as they were fitted, past that what tokens of
prefill cost. A verified token goes through the same matrices as those. The KV of a sequence is read once for
all its tokens. `profile.speculating` gives the profile of t / E a token. All that reads profiles uses it,
placement and bounds included. Prefill costs what it did. A first token comes of a whole step and waits for
half of one, which the frontend makes up for. The rest is exact in the sum: n tokens of decode and the
prefills among them take the same time. A prefill falls on one token of a sequence, though, not on E.

By chance a request needs more steps or fewer than (output - 1) / E: `paces` draws by how much.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from controlplane.errors import BadInput
from controlplane.perfmodel.step import Hinge, StepModel

MOST_DRAFTED = 32
PIECES = 3  # straight ones of what decode costs: a profile has two places for hinges of sequences

Point = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Speculation:
    """Shares of the steps in which the first, the second, … draft is accepted, and what drafting takes.

    `draft_s`: of a drafted token. `round_s`: of a step apart from them, for the draft model's pass over what
    was accepted, and the sampling that accepts or rejects.
    """

    acceptance: tuple[float, ...]
    draft_s: float = 0.0
    round_s: float = 0.0

    def __post_init__(self) -> None:
        shares, got = self.acceptance, "/".join(f"{share:g}" for share in self.acceptance)
        if not 1 <= len(shares) <= MOST_DRAFTED or not all(0 < a <= 1 for a in shares):
            raise BadInput(
                f"speculation: acceptance: must be 1 to {MOST_DRAFTED} shares above 0, at most 1, got {got}"
            )
        if any(later > earlier for earlier, later in pairwise(shares)):
            raise BadInput(
                f"speculation: acceptance: none is accepted more often than the one before it, got {got}"
            )
        for name in ("draft_s", "round_s"):
            if not 0 <= (seconds := getattr(self, name)) < math.inf:
                raise BadInput(f"speculation: {name}: must be a number of at least 0, got {seconds}")

    @property
    def drafted(self) -> int:
        """K, tokens that are drafted for each sequence and step."""
        return len(self.acceptance)

    @property
    def tokens_per_step(self) -> float:
        """E, those that come of a step on average: vLLM's mean acceptance length."""
        return 1.0 + sum(self.acceptance)

    @property
    def squares_per_step(self) -> float:
        """The mean square of the tokens of a step: Σ (2i + 1)·a_i, a_0 = 1."""
        return 1.0 + sum((2 * i + 1) * a for i, a in enumerate(self.acceptance, start=1))


def verified_base_s(step: StepModel, speculation: Speculation) -> float:
    """Seconds of a step that verifies drafts, whatever its batch."""
    return step.base_s + speculation.round_s + speculation.draft_s * speculation.drafted


def verified_step(step: StepModel, speculation: Speculation, fitted: float, max_seqs: int) -> StepModel:
    """The step per token with speculation; `step` is the plain one, fitted up to `fitted` sequences."""
    made, wide = speculation.tokens_per_step, 1 + speculation.drafted
    slopes = _decode_slopes(step, fitted, wide * max_seqs)
    hinges = [
        Hinge("sequences", start / wide, slope * wide / made) for start, slope in slopes[1:] if slope > 0
    ]
    for hinge in step.hinges:
        if hinge.of == "experts":
            hinges.append(Hinge("experts", hinge.start / wide, hinge.per_unit_s * wide / made))
        elif hinge.of == "prefill_tokens":
            hinges.append(hinge)
    return replace(
        step,
        base_s=verified_base_s(step, speculation) / made,
        per_sequence_s=slopes[0][1] * wide / made,
        per_context_token_s=step.per_context_token_s / made,
        hinges=tuple(hinges),
    )


def _decode_slopes(step: StepModel, fitted: float, most: int) -> list[tuple[float, float]]:
    """Tokens of decode in a step: (from how many, seconds each adds more than before), at most three.

    The lower convex hull of the seconds that tokens take, up to `most` tokens.
    """
    knees = {h.start for h in step.hinges if h.of == "sequences"} | {fitted}
    knees |= {h.start for h in step.hinges if h.of == "prefill_tokens" and h.start > fitted}
    at = [0.0, *sorted(k for k in knees if 0 < k < most), float(most)]
    points = _hull([(n, _tokens_s(step, n, fitted)) for n in at])
    while len(points) > PIECES + 1:  # as many as a profile has places for: the least bend is left out
        slopes = [_slope(*pair) for pair in pairwise(points)]
        del points[1 + int(np.argmin(np.diff(slopes)))]
    slopes = [_slope(*pair) for pair in pairwise(points)]
    return [(n, more) for (n, _), more in zip(points, np.diff(slopes, prepend=0.0).tolist(), strict=False)]


def _hull(points: list[Point]) -> list[Point]:
    """The lower convex hull of points in the order of their first coordinate."""
    kept: list[Point] = []
    for point in points:
        while len(kept) > 1 and _slope(kept[-2], kept[-1]) >= _slope(kept[-1], point):
            kept.pop()
        kept.append(point)
    return kept


def _slope(first: Point, second: Point) -> float:
    return (second[1] - first[1]) / (second[0] - first[0])


def _tokens_s(step: StepModel, tokens: float, fitted: float) -> float:
    """Seconds that `tokens` tokens of decode add to a step: past the fit's range, as prefill would."""
    near = min(tokens, fitted)
    hinges = [h for h in step.hinges if h.of == "sequences"]
    seconds = step.per_sequence_s * near + sum(h.per_unit_s * max(near - h.start, 0.0) for h in hinges)
    if tokens > near:
        seconds += step.per_prefill_token_s * (tokens - near)
        for h in step.hinges:
            if h.of == "prefill_tokens":
                seconds += h.per_unit_s * (max(tokens - h.start, 0.0) - max(near - h.start, 0.0))
    return seconds


def pays_up_to(plain: StepModel, faster: StepModel, max_seqs: int, context_tokens: float) -> int:
    """The largest batch, of sequences of that context, in which a token takes less time with speculation.

    0 where it never does; the engine's most sequences where it always does.
    """
    batch = np.arange(1, max_seqs + 1, dtype=float)
    pays = faster.step_s(0, batch, batch * context_tokens) < plain.step_s(0, batch, batch * context_tokens)
    stops = np.flatnonzero(~pays)
    return int(stops[0]) if len(stops) else len(batch)


def paces(
    speculation: Speculation, output_tokens: NDArray[np.int64], rng: np.random.Generator
) -> NDArray[np.float64]:
    """[requests] steps that each takes by chance, over those that its tokens after the first take on average.

    First passage of a random walk: mean and variance by renewal theory, and never fewer steps than if all
    drafts were accepted.
    """
    made, squares = speculation.tokens_per_step, speculation.squares_per_step
    gaps = np.maximum(output_tokens - 1, 0).astype(float)
    mean = (gaps + squares / (2 * made) - 0.5) / made
    spread = np.sqrt(gaps * max(squares - made**2, 0.0) / made**3)
    steps = np.rint(mean + spread * rng.standard_normal(len(gaps)))
    steps = np.clip(steps, np.ceil(gaps / (1 + speculation.drafted)), np.maximum(gaps, 0.0))
    return np.where(gaps > 0, steps * made / np.maximum(gaps, 1.0), 1.0)
