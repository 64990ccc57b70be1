"""Samples of engine steps as columns, and the grid of batches on which an engine is measured.

A sample is the composition of a step and its duration. A `Burst` is one visit to the grid, which covers the
quantities that the step model depends on. `decoding` requests of `context_tokens` each are prefilled and
decode. Once all of them do, `prefills` prompts of `prefill_tokens` each join, whole or in chunks as the
budget of a step has it. Every step in between is a sample, the odd ones at either end as well.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controlplane.errors import BadInput
from controlplane.perfmodel.step import Batch

_COLUMNS = ("prefill_tokens", "sequences", "context_tokens", "step_s")
_OPTIONAL = ("prefill_sum_sq", "kv_blocks")
FOLDS = 5
FEW_POINTS = 40  # up to as many distinct batches each is a fold of its own
DECODE_STEPS = 8  # of every burst that decodes
SHORTEST = 16
KV_SHARE = 0.9  # of the KV memory that a burst may fill: preemptions are another story


@dataclass(frozen=True)
class StepSamples:
    """Measured steps; every column has shape [samples].

    `prefill_tokens`: prefilled in the step. `sequences`: those that decoded in it. `context_tokens`: those
    they held at its start. `step_s`: the seconds it took. `prefill_sum_sq`: Σ (end² - start²) over the
    prefill chunks, or None when that was not recorded (then no length² term can be fitted). `experts`: the
    tokens that touch 1 - 1/e of a mixture's (`step.py`); 0 for a dense model, or where that is not known.
    `kv_blocks`: KV blocks in use, with those of the step's own tokens (0: not known), or None.
    """

    prefill_tokens: NDArray[np.float64]
    sequences: NDArray[np.float64]
    context_tokens: NDArray[np.float64]
    step_s: NDArray[np.float64]
    prefill_sum_sq: NDArray[np.float64] | None = None
    experts: float = 0.0
    kv_blocks: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        n = len(self.step_s)
        for name in self._recorded:
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
        return replace(self, **{name: getattr(self, name)[rows] for name in self._recorded})

    @property
    def _recorded(self) -> list[str]:
        return [name for name in (*_COLUMNS, *_OPTIONAL) if getattr(self, name) is not None]

    @property
    def batch(self) -> Batch:
        """The steps' contents in the model's terms; a Σ length² that was not recorded is 0."""
        sum_sq = np.zeros(len(self)) if self.prefill_sum_sq is None else self.prefill_sum_sq
        return Batch(self.prefill_tokens, self.sequences, self.context_tokens, sum_sq)

    @property
    def points(self) -> NDArray[np.int64]:
        """The number of each sample's distinct batch, in order of (prefill, sequences, context)."""
        _, point = np.unique(np.column_stack(self.batch), axis=0, return_inverse=True)
        return np.asarray(point, np.int64).reshape(-1)


def concatenated(parts: list[StepSamples]) -> StepSamples:
    """All samples of several tables; Σ length² and KV blocks are kept only where every table has them."""
    columns: dict[str, Any] = dict.fromkeys(_OPTIONAL)
    for name in set.intersection(*(set(part._recorded) for part in parts)):
        columns[name] = np.concatenate([getattr(part, name) for part in parts])
    return StepSamples(**columns)


def folds(samples: StepSamples, few_points: int = FEW_POINTS) -> NDArray[np.int64]:
    """The fold that judges each sample, shape [samples]; -1 = none, it is always learned from.

    Few batches (`few_points` at most) are judged one by one. A batch that is alone at either end of a column
    stays: a fit without it would be judged on an extrapolation, which says nothing about predictions inside
    the range.
    """
    point = samples.points
    distinct = point.max() + 1
    fold = point % (FOLDS if distinct > few_points else distinct)
    for column in (samples.prefill_tokens, samples.sequences, samples.context_tokens):
        present = column[column > 0]
        for end in (present.min(), present.max()) if len(present) else ():
            at_end = np.unique(point[column == end])
            if len(at_end) == 1:
                fold[point == at_end[0]] = -1
    # Numbered again without gaps: an emptied fold is no fold.
    kept = np.unique(fold[fold >= 0])
    return np.where(fold < 0, -1, np.searchsorted(kept, fold))


def by_point(samples: StepSamples, points: Sequence[str], repeats: Sequence[str]) -> StepSamples:
    """A designed grid's steps, those of one point that carry the same work as one: the median of their times.

    Decode steps of a point count as the same work, at their mean context. Without this a point that decodes
    would weigh as many times as it has steps. Steps that less than half of a point's repeats have met (a
    prompt that arrived a moment late) are left out.
    """
    work = work_of(samples, points)
    name = work[:, 0].astype(np.int64)
    _, first, group = np.unique(work, axis=0, return_index=True, return_inverse=True)
    group, repeat = group.reshape(-1), np.asarray(repeats)
    of_point = [len(np.unique(repeat[name == n])) for n in range(name.max() + 1)]
    merged = [
        g for g in range(len(first)) if 2 * len(np.unique(repeat[group == g])) >= of_point[name[first[g]]]
    ]
    once = samples.take(first[merged])
    means: dict[str, Any] = {
        name: np.array([getattr(samples, name)[group == g].mean() for g in merged])
        for name in ("context_tokens", "kv_blocks")
        if name in samples._recorded
    }
    return replace(once, step_s=np.array([np.median(samples.step_s[group == g]) for g in merged]), **means)


