"""The choice of a worker by a look at every one, by their numbers: what `assign` must agree with.

Compiled, so that benchmarks may time it too; for policies that rank workers by load, without prefix caches.
"""

from __future__ import annotations

import numpy as np

from controlplane.compiled import compiled
from controlplane.placement.baselines import serves
from controlplane.placement.constraints import SettingsRow, fits
from controlplane.placement.ledger import NONE, Ledger, view
from controlplane.placement.policies import CONSTRAINED
from controlplane.placement.ranking import load


@compiled
def scan(
    led: Ledger, policy: int, settings: SettingsRow, r: int, now_s: float, late: bool, phase_role: int
) -> tuple[int, int]:
    """The least loaded worker that may take request `r` (the lowest of equal ones), or NONE; and how many
    workers were asked whether they may.
    """
    best, best_load, asked = NONE, np.inf, 0
    for w in range(len(led.workers)):
        if not serves(led, w, phase_role):
            continue
        view(led, w, now_s)
        rank = load(led, policy, settings, w, r, 0, now_s)
        if rank < best_load:
            asked += 1
            if policy not in CONSTRAINED or fits(led, settings, w, r, 0, now_s, late):
                best, best_load = w, rank
    return best, asked
