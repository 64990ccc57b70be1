"""A segment inside an emulated engine, and the token ids it produces.

The next token is a hash of all tokens before it. So a stream is repeatable, differs between prompts, and
continues unchanged on another engine, as greedy decoding does: a lost, repeated or swapped token changes
everything after it.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from dataplane.live.engine_api.kv_messages import Transfer
from dataplane.live.engine_api.messages import EngineRequest, Moment

END_SALT = 0x9E3779B9


@dataclass(frozen=True, slots=True)
class Noise:
    """The output of an emulated model: ids in [first, last), an end after `mean_output_tokens` on average."""

    first: int = 32
    last: int = 256
    mean_output_tokens: int = 256

    def token(self, state: int) -> int:
        """The token that follows a prefix with this state."""
        return self.first + state % (self.last - self.first)

    def continuation(self, prompt: Sequence[int], tokens: int) -> list[int]:
        """The tokens that follow a prompt: what a stream must be, moved, replayed or neither."""
        state, made = state_after(prompt), list[int]()
        for _ in range(tokens):
            made.append(self.token(state))
            state = state_after(made[-1:], state)
        return made

    def ends(self, state: int) -> bool:
        """Whether the output ends after a prefix with this state."""
        return (state ^ END_SALT) % self.mean_output_tokens == 0


def state_after(tokens: Sequence[int], state: int = 0) -> int:
    """The hash of a prefix, from the state before `tokens`."""
    return zlib.crc32(np.asarray(tokens, np.uint32).tobytes(), state)


@dataclass(slots=True, eq=False)
class Segment:
    """One request in the batch or in the queue. Counts are tokens; `blocks` are KV blocks it owns."""

    request: EngineRequest
    transfer: Transfer
    state: int
    tokens: int  # prompt and outputs so far
    computed: int = 0
    produced: int = 0
    blocks: int = 0
    cached: int = 0
    doomed: bool = False  # aborted while its KV was on the way
    events: list[Moment] = field(default_factory=list)

    @property
    def id(self) -> str:
        return str(self.request.request_id)

    @property
    def params(self) -> Any:
        """A `Sampling`, or vLLM's own."""
        return self.request.sampling_params

    @property
    def decodes(self) -> bool:
        """Whether its next step computes the one token it made last."""
        return self.produced > 0 and self.computed == self.tokens - 1

    @property
    def rank(self) -> tuple[int, float]:
        """Order in the queue: lower goes first."""
        return int(self.request.priority), float(self.request.arrival_time)
