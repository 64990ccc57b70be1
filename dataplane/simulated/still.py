"""A fleet in which no request can move: requests are placed by targets, and each worker is alone of its type.

Heartbeats still bring the ledger up to date, and placement reads it. The rules that would decline every move
are left out.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from controlplane.migration.loads import loads
from controlplane.migration.overload import ShedSettings
from controlplane.placement.policies import BY_TARGETS, Policy
from controlplane.worker_type import name_in_role
from dataplane.simulated.beats import limits_of, next_beat_s, pass_beats
from dataplane.simulated.control_loop import ControlSettings
from dataplane.simulated.run import RunState, WorkerSpec


def is_still(run: RunState, workers: Sequence[WorkerSpec]) -> bool:
    """Whether no request can move: each worker is alone of its type and role, and none comes or goes."""
    if not run.migrates or run.policy not in BY_TARGETS - {Policy.EXACT}:
        return False
    names = [name_in_role(spec.profile.type_name, spec.role) for spec in workers]
    stays = all(spec.ready_s <= 0 and not spec.fails_s and spec.drain_s is None for spec in workers)
    return stays and len(set(names)) == len(names)


def run_still(run: RunState) -> None:
    """Run to the end by heartbeats, as `control_loop.drive` does for a fleet whose requests move."""
    ledger, engines, cluster = run.ledger, run.engines, run.cluster
    limits, beat_s = limits_of(ShedSettings(headroom=run.settings.headroom)), ControlSettings().beat_s
    at_s, is_more = beat_s, True
    while is_more and not _is_over(run):
        at_s, is_more = pass_beats(ledger, engines, cluster, run.rules, limits, beat_s, at_s)
        loads(ledger)
        at_s = next_beat_s(ledger, engines, cluster, at_s, beat_s)


def _is_over(run: RunState) -> bool:
    """Whether too many have missed, or every request has finished."""
    if run.engines.total["misses"][0] > run.rules.max_misses:
        return True
    return len(run.arrived) == len(run.workload) and not np.isnan(run.engines.requests["finish_s"]).any()
