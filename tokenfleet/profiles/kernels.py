"""A rank's steps as aiconfigurator-core's operation tables have them, to fit and to check.

In tables of attention in data parallel, all ranks do the same. Decode is taken to be so, as padding makes it.
A rank's own part of prefill is the time outside experts and the way to them, and its share of the rest.

Kernels of matrices compute whole tiles of TILE rows, and tables are measured where a tile ends. So a step of
T - TILE + 1 tokens takes as long as one of T, and the tables' time stands for the middle (`amid_tile`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from controlplane.errors import BadInput
from controlplane.perfmodel.ranks import Ranks
from controlplane.perfmodel.samples import StepSamples
from controlplane.perfmodel.step import StepModel

# Standard deviations: drift between releases, graphs, clocks, what a host adds; of dense models, and of
# mixtures of experts, as measured runs show them.
UNSEEN, UNSEEN_MIXTURE = 0.10, 0.25
TILE = 128
ROWS = 512  # from which matrices compute longer than they read weights


class Windows(NamedTuple):
    """The share of the layers that attend to `tokens` tokens, where the tables have all attend to all."""

    share: float
    tokens: int


class SplitHeads(NamedTuple):
    """Tables of a part of a GPU's KV heads, and the number of parts.

    Tables have at most 8 KV heads. The package lets time grow in proportion to more, launch included.
    A kernel of decode deals out (sequence, KV head), so b sequences are parts·b of a part's.
    """

    engine: Any
    parts: int


@dataclass(frozen=True, slots=True)
class Kernels:
    """The tables' seconds of a rank's steps: `ranks` share experts, a stage is `uneven` times the mean."""

    engine: Any
    ranks: int
    uneven: float
    windows: Windows | None = None
    heads: SplitHeads | None = None

    def prefill_s(self, prompts: int, length: int) -> float:
        """The time of a rank's prefill step, while the other ranks prefill nothing."""
        alone_ms = self.engine.predict_prefill_latency(prompts, length, 0)
        if self.windows is not None and length > self.windows.tokens:
            # A token of a window attends to the window's tokens. The time is proportional to pairs of tokens.
            seen = self.windows.tokens * (length - self.windows.tokens / 2) / (length**2 / 2)
            alone_ms -= self.windows.share * _attention_ms(self.engine, 0, prompts, length) * (1 - seen)
        if self.ranks > 1:
            alone_ms -= self.experts_s(prompts, length) * 1e3 * (self.ranks - 1)
        return float(alone_ms / 1e3 * self.uneven)

    def experts_s(self, prompts: int, length: int) -> float:
        """One rank's part of the time in experts and on the way to them, where all ranks prefill as much."""
        operations, _ = self.engine.run_static_per_op(batch_size=prompts, isl=length, osl=2)
        return float(sum(ms for name, ms, *_ in operations if "moe" in name) / 1e3 / self.ranks)

    def decode_s(self, batch: int, context: int) -> float:
        alone_ms = self.engine.predict_decode_latency(batch, context, 2) - self._beyond_ms(batch, context)
        return float(alone_ms / 1e3 * self.uneven)

    def mixed_s(self, prompts: int, batch: int, length: int) -> float:
        """Of a step of prefill and decode, the same on all ranks, with contexts of twice the prompts' length.

        The tables take decoding requests at half their output: length + 2·length / 2.
        """
        alone_ms = self.engine.mixed_step_latency(prompts * length, batch, length, 2 * length)
        return float((alone_ms - self._beyond_ms(batch, 2 * length)) / 1e3 * self.uneven)

    def _beyond_ms(self, batch: int, context: int) -> float:
        """Of a decode, what is counted too much: windows beyond their tokens, and more than 8 KV heads."""
        if self.heads is not None:
            parts = _attention_ms(self.heads.engine, 1, self.heads.parts * batch, context)
            return _attention_ms(self.engine, 1, batch, context) - parts
        if self.windows is None or context <= self.windows.tokens:
            return 0.0
        whole, within = (_attention_ms(self.engine, 1, batch, n) for n in (context, self.windows.tokens))
        return self.windows.share * (whole - within)


def _attention_ms(engine: Any, phase: int, batch: int, length: int) -> float:
    """Of all layers, in prefill (0) or in decode (1)."""
    operations = engine.run_static_per_op(batch_size=batch, isl=length, osl=2)[phase]
    return float(sum(ms for name, ms, *_ in operations if name.endswith("_attention")))


def uneven_stages(config: Mapping[str, Any], stages: int) -> float:
    """How many times the mean stage's layers the largest stage has, as vLLM deals them out."""
    layers = int(config.get("num_hidden_layers") or stages)
    if layers < stages:
        raise BadInput(f"--pipeline-parallel: {stages} stages of {layers} layers")
    return math.ceil(layers / stages) * stages / layers


def grid_samples(
    kernels: Kernels, budget: int, max_seqs: int, longest: int, capacity: int, host_s: float
) -> StepSamples:
    """Prefill alone up to a step's budget, decode alone up to the KV's size; seconds, host time added."""
    rows = []
    for length in _up_to(min(budget, longest), start=16):
        for n in (1, 2, 4, 8, 16):
            if n * length <= budget:
                rows.append((amid_tile(n * length), 0, 0, kernels.prefill_s(n, length), n * length**2))
    for batch in _up_to(max_seqs, start=1):
        for context in _up_to(min(longest - 2, 32768), start=128):
            if batch * context <= capacity:
                rows.append((0, batch, batch * context, kernels.decode_s(batch, context), 0))
    table = np.array(rows, float)
    return StepSamples(table[:, 0], table[:, 1], table[:, 2], table[:, 3] + host_s, table[:, 4])


def amid_tile(tokens: int) -> float:
    """The prefill tokens in the middle of the tile that ends with these; as they are where no tile ends."""
    return tokens if tokens % TILE else max(tokens - TILE / 2, 0.0)


def beside_prompts(step: StepModel) -> StepModel:
    """The step model in which a sequence next to a prompt costs as much as a prefilled token."""
    row_s = float(step.step_s(2 * ROWS, 0, 0) - step.step_s(ROWS, 0, 0)) / ROWS
    return replace(step, per_prefill_sequence_s=row_s)


def mixed_error(
    kernels: Kernels,
    fitted: tuple[StepModel, Ranks | None],
    limits: tuple[int, int],
    longest: int,
    capacity: int,
    host_s: float,
) -> float:
    """Mean relative distance of the tables' mixed steps, the same on all ranks, from the fitted model's.

    `limits`: the step budget and the most sequences.
    """
    (step, ranks), (budget, max_seqs) = fitted, limits
    others = 0.0 if ranks is None else (ranks.count - 1) * ranks.shared_token_s
    errors = []
    length = min(512, longest // 4)
    context = 2 * length
    for prompts in _up_to(max(budget // length // 2, 1), start=1):
        for batch in _up_to(min(max_seqs, 128), start=8):
            prefill = prompts * length
            if batch * context + prefill <= capacity:
                seen_s = kernels.mixed_s(prompts, batch, length) + host_s
                sum_sq, of_tile = prompts * length**2, amid_tile(prefill)
                fitted_s = float(step.step_s(of_tile, batch, batch * context, sum_sq))
                errors.append(abs((fitted_s + others * prefill) / seen_s - 1))
    return float(np.mean(errors)) if errors else UNSEEN


def _up_to(most: int, start: int) -> Iterator[int]:
    value = start
    while value < most:
        yield value
        value *= 2
    yield most
