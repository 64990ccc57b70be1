"""The placement decision of one request: a worker now, at the last chance, in the end, or later.

Both planes call `decide` when a request arrives and again for each that is held, every `retry_s`; where
prefill and decode have workers of their own, `decode_worker` once the prefill is done.
"""

from __future__ import annotations

import numpy as np

from controlplane.compiled import compiled
from controlplane.perfmodel.coefficients import MAX_SEQS
from controlplane.placement.constraints import Knobs, hopeless
from controlplane.placement.ledger import DECODE_ONLY, NONE, Floats, Ledger
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
    worker with a seat, whatever it breaks.
    """
    late = not np.isnan(led.requests[r].first_s) or hopeless(led, r, now_s, False)
    w = assign(led, policy, knobs, r, now_s, late, phase_role, draw)
    if w == NONE and not late and policy in CONSTRAINED and hopeless(led, r, now_s + retry_s, True):
        w = last_chance(led, knobs, r, now_s, phase_role)
    if w == NONE and now_s - led.requests[r].arrival_s >= patience * led.requests[r].ttft_s:
        w = assign(led, JSQ, knobs, r, now_s, late, phase_role, draw)
        # Past its seats a worker only queues, where none may overtake; here another worker may take it.
        if w != NONE and not has_seat(led, w):
            w = NONE
    return w


@compiled
def decode_worker(led: Ledger, policy: int, knobs: Knobs, r: int, now_s: float, draw: Floats) -> int:
    """The decode worker for a request whose prefill is done: the policy's choice, else the least loaded."""
    w = assign(led, policy, knobs, r, now_s, True, DECODE_ONLY, draw)
    return w if w != NONE else assign(led, JSQ, knobs, r, now_s, True, DECODE_ONLY, draw)


@compiled
def has_seat(led: Ledger, w: int) -> bool:
    """Whether a worker's batch has room for one more than it has been given."""
    return (
        led.workers[w].decoding + led.workers[w].queued < led.coefficients[led.workers[w].variant][MAX_SEQS]
    )
