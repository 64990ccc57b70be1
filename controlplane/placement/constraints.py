"""Aladdin's constraints (b) to (e): whether a worker may take a request, on the ledger's live state.

For worker w with b decoding requests and a candidate r of L prefill tokens:

(b) a decode step with everything assigned to w, its outputs grown by θ of what is expected, within TPOT;
    a target that no type of worker keeps even for its request alone is none (kept_tpot_s), and one that w
    does not, of a request that had to go there, is lost and binds no other
(c) step in progress + prefill of all queued at w and of r, within what is left of r's TTFT; and where r loads
    KV from host memory: the loads before it and its own, the step in progress then, the prefill of the rest
(d) that prefill costs no decoding request k more than it has saved against its TPOT line by then:
        slack_k = tpot_k·(tokens after the first) - (time since the first)
    A request behind its line is not lost: it may catch up before it ends. With a deficit of d, saving s a
    step and ending after e expected steps (memoryless), it fails with 1 - exp(-d / (s·e)). The harm of a
    prefill is what it adds to these, summed; the paper's (d) is harm = 0, but for requests that have failed
    already, which block none here.
(e) KV of all assigned, each growing by a token a step until its expected end, within γ·capacity at every
    step, windows counted as at its end; what running requests share is held once

**Room for tighter classes.** Work that can wait, beside a class whose TTFT target is `YIELDS` times as tight,
takes no worker's last: it leaves a share `ROOM` of the step time that the tighter class's TPOT allows, of the
memory and of the seats, and does not queue behind another prefill. So a tight request that comes next finds
a worker, and loose work fills what is left; held, it goes where there is room for it in time. A worker too
slow for the tighter class, even for one request alone, has nothing to leave to it: loose work fills it.
Work that may wait for longer than `LONG_WAIT_S` leaves `FIRST_ROOM` at first and ever less until it is due,
so that at a peak what has waited longest is let in, and the rest finds the valley.

Where an engine mixes phases (chunked), prefill does not stop decoding: the cost in (d) is what the chunks
add to the steps, less what those steps themselves save.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controlplane.compiled import compiled
from controlplane.perfmodel.coefficients import (
    BLOCK_TOKENS,
    CHUNKED,
    KV_BLOCKS,
    MAX_BATCHED,
    MAX_SEQS,
    MODE,
    PER_CONTEXT,
    PER_PREFILL,
    PER_PROMPT_TOKEN,
    PER_REQUEST,
    PER_SUM_SQ,
    PREFILL_STEP,
    WINDOW_BLOCKS,
    decode_base_s,
    frontend_s,
    prefill_hinges_s,
    prefill_s,
    window_blocks,
)
from controlplane.placement.batch import expect_end
from controlplane.placement.ledger import (
    ANY_PHASE,
    DECODE_ONLY,
    DECODING,
    NONE,
    PREFILL_ONLY,
    SERVING,
    Floats,
    Ints,
    Ledger,
    cached_tokens,
    generated,
    known_cached,
    known_loads,
    loads_s,
    shared_tokens,
)
from controlplane.placement.order import LEVELS, OPEN, level_of
from controlplane.types import Slo

Knobs = NDArray[np.float64]

# Where a knob stands in the row of knobs; PlacementSettings (policies.py) fills it.
THETA, GAMMA, TOLERANCE = 0, 1, 2
USE_B, USE_C, USE_D, USE_E = 3, 4, 5, 6
HEADROOM = 7
AS_REPORTED = 8
KNOBS = 9

ALL_TIME = 1e9  # seconds
ROUNDING_S = 1e-9
YIELDS = 10.0
ROOM = 0.2
FIRST_ROOM = 0.35
LONG_WAIT_S = 120.0
NO_TPOT_S = 1e6  # a target that is always met


def kept_tpot_s(types: Floats, prompt_tokens: Ints, tpot_s: Floats) -> Floats:
    """The TPOT targets that placement keeps, of requests with these prompts: those asked for.

    A target that no type of worker keeps even for the request alone is lost, as a TTFT can be: to hold the
    request back for it would help nobody. `types`: their rows of coefficients.
    """
    alone_s = [decode_base_s(k, 1.0) + k[PER_CONTEXT] * prompt_tokens for k in types]
    return np.where(np.min(alone_s, axis=0) <= tpot_s, tpot_s, NO_TPOT_S)


def yields_to(slo: Slo, slos: Sequence[Slo]) -> tuple[float, float]:
    """The tightest and the loosest TPOT target of those that requests of `slo` yield to; 0 for none."""
    tpot_s = [tight.tpot_s for tight in slos if tight.ttft_s * YIELDS <= slo.ttft_s]
    return min(tpot_s, default=0.0), max(tpot_s, default=0.0)


@compiled
def fits(led: Ledger, knobs: Knobs, w: int, r: int, cached: int, now_s: float, late: bool) -> bool:
    """Whether worker `w` may take request `r` now; `late` drops (c) for one past its TTFT already.

    `cached`: the request's tokens that the worker would not compute (`ledger.known_cached`).
    """
    return harm(led, knobs, w, r, cached, now_s, late, 0.0) <= 0.0


@compiled
def could_fit(led: Ledger, knobs: Knobs, w: int, r: int, cached: int, now_s: float, late: bool) -> bool:
    """Whether `w` could take `r` now if it had nothing else to do; where not, it is no use to wait for it."""
    k = led.coefficients[led.workers[w].variant]
    tokens = led.requests[r].prompt + led.requests[r].key
    grown = tokens + knobs[THETA] * max(led.requests[r].predicted - led.requests[r].key, 1)
    if decode_base_s(k, 1.0) + k[PER_CONTEXT] * grown > led.requests[r].tpot_s:
        return False
    lasts_s = prefill_lasts_s(k, tokens - cached, tokens, cached, 0, 0) + own_loads_s(led, w, r)
    lasts_s += frontend_s(k, led.requests[r].prompt)
    return late or now_s + lasts_s <= led.requests[r].arrival_s + led.requests[r].ttft_s


@compiled
def harm(
    led: Ledger, knobs: Knobs, w: int, r: int, cached: int, now_s: float, late: bool, most: float
) -> float:
    """The harm of (d) that taking `r` does at worker `w`; infinite past `most` or where (b), (c), (e) forbid.

    In the order of cost: most workers that may not are told so by (c) or by the newest request in (d).
    """
    worker = led.workers[w]
    k = led.coefficients[worker.variant]
    harmed = 0.0
    if worker.role != DECODE_ONLY:
        tokens = led.requests[r].prompt + led.requests[r].key
        work = worker.queued_tokens + tokens - cached
        start_s = max(worker.boundary_s, now_s)
        lasts_s = prefill_lasts_s(k, work, tokens, cached, worker.decoding, worker.context)
        if knobs[USE_C] > 0 and not late:
            wait_s = prefilled_s(led, w, r, cached, start_s, lasts_s) - led.requests[r].arrival_s
            wait_s += frontend_s(k, led.requests[r].prompt)
            if wait_s > led.requests[r].ttft_s:
                return np.inf
        if worker.role == PREFILL_ONLY:
            return 0.0
        if knobs[USE_D] > 0:
            harmed = interference(led, k, w, start_s, lasts_s, work, most)
            if harmed > most:
                return np.inf
    sequences = worker.decoding + worker.queued + 1
    share, left_tpot_s = left_to(led, w, r, now_s)
    if sequences > share * k[MAX_SEQS]:
        return np.inf
    held, growth, tpot_s = outlook(led, w, r)
    tpot_s = min(tpot_s, left_tpot_s)
    if knobs[USE_B] > 0:
        context_s = k[PER_CONTEXT] * (held + knobs[THETA] * growth)
        if decode_base_s(k, sequences) + context_s > tpot_s:
            return np.inf
    if knobs[USE_E] > 0 and sequences > 1:
        limit = share * knobs[GAMMA] * k[KV_BLOCKS] * k[BLOCK_TOKENS]
        # As if all ended at once, which no peak exceeds; only past that does it matter who ends when.
        windows = sequences * k[WINDOW_BLOCKS] * k[BLOCK_TOKENS]
        at_most = held + growth - shared_tokens(led, w) + windows
        if at_most > limit and overflows(led, w, r, cached, at_most, limit):
            return np.inf
    return harmed


@compiled
def prefilled_s(led: Ledger, w: int, r: int, cached: int, start_s: float, lasts_s: float) -> float:
    """When worker `w` would have prefilled `r`, if all it is to compute until then lasts so long."""
    load_s = loads_s(led, w, r, start_s)
    if load_s == 0.0:
        return start_s + lasts_s
    worker, tokens = led.workers[w], led.requests[r].prompt + led.requests[r].key
    k = led.coefficients[worker.variant]
    load_s += prefill_lasts_s(k, tokens - cached, tokens, cached, worker.decoding, worker.context)
    if worker.decoding > 0:  # it waits for the end of a step
        load_s += decode_base_s(k, worker.decoding) + k[PER_CONTEXT] * worker.context
    return start_s + max(lasts_s, load_s)


@compiled
def own_loads_s(led: Ledger, w: int, r: int) -> float:
    """Seconds that loading a request takes at worker `w` by itself."""
    copies = known_loads(led, w, r)
    return float(copies * led.host.links[w].copy_s) if copies > 0 else 0.0


@compiled
def closed_to(led: Ledger, knobs: Knobs, w: int, r: int, now_s: float) -> tuple[int, float]:
    """The lowest level of prompts that (d) forbids worker `w`, and up to which length, until its step ends.

    OPEN where it does not forbid those that are at the level of `r`'s. While the step lasts, time changes
    nothing in (d), and of prompts of as many steps the longer do more harm. For a worker that caches nothing.
    """
    worker = led.workers[w]
    k = led.coefficients[worker.variant]
    found, longest, least = OPEN, np.inf, 1.0
    if knobs[USE_D] == 0 or worker.role != ANY_PHASE:
        return found, longest
    start_s = max(worker.boundary_s, now_s)
    tokens = led.requests[r].prompt + led.requests[r].key
    if k[MODE] == CHUNKED:
        budget = max(k[MAX_BATCHED] - worker.decoding, 1.0)
        longest = prefill_steps(k, worker.queued_tokens + tokens, worker.decoding) * budget
        longest -= worker.queued_tokens
        least = longest - budget + 1.0
    low, high = 0, level_of(tokens)
    level = high
    while low <= high:
        shortest = float(LEVELS[level])
        work = worker.queued_tokens + shortest
        lasts_s = prefill_lasts_s(k, work, shortest, 0, worker.decoding, worker.context) - ROUNDING_S
        if shortest >= least and interference(led, k, w, start_s, lasts_s, work, 0.0) > 0.0:
            found, high = level, level - 1
        elif found == OPEN:
            break
        else:
            low = level + 1
        level = (low + high) // 2
    return found, longest


@compiled
def yields_at(led: Ledger, w: int, r: int) -> float:
    """TPOT of the tighter classes that `r` leaves room for at `w`; 0 where it is too slow for them."""
    tight_s = led.requests[r].yields_tpot_s
    if tight_s <= 0.0:
        return 0.0
    alone_s = decode_base_s(led.coefficients[led.workers[w].variant], 1.0)
    if alone_s <= tight_s:
        return tight_s
    return led.requests[r].yields_most_tpot_s if alone_s <= led.requests[r].yields_most_tpot_s else 0.0


@compiled
def left_to(led: Ledger, w: int, r: int, now_s: float) -> tuple[float, float]:
    """The share of a worker that a request may fill, and the step it may bring it to.

    All of it, unless it yields to a tighter class that the worker is fast enough for: then no more than
    leaves that its room, and nothing where others wait to be prefilled.
    """
    worker, tight_s = led.workers[w], yields_at(led, w, r)
    if tight_s <= 0.0 or worker.decoding + worker.queued == 0:
        return 1.0, np.inf
    if worker.queued_tokens > 0:
        return 0.0, 0.0
    request = led.requests[r]
    room = room_left(request.arrival_s + request.ttft_s - now_s, request.ttft_s)
    return 1.0 - room, (1.0 - room) * tight_s


@compiled
def room_left(left_s: float, ttft_s: float) -> float:
    """The share of a worker that work leaves which yields, due in `left_s` of the `ttft_s` it had."""
    if ttft_s <= LONG_WAIT_S:
        return ROOM
    return ROOM + (FIRST_ROOM - ROOM) * min(max(left_s / ttft_s, 0.0), 1.0)


@compiled
def overflows(led: Ledger, w: int, r: int, cached: int, most: float, limit: float) -> bool:
    """Whether `r` would drive worker `w`, which should hold `most` tokens then at most, over its limit.

    What others use of the request's prefix takes no memory; what sleeps of it is memory as any other.
    """
    limit += cached_tokens(led, w, r, cached, True)
    return most > limit and kv_peak(led, w, r) > limit


@compiled
def prefill_steps(k: NDArray[np.float64], work: float, decoding: int) -> float:
    """Steps that `work` prefill tokens take beside `decoding` requests."""
    if k[MODE] != CHUNKED:
        return 1.0
    return float(np.ceil(work / max(k[MAX_BATCHED] - decoding, 1.0)))


@compiled
def prefill_lasts_s(
    k: NDArray[np.float64], work: float, last: float, cached: float, decoding: int, context: float
) -> float:
    """Seconds to compute `work` tokens, the last prompt among them `last` tokens long, its first `cached`.

    Those are not computed, but those after them attend to them.
    """
    if k[MODE] != CHUNKED:
        return prefill_s(k, work, last * last - cached * cached)
    step_s = decode_base_s(k, decoding) + k[PREFILL_STEP] + k[PER_CONTEXT] * context
    steps, budget = prefill_steps(k, work, decoding), max(k[MAX_BATCHED] - decoding, 1.0)
    lasts_s = steps * step_s + k[PER_PREFILL] * work + k[PER_SUM_SQ] * (last * last - cached * cached)
    full = steps - 1.0  # steps with as much prefill as fits, before the last
    lasts_s += full * prefill_hinges_s(k, budget, decoding)
    return lasts_s + prefill_hinges_s(k, work - full * budget, decoding)


@compiled
def outlook(led: Ledger, w: int, r: int) -> tuple[int, int, float]:
    """With `r` at worker `w`: tokens held by all, tokens they should still make, their tightest TPOT.

    Targets that the worker does not keep even for a request alone are left out.
    """
    worker = led.workers[w]
    held = worker.context + worker.queued_context + led.requests[r].prompt + led.requests[r].key
    growth = max(led.requests[r].predicted - led.requests[r].key, 1)
    tpot_s = led.requests[r].tpot_s
    alone_s = decode_base_s(led.coefficients[worker.variant], 1.0)
    for i in range(worker.running_n):
        other = led.running[w, i]
        growth += remaining(led, w, other)
        if led.requests[other].tpot_s >= alone_s:
            tpot_s = min(tpot_s, led.requests[other].tpot_s)
    for p in range(len(led.queue_head)):
        other = led.queue_head[p, w]
        while other != NONE:
            growth += max(led.requests[other].predicted - led.requests[other].key, 1)
            if led.requests[other].tpot_s >= alone_s:
                tpot_s = min(tpot_s, led.requests[other].tpot_s)
            other = led.requests[other].next
    return held, growth, tpot_s


@compiled
def remaining(led: Ledger, w: int, r: int) -> int:
    """Tokens an admitted request should still make, its prediction renewed once it has outlived it."""
    if led.requests[r].phase != DECODING:
        return max(led.requests[r].predicted - led.requests[r].key, 1)
    if led.requests[r].ends <= led.workers[w].step:
        expect_end(led, w, r)
    return led.requests[r].ends - led.workers[w].step


@compiled
def interference(
    led: Ledger, k: NDArray[np.float64], w: int, start_s: float, lasts_s: float, work: float, most: float
) -> float:
    """(d): the expected number of requests decoding at `start_s` that a prefill of `lasts_s` makes fail.

    Stops counting past `most`.
    """
    worker = led.workers[w]
    step_s = decode_base_s(k, worker.decoding) + k[PER_CONTEXT] * worker.context
    earned_steps = prefill_steps(k, work, worker.decoding) if k[MODE] == CHUNKED else 0.0
    harmed = 0.0
    for i in range(worker.running_n - 1, -1, -1):  # the newest has saved least
        other = led.running[w, i]
        tpot_s = led.requests[other].tpot_s
        slack_s = saved_s(led, w, other, start_s) + tpot_s * earned_steps
        if slack_s < lasts_s:
            saves_s = (tpot_s - step_s) * max(remaining(led, w, other) - 1, 1)
            harmed += failing(lasts_s - slack_s, saves_s) - failing(-slack_s, saves_s)
            if harmed > most:
                break
    return harmed


@compiled
def saved_s(led: Ledger, w: int, r: int, at_s: float) -> float:
    """An admitted request's saving against its TPOT line by `at_s`, when the step in progress ends."""
    request = led.requests[r]
    if request.phase != DECODING:
        return 0.0  # its first token comes at the boundary
    after_first = request.key + led.workers[w].step + led.workers[w].gains - 1
    return request.tpot_s * after_first - (at_s - request.first_s)


