"""Presence and frequency penalties that go on counting tokens made before a move.

vLLM computes, for a token t with c(t) of it among the outputs (OpenAI's definition):

    logit(t) ← rep(logit(t)) - frequency · c(t) - presence · [c(t) > 0]

where rep is the repetition penalty of tokens seen in prompt or output. In a continuation the earlier outputs
are prompt; rep still sees them, c does not. A logits processor adds what the earlier ones are due. The first
model runner of vLLM calls it before its own penalties, so it undoes rep where rep will be applied on top. The
second one, which GPUs use, calls it after them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

from dataplane.live.engine_api.link import PRIOR_TOKENS
from dataplane.live.engine_api.slot_penalty import SlotPenalty, charge_drafted, charge_row, slot_penalty
from dataplane.live.engine_api.vllm_surface import AdapterLogitsProcessor, SamplingParams, SlotLogitsProcessor


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


def _carries_penalty(params: SamplingParams) -> list[int]:
    """The earlier tokens of a request that has a penalty to go on with, else none."""
    prior: list[int] = (params.extra_args or {}).get(PRIOR_TOKENS) or []
    return prior if params.presence_penalty or params.frequency_penalty else []


class CarriedPenalties(AdapterLogitsProcessor):  # type: ignore[misc]
    """The form of vLLM's first model runner: its per-request hook around `PriorPenalty`."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Accept all: the tokens come from the gateway, never from a client."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> PriorPenalty | None:
        prior = _carries_penalty(params)
        if not prior:
            return None
        return PriorPenalty(
            prior, params.presence_penalty, params.frequency_penalty, params.repetition_penalty
        )


class SlotCarriedPenalties(SlotLogitsProcessor):  # type: ignore[misc]
    """The form of vLLM's second model runner: one object for all requests, by their slots in the batch."""

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        self._states = req_states
        self._slots: dict[int, SlotPenalty] = {}

    def add_request(self, req_idx: int, sampling_params: SamplingParams) -> bool:
        """Take what a request carries, in place of what its slot held; False where that is nothing."""
        self._slots.pop(req_idx, None)
        prior = _carries_penalty(sampling_params)
        if not prior:
            return False
        presence, frequency = sampling_params.presence_penalty, sampling_params.frequency_penalty
        self._slots[req_idx] = slot_penalty(prior, presence, frequency, self._states.device)
        return True

    def apply(self, logits: torch.Tensor, ctx: Any) -> torch.Tensor:
        """Charge the rows, shape [rows, vocabulary], of requests that carry penalties."""
        is_row_a_request = len(ctx.expanded_idx_mapping) == len(ctx.idx_mapping_np)
        for at, slot in enumerate(map(int, ctx.idx_mapping_np)):
            carried = self._slots.get(slot)
            if carried is None:
                continue
            prompt_tokens = int(self._states.prompt_len.np[slot])
            length = int(ctx.seq_lens_upper_bound_np[at])  # known on the host, and exact without drafts
            history = self._states.all_token_ids.gpu[slot, prompt_tokens:length]
            if is_row_a_request:
                charge_row(logits[at], carried, history)
            else:
                is_own = ctx.expanded_idx_mapping == slot
                charge_drafted(logits, is_own, carried, history, prompt_tokens, (ctx.pos, ctx.input_ids))
        return logits


def penalties_of(uses_second_runner: bool) -> str:
    """The class that the model runner in force takes, as `logits_processors` names it."""
    taken = SlotCarriedPenalties if uses_second_runner else CarriedPenalties
    return f"{taken.__module__}:{taken.__name__}"
