"""Aladdin's constraints (b) to (e): whether a worker may take a request, on the ledger's live state.

For worker w with b decoding requests and a candidate r of L prefill tokens:

(b) a decode step with everything assigned to w, its outputs grown by θ of what is expected, within TPOT;
    a target that no type of worker keeps even for its request alone is none (kept_tpot_s), and one that w
    does not, of a request that had to go there, is lost and binds no other
(c) step in progress, those planned ahead, prefill of all queued at w and of r, within what is left of r's
    TTFT; and where r loads KV from host memory: the loads before it and its own, the step in progress then,
    the prefill of the rest
(d) that prefill costs no decoding request k more than it has saved against its TPOT line by then:
        slack_k = tpot_k·(tokens after the first) - (time since the first)
    A request behind its line is not lost: it may catch up before it ends. With a deficit of d, saving s a
    step and ending after e expected steps (memoryless), it fails with 1 - exp(-d / (s·e)). The harm of a
    prefill is what it adds to these, summed; the paper's (d) is harm = 0, but for requests that have failed
    already, which block none here.
(e) KV of all assigned, each growing by a token a step until its expected end, within γ·capacity at every
    step, windows counted as at its end; what running requests share is held once

**Room for tighter classes.** Work that can wait yields to a class whose TTFT target is `YIELDS` times as
tight. It leaves a share `ROOM` of each worker: of the step time that the tighter class's TPOT allows, of the
memory and of the seats. It does not queue behind another prefill. So a tight request that comes next finds a
worker, and loose work fills what is left. Loose work that is held goes where there is room for it in time.
A worker too slow for the tighter class, even for one request alone, has nothing to leave to it: loose work
fills it. Work that may wait for longer than `LONG_WAIT_S` leaves `FIRST_ROOM` at first, and less and less
until it is due. So at a peak the work that has waited longest is let in, and the rest runs in the valley.

Where an engine mixes phases (chunked), prefill does not stop decoding: the cost in (d) is what the chunks
add to the steps, less what those steps themselves save.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from controlplane.compiled import compiled
from controlplane.perfmodel import coefficients as speed
from controlplane.placement import hits, outlook
from controlplane.placement import ledger as state
from controlplane.placement.ledger import Floats, Ints, Ledger
from controlplane.placement.order import LEVELS, OPEN, level_of
from controlplane.types import Slo

SettingsRow = NDArray[np.float64]

# Where each setting stands in the row; PlacementSettings (policies.py) fills it.
THETA, GAMMA, TOLERANCE = 0, 1, 2
USE_B, USE_C, USE_D, USE_E = 3, 4, 5, 6
HEADROOM = 7
SETTINGS = 8

ROUNDING_S = 1e-9
YIELDS = 10.0
ROOM = 0.2
FIRST_ROOM = 0.35
LONG_WAIT_S = 120.0
NO_TPOT_S = 1e6  # a target that is always met


def kept_tpot_s(types: Floats, prompt_tokens: Ints, tpot_s: Floats) -> Floats:
    """The TPOT targets that placement keeps, of requests with these prompts: those asked for.

    A target that no type of worker keeps even for the request alone is lost, as a TTFT can be. Holding the
    request back for it would help no request. `types`: their rows of coefficients.
    """
    alone_s = [speed.decode_base_s(k, 1.0) + k[speed.PER_CONTEXT] * prompt_tokens for k in types]
    return np.where(np.min(alone_s, axis=0) <= tpot_s, tpot_s, NO_TPOT_S)


def yields_to(slo: Slo, slos: Sequence[Slo]) -> tuple[float, float]:
    """The tightest and the loosest TPOT target of those that requests of `slo` yield to; 0 for none."""
    tpot_s = [tight.tpot_s for tight in slos if tight.ttft_s * YIELDS <= slo.ttft_s]
    return min(tpot_s, default=0.0), max(tpot_s, default=0.0)


@compiled
def fits(
    ledger: Ledger, settings: SettingsRow, w: int, r: int, cached: int, now_s: float, late: bool
) -> bool:
    """Whether worker `w` may take request `r` now; `late` drops (c) for one past its TTFT already.

    `cached`: the request's tokens that the worker would not compute (`hits.known_cached`).
    """
    return harm(ledger, settings, w, r, cached, now_s, late, 0.0) <= 0.0


@compiled
def could_fit(
    ledger: Ledger, settings: SettingsRow, w: int, r: int, cached: int, now_s: float, late: bool
) -> bool:
    """Whether `w` could take `r` now if it had nothing else to do; where not, it is no use to wait for it."""
    k = ledger.coefficients[ledger.workers[w].variant]
    tokens = ledger.requests[r].prompt + ledger.requests[r].key
    grown = tokens + settings[THETA] * max(ledger.requests[r].predicted - ledger.requests[r].key, 1)
    if speed.decode_s(k, 1.0, grown) > ledger.requests[r].tpot_s:
        return False
    lasts_s = outlook.prefill_lasts_s(k, tokens - cached, tokens, cached, 0, 0) + outlook.own_loads_s(
        ledger, w, r
    )
    lasts_s += speed.frontend_s(k, ledger.requests[r].prompt)
    return late or now_s + lasts_s <= ledger.requests[r].arrival_s + ledger.requests[r].ttft_s


@compiled
def harm(
    ledger: Ledger, settings: SettingsRow, w: int, r: int, cached: int, now_s: float, late: bool, most: float
) -> float:
    """The harm of (d) that taking `r` does at worker `w`; infinite past `most` or where (b), (c), (e) forbid.

    Checks run in the order of cost: (c), or the newest request in (d), excludes most of the workers that
    may not take `r`.
    """
    worker = ledger.workers[w]
    k = ledger.coefficients[worker.variant]
    harmed = 0.0
    if worker.role != state.DECODE_ONLY:
        tokens = ledger.requests[r].prompt + ledger.requests[r].key
        work = worker.queued_tokens + tokens - cached
        start_s = max(worker.boundary_s, now_s)
        lasts_s = outlook.prefill_lasts_s(k, work, tokens, cached, worker.decoding, worker.context)
        if settings[USE_C] > 0 and not late:
            wait_s = outlook.prefilled_s(ledger, w, r, cached, start_s, lasts_s)
            wait_s -= ledger.requests[r].arrival_s
            wait_s += speed.frontend_s(k, ledger.requests[r].prompt)
            wait_s += speed.ahead_s(k, worker.decoding, worker.context)
            if wait_s > ledger.requests[r].ttft_s:
                return np.inf
        if worker.role == state.PREFILL_ONLY:
            return 0.0
        if settings[USE_D] > 0:
            harmed = outlook.interference(ledger, k, w, start_s, lasts_s, work, most)
            if harmed > most:
                return np.inf
    sequences = worker.decoding + worker.queued + 1
    share, left_tpot_s = left_to(ledger, w, r, now_s)
    if sequences > share * k[speed.MAX_SEQS]:
        return np.inf
    held, growth, tpot_s = outlook.demand(ledger, w, r)
    tpot_s = min(tpot_s, left_tpot_s)
    if settings[USE_B] > 0 and speed.decode_s(k, sequences, held + settings[THETA] * growth) > tpot_s:
        return np.inf
    if settings[USE_E] > 0 and sequences > 1:
        limit = share * settings[GAMMA] * k[speed.KV_BLOCKS] * k[speed.BLOCK_TOKENS]
        # As if all ended at once, which no peak exceeds; only past that does it matter who ends when.
        windows = sequences * k[speed.WINDOW_BLOCKS] * k[speed.BLOCK_TOKENS]
        at_most = held + growth - hits.shared_tokens(ledger, w) + windows
        if at_most > limit and overflows(ledger, w, r, cached, at_most, limit):
            return np.inf
    return harmed


@compiled
def closed_to(ledger: Ledger, settings: SettingsRow, w: int, r: int, now_s: float) -> tuple[int, float]:
    """The lowest level of prompts that (d) forbids worker `w`, and up to which length, until its step ends.

    OPEN where it does not forbid those that are at the level of `r`'s. While the step lasts, time changes
    nothing in (d), and of prompts of as many steps the longer do more harm. For a worker that caches nothing.
    """
    worker = ledger.workers[w]
    k = ledger.coefficients[worker.variant]
    found, longest, least = OPEN, np.inf, 1.0
    if settings[USE_D] == 0 or worker.role != state.ANY_PHASE:
        return found, longest
    start_s = max(worker.boundary_s, now_s)
    tokens = ledger.requests[r].prompt + ledger.requests[r].key
    if k[speed.MODE] == speed.CHUNKED:
        budget = max(k[speed.MAX_BATCHED] - worker.decoding, 1.0)
        longest = outlook.prefill_steps(k, worker.queued_tokens + tokens, worker.decoding) * budget
        longest -= worker.queued_tokens
        least = longest - budget + 1.0
    low, high = 0, level_of(tokens)
    level = high
    while low <= high:
        shortest = float(LEVELS[level])
        work = worker.queued_tokens + shortest
        lasts_s = outlook.prefill_lasts_s(k, work, shortest, 0, worker.decoding, worker.context) - ROUNDING_S
        if shortest >= least and outlook.interference(ledger, k, w, start_s, lasts_s, work, 0.0) > 0.0:
            found, high = level, level - 1
        elif found == OPEN:
            break
        else:
            low = level + 1
        level = (low + high) // 2
    return found, longest


@compiled
def yields_at(ledger: Ledger, w: int, r: int) -> float:
    """TPOT of the tighter classes that `r` leaves room for at `w`; 0 where it is too slow for them."""
    tight_s = ledger.requests[r].yields_tpot_s
    if tight_s <= 0.0:
        return 0.0
    alone_s = speed.decode_base_s(ledger.coefficients[ledger.workers[w].variant], 1.0)
    if alone_s <= tight_s:
        return tight_s
    return ledger.requests[r].yields_most_tpot_s if alone_s <= ledger.requests[r].yields_most_tpot_s else 0.0


@compiled
def left_to(ledger: Ledger, w: int, r: int, now_s: float) -> tuple[float, float]:
    """The share of a worker that a request may fill, and the step it may bring it to.

    A request may fill all of it, unless it yields to a tighter class that the worker is fast enough for.
    Then it leaves that class its room, and takes nothing where others wait to be prefilled.
    """
    worker, tight_s = ledger.workers[w], yields_at(ledger, w, r)
    if tight_s <= 0.0 or worker.decoding + worker.queued == 0:
        return 1.0, np.inf
    if worker.queued_tokens > 0:
        return 0.0, 0.0
    request = ledger.requests[r]
    room = room_left(request.arrival_s + request.ttft_s - now_s, request.ttft_s)
    return 1.0 - room, (1.0 - room) * tight_s


@compiled
def room_left(left_s: float, ttft_s: float) -> float:
    """The share of a worker that work leaves which yields, due in `left_s` of the `ttft_s` it had."""
    if ttft_s <= LONG_WAIT_S:
        return ROOM
    return ROOM + (FIRST_ROOM - ROOM) * min(max(left_s / ttft_s, 0.0), 1.0)


@compiled
def overflows(ledger: Ledger, w: int, r: int, cached: int, most: float, limit: float) -> bool:
    """Whether `r` would drive worker `w`, which should hold `most` tokens then at most, over its limit.

    What others use of the request's prefix takes no memory; what sleeps of it is memory as any other.
    """
    limit += hits.cached_tokens(ledger, w, r, cached, True)
    return most > limit and outlook.kv_peak(ledger, w, r, limit) > limit
