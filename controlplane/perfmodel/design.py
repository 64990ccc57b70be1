"""The design of a measurement: a grid of batches over the quantities that the step model depends on.

A `Burst` is one visit to the grid. `decoding` requests of `context_tokens` each are prefilled and decode;
once all of them do, `prefills` prompts of `prefill_tokens` each join, whole or in chunks as the budget of a
step has it. Every step in between is a sample, the odd ones at either end as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

DECODE_STEPS = 8  # of every burst that decodes
SHORTEST = 16
KV_SHARE = 0.9  # of the KV memory that a burst may fill: preemptions are another story


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
    fitting = [
        b
        for b in dict.fromkeys(bursts)
        if b.tokens <= KV_SHARE * room.kv_tokens
        and b.decoding + b.prefills <= room.max_seqs
        and b.prefill_tokens <= longest
    ]
    return [fitting[i] for i in rng.permutation(len(fitting))]


def _up_to(most: int, values: list[int]) -> list[int]:
    return sorted({v for v in values if v <= most})