def work_of(samples: StepSamples, points: Sequence[str]) -> NDArray[np.float64]:
    """The key of each sample's batch in a grid, shape [samples, 4]; the number of the point first."""
    name = np.unique(np.asarray(points), return_inverse=True)[1]
    sum_sq = samples.prefill_sum_sq if samples.prefill_sum_sq is not None else np.zeros(len(samples))
    return np.column_stack([name, samples.prefill_tokens, samples.sequences, sum_sq])


@dataclass(frozen=True, slots=True)
class Burst:
    """A grid point; module docstring."""

    decoding: int = 0
    context_tokens: int = 0
    prefills: int = 0
    prefill_tokens: int = 0

    @property
    def name(self) -> str:
        """Unique in a grid: `8x1024` decodes, `8x1024+1x512` a prompt joins, `+1x512` is prefill alone."""
        decode = f"{self.decoding}x{self.context_tokens}" if self.decoding else ""
        prefill = f"+{self.prefills}x{self.prefill_tokens}" if self.prefills else ""
        return decode + prefill

    @property
    def tokens(self) -> int:
        """KV it needs at its fullest."""
        return self.decoding * (self.context_tokens + 4 * DECODE_STEPS) + self.prefills * self.prefill_tokens


@dataclass(frozen=True, slots=True)
class EngineRoom:
    """The largest batch and context of an engine."""

    kv_tokens: int
    max_seqs: int
    max_batched_tokens: int
    max_context_tokens: int


def grid(room: EngineRoom, rng: np.random.Generator) -> list[Burst]:
    """Prefill alone (whole and chunked, one prompt and several), decode alone, and both, in random order.

    Random, so that a grid cut short by its time budget is still spread, and slow drifts of the machine do not
    pass for a term of the model.
    """
    longest = room.max_context_tokens - 4 * DECODE_STEPS
    budget = room.max_batched_tokens
    lengths = _up_to(longest, [SHORTEST, 64, 128, 256, 512, 1024, budget, budget * 5 // 2])
    contexts = _up_to(longest, [32, 256, 1024, 4096, 16384])
    sequences = _up_to(room.max_seqs, [1, 2, 4, 8, 16, 32, 64, 128, 256])
    some = _up_to(room.max_seqs - 1, [4, 32])
    bursts = [Burst(prefills=1, prefill_tokens=n) for n in lengths]
    bursts += [Burst(prefills=k, prefill_tokens=n) for k, n in ((4, 64), (16, 32), (4, 256), (8, 256))]
    bursts += [Burst(b, c) for b in sequences for c in contexts]
    joining = _up_to(longest, [64, 512, budget * 3 // 2])
    bursts += [Burst(b, c, 1, n) for b in some for c in contexts[:3] for n in joining]
    fitting = _with_room(bursts, room)
    return [fitting[i] for i in rng.permutation(len(fitting))]


def design(room: EngineRoom) -> list[Burst]:
    """The short design for an engine that is measured as it starts, cheap and telling bursts first.

    The first six vary P, b, C and S apart from each other, so that a design cut short after them still tells
    every coefficient. The others widen the range to what a fleet serves; the last are for engines that are
    fast.
    """
    budget = room.max_batched_tokens
    bursts = [
        Burst(1, 32, 1, 16),
        Burst(4, 128, 1, 64),
        Burst(prefills=1, prefill_tokens=128),
        Burst(8, 32),
        Burst(2, 512, 1, 256),
        Burst(prefills=1, prefill_tokens=512),
        Burst(16, 64, 1, 128),
        Burst(1, 1024),
        Burst(prefills=4, prefill_tokens=64),
        Burst(8, 256, 1, 512),
        Burst(32, 64, 1, 64),
        Burst(prefills=1, prefill_tokens=1024),
        Burst(32, 256),
        Burst(4, 1024, 2, 256),
        Burst(64, 64, 1, 256),
        Burst(128, 32),
        Burst(prefills=1, prefill_tokens=budget),
        Burst(8, 1024),
        Burst(256, 32),
        Burst(prefills=1, prefill_tokens=budget * 5 // 2),
        Burst(32, 1024),
        Burst(64, 1024),
        Burst(32, 4096),
        Burst(128, 1024),
    ]
    return _with_room(bursts, room)


def _with_room(bursts: Sequence[Burst], room: EngineRoom) -> list[Burst]:
    """Those that the engine has room for, each once."""
    longest = room.max_context_tokens - 4 * DECODE_STEPS
    return [
        b
        for b in dict.fromkeys(bursts)
        if b.tokens <= KV_SHARE * room.kv_tokens
        and b.decoding + b.prefills <= room.max_seqs
        and max(b.prefill_tokens, b.context_tokens) <= longest
    ]


def _up_to(most: int, values: list[int]) -> list[int]:
    return sorted({v for v in values if v <= most})
