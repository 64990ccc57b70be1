"""The outlook of a worker: its time to prefill a prompt, the slack of what decodes, its peak of KV."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from controlplane.compiled import compiled
from controlplane.perfmodel import coefficients as speed
from controlplane.placement import batch, hits
from controlplane.placement import ledger as state
from controlplane.placement.ledger import Floats, Ints, Ledger
from controlplane.placement.order import ASKED

ALL_TIME = 1e9  # seconds
CERTAIN = 1e-12  # by mean savings, a deficit with a chance to fail above 0 in spite of rounding


@compiled
def prefill_steps(k: NDArray[np.float64], work: float, decoding: int) -> float:
    """Steps that `work` prefill tokens take in a batch with `decoding` requests."""
    if k[speed.MODE] != speed.CHUNKED:
        return 1.0
    return float(np.ceil(work / max(k[speed.MAX_BATCHED] - decoding, 1.0)))


@compiled
def prefill_lasts_s(
    k: NDArray[np.float64], work: float, last: float, cached: float, decoding: int, context: float
) -> float:
    """Seconds to compute `work` tokens, the last prompt among them `last` tokens long, its first `cached`.

    Those are not computed, but those after them attend to them.
    """
    if k[speed.MODE] != speed.CHUNKED:
        return speed.prefill_s(k, work, last * last - cached * cached)
    step_s = speed.decode_s(k, decoding, context) + speed.prefilling_s(k, decoding)
    steps, budget = prefill_steps(k, work, decoding), max(k[speed.MAX_BATCHED] - decoding, 1.0)
    lasts_s = steps * step_s + k[speed.PER_PREFILL] * work
    lasts_s += k[speed.PER_SUM_SQ] * (last * last - cached * cached)
    full = steps - 1.0  # steps with as much prefill as fits, before the last
    lasts_s += full * speed.prefill_hinges_s(k, budget, decoding)
    return lasts_s + speed.prefill_hinges_s(k, work - full * budget, decoding)


@compiled
def prefilled_s(ledger: Ledger, w: int, r: int, cached: int, start_s: float, lasts_s: float) -> float:
    """When worker `w` would have prefilled `r`, if all it is to compute until then lasts so long."""
    load_s = hits.loads_s(ledger, w, r, start_s)
    if load_s == 0.0:
        return start_s + lasts_s
    worker, tokens = ledger.workers[w], ledger.requests[r].prompt + ledger.requests[r].key
    k = ledger.coefficients[worker.variant]
    load_s += prefill_lasts_s(k, tokens - cached, tokens, cached, worker.decoding, worker.context)
    if worker.decoding > 0:  # it waits for the end of a step
        load_s += speed.decode_s(k, worker.decoding, worker.context)
    return start_s + max(lasts_s, load_s)


@compiled
def own_loads_s(ledger: Ledger, w: int, r: int) -> float:
    """Seconds that loading a request takes at worker `w` by itself."""
    copies = hits.known_loads(ledger, w, r)
    return float(copies * ledger.host.links[w].copy_s) if copies > 0 else 0.0


@compiled
def least_prefill_s(ledger: Ledger, r: int, cached: int, busy: bool) -> float:
    """Seconds until an idle worker of the fastest type, or a busy one, has prefilled a request."""
    tokens = ledger.requests[r].prompt + ledger.requests[r].key
    least_s = np.inf
    for v in range(ledger.coefficients.shape[0]):
        k = ledger.coefficients[v]
        lasts_s = prefill_lasts_s(k, tokens - cached, tokens, cached, 0, 0)
        lasts_s += speed.frontend_s(k, ledger.requests[r].prompt)
        if busy:
            tpot_s = ledger.requests[r].tpot_s
            lasts_s += (1.0 + k[speed.AHEAD]) * tpot_s
            # The step in progress has chunks of others, its own steps decode too.
            if k[speed.MODE] == speed.CHUNKED:
                lasts_s += speed.prefilling_s(k, 0.0) + k[speed.PER_PREFILL] * k[speed.MAX_BATCHED]
                lasts_s += speed.prefill_hinges_s(k, k[speed.MAX_BATCHED], 0.0)
                others_s = max(tpot_s - speed.decode_base_s(k, 0.0), 0.0)
                lasts_s += prefill_steps(k, tokens - cached, 0) * others_s
        least_s = min(least_s, lasts_s)
    return least_s


@compiled
def known_least_s(ledger: Ledger, r: int, busy: bool) -> float:
    """The same with nothing cached, worked out once for a request without tokens.

    One that waits is asked for it four times an offer. Where changes are not told it is worked out each time.
    """
    known, row, column = ledger.orders, r % ASKED, int(busy)
    if not known.are_kept[0] or ledger.requests[r].key > 0:
        return least_prefill_s(ledger, r, 0, busy)
    if known.least_of[row] != r:
        known.least_of[row] = r
        known.least_s[row, :] = 0.0
    if known.least_s[row, column] == 0.0:
        known.least_s[row, column] = least_prefill_s(ledger, r, 0, busy)
    return known.least_s[row, column]


@compiled
def least_cached_s(ledger: Ledger, r: int, busy: bool) -> float:
    """The same of one that has as much cached as any serving worker; what that would load, it loads."""
    least_s, most = np.inf, 0
    for w in range(len(ledger.workers)):
        if ledger.workers[w].status == state.SERVING and ledger.workers[w].role != state.DECODE_ONLY:
            cached = hits.known_cached(ledger, w, r, most)
            if cached <= most:
                continue
            load_s = own_loads_s(ledger, w, r)
            if load_s > 0.0:
                least_s = min(least_s, least_prefill_s(ledger, r, cached, busy) + load_s)
            else:
                most = cached
    return min(least_s, least_prefill_s(ledger, r, most, busy))


@compiled
def hopeless(ledger: Ledger, r: int, now_s: float, busy: bool) -> bool:
    """Whether not even an idle worker of the fastest type could still meet a request's TTFT.

    It has cached as much of the request as any worker has. `busy`: one as full as (b) lets it be instead, a
    step in progress. Who waits until only an idle worker would do finds the few whose step happens to end
    just then, and no choice of where to do least harm.
    """
    due_s = ledger.requests[r].arrival_s + ledger.requests[r].ttft_s
    if now_s > due_s:
        return True
    if now_s + known_least_s(ledger, r, busy) <= due_s:
        return False
    return ledger.caches.tokens == 0 or now_s + least_cached_s(ledger, r, busy) > due_s


@compiled
def time_left_s(ledger: Ledger, r: int, now_s: float) -> float:
    """Seconds in which an idle worker of the fastest type must begin a request's prefill to meet its TTFT."""
    cold = ledger.caches.tokens == 0
    least_s = least_prefill_s(ledger, r, 0, False) if cold else least_cached_s(ledger, r, False)
    return ledger.requests[r].arrival_s + ledger.requests[r].ttft_s - now_s - least_s


