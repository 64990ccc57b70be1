"""A fleet in which no request can move: requests are placed by targets, and each worker is alone of its type.

Heartbeats still bring the ledger up to date, and placement reads it. The rules that would decline every move
are left out. So are the loads that they compare with limits: no number is past a limit that is none.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from controlplane.placement.policies import BY_TARGETS, Policy
from controlplane.worker_type import name_in_role
from dataplane.simulated.beats import pass_beats
from dataplane.simulated.control_loop import ControlSettings
from dataplane.simulated.run import RunState, WorkerSpec

NO_LIMITS = np.full(3, np.nan)


def is_still(run: RunState, workers: Sequence[WorkerSpec]) -> bool:
    """Whether no request can move: each worker is alone of its type and role, and none comes or goes."""
    if not run.migrates or run.policy not in BY_TARGETS - {Policy.EXACT}:
        return False
    names = [name_in_role(spec.profile.type_name, spec.role) for spec in workers]
    stays = all(spec.ready_s <= 0 and not spec.fails_s and spec.drain_s is None for spec in workers)
    return stays and len(set(names)) == len(names)


def run_still(run: RunState) -> None:
    """Run to the end by heartbeats, as `control_loop.drive` does for a fleet whose requests move."""
    beat_s = ControlSettings().beat_s
    pass_beats(run.ledger, run.engines, run.cluster, run.rules, NO_LIMITS, beat_s, beat_s)
