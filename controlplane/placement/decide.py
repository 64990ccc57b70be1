"""Now, at the last chance, in the end regardless, or later: the whole answer to where a request goes.

Both planes ask `decide` when a request arrives and again for each that is held, every `retry_s`.
"""

from __future__ import annotations

import numpy as np

from controlplane.compiled import compiled
from controlplane.placement.assign import CONSTRAINED, JSQ, assign, last_chance
from controlplane.placement.constraints import Knobs, prefill_lasts_s
from controlplane.placement.ledger import NONE, Floats, Ledger


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

    The policy's choice; without one, for a request whose TTFT would be lost by the next try, the worker where
    it does least harm; and after `patience` of its TTFT targets the least loaded worker, whatever it breaks.
    """
    late = not np.isnan(led.requests[r].first_s) or hopeless(led, r, now_s)
    w = assign(led, policy, knobs, r, now_s, late, phase_role, draw)
    if w == NONE and not late and policy in CONSTRAINED and hopeless(led, r, now_s + retry_s):
        w = last_chance(led, knobs, r, now_s, phase_role)
    if w == NONE and now_s - led.requests[r].arrival_s >= patience * led.requests[r].ttft_s:
        w = assign(led, JSQ, knobs, r, now_s, late, phase_role, draw)
    return w


@compiled
def hopeless(led: Ledger, r: int, now_s: float) -> bool:
    """Whether not even an idle worker of the fastest variant could still meet a request's TTFT."""
    tokens = led.requests[r].prompt + led.requests[r].key
    due_s = led.requests[r].arrival_s + led.requests[r].ttft_s
    for v in range(led.coefficients.shape[0]):
        if now_s + prefill_lasts_s(led.coefficients[v], tokens, tokens, 0, 0) <= due_s:
            return False
    return True
