"""The sending of a run's requests: at the times of the workload, or, in sessions, after answers.

In an open loop the rows are sent in order, at their times. In a closed loop a turn is sent `think_s` after
the last of the answers it waits for is complete. Where `think_s` is no time at all, it is sent after the step
that begins there. A request that was turned away counts as answered at that moment. What is known to be sent
stands in a heap by (time, row).

`agents` is how many sessions run at once. The next one begins the instant one has ended, in order of their
first arrivals. Its first requests keep their distances in time.

An engine that plans ahead makes a request's tokens later. When the request comes amid a step, or what it
waited for ends with one, the next step is planned already. That step, without those that join now, is what it
still waits for. What only a spent budget kept out of the last step was known when the next one was planned.
"""

from __future__ import annotations

import numpy as np

from controlplane.compiled import compiled
from controlplane.perfmodel import coefficients as speed
from controlplane.placement import batch
from controlplane.placement.ledger import Floats, Ledger
from controlplane.placement.outlook import client_s
from controlplane.prefixes import Sessions
from dataplane.simulated.records import SENT, Engines, Sending


def is_closed(sessions: Sessions | None, agents: int | None) -> bool:
    """Whether anything is sent after answers."""
    return sessions is not None and (len(sessions.before) > 0 or agents is not None)


def new_sending(arrival_s: Floats, sessions: Sessions | None, agents: int | None) -> Sending:
    """Nothing sent yet."""
    n = len(arrival_s)
    counts, none, no_s = np.zeros(1, SENT), np.zeros(0, np.int64), np.zeros(0)
    if sessions is None or not is_closed(sessions, agents):
        order = np.arange(n)
        return Sending(counts, order, none, none, no_s, none, none, none, none, none, none, no_s)
    left = np.diff(sessions.offsets)
    owner = np.repeat(np.arange(n), left)
    by_before = np.argsort(sessions.before, kind="stable")
    heads = np.flatnonzero(left == 0)
    session, unended, first_s = np.full(n, -1, np.int64), none, no_s
    if agents is not None:
        known = sessions.session >= 0
        _, first, inverse = np.unique(sessions.session[known], return_index=True, return_inverse=True)
        rank = np.argsort(np.argsort(first))  # by their first rows
        session[known] = rank[inverse]
        unended = np.bincount(session[known], minlength=len(first))
        first_s = arrival_s[known][np.sort(first)]
    of = session[heads]
    at_start = heads[(of < 0) | (of < (agents or 0))]
    begun = np.zeros(n) if agents is None else np.where(session >= 0, np.append(first_s, 0.0)[session], 0.0)
    sent_s = arrival_s - begun
    due = np.zeros(n, np.int64)
    due[: len(at_start)] = at_start[np.lexsort((at_start, sent_s[at_start]))]  # sorted is a heap
    counts["due"], counts["begun"] = len(at_start), min(agents or 0, len(unended))
    owned = heads[of >= 0][np.argsort(of[of >= 0], kind="stable")]
    return Sending(
        counts=counts,
        order=np.zeros(n, np.int64),
        due=due,
        left=left.copy(),
        think_s=sessions.think_s,
        after=owner[by_before],
        after_at=np.searchsorted(sessions.before[by_before], np.arange(n + 1)),
        unended=unended,
        session=session,
        heads=owned,
        heads_at=np.searchsorted(session[owned], np.arange(len(unended) + 1)),
        head_s=sent_s[owned],
    )


def first_times(sending: Sending, arrival_s: Floats) -> Floats:
    """When each request is sent, where the start determines it; inf elsewhere."""
    if len(sending.left) == 0:
        return arrival_s
    sent_s = np.full(len(arrival_s), np.inf)
    due = sending.due[: int(sending.counts["due"][0])]
    sent_s[due] = arrival_s[due]
    begun = sending.heads_at[int(sending.counts["begun"][0])] if len(sending.unended) else 0
    sent_s[sending.heads[:begun]] = sending.head_s[:begun]
    return sent_s


