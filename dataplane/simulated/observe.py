"""The simulated fleet's snapshot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from controlplane.migration.loads import Listed, load_of, loads
from controlplane.perfmodel.profile import Profile
from controlplane.placement.ledger import DECODING, DONE, DRAINING, OFF, ROLES, Ledger
from controlplane.placement.queue import REFUSALS, Queue, on_time
from controlplane.placement.rebalance import Decoding, DeviationTracker, Error
from controlplane.snapshot import DRAINING as DRAINS
from controlplane.snapshot import SERVING as SERVES
from controlplane.snapshot import STARTING as STARTS
from controlplane.snapshot import HeldRequest, RunningRequest, Snapshot, WorkerLoad
from controlplane.types import RequestId, WorkerId
from controlplane.worker_type import name_in_role

_STATES = {OFF: STARTS, DRAINING: DRAINS}


def deviations(tracker: DeviationTracker, led: Ledger) -> dict[WorkerId, Error]:
    """Algorithm 2's errors now, the ledger and its predictions being up to date (`observe` renews them)."""
    running_n, steps = led.workers["running_n"], led.workers["step"]
    rows = led.running[np.arange(led.running.shape[1]) < running_n[:, None]]
    worker = np.repeat(np.arange(len(running_n)), running_n)
    decodes = led.requests["phase"][rows] == DECODING
    rows, worker = rows[decodes], worker[decodes]
    made = led.requests["key"][rows] + steps[worker]
    return tracker.look(
        {WorkerId(str(w)): step for w, step in enumerate(steps.tolist())},
        Decoding(rows, worker, made, led.requests["predicted"][rows]),
        lambda gone: led.requests["phase"][gone] == DONE,
    )


def held_requests(led: Ledger, queue: Queue, now_s: float) -> tuple[HeldRequest, ...]:
    """The first in the cluster's line that may still be on time."""
    line, left_s = np.empty(REFUSALS, np.int64), np.empty(REFUSALS)
    n = on_time(led, queue, now_s, line, left_s)
    held = []
    for r, left in zip(line[:n].tolist(), left_s[:n].tolist(), strict=True):
        row = led.requests[r]
        tokens, still = int(row["prompt"] + row["key"]), max(int(row["predicted"] - row["key"]), 1)
        of = RunningRequest(
            RequestId(str(r)), tokens, int(row["priority"]), int(row["key"]), still, float(row["tpot_s"])
        )
        held.append(HeldRequest(of, left))
    return tuple(held)


def observe(
    led: Ledger,
    profiles: Sequence[Profile],
    now_s: float,
    moving: frozenset[int],
    busy: frozenset[int],
    states: Sequence[str | None] | None = None,
) -> Snapshot:
    """The fleet at `now_s`, the ledger brought up to it before; workers and requests go by their numbers,
    kinds by their profiles' variants.

    `states`: of an elastic fleet's workers, None for those that are not there.
    """
    table = loads(led).tolist()
    status, variant = led.workers["status"].tolist(), led.workers["variant"].tolist()
    roles = led.workers["role"].tolist()
    capacity = [p.kv.capacity_tokens for p in profiles]
    kinds = [p.type_name for p in profiles]
    workers = []
    for w, row in enumerate(table):
        state = _STATES.get(status[w], SERVES) if states is None else states[w]
        if state is None:
            continue
        profile, load = profiles[variant[w]], load_of(row)
        workers.append(
            WorkerLoad(
                WorkerId(str(w)),
                state,
                capacity[variant[w]] if status[w] != OFF else 0,
                Listed(led, w, False, load.running),
                Listed(led, w, True, load.waiting),
                profile.step,
                profile.engine.max_seqs,
                load,
                name_in_role(kinds[variant[w]], ROLES[roles[w]]),
                float(profile.kv.bytes_per_token),
            )
        )
    return Snapshot(
        now_s,
        tuple(workers),
        len(workers),
        moving=frozenset(RequestId(str(r)) for r in moving),
        busy=frozenset(WorkerId(str(w)) for w in busy),
    )