@compiled
def client_s(ledger: Ledger, r: int) -> float:
    """How much later than its worker makes a request's tokens its client has them; 0 if it is on none."""
    if ledger.requests[r].worker < 0:
        return 0.0
    k = ledger.coefficients[ledger.workers[ledger.requests[r].worker].variant]
    return ledger.requests[r].lag_s + speed.frontend_s(k, ledger.requests[r].prompt)


def clients_s(ledger: Ledger, rows: Ints | slice = slice(None)) -> Floats:
    """The same of several requests."""
    requests = ledger.requests[rows]
    k = ledger.coefficients[ledger.workers["variant"][requests["worker"]]]
    seconds = k[:, speed.PER_REQUEST] + k[:, speed.PER_PROMPT_TOKEN] * requests["prompt"]
    return np.where(requests["worker"] < 0, 0.0, requests["lag_s"] + seconds)


@compiled
def interference(
    ledger: Ledger, k: NDArray[np.float64], w: int, start_s: float, lasts_s: float, work: float, most: float
) -> float:
    """(d): the expected number of requests decoding at `start_s` that a prefill of `lasts_s` makes fail.

    Stops counting past `most`. Past 0 the first that may fail is enough, and counts as one.
    """
    worker = ledger.workers[w]
    step_s = speed.decode_s(k, worker.decoding, worker.context)
    earned_steps = prefill_steps(k, work, worker.decoding) if k[speed.MODE] == speed.CHUNKED else 0.0
    harmed = 0.0
    for i in range(worker.running_n - 1, -1, -1):  # the newest has saved least
        other = ledger.running[w, i]
        tpot_s = ledger.requests[other].tpot_s
        slack_s = saved_s(ledger, w, other, start_s) + tpot_s * earned_steps
        if slack_s < lasts_s:
            saves_s = (tpot_s - step_s) * max(remaining(ledger, w, other) - 1, 1)
            if most == 0.0 and slack_s >= 0.0 and lasts_s - slack_s > CERTAIN * saves_s:
                return 1.0
            harmed += failing(lasts_s - slack_s, saves_s) - failing(-slack_s, saves_s)
            if harmed > most:
                break
    return harmed


@compiled
def saved_s(ledger: Ledger, w: int, r: int, at_s: float) -> float:
    """An admitted request's saving against its TPOT line by `at_s`, when the step in progress ends."""
    request = ledger.requests[r]
    if request.phase != state.DECODING:
        return 0.0  # its first token comes at the boundary
    after_first = request.key + ledger.workers[w].step + ledger.workers[w].gains - 1
    return request.tpot_s * after_first - (at_s - request.first_s)


