"""Now, at the last chance, in the end regardless, or later: the whole answer to where a request goes.

Both planes ask `decide` when a request arrives and again for each that is held, every `retry_s`.
"""

from __future__ import annotations

import numpy as np

from controlplane.compiled import compiled
from controlplane.perfmodel.coefficients import (
    CHUNKED,
    MAX_BATCHED,
    MODE,
    PER_PREFILL,
    PREFILL_STEP,
    decode_base_s,
)
from controlplane.placement.constraints import Knobs, prefill_lasts_s, prefill_steps
from controlplane.placement.ledger import NONE, Floats, Ledger
from controlplane.placement.policies import CONSTRAINED, JSQ, assign, last_chance

PATIENCE = 4.0  # TTFT targets that a request is held for at most, unless a run says otherwise


@compiled
def decide(
    led: Ledger,
    policy: int,
    knobs: Knobs,
    r: int,
    now_s: float,
    retry_s: float,
    patience: float,
    phase_role: int,
    draw: Floats,
) -> int:
    """Return the worker for request `r`, or NONE to hold it until the next try.

    The policy's choice; without one, for a request whose TTFT a busy worker could not meet any more by the
    next try, the worker where it does least harm; and after `patience` of its TTFT targets the least loaded
    worker, whatever it breaks.
    """
    late = not np.isnan(led.requests[r].first_s) or hopeless(led, r, now_s, False)
    w = assign(led, policy, knobs, r, now_s, late, phase_role, draw)
    if w == NONE and not late and policy in CONSTRAINED and hopeless(led, r, now_s + retry_s, True):
        w = last_chance(led, knobs, r, now_s, phase_role)
    if w == NONE and now_s - led.requests[r].arrival_s >= patience * led.requests[r].ttft_s:
        w = assign(led, JSQ, knobs, r, now_s, late, phase_role, draw)
    return w


@compiled
def hopeless(led: Ledger, r: int, now_s: float, busy: bool) -> bool:
    """Whether not even an idle worker of the fastest variant could still meet a request's TTFT.

    `busy`: one as full as (b) lets it be instead, a step in progress. Who waits until only an idle worker
    would do finds the few whose step happens to end just then, and no choice of where to do least harm.
    """
    tokens = led.requests[r].prompt + led.requests[r].key
    due_s = led.requests[r].arrival_s + led.requests[r].ttft_s
    for v in range(led.coefficients.shape[0]):
        k = led.coefficients[v]
        lasts_s = prefill_lasts_s(k, tokens, tokens, 0, 0)
        if busy:
            tpot_s = led.requests[r].tpot_s
            lasts_s += tpot_s
            if k[MODE] == CHUNKED:  # the step in progress has chunks of others, its own steps decode too
                lasts_s += k[PREFILL_STEP] + k[PER_PREFILL] * k[MAX_BATCHED]
                lasts_s += prefill_steps(k, tokens, 0) * max(tpot_s - decode_base_s(k, 0.0), 0.0)
        if now_s + lasts_s <= due_s:
            return False
    return True