@compiled
def next_send(ledger: Ledger, sending: Sending) -> tuple[float, int]:
    """When the next request is sent, of those whose time is known, and which; inf for none."""
    if len(sending.left) == 0:
        r = sending.counts[0].sent
        if r >= len(sending.order):
            return np.inf, -1
        return ledger.requests[r].arrival_s, r
    if sending.counts[0].due == 0:
        return np.inf, -1
    return ledger.requests[sending.due[0]].arrival_s, sending.due[0]


@compiled
def send(ledger: Ledger, sending: Sending) -> int:
    """Take the next request to be sent."""
    r = next_send(ledger, sending)[1]
    sending.order[sending.counts[0].sent] = r
    sending.counts[0].sent += 1
    if len(sending.left) > 0:
        pop_due(ledger, sending)
    return r


@compiled
def sooner(ledger: Ledger, one: int, other: int) -> bool:
    """The heap's order."""
    one_s, other_s = ledger.requests[one].arrival_s, ledger.requests[other].arrival_s
    return one_s < other_s or (one_s == other_s and one < other)


@compiled
def push_due(ledger: Ledger, sending: Sending, r: int, at_s: float) -> None:
    """A request will be sent at `at_s`."""
    ledger.requests[r].arrival_s = at_s
    i = sending.counts[0].due
    sending.counts[0].due += 1
    while i > 0 and sooner(ledger, r, sending.due[(i - 1) // 2]):
        sending.due[i] = sending.due[(i - 1) // 2]
        i = (i - 1) // 2
    sending.due[i] = r


@compiled
def pop_due(ledger: Ledger, sending: Sending) -> None:
    """Take the first out of the heap."""
    sending.counts[0].due -= 1
    n = sending.counts[0].due
    r = sending.due[n]
    i = 0
    while 2 * i + 1 < n:
        child = 2 * i + 1
        if child + 1 < n and sooner(ledger, sending.due[child + 1], sending.due[child]):
            child += 1
        if not sooner(ledger, sending.due[child], r):
            break
        sending.due[i] = sending.due[child]
        i = child
    sending.due[i] = r


@compiled
def release(ledger: Ledger, engines: Engines, sending: Sending, now_s: float) -> None:
    """Send in time what waited for the requests that have ended by now."""
    while sending.counts[0].released < engines.total[0].ended_n:
        r = engines.ended[sending.counts[0].released]
        sending.counts[0].released += 1
        answered_s = now_s + client_s(ledger, r)
        for i in range(sending.after_at[r], sending.after_at[r + 1]):
            turn = sending.after[i]
            sending.left[turn] -= 1
            if sending.left[turn] == 0:
                push_due(ledger, sending, turn, answered_s + sending.think_s[turn])
        if len(sending.unended) > 0 and sending.session[r] >= 0:
            sending.unended[sending.session[r]] -= 1
            if sending.unended[sending.session[r]] == 0 and sending.counts[0].begun < len(sending.unended):
                begin_session(ledger, sending, sending.counts[0].begun, answered_s)
                sending.counts[0].begun += 1


@compiled
def begin_session(ledger: Ledger, sending: Sending, session: int, now_s: float) -> None:
    """An agent that is free begins a session."""
    for i in range(sending.heads_at[session], sending.heads_at[session + 1]):
        push_due(ledger, sending, sending.heads[i], now_s + sending.head_s[i])


@compiled
def note_planned(ledger: Ledger, engines: Engines, w: int) -> None:
    """Keep how long the step lasts that begins here, before any request joins it."""
    engine = engines.workers[w]
    ahead = ledger.coefficients[ledger.workers[w].variant, speed.AHEAD]
    if ahead > 0.0:
        alone_s = batch.lasts_s(ledger, w, engine.prefill, engine.squares)
        engine.ahead_s = ahead * alone_s * (1.0 + engine.slowdown)


@compiled
def note_lag(ledger: Ledger, engines: Engines, w: int, r: int) -> None:
    """A request that has no token yet joins the batch: note how much later its tokens come."""
    engine = engines.workers[w]
    if not np.isnan(ledger.requests[r].first_s):
        return
    was_known = engine.spent == 1 and engines.requests[r].placed_s < engine.planned_s
    ledger.requests[r].lag_s = 0.0 if was_known else engine.ahead_s
