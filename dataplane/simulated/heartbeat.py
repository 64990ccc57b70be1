"""The exact policy's heartbeat: places all held requests together, by placement.exact's program."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import Profile
from controlplane.placement.exact import solve
from controlplane.placement.heartbeat import MOST_REQUESTS, heartbeat_of
from controlplane.placement.ledger import NONE, SERVING, Ledger
from controlplane.placement.policies import BEST_FIT, PlacementSettings
from controlplane.placement.queue import begin_round, leave, line_up, offer_late
from controlplane.types import Slo
from dataplane.simulated.cluster import place_held, view_all
from dataplane.simulated.engine import arrive, count_miss
from dataplane.simulated.records import Cluster, Engines, Rules

HEARTBEAT_S = 0.05
TIME_LIMIT_S = 1.0


def place_together(
    led: Ledger,
    eng: Engines,
    clu: Cluster,
    rules: Rules,
    profile: Profile,
    settings: PlacementSettings,
) -> None:
    """Place the requests held now as the heartbeat's exact optimum has it; those it cannot place stay held.

    A request that can no longer meet its TTFT is no part of the program: it goes where it does no harm.
    """
    now_s = float(clu.clock["now_s"][0])
    view_all(led, eng, now_s)
    line, lost = np.empty(MOST_REQUESTS, np.int64), np.empty(clu.queue.waiting, np.int64)
    n, m = line_up(led, clu.queue, now_s, line, lost)
    for r in lost[:m].tolist():
        count_miss(eng, r)
    serving = np.flatnonzero(led.workers["status"] == SERVING)
    if n and len(serving):
        beat = heartbeat_of(led, line[:n], serving, profile, settings, now_s)
        for r, j in zip(line[:n].tolist(), solve(beat, TIME_LIMIT_S).worker, strict=True):
            if j is not None:
                leave(led, clu.queue, r)
                arrive(led, eng, int(serving[j]), r, now_s, False)
    begin_round(clu.queue)
    while (r := offer_late(led, clu.queue)) != NONE:
        place_held(led, eng, clu, rules._replace(policy=BEST_FIT), r)


def check_exact(profiles: Sequence[Profile], slos: Sequence[Slo]) -> None:
    """Raise BadInput where the heartbeat's program does not cover what is asked."""
    if len(profiles) > 1 or len(slos) > 1:
        raise BadInput("policy: exact: covers one worker type and one SLO class; else use spread or best-fit")