@compiled
def spare_s(led: Ledger, w: int, r: int, cached: int, now_s: float) -> float:
    """The least saving of a decoding request at `w` that is left once `r` is prefilled there.

    Those behind their line already do not count; a worker without any to count has ALL_TIME to spare.
    """
    worker = led.workers[w]
    k = led.coefficients[worker.variant]
    tokens = led.requests[r].prompt + led.requests[r].key
    work = worker.queued_tokens + tokens - cached
    start_s = max(worker.boundary_s, now_s)
    earned_steps = prefill_steps(k, work, worker.decoding) if k[MODE] == CHUNKED else 0.0
    least_s = ALL_TIME
    for i in range(worker.running_n):
        other = led.running[w, i]
        slack_s = saved_s(led, w, other, start_s)
        if slack_s >= 0.0:
            least_s = min(least_s, slack_s + led.requests[other].tpot_s * earned_steps)
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
def hopeless(led: Ledger, r: int, now_s: float, busy: bool) -> bool:
    """Whether not even an idle worker of the fastest type could still meet a request's TTFT.

    It has cached as much of the request as any worker has. `busy`: one as full as (b) lets it be instead, a
    step in progress. Who waits until only an idle worker would do finds the few whose step happens to end
    just then, and no choice of where to do least harm.
    """
    due_s = led.requests[r].arrival_s + led.requests[r].ttft_s
    if now_s > due_s:
        return True
    if now_s + least_prefill_s(led, r, 0, busy) <= due_s:
        return False
    return led.caches.tokens == 0 or now_s + least_cached_s(led, r, busy) > due_s


