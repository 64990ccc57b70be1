"""A profile as one row of numbers for compiled code, and the step times computed from that row.

The row is laid out once, here: the terms of `step.py` in their order, hinges, the prefill terms. Then the
engine, the frontend, windows, ranks, the steps planned ahead, and the groups of windows.
Models outside the layout (more hinges than it has places for) are refused.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from controlplane.compiled import compiled
from controlplane.errors import BadInput
from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.step import PREFILL_TERMS, STEP_TERMS, Hinge, coefficients
from controlplane.types import EngineMode

SEQ_HINGE = len(STEP_TERMS)  # two of (start, per unit)
BASE, PER_PREFILL, PER_SEQUENCE, PER_CONTEXT, PER_SUM_SQ, PREFILL_STEP, BESIDE = range(SEQ_HINGE)
PREFILL_HINGE = SEQ_HINGE + 4  # two
EXPERTS = PREFILL_HINGE + 4  # one
PRE_BASE = EXPERTS + 2
PRE_HINGE = PRE_BASE + len(PREFILL_TERMS)  # two
PRE_TOKEN, PRE_SUM_SQ = range(PRE_BASE + 1, PRE_HINGE)
KV_BLOCKS, BLOCK_TOKENS, MAX_BATCHED, MAX_SEQS, MODE = range(PRE_HINGE + 4, PRE_HINGE + 9)
PER_REQUEST, PER_PROMPT_TOKEN = MODE + 1, MODE + 2
WINDOW_BLOCKS, WINDOW_TOKENS = PER_PROMPT_TOKEN + 1, PER_PROMPT_TOKEN + 2
SHARED_TOKEN = WINDOW_TOKENS + 1  # of a prefilled token's seconds, those that ranks add up
AHEAD = SHARED_TOKEN + 1  # steps that are planned before a request that comes can join one
WINDOW_GROUPS, WINDOW_IS_CHUNK = AHEAD + 1, AHEAD + 2
WIDTH = WINDOW_IS_CHUNK + 1

CHUNKED, PREFILL_FIRST = 0.0, 1.0
_MODES = {
    EngineMode.CHUNKED: CHUNKED,
    EngineMode.PREFILL_FIRST: PREFILL_FIRST,
    EngineMode.SPLIT: CHUNKED,  # its prefill workers are engines that chunk, as live ones are
}


def coefficient_row(profile: Profile) -> NDArray[np.float64]:
    """The profile's numbers as float64[WIDTH]; raises BadInput if it has more hinges than places."""
    row = np.zeros(WIDTH)
    step = profile.step
    row[BASE:SEQ_HINGE] = list(coefficients(step).values())
    _place(row, SEQ_HINGE, [h for h in step.hinges if h.of == "sequences"], profile)
    _place(row, PREFILL_HINGE, [h for h in step.hinges if h.of == "prefill_tokens"], profile)
    _place(row, EXPERTS, [h for h in step.hinges if h.of == "experts"], profile, 1)
    if profile.prefill is not None:
        row[PRE_BASE:PRE_HINGE] = list(coefficients(profile.prefill).values())
        _place(row, PRE_HINGE, list(profile.prefill.hinges), profile)
    row[KV_BLOCKS] = profile.kv.capacity_tokens // profile.kv.block_tokens
    row[BLOCK_TOKENS] = profile.kv.block_tokens
    row[MAX_BATCHED] = profile.engine.max_batched_tokens
    row[MAX_SEQS] = profile.engine.max_seqs
    row[MODE] = _MODES[profile.engine.mode]
    row[PER_REQUEST] = profile.frontend.per_request_s
    row[PER_PROMPT_TOKEN] = profile.frontend.per_prompt_token_s
    row[WINDOW_BLOCKS] = -(-profile.kv.request_tokens // profile.kv.block_tokens)
    row[WINDOW_TOKENS] = max(profile.kv.window_tokens, 1)
    if profile.ranks is not None:
        row[SHARED_TOKEN] = profile.ranks.shared_token_s
    row[AHEAD] = profile.engine.steps_ahead
    row[WINDOW_GROUPS] = profile.kv.window_groups
    row[WINDOW_IS_CHUNK] = float(profile.kv.window_is_chunk)
    return row


def _place(row: NDArray[np.float64], at: int, hinges: list[Hinge], profile: Profile, most: int = 2) -> None:
    if len(hinges) > most:
        raise BadInput(f"{profile.label}: hinges: at most {most} of {hinges[0].of}, got {len(hinges)}")
    for i in range(most):
        row[at + 2 * i] = hinges[i].start if i < len(hinges) else math.inf
        row[at + 2 * i + 1] = hinges[i].per_unit_s if i < len(hinges) else 0.0


@compiled
def decode_base_s(k: NDArray[np.float64], sequences: float) -> float:
    """Seconds of a decode step without its context term."""
    t = k[BASE] + k[PER_SEQUENCE] * sequences
    for i in range(SEQ_HINGE, SEQ_HINGE + 4, 2):
        if sequences > k[i]:
            t += k[i + 1] * (sequences - k[i])
    return t + experts_s(k, sequences)


@compiled
def decode_s(k: NDArray[np.float64], sequences: float, context: float) -> float:
    """Seconds of a decode step."""
    return decode_base_s(k, sequences) + k[PER_CONTEXT] * context


@compiled
def prefilling_s(k: NDArray[np.float64], sequences: float) -> float:
    """Seconds that a step of `sequences` takes longer for prefilling at all."""
    return k[PREFILL_STEP] + k[BESIDE] * sequences


@compiled
def experts_s(k: NDArray[np.float64], tokens: float) -> float:
    """Seconds to read the experts that `tokens` tokens touch."""
    if k[EXPERTS + 1] == 0.0:
        return 0.0
    return -k[EXPERTS + 1] * k[EXPERTS] * math.expm1(-tokens / k[EXPERTS])


@compiled
def mixed_s(k: NDArray[np.float64], prefill: float, sequences: float, context: float, sum_sq: float) -> float:
    """Seconds of a step with prefill tokens and decoding sequences."""
    t = decode_s(k, sequences, context)
    t += k[PER_PREFILL] * prefill + k[PER_SUM_SQ] * sum_sq
    if prefill > 0:
        t += prefilling_s(k, sequences)
    return t + prefill_hinges_s(k, prefill, sequences)


@compiled
def prefill_hinges_s(k: NDArray[np.float64], prefill: float, sequences: float) -> float:
    """Seconds that prefill adds by its hinges, and by experts that the `sequences` do not touch."""
    t = experts_s(k, sequences + prefill) - experts_s(k, sequences)
    for i in range(PREFILL_HINGE, PREFILL_HINGE + 4, 2):
        if prefill > k[i]:
            t += k[i + 1] * (prefill - k[i])
    return t


@compiled
def prefill_s(k: NDArray[np.float64], tokens: float, sum_sq: float) -> float:
    """Seconds of a step that carries prefill alone (Eq 2)."""
    t = k[PRE_BASE] + k[PRE_TOKEN] * tokens + k[PRE_SUM_SQ] * sum_sq
    for i in range(PRE_HINGE, PRE_HINGE + 4, 2):
        if tokens > k[i]:
            t += k[i + 1] * (tokens - k[i])
    return t


@compiled
def window_blocks(k: NDArray[np.float64], tokens: int) -> int:
    """KV blocks that a request of `tokens` tokens holds beyond those of its tokens (`profile.KvModel`).

    0 at a worker without a profile: only its room is known.
    """
    window = int(k[WINDOW_TOKENS])
    if window == 0:
        return 0
    return (int(k[WINDOW_BLOCKS]) * min(tokens, window) + window - 1) // window


@compiled
def window_start(k: NDArray[np.float64], computed: int) -> int:
    """Blocks of a request that no window reaches once `computed` tokens are computed."""
    window, block = int(k[WINDOW_TOKENS]), int(k[BLOCK_TOKENS])
    if k[WINDOW_IS_CHUNK] > 0:
        return computed // window * window // block
    return max(computed - window + 1, 0) // block


@compiled
def most_window_blocks(k: NDArray[np.float64]) -> int:
    """Blocks that a group of windows holds of a request at most: its window, and the steps under way."""
    tokens = int(k[WINDOW_TOKENS]) + int(k[MAX_BATCHED]) * (1 + int(k[AHEAD]))
    block = int(k[BLOCK_TOKENS])
    if k[WINDOW_IS_CHUNK] > 0:
        return (tokens + block - 1) // block
    return (tokens - 1 + block - 1) // block + 1


@compiled
def frontend_s(k: NDArray[np.float64], prompt: float) -> float:
    """Seconds of a first token outside its steps (`profile.Frontend`)."""
    return k[PER_REQUEST] + k[PER_PROMPT_TOKEN] * prompt


@compiled
def ahead_s(k: NDArray[np.float64], decoding: float, context: float) -> float:
    """Seconds that a request waits for the steps planned before it, where `decoding` sequences decode."""
    if k[AHEAD] == 0.0 or decoding == 0:
        return 0.0
    return k[AHEAD] * decode_s(k, decoding, context)


@compiled
def run_s(first_s: float, growth_s: float, steps: float) -> float:
    """Seconds of `steps` decode steps, the first of `first_s` and each `growth_s` longer than the last."""
    return steps * first_s + growth_s * (steps * (steps - 1.0) * 0.5)


@compiled
def steps_within(first_s: float, growth_s: float, elapsed_s: float) -> int:
    """The most steps of such a run that end within `elapsed_s` (the root of the quadratic, made exact)."""
    if elapsed_s < first_s:
        return 0
    half = 0.5 * growth_s
    lead = first_s - half
    # 2e / (lead + sqrt(...)) rather than the textbook form: no cancellation as growth goes to 0.
    n = int(2.0 * elapsed_s / (lead + math.sqrt(lead * lead + 4.0 * half * elapsed_s)))
    while run_s(first_s, growth_s, n + 1) <= elapsed_s:
        n += 1
    while n > 0 and run_s(first_s, growth_s, n) > elapsed_s:
        n -= 1
    return n
