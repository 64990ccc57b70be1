"""The exact policy's heartbeat: the requests held are placed together, by placement.exact's program."""

from __future__ import annotations

import numpy as np

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.step import PrefillModel
from controlplane.placement.constraints import prefill_lasts_s, remaining
from controlplane.placement.decide import hopeless
from controlplane.placement.exact import solve
from controlplane.placement.heartbeat import Heartbeat, NewRequest, WorkerState
from controlplane.placement.ledger import DECODING, NONE, SERVING, Ledger, generated
from controlplane.placement.policies import BEST_FIT, PlacementSettings
from controlplane.types import EngineMode, Slo
from dataplane.simulated.cluster import LATE, hold, offer_queue, unlink_held, view_all
from dataplane.simulated.engine import arrive, count_miss
from dataplane.simulated.records import Cluster, Engines, Rules

HEARTBEAT_S = 0.05
MOST_REQUESTS = 64  # of one heartbeat; the others wait for the next
TIME_LIMIT_S = 1.0


def place_held(
    led: Ledger,
    eng: Engines,
    clu: Cluster,
    rules: Rules,
    profile: Profile,
    slo: Slo,
    settings: PlacementSettings,
) -> None:
    """Place the requests held now as the heartbeat's exact optimum has it; those it cannot place stay held.

    A request that can no longer meet its TTFT is no part of the program: it goes where it does no harm.
    """
    now_s = float(clu.clock["now_s"][0])
    view_all(led, eng, now_s)
    offer_queue(led, eng, clu, rules._replace(policy=BEST_FIT), LATE, 0)
    rows: list[int] = []
    for p in (1, 0):
        before, r = NONE, int(clu.held_head[p])
        while r != NONE and len(rows) < MOST_REQUESTS:
            following = int(led.requests[r]["next"])
            if np.isnan(float(led.requests[r]["first_s"])) and hopeless(led, r, now_s, False):
                count_miss(eng, r)
                unlink_held(led, clu, p, before, r)
                hold(led, clu, LATE, r, False)
            else:
                rows.append(r)
                before = r
            r = following
    serving = [w for w in range(len(led.workers)) if led.workers[w]["status"] == SERVING]
    if not rows or not serving:
        return
    oldest_s = max(now_s - float(led.requests[r]["arrival_s"]) for r in rows)
    beat = Heartbeat(
        requests=tuple(
            NewRequest(
                int(led.requests[r]["prompt"] + led.requests[r]["key"]),
                max(int(led.requests[r]["predicted"] - led.requests[r]["key"]), 1),
            )
            for r in rows
        ),
        workers=tuple(_state(led, w, now_s) for w in serving),
        step=profile.step,
        prefill=_prefill(profile),
        slo=Slo(max(slo.ttft_s - oldest_s, 1e-6), slo.tpot_s),
        kv_capacity_tokens=profile.kv.capacity_tokens,
        max_seqs=profile.engine.max_seqs,
        theta=settings.theta,
        gamma=settings.gamma,
    )
    found = solve(beat, TIME_LIMIT_S)
    for r, j in zip(rows, found.worker, strict=True):
        if j is not None:
            _unlink(led, clu, r)
            arrive(led, eng, serving[j], r, now_s, False)


def check_exact(profiles: list[Profile], slos: list[Slo]) -> None:
    """Raise BadInput where the heartbeat's program does not cover what is asked."""
    if len(profiles) > 1 or len(slos) > 1:
        raise BadInput("policy: exact: covers one variant and one SLO class; use spread or best-fit for more")


def _state(led: Ledger, w: int, now_s: float) -> WorkerState:
    worker = led.workers[w]
    k = led.coefficients[worker["variant"]]
    start_s = max(float(worker["boundary_s"]), now_s)
    held, still, slack_s = [], [], np.inf
    for i in range(int(worker["running_n"])):
        r = int(led.running[w, i])
        request = led.requests[r]
        held.append(int(request["prompt"]) + int(generated(led, r)))
        still.append(int(remaining(led, w, r)))
        after_first = held[-1] - int(request["prompt"]) + int(worker["gains"]) - 1
        saved_s = 0.0  # its first token comes at the boundary
        if request["phase"] == DECODING:
            saved_s = float(request["tpot_s"]) * after_first - (start_s - float(request["first_s"]))
        slack_s = min(slack_s, saved_s)
    queued_s = 0.0
    for p in (1, 0):
        r = int(led.queue_head[p, w])
        while r != NONE:
            request = led.requests[r]
            held.append(int(request["prompt"] + request["key"]))
            still.append(max(int(request["predicted"] - request["key"]), 1))
            r = int(request["next"])
    if worker["queued_tokens"] > 0:
        work = float(worker["queued_tokens"])
        queued_s = float(prefill_lasts_s(k, work, work, int(worker["decoding"]), float(worker["context"])))
    return WorkerState(tuple(held), tuple(still), slack_s - queued_s, start_s - now_s + queued_s)


def _prefill(profile: Profile) -> PrefillModel:
    if profile.engine.mode != EngineMode.CHUNKED and profile.prefill is not None:
        return profile.prefill
    return PrefillModel(profile.step.base_s, profile.step.per_prefill_token_s)


def _unlink(led: Ledger, clu: Cluster, r: int) -> None:
    p = int(led.requests[r]["priority"])
    before, at = NONE, int(clu.held_head[p])
    while at != r:
        before, at = at, int(led.requests[at]["next"])
    unlink_held(led, clu, p, before, r)
