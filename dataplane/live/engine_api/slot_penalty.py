"""Penalties that a request carries in a slot of vLLM's second model runner, charged on rows of logits.

A step launches these kernels and goes on. Nothing here waits for the device: a wait would end the overlap of
two steps. So tokens are looked up in a mask of the vocabulary. A search (`isin`, `unique`, `nonzero`) would
wait for what it has found.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class SlotPenalty:
    """What a request carries. `tokens`, `due` (frequency times count): shape [distinct earlier tokens]."""

    tokens: torch.Tensor
    due: torch.Tensor
    presence: float


def slot_penalty(
    prior_tokens: list[int], presence: float, frequency: float, device: torch.device | str
) -> SlotPenalty:
    """The penalty of a request's earlier tokens, on its device."""
    counts = Counter(prior_tokens)
    tokens = torch.tensor(list(counts))
    due = torch.tensor([frequency * n for n in counts.values()], dtype=torch.float32)
    if torch.device(device).type == "cuda":
        tokens, due = tokens.pin_memory(), due.pin_memory()  # else the copy waits for the device
    return SlotPenalty(tokens.to(device, non_blocking=True), due.to(device, non_blocking=True), presence)


def charge_row(row: torch.Tensor, carried: SlotPenalty, new: torch.Tensor) -> None:
    """Charge a row of logits, shape [vocabulary]. For its `new` tokens vLLM charges presence itself."""
    mask = torch.zeros_like(row, dtype=torch.bool).index_fill_(0, _in_range(new, len(row)), True)
    seen = mask.index_select(0, carried.tokens)
    row.index_add_(0, carried.tokens, _due(carried, seen, row.dtype))


def charge_drafted(
    logits: torch.Tensor,
    is_own: torch.Tensor,
    carried: SlotPenalty,
    history: torch.Tensor,
    prompt_tokens: int,
    places: tuple[torch.Tensor, torch.Tensor],
) -> None:
    """Charge the rows of a request with drafts: a row has the drafts before it as outputs.

    `is_own`: which rows are the request's, in the order of their drafts. `history`: its tokens from the
    prompt on, with room for drafts. `places`: of each row the position, and the token fed to the model there.
    """
    pos, fed = places
    first = torch.where(is_own, pos, pos.max()).min()
    is_made = torch.arange(len(history), device=logits.device) + prompt_tokens <= first
    made = torch.zeros(logits.shape[-1], dtype=torch.int32, device=logits.device)
    made.scatter_add_(0, _in_range(history, len(made)), is_made.int())
    is_draft = is_own & (pos > first)
    drafted = (fed[:, None] == carried.tokens[None, :]) & is_draft[:, None]
    seen = made.index_select(0, carried.tokens).bool()[None, :] | (drafted.cumsum(0) > 0)
    logits.index_add_(1, carried.tokens, _due(carried, seen, logits.dtype) * is_own[:, None])


def _in_range(tokens: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """Places without a token yet may hold anything, and an index out of range ends the engine."""
    return tokens.long().clamp(0, vocabulary - 1)


def _due(carried: SlotPenalty, seen: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return -(carried.due + carried.presence * (~seen).to(carried.due.dtype)).to(dtype)
