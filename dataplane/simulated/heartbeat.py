"""The exact policy's heartbeat in simulated time; the rest of it is controlplane.placement.exact."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import Profile
from controlplane.placement.exact import place_together, waiting_line
from controlplane.placement.ledger import NONE, SERVING, Ledger
from controlplane.placement.policies import BEST_FIT, PlacementSettings
from controlplane.placement.queue import begin_round, leave, offer_late
from controlplane.types import Slo
from dataplane.simulated.cluster import place_held, view_all
from dataplane.simulated.engine import arrive, count_miss
from dataplane.simulated.records import Cluster, Engines, Rules


def beat(
    led: Ledger, eng: Engines, clu: Cluster, rules: Rules, profile: Profile, settings: PlacementSettings
) -> None:
    """Place the requests held now; those that find no place stay held."""
    now_s = float(clu.clock["now_s"][0])
    view_all(led, eng, now_s)
    line, lost = waiting_line(led, clu.queue, now_s)
    for r in lost.tolist():
        count_miss(eng, r)
    serving = np.flatnonzero(led.workers["status"] == SERVING)
    placed, _ = place_together(led, line, serving, profile, settings, now_s)
    for r, w in placed:
        leave(led, clu.queue, r)
        arrive(led, eng, w, r, now_s, False)
    begin_round(clu.queue)
    while (r := offer_late(led, clu.queue)) != NONE:
        place_held(led, eng, clu, rules._replace(policy=BEST_FIT), r)


def check_exact(profiles: Sequence[Profile], slos: Sequence[Slo]) -> None:
    """Raise BadInput where the heartbeat's program does not cover what is asked."""
    if len(profiles) > 1 or len(slos) > 1:
        raise BadInput("policy: exact: covers one worker type and one SLO class; else use spread or best-fit")
