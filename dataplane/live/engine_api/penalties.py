"""Presence and frequency penalties that go on counting tokens made before a move.

vLLM computes, for a token t with c(t) of it among the outputs (OpenAI's definition):

    logit(t) ← rep(logit(t)) - frequency · c(t) - presence · [c(t) > 0]

where rep is the repetition penalty of tokens seen in prompt or output. In a continuation the earlier outputs
are prompt; rep still sees them, c does not. This logits processor runs before vLLM's penalties and adds what
the earlier ones are due, undoing rep where it will be applied on top.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from dataplane.live.engine_api.link import PRIOR_TOKENS
from dataplane.live.engine_api.vllm_surface import AdapterLogitsProcessor, SamplingParams


class PriorPenalty:
    """The penalty of one request's earlier tokens, applied to its row of logits, shape [vocabulary]."""

    def __init__(self, prior_tokens: list[int], presence: float, frequency: float, repetition: float) -> None:
        counts = Counter(prior_tokens)
        self._tokens = torch.tensor(list(counts))
        self._frequency = torch.tensor([frequency * n for n in counts.values()])
        self._index = {token: at for at, token in enumerate(counts)}
        self._presence = presence
        self._repetition = repetition

    def __call__(self, output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        due = self._frequency + self._presence
        if self._presence:
            # vLLM charges presence itself for tokens it sees among the new outputs.
            again = [self._index[t] for t in set(output_ids) if t in self._index]
            due = due.clone()
            due[again] -= self._presence
        tokens = self._tokens.to(logits.device)
        due = due.to(logits)
        rows = logits[tokens]
        if self._repetition == 1.0:
            logits[tokens] = rows - due
        else:
            scale = self._repetition
            penalised = torch.where(rows > 0, rows / scale, rows * scale) - due
            logits[tokens] = torch.where(penalised > 0, penalised * scale, penalised / scale)
        return logits


class CarriedPenalties(AdapterLogitsProcessor):  # type: ignore[misc]
    """vLLM's public per-request logits processor hook around `PriorPenalty`."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Accept all: the tokens come from the gateway, never from a client."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> PriorPenalty | None:
        prior = (params.extra_args or {}).get(PRIOR_TOKENS)
        if not prior or not (params.presence_penalty or params.frequency_penalty):
            return None
        return PriorPenalty(
            prior, params.presence_penalty, params.frequency_penalty, params.repetition_penalty
        )
