"""The state of a simulated cluster beyond its ledger and engines, and what stays as it is during a run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from controlplane.placement.constraints import Knobs
from controlplane.placement.ledger import NONE, Floats, Ints, Records

READY, FAIL, DRAIN = 0, 1, 2  # what the timeline can do to a worker

CLOCK = np.dtype(
    [
        ("now_s", np.float64),
        ("arrived", np.int64),  # requests that have arrived
        ("held_n", np.int64),
        ("offer_s", np.float64),  # when held requests are offered next; inf while there are none
        ("transit_n", np.int64),
        ("timeline_at", np.int64),
    ],
    align=True,
)


class Cluster(NamedTuple):
    """State of the run beyond ledger and engines."""

    clock: Records  # [1] of CLOCK
    held_head: Ints  # [3] the cluster's queues, linked through the requests' `next`: normal, high, LATE
    held_tail: Ints
    transit: Ints  # [requests] KV on its way to a decode worker,
    transit_s: Floats  # when it gets there
    # what happens to workers, in order of time
    timeline_s: Floats
    timeline_worker: Ints
    timeline_what: Ints


def new_cluster(requests: int, timeline: list[tuple[float, int, int]]) -> Cluster:
    """A cluster at time 0; `timeline` rows are (seconds, worker, READY | FAIL | DRAIN)."""
    rows = sorted(timeline)
    clock = np.zeros(1, CLOCK)
    clock["offer_s"] = np.inf
    return Cluster(
        clock=clock,
        held_head=np.full(3, NONE, np.int64),
        held_tail=np.full(3, NONE, np.int64),
        transit=np.zeros(requests, np.int64),
        transit_s=np.zeros(requests),
        timeline_s=np.array([r[0] for r in rows], np.float64),
        timeline_worker=np.array([r[1] for r in rows], np.int64),
        timeline_what=np.array([r[2] for r in rows], np.int64),
    )


class Rules(NamedTuple):
    """What does not change during a run."""

    policy: int
    knobs: Knobs
    split: bool
    transfer_s: float  # of one request's KV, prefill worker to decode worker
    offer_every_s: float  # how often held requests are offered to the workers again
    patience: float  # a held request is placed regardless once it waited this many of its TTFT
    max_misses: int  # stop the run when more have missed their targets
    draws: Floats  # [requests, 2] uniform
