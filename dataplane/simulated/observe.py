"""The simulated fleet as rules see it: workers and requests by the numbers of their rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from controlplane import port
from controlplane.migration.loads import loads
from controlplane.perfmodel.profile import Profile
from controlplane.placement.ledger import DRAINING, OFF, ROLES, Ledger
from controlplane.placement.queue import REFUSALS, Queue, on_time
from controlplane.port import LedgerWorker, held_request
from controlplane.snapshot import DRAINING as DRAINS
from controlplane.snapshot import SERVING as SERVES
from controlplane.snapshot import STARTING as STARTS
from controlplane.snapshot import HeldRequest, Snapshot
from controlplane.types import RequestId, WorkerId
from controlplane.worker_type import name_in_role

_STATES = {OFF: STARTS, DRAINING: DRAINS}


def held_requests(ledger: Ledger, queue: Queue, now_s: float) -> tuple[HeldRequest, ...]:
    """The first in the cluster's line that may still be on time."""
    line, left_s = np.empty(REFUSALS, np.int64), np.empty(REFUSALS)
    n = on_time(ledger, queue, now_s, line, left_s)
    return tuple(held_request(ledger, *at) for at in zip(line[:n].tolist(), left_s[:n].tolist(), strict=True))


def observe(
    ledger: Ledger,
    profiles: Sequence[Profile],
    now_s: float,
    moving: frozenset[int] = frozenset(),
    busy: frozenset[int] = frozenset(),
    states: Sequence[str | None] | None = None,
) -> Snapshot:
    """The fleet at `now_s`, the ledger brought up to it before; kinds are those of the variants' profiles.

    `states`: of an elastic fleet's workers, None for those that are not there.
    """
    status, variant = ledger.workers["status"].tolist(), ledger.workers["variant"].tolist()
    role, kinds = ledger.workers["role"].tolist(), [p.type_name for p in profiles]
    places = []
    for w, v in enumerate(variant):
        state = _STATES.get(status[w], SERVES) if states is None else states[w]
        if state is None:
            continue
        profile = profiles[v]
        places.append(
            LedgerWorker(
                w,
                WorkerId(str(w)),
                state,
                name_in_role(kinds[v], ROLES[role[w]]),
                profile.step,
                profile.kv.capacity_tokens if status[w] != OFF else 0,
                profile.engine.max_seqs,
                float(profile.kv.bytes_per_token),
            )
        )
    return replace(
        port.observe(ledger, loads(ledger), places, now_s),
        moving=frozenset(RequestId(str(r)) for r in moving),
        busy=frozenset(WorkerId(str(w)) for w in busy),
    )