@compiled
def least_prefill_s(led: Ledger, r: int, cached: int, busy: bool) -> float:
    """Seconds until an idle worker of the fastest type, or a busy one, has prefilled a request."""
    tokens = led.requests[r].prompt + led.requests[r].key
    least_s = np.inf
    for v in range(led.coefficients.shape[0]):
        k = led.coefficients[v]
        lasts_s = prefill_lasts_s(k, tokens - cached, tokens, cached, 0, 0)
        lasts_s += frontend_s(k, led.requests[r].prompt)
        if busy:
            tpot_s = led.requests[r].tpot_s
            lasts_s += tpot_s
            if k[MODE] == CHUNKED:  # the step in progress has chunks of others, its own steps decode too
                lasts_s += k[PREFILL_STEP] + k[PER_PREFILL] * k[MAX_BATCHED]
                lasts_s += prefill_hinges_s(k, k[MAX_BATCHED], 0.0)
                lasts_s += prefill_steps(k, tokens - cached, 0) * max(tpot_s - decode_base_s(k, 0.0), 0.0)
        least_s = min(least_s, lasts_s)
    return least_s


@compiled
def least_cached_s(led: Ledger, r: int, busy: bool) -> float:
    """The same of one that has as much cached as any serving worker; what that would load, it loads."""
    least_s, most = np.inf, 0
    for w in range(len(led.workers)):
        if led.workers[w].status == SERVING and led.workers[w].role != DECODE_ONLY:
            cached = known_cached(led, w, r, most)
            if cached <= most:
                continue
            load_s = own_loads_s(led, w, r)
            if load_s > 0.0:
                least_s = min(least_s, least_prefill_s(led, r, cached, busy) + load_s)
            else:
                most = cached
    return min(least_s, least_prefill_s(led, r, most, busy))


