"""Whether the KV of a simulated engine has room: for how many steps, and who leaves when it has not."""

from __future__ import annotations

from controlplane.compiled import compiled
from controlplane.placement.ledger import (
    DECODING,
    QUEUED,
    Ledger,
    enqueue,
    generated,
    stop_decoding,
)
from dataplane.simulated.engine_records import (
    Engines,
)


@compiled
def blocks_of(tokens: int, block: int) -> int:
    """KV blocks that hold `tokens`."""
    return (tokens + block - 1) // block


@compiled
def blocks_after(led: Ledger, w: int, steps: int, block: int) -> int:
    """KV blocks the admitted requests hold once each has `steps` more tokens."""
    used = 0
    for i in range(led.workers[w].running_n):
        r = led.running[w, i]
        used += blocks_of(led.requests[r].prompt + generated(led, r) + steps, block)
    return used


@compiled
def steps_with_room(led: Ledger, w: int, steps: int, block: int, capacity: int) -> int:
    """How many of `steps` decode steps KV has room for; the first is known to fit."""
    count = led.workers[w].running_n
    if led.workers[w].context + count * (steps + block - 1) <= capacity * block:
        return steps  # even with every last block nearly empty
    low, high = 1, steps
    while low < high:
        middle = (low + high + 1) // 2
        if blocks_after(led, w, middle, block) <= capacity:
            low = middle
        else:
            high = middle - 1
    return low


@compiled
def drop_running(led: Ledger, w: int, i: int) -> int:
    """Take the i-th admitted request off a worker's list and return it; the order of the others stays."""
    r = led.running[w, i]
    for j in range(i, led.workers[w].running_n - 1):
        led.running[w, j] = led.running[w, j + 1]
    led.workers[w].running_n -= 1
    return r


@compiled
def preempt_newest(led: Ledger, eng: Engines, w: int) -> None:
    """Free the KV of the newest admitted request; it waits at the head, to be prefilled anew."""
    r = drop_running(led, w, led.workers[w].running_n - 1)
    if led.requests[r].phase == DECODING:
        stop_decoding(led, w, r, QUEUED)
    else:  # part of its prefill is lost; it had been counted as queued all along
        led.workers[w].queued -= 1
        led.workers[w].queued_context -= led.requests[r].prompt + led.requests[r].key
        led.workers[w].queued_tokens -= (
            led.requests[r].prompt + led.requests[r].key - eng.requests[r].computed
        )
    eng.requests[r].computed = 0
    eng.requests[r].preemptions += 1
    enqueue(led, w, r, True)