@compiled
def spare_s(ledger: Ledger, w: int, r: int, cached: int, now_s: float) -> float:
    """The least saving of a decoding request at `w` that is left once `r` is prefilled there.

    Those behind their line already do not count. A worker without any to count has a slack of `ALL_TIME`.
    """
    worker = ledger.workers[w]
    k = ledger.coefficients[worker.variant]
    tokens = ledger.requests[r].prompt + ledger.requests[r].key
    work = worker.queued_tokens + tokens - cached
    start_s = max(worker.boundary_s, now_s)
    earned_steps = prefill_steps(k, work, worker.decoding) if k[speed.MODE] == speed.CHUNKED else 0.0
    least_s = ALL_TIME
    for i in range(worker.running_n):
        other = ledger.running[w, i]
        slack_s = saved_s(ledger, w, other, start_s)
        if slack_s >= 0.0:
            least_s = min(least_s, slack_s + ledger.requests[other].tpot_s * earned_steps)
    return least_s - prefill_lasts_s(k, work, tokens, cached, worker.decoding, worker.context)


@compiled
def failing(deficit_s: float, saves_s: float) -> float:
    """The chance to end before `deficit_s` is made up for, with `saves_s` saved by the mean end."""
    if deficit_s <= 0.0:
        return 0.0
    if saves_s <= 0.0:
        return 1.0
    return 1.0 - np.exp(-deficit_s / saves_s)


@compiled
def remaining(ledger: Ledger, w: int, r: int) -> int:
    """Tokens an admitted request should still make, its prediction renewed once it has outlived it."""
    if ledger.requests[r].phase != state.DECODING:
        return max(ledger.requests[r].predicted - ledger.requests[r].key, 1)
    if ledger.requests[r].ends <= ledger.workers[w].step:
        batch.expect_end(ledger, w, r)
    return ledger.requests[r].ends - ledger.workers[w].step


@compiled
def demand(ledger: Ledger, w: int, r: int) -> tuple[int, int, float]:
    """With `r` at worker `w`: tokens held by all, tokens they should still make, their tightest TPOT.

    Targets that the worker does not keep even for a request alone are left out.
    """
    worker = ledger.workers[w]
    held = worker.context + worker.queued_context + ledger.requests[r].prompt + ledger.requests[r].key
    growth = max(ledger.requests[r].predicted - ledger.requests[r].key, 1)
    tpot_s = ledger.requests[r].tpot_s
    alone_s = speed.decode_base_s(ledger.coefficients[worker.variant], 1.0)
    for i in range(worker.running_n):
        other = ledger.running[w, i]
        growth += remaining(ledger, w, other)
        if ledger.requests[other].tpot_s >= alone_s:
            tpot_s = min(tpot_s, ledger.requests[other].tpot_s)
    for p in range(len(ledger.queue_head)):
        other = ledger.queue_head[p, w]
        while other != state.NONE:
            growth += max(ledger.requests[other].predicted - ledger.requests[other].key, 1)
            if ledger.requests[other].tpot_s >= alone_s:
                tpot_s = min(tpot_s, ledger.requests[other].tpot_s)
            other = ledger.requests[other].next
    return held, growth, tpot_s


@compiled
def kv_peak(ledger: Ledger, w: int, r: int, enough: float) -> float:
    """(e): the most KV tokens that worker `w` should ever hold with all it has and `r`, unless that is NONE.

    Demand at step n is Σ (context + n) over requests that last n steps; it peaks where one ends. Where it is
    past `enough` at the step of the last peak, that demand is returned, and nothing is sorted.
    """
    k = ledger.coefficients[ledger.workers[w].variant]
    count = ledger.workers[w].running_n
    lasts = np.empty(count + ledger.workers[w].queued + 1, np.int64)
    holds = np.empty(len(lasts), np.int64)
    for i in range(count):
        other = ledger.running[w, i]
        lasts[i] = remaining(ledger, w, other)
        holds[i] = ledger.requests[other].prompt + state.generated(ledger, other)
    if r != state.NONE:
        lasts[count] = max(ledger.requests[r].predicted - ledger.requests[r].key, 1)
        holds[count] = ledger.requests[r].prompt + ledger.requests[r].key
        count += 1
    for p in range(len(ledger.queue_head)):
        other = ledger.queue_head[p, w]
        while other != state.NONE:
            lasts[count] = max(ledger.requests[other].predicted - ledger.requests[other].key, 1)
            holds[count] = ledger.requests[other].prompt + ledger.requests[other].key
            count += 1
            other = ledger.requests[other].next
    then, held = max(ledger.workers[w].peak_step - ledger.workers[w].step, 1), 0.0
    for i in range(count):
        holds[i] += speed.window_blocks(k, holds[i] + lasts[i]) * int(k[speed.BLOCK_TOKENS])
        if lasts[i] >= then:
            held += holds[i] + then
    shared = hits.shared_tokens(ledger, w)
    if held - shared > enough:
        return held - shared
    order = np.argsort(lasts[:count])
    held, peak = 0.0, 0.0
    for i in range(count - 1, -1, -1):
        held += holds[order[i]]
        if held + (count - i) * lasts[order[i]] > peak:
            peak = held + (count - i) * lasts[order[i]]
            ledger.workers[w].peak_step = ledger.workers[w].step + lasts[order[i]]
    return peak - shared
