"""The choice of a worker by a placement policy: compiled functions, the same in both planes.

`spread`, `best-fit` and `slack-fit` consider only workers that satisfy the constraints, and differ in the
order. `spread` takes the least loaded by capacity_norm (Algorithm 1) first, `best-fit` the most loaded.
`slack-fit` takes the one with least slack in (d), so that workers with much slack are kept for long prompts.
Under the former two, work that yields to a tighter class goes to the slowest kind of worker that has room for
it. So the fast workers are left to those that need them. Where no worker satisfies the constraints the
request is held in the cluster's queue. The baselines (placement.baselines) never hold and know no constraint.

Both planes call `decide` when a request arrives, and again every `retry_s` for each that is held. Where
prefill and decode have workers of their own, they call `decode_worker` once the prefill is done.

Where workers cache prefixes, `spread` takes the one with the least added work, in seconds of prefill:

    what the worker still has to compute of others + what it would have to compute of the request

A worker that has the request's prefix cached has less of the second. What it has of it in host memory below
its cache it would load: that takes the loads before it and its own. Once its queue outweighs that, the
request goes elsewhere and the prefix is cached there too. So a hot prefix is replicated, and a first block
that all share draws no request anywhere. At a tie it is the worker whose memory holds least.

The constraints cover what requests do to each other beyond this. Where they refuse that worker for now, the
request is held. It is not recomputed on one that has less of it cached: that work would be in the way of all
that come after. Where step times are not known, capacity_norm with the cached tokens taken off stands for the
work.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from controlplane.compiled import compiled
from controlplane.perfmodel import coefficients as speed
from controlplane.placement import baselines, constraints, hits, misprediction, outlook, policies, ranking
from controlplane.placement import ledger as state
from controlplane.placement.constraints import SettingsRow
from controlplane.placement.ledger import Ledger, view

# What is known of a choice: nothing; that the policy makes none; nor would a last chance, if it is due.
ASK, REFUSED, NO_CHANCE = 0, 1, 2


@compiled
def assign(
    ledger: Ledger,
    policy: int,
    settings: SettingsRow,
    r: int,
    now_s: float,
    late: bool,
    phase_role: int,
    draw: NDArray[np.float64],
) -> int:
    """Return the worker for request `r`, or NONE to hold it in the cluster's queue.

    `late`: its TTFT cannot be met any more, so (c) no longer matters. `phase_role`: PREFILL_ONLY or
    DECODE_ONLY restricts the choice to that pool in split mode, ANY_PHASE does not. `draw` [2] uniform in
    [0, 1), used by the policies that draw workers.
    """
    if policy in policies.WITHOUT_RANK:
        state.view_workers(ledger, now_s)
        return pick(ledger, policy, r, now_s, phase_role, draw)
    if ranking.has_order(ledger, policy, settings):
        return ranking.first_to_take(ledger, policy, settings, r, now_s, late, phase_role)
    constrained = policy in policies.CONSTRAINED
    by_work = policy == policies.SPREAD and ledger.caches.tokens > 0
    best, best_score, emptiest, had, cached = state.NONE, np.inf, 0, 0, 0
    wanted_score, wanted = np.inf, 0  # of one that refuses: its added work, and what it has cached
    for w in range(len(ledger.workers)):
        if not baselines.serves(ledger, w, phase_role):
            continue
        view(ledger, w, now_s)
        if constrained and phase_role != state.DECODE_ONLY:
            cached = hits.known_cached(ledger, w, r, cached)  # often as at the worker before
        score = ranking.load(ledger, policy, settings, w, r, cached, now_s)
        empty = hits.empty_everywhere(ledger, w) if by_work else 0
        better = (score < best_score) | ((score == best_score) & (empty > emptiest))
        if not better:
            continue
        if not constrained or constraints.fits(ledger, settings, w, r, cached, now_s, late):
            best, best_score, emptiest, had = w, score, empty, cached
        elif (
            by_work
            and score < wanted_score
            and constraints.could_fit(ledger, settings, w, r, cached, now_s, late)
        ):
            wanted_score, wanted = score, cached
    return state.NONE if (wanted_score < best_score) & (wanted > had) else best


@compiled
def refuses(
    ledger: Ledger, settings: SettingsRow, w: int, r: int, now_s: float, late: bool, phase_role: int
) -> bool:
    """Whether the constraints forbid a worker to take a request now."""
    return not baselines.serves(ledger, w, phase_role) or not constraints.fits(
        ledger, settings, w, r, hits.known_cached(ledger, w, r, 0), now_s, late
    )


@compiled
def pick(
    ledger: Ledger, policy: int, r: int, now_s: float, phase_role: int, draw: NDArray[np.float64]
) -> int:
    """The choice of the baselines that are no order of workers by one number."""
    if policy == policies.P2C:
        return baselines.two_choices(ledger, phase_role, draw)
    if policy == policies.LEAST_PREFILL:
        return baselines.least_prefill(ledger, now_s, phase_role)
    if policy == policies.LONGEST_PREFIX:
        return baselines.longest_prefix(ledger, r, phase_role)
    if policy == policies.LLM_D:
        return baselines.highest_score(ledger, r, phase_role, draw)
    if policy == policies.SGLANG:
        return baselines.prefix_unless_unbalanced(ledger, r, phase_role)
    if policy == policies.RANDOM:
        return baselines.by_chance(ledger, phase_role, draw[0])
    if policy == policies.LEAST_REQUEST:
        return baselines.fewer_requests(ledger, phase_role, draw)
    return baselines.in_turn(ledger, r, phase_role)


@compiled
def last_chance(ledger: Ledger, settings: SettingsRow, r: int, now_s: float, phase_role: int) -> int:
    """Return the worker where `r`, about to lose its TTFT, does least harm; NONE past the tolerance.

    It yields to no tighter class any more.
    """
    ledger.requests[r].yields_tpot_s = -abs(ledger.requests[r].yields_tpot_s)
    best, least, cached = state.NONE, settings[constraints.TOLERANCE], 0
    for w in range(len(ledger.workers)):
        if baselines.serves(ledger, w, phase_role):
            view(ledger, w, now_s)
            cached = hits.known_cached(ledger, w, r, cached)
            harmed = constraints.harm(ledger, settings, w, r, cached, now_s, False, least)
            if harmed < least:
                best, least = w, harmed
    return best


@compiled
def decide(
    ledger: Ledger,
    policy: int,
    settings: SettingsRow,
    r: int,
    now_s: float,
    retry_s: float,
    patience: float,
    phase_role: int,
    draw: NDArray[np.float64],
    known: int,
) -> int:
    """Return the worker for request `r`, or NONE to hold it until the next try.

    `known`: with ASK the policy chooses; else it is known that it would choose none. Without a choice,
    a request whose TTFT a busy worker could not meet any more by the next try goes to the worker where it
    does least harm. Failing that, after `patience` times its TTFT target it goes to the least loaded worker
    with room, whatever it breaks.
    """
    w = state.NONE
    if known != NO_CHANCE:
        misprediction.renew(ledger, r)
        late = not np.isnan(ledger.requests[r].first_s) or outlook.hopeless(ledger, r, now_s, False)
        if known == ASK:
            w = assign(ledger, policy, settings, r, now_s, late, phase_role, draw)
        if (
            w == state.NONE
            and not late
            and policy in policies.CONSTRAINED
            and outlook.hopeless(ledger, r, now_s + retry_s, True)
        ):
            w = last_chance(ledger, settings, r, now_s, phase_role)
    if w == state.NONE and now_s - ledger.requests[r].arrival_s >= patience * ledger.requests[r].ttft_s:
        w = assign(ledger, policies.JSQ, settings, r, now_s, True, phase_role, draw)
        # Past its room a worker only queues, where none may overtake; here another worker may take it.
        if w != state.NONE and not has_room(ledger, w, r):
            w = least_with_room(ledger, r, phase_role)
    return w


@compiled
def decode_worker(
    ledger: Ledger, policy: int, settings: SettingsRow, r: int, now_s: float, draw: NDArray[np.float64]
) -> int:
    """The decode worker for a request whose prefill is done: the policy's choice, else the least loaded."""
    w = assign(ledger, policy, settings, r, now_s, True, state.DECODE_ONLY, draw)
    return (
        w
        if w != state.NONE
        else assign(ledger, policies.JSQ, settings, r, now_s, True, state.DECODE_ONLY, draw)
    )


