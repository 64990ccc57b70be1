"""Engines in lockstep that make one worker: attention in data parallel, or the stages of a pipeline.

**Data** (vLLM's `--data-parallel-size`, mixtures of experts alone): each of R ranks has its own sequences, KV
and limits. They share the experts, so that a step begins and ends for all at once. With CUDA graphs each runs
as many tokens as the fullest one (vLLM 0.32, `coordinate_batch_across_dp`). The profile is that of a rank
whose others decode as it does and prefill nothing. A prefilled token of any rank passes through the experts
of all. `shared_token_s` of its time is added up over the ranks, the rest is each rank's own:

    t = max over ranks (t_r - s_r) + Σ s_r          s_r = shared_token_s · P_r

**Pipeline** (`--pipeline-parallel-size`): a batch passes R stages one after another, R batches are under way,
and a request is in one of them. t_r is the time of a batch through all stages. None overtakes another, so in
a cycle of R batches and R stages all take as long as the slowest: t = max t_r. One scheduler gives out one
KV. Each batch is taken to have its share of it, and of the sequences.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from controlplane.errors import BadInput
from controlplane.types import ABOVE_0

RanksOf = Literal["data", "pipeline"]
SHORT = {"data": "DP", "pipeline": "PP"}
FLAG = {"data": "--data-parallel-size", "pipeline": "--pipeline-parallel-size"}


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of one worker, or its batches under way: `count` of them."""

    of: RanksOf
    count: int = field(metadata=ABOVE_0)
    shared_token_s: float = 0.0

    def __post_init__(self) -> None:
        if self.of not in SHORT or not 2 <= self.count <= 1024:
            raise BadInput(f"ranks: expected 2 to 1024 of data or pipeline, got {self.count} of {self.of}")
        if not 0 <= self.shared_token_s < math.inf or (self.shared_token_s and self.of == "pipeline"):
            got = f"got {self.shared_token_s}"
            raise BadInput(f"ranks: shared_token_s: must be at least 0, and 0 of a pipeline, {got}")

    @property
    def name(self) -> str:
        """Their part of the name of a worker type: DP8, PP2."""
        return f"{SHORT[self.of]}{self.count}"

    @property
    def flag(self) -> str:
        """The flag that vLLM is started with."""
        return f"{FLAG[self.of]} {self.count}"