@compiled
def time_left_s(led: Ledger, r: int, now_s: float) -> float:
    """Seconds in which an idle worker of the fastest type must begin a request's prefill to meet its TTFT."""
    cold = led.caches.tokens == 0
    least_s = least_prefill_s(led, r, 0, False) if cold else least_cached_s(led, r, False)
    return led.requests[r].arrival_s + led.requests[r].ttft_s - now_s - least_s


@compiled
def kv_peak(led: Ledger, w: int, r: int) -> float:
    """(e): the most KV tokens that worker `w` should ever hold with all it has and `r`, unless that is NONE.

    Demand at step n is Σ (context + n) over requests that last n steps; it peaks where one ends.
    """
    k = led.coefficients[led.workers[w].variant]
    count = led.workers[w].running_n
    lasts = np.empty(count + led.workers[w].queued + 1, np.int64)
    holds = np.empty(len(lasts), np.int64)
    for i in range(count):
        other = led.running[w, i]
        lasts[i] = remaining(led, w, other)
        holds[i] = led.requests[other].prompt + generated(led, other)
    if r != NONE:
        lasts[count] = max(led.requests[r].predicted - led.requests[r].key, 1)
        holds[count] = led.requests[r].prompt + led.requests[r].key
        count += 1
    for p in range(len(led.queue_head)):
        other = led.queue_head[p, w]
        while other != NONE:
            lasts[count] = max(led.requests[other].predicted - led.requests[other].key, 1)
            holds[count] = led.requests[other].prompt + led.requests[other].key
            count += 1
            other = led.requests[other].next
    for i in range(count):
        holds[i] += window_blocks(k, holds[i] + lasts[i]) * int(k[BLOCK_TOKENS])
    order = np.argsort(lasts[:count])
    held, peak = 0.0, 0.0
    for i in range(count - 1, -1, -1):
        held += holds[order[i]]
        peak = max(peak, held + (count - i) * lasts[order[i]])
    return peak - shared_tokens(led, w)


@compiled
def client_s(led: Ledger, r: int) -> float:
    """How much later than its worker makes a request's tokens its client has them; 0 if it is on none."""
    if led.requests[r].worker < 0:
        return 0.0
    return frontend_s(led.coefficients[led.workers[led.requests[r].worker].variant], led.requests[r].prompt)


def clients_s(led: Ledger, rows: Ints | slice = slice(None)) -> Floats:
    """The same of several requests."""
    requests = led.requests[rows]
    k = led.coefficients[led.workers["variant"][requests["worker"]]]
    seconds = k[:, PER_REQUEST] + k[:, PER_PROMPT_TOKEN] * requests["prompt"]
    return np.where(requests["worker"] < 0, 0.0, seconds)