@compiled
def has_seat(ledger: Ledger, w: int) -> bool:
    """Whether a worker's batch has room for one more than it has been given."""
    return (
        ledger.workers[w].decoding + ledger.workers[w].queued
        < ledger.coefficients[ledger.workers[w].variant][speed.MAX_SEQS]
    )


@compiled
def has_room(ledger: Ledger, w: int, r: int) -> bool:
    """Whether a worker has a seat and free KV memory for `r`."""
    worker = ledger.workers[w]
    others = worker.decoding + worker.queued
    if others == 0 or worker.role == state.PREFILL_ONLY:
        return bool(has_seat(ledger, w))
    k = ledger.coefficients[worker.variant]
    held = worker.context + worker.queued_context + ledger.requests[r].prompt + ledger.requests[r].key
    held += (others + 1) * k[speed.WINDOW_BLOCKS] * k[speed.BLOCK_TOKENS] - hits.shared_tokens(ledger, w)
    return bool(has_seat(ledger, w)) and held <= k[speed.KV_BLOCKS] * k[speed.BLOCK_TOKENS]


@compiled
def least_with_room(ledger: Ledger, r: int, phase_role: int) -> int:
    """The worker with the fewest requests of those that have room for `r`, or NONE.

    Where none has, of those with a seat where no other waits. So a prompt that is larger than what is ever
    free goes in when that worker's next requests have ended.
    """
    best, first, fewest = state.NONE, 2, 0
    for w in range(len(ledger.workers)):
        if baselines.serves(ledger, w, phase_role) and has_seat(ledger, w):
            rank = 0 if has_room(ledger, w, r) else 1 if ledger.workers[w].queued == 0 else 2
            requests = baselines.requests_at(ledger, w)
            if rank < first or (rank == first < 2 and requests < fewest):
                best, first, fewest = w, rank, requests
    return best
