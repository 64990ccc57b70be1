"""Algorithm 2's errors of a simulated run, kept from what the ledger shows at each heartbeat.

Of every request that decodes: the step of its worker at which, by its first prediction, it should end. One
that is done before leaves that end as work its worker no longer has; one that goes on beyond it adds the rest
now expected of it (placement.rebalance). Columns over all requests, so that a look costs little.
"""

from __future__ import annotations

import numpy as np

from controlplane.placement.ledger import DECODING, DONE, Ledger
from controlplane.placement.rebalance import Error
from controlplane.types import WorkerId


class SurpriseBook:
    """What was planned for each request on the worker it decodes on, and what came of it."""

    def __init__(self, led: Ledger) -> None:
        n = len(led.requests)
        self._led = led
        self._first = led.requests["predicted"].copy()  # the ledger predicts anew in place
        self._worker = np.full(n, -1, np.int64)  # where it was seen decoding
        self._end = np.zeros(n, np.int64)
        self._settled = np.zeros(n, bool)
        self._begun = 0  # all before are settled
        self._early: list[list[int]] = [[] for _ in range(len(led.workers))]

    def look(self) -> dict[WorkerId, Error]:
        """The errors now, the ledger being up to date; empty where nothing is off."""
        led, n = self._led, len(self._led.requests)
        while self._begun < n and self._settled[self._begun]:
            self._begun += 1
        rows = np.flatnonzero(~self._settled[self._begun :] & (self._worker[self._begun :] >= 0))
        rows += self._begun
        phase, worker = led.requests["phase"], led.requests["worker"]
        steps = led.workers["step"]
        done = rows[phase[rows] == DONE]
        for r in done.tolist():
            w = int(self._worker[r])
            if self._end[r] > steps[w]:
                self._early[w].append(int(self._end[r]))
        self._settled[done] = True
        # A request that moved, or was preempted, is planned anew where it decodes next.
        left = rows[(phase[rows] == DECODING) & (worker[rows] != self._worker[rows])]
        self._worker[left] = -1
        decoding = np.flatnonzero(phase[self._begun :] == DECODING) + self._begun
        here = worker[decoding]
        made = led.requests["key"][decoding] + steps[here]
        new = self._worker[decoding] < 0
        fresh = decoding[new]
        self._worker[fresh] = here[new]
        self._end[fresh] = steps[here[new]] + np.maximum(self._first[fresh] - made[new], 1)
        rest = led.requests["ends"][decoding] - steps[here]
        # Once past its new end, too, a request weighs nothing until it is predicted anew.
        late = (made >= self._first[decoding]) & (rest > 0)
        tokens, sequences = np.zeros(len(steps), np.int64), np.zeros(len(steps), np.int64)
        np.add.at(tokens, here[late], rest[late])
        np.add.at(sequences, here[late], 1)
        errors = {}
        for w, early in enumerate(self._early):
            self._early[w] = early = [end for end in early if end > steps[w]]
            tokens[w] -= sum(end - int(steps[w]) for end in early)
            sequences[w] -= len(early)
            errors[WorkerId(str(w))] = Error(int(tokens[w]), int(sequences[w]))
        return errors if any(e.sequences or e.output_tokens for e in errors.values()) else {}
