"""One heartbeat's placement as a vector bin packing: requests, workers, and the rows that a worker must keep.

Aladdin's MIP (§4.2): place each new request on one worker, ongoing ones stay, use the fewest workers. For
worker j with ongoing requests k holding h_k tokens, r_k still expected, and the new requests i placed on it:

    (b) c3 + c2·b + k2·(Σ h_k + θ·r_k + Σ L_i + θ·p_i) <= TPOT              b = ongoing + new
    (c) backlog + c1 + k1·Σ L_i <= TTFT
    (d) c1 + k1·Σ L_i <= the least slack of the ongoing requests against their TPOT line
    (e) Σ_{r_k >= n} (h_k + n) + Σ_{p_i >= n} (L_i + n) <= γ·capacity       at every coming step n

Each is linear in what is placed, so each is a row `Σ weight_i <= limit`. A hinge is convex: its maximum is
kept by one row per hinge, and all experts count as touched. (e) rises between two ends, so the ends are the
only steps to write rows for. Times are whole nanoseconds, weights rounded up and limits down. A request that
fits nowhere is held.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, hypot, inf, isfinite

import numpy as np
from numpy.typing import NDArray

from controlplane.errors import BadInput
from controlplane.perfmodel.coefficients import BLOCK_TOKENS, KV_BLOCKS, MAX_SEQS, ahead_s
from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.step import Hinge, PrefillModel, StepModel
from controlplane.placement.ledger import DECODING, NONE, Ledger, generated
from controlplane.placement.outlook import prefill_lasts_s, remaining
from controlplane.placement.policies import PlacementSettings
from controlplane.types import EngineMode, Slo

Ints = NDArray[np.int64]

_NS = 1e9
_ROUNDING = 1e-6  # of a nanosecond: what float arithmetic may add to a whole number
_UNLIMITED = 1 << 60
_NO_TTFT_S = 1e9  # for requests that have their first token
MOST_REQUESTS = 64  # of one heartbeat; the others wait for the next


@dataclass(frozen=True, slots=True)
class WorkerState:
    """A worker's load at the heartbeat; idle when there is none.

    `held_tokens` and `remaining_tokens`, per ongoing request (queued ones included): tokens it holds once
    prefilled, output tokens still expected. `min_slack_s`: the least time any of them has saved against
    its TPOT line, less what the backlog will cost it. `backlog_s`: the step in progress and prefill queued.
    """

    held_tokens: tuple[int, ...] = ()
    remaining_tokens: tuple[int, ...] = ()
    min_slack_s: float = inf
    backlog_s: float = 0.0

    def __post_init__(self) -> None:
        if len(self.held_tokens) != len(self.remaining_tokens):
            raise BadInput(
                "worker state: held_tokens and remaining_tokens must have one entry a request each"
            )

    @property
    def idle(self) -> bool:
        return not self.held_tokens


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request to place; both at least 1."""

    prompt_tokens: int
    predicted_tokens: int

    def __post_init__(self) -> None:
        if self.prompt_tokens < 1 or self.predicted_tokens < 1:
            raise BadInput(f"new request: tokens must be at least 1, got {self}")


@dataclass(frozen=True, slots=True)
class Heartbeat:
    """The problem: workers of one type, all requests under one SLO.

    `theta` in [0, 1]: the share of expected growth that (b) counts. `gamma` in (0, 1]: the share of KV
    capacity that (e) may fill.
    """

    requests: tuple[PendingRequest, ...]
    workers: tuple[WorkerState, ...]
    step: StepModel
    prefill: PrefillModel
    slo: Slo
    kv_capacity_tokens: int
    max_seqs: int = 256
    theta: float = 0.5
    gamma: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.theta <= 1:
            raise BadInput(f"heartbeat: theta: must be between 0 and 1, got {self.theta:g}")
        if not 0 < self.gamma <= 1:
            raise BadInput(f"heartbeat: gamma: must be above 0 and at most 1, got {self.gamma:g}")


@dataclass(frozen=True)
class Rows:
    """A worker's constraints: `weights` [rows, requests], `limits` [rows], whole numbers.

    `open` is False where the ongoing requests alone break one: the worker takes nothing.
    """

    weights: Ints
    limits: Ints

    @property
    def open(self) -> bool:
        return bool((self.limits >= 0).all())


@dataclass(frozen=True, slots=True)
class HeartbeatPlacement:
    """The worker of each request (None: held), and the cost: held first, then workers used.

    `workers_used` counts those with ongoing requests. `bound`: no placement costs less. `proven`: none is
    cheaper than this one.
    """

    worker: tuple[int | None, ...]
    workers_used: int
    cost: int
    bound: int
    proven: bool

    @property
    def held(self) -> int:
        return sum(w is None for w in self.worker)


def heartbeat_of(
    ledger: Ledger, rows: Ints, workers: Ints, profile: Profile, settings: PlacementSettings, now_s: float
) -> Heartbeat:
    """The heartbeat that places requests `rows` of a ledger on `workers` of it, all of one profile.

    One SLO holds for all, the tightest: what is left of the TTFT to the request that needs its first token
    soonest, and the least TPOT.
    """
    requests, k = ledger.requests[rows], ledger.coefficients[ledger.workers["variant"][workers]]
    left_s = requests["ttft_s"] - (now_s - requests["arrival_s"])
    left_s -= profile.frontend.seconds(requests["prompt"])
    due_s = min(left_s[np.isnan(requests["first_s"])].tolist(), default=_NO_TTFT_S)
    prefill = profile.prefill
    if prefill is None or profile.engine.mode == EngineMode.CHUNKED:
        prefill = PrefillModel(profile.step.base_s, profile.step.per_prefill_token_s)
    return Heartbeat(
        requests=tuple(
            PendingRequest(int(r["prompt"] + r["key"]), max(int(r["predicted"] - r["key"]), 1))
            for r in requests
        ),
        workers=tuple(worker_state(ledger, int(w), now_s) for w in workers),
        step=profile.step,
        prefill=prefill,
        slo=Slo(max(due_s, 1e-6), float(requests["tpot_s"].min())),
        kv_capacity_tokens=int((k[:, KV_BLOCKS] * k[:, BLOCK_TOKENS]).min()),
        max_seqs=int(k[:, MAX_SEQS].min()),
        theta=settings.theta,
        gamma=settings.gamma,
    )


def worker_state(ledger: Ledger, w: int, now_s: float) -> WorkerState:
    """What worker `w` of a ledger carries at `now_s`."""
    worker = ledger.workers[w]
    k = ledger.coefficients[worker["variant"]]
    start_s = max(float(worker["boundary_s"]), now_s)
    held, still, slack_s = [], [], inf
    for i in range(int(worker["running_n"])):
        r = int(ledger.running[w, i])
        request = ledger.requests[r]
        held.append(int(request["prompt"]) + int(generated(ledger, r)))
        still.append(int(remaining(ledger, w, r)))
        after_first = held[-1] - int(request["prompt"]) + int(worker["gains"]) - 1
        saved_s = 0.0  # its first token comes at the boundary
        if request["phase"] == DECODING:
            saved_s = float(request["tpot_s"]) * after_first - (start_s - float(request["first_s"]))
        slack_s = min(slack_s, saved_s)
    queued_s = 0.0
    for p in range(len(ledger.queue_head) - 1, -1, -1):
        r = int(ledger.queue_head[p, w])
        while r != NONE:
            request = ledger.requests[r]
            held.append(int(request["prompt"] + request["key"]))
            still.append(max(int(request["predicted"] - request["key"]), 1))
            r = int(request["next"])
    if worker["queued_tokens"] > 0:
        work = float(worker["queued_tokens"])
        queued_s = float(
            prefill_lasts_s(k, work, work, 0.0, int(worker["decoding"]), float(worker["context"]))
        )
    wait_s = start_s - now_s + queued_s + ahead_s(k, int(worker["decoding"]), float(worker["context"]))
    return WorkerState(tuple(held), tuple(still), slack_s - queued_s, wait_s)


def cost_of(beat: Heartbeat, worker: Sequence[int | None]) -> tuple[int, int]:
    """(workers used, cost) of a placement; one held request outweighs all the workers there are."""
    used = {j for j, state in enumerate(beat.workers) if not state.idle} | {
        w for w in worker if w is not None
    }
    return len(used), sum(w is None for w in worker) * (len(beat.workers) + 1) + len(used)


def worker_rows(beat: Heartbeat, state: WorkerState) -> Rows:
    """The rows (b) to (e) of one worker over all the heartbeat's requests."""
    prompt = np.array([r.prompt_tokens for r in beat.requests], float)
    grown = prompt + beat.theta * np.array([r.predicted_tokens for r in beat.requests], float)
    rows = [(np.ones(len(prompt), np.int64), beat.max_seqs - len(state.held_tokens))]

    # (b): base and hinges move to the right side, leaving what each request adds.
    step = beat.step
    touched_s = step.base_s + sum(h.start * h.per_unit_s for h in step.hinges if h.of == "experts")
    for per_sequence_s, base_s in _pieces(step.per_sequence_s, touched_s, step.hinges, "sequences"):
        context = sum(state.held_tokens) + beat.theta * sum(state.remaining_tokens)
        ongoing_s = base_s + per_sequence_s * len(state.held_tokens) + step.per_context_token_s * context
        rows.append(_times(per_sequence_s + step.per_context_token_s * grown, beat.slo.tpot_s - ongoing_s))

    # (c) and (d) bound the same prefill.
    most_s = min(beat.slo.ttft_s - state.backlog_s, state.min_slack_s)
    prefill = beat.prefill
    for per_token_s, base_s in _pieces(prefill.per_token_s, prefill.base_s, prefill.hinges, "prefill_tokens"):
        rows.append(_times(per_token_s * prompt + prefill.per_sum_sq_s * prompt**2, most_s - base_s))

    rows.extend(_kv_rows(beat, state))
    return Rows(np.array([w for w, _ in rows], np.int64), np.array([limit for _, limit in rows], np.int64))


def best_fit(beat: Heartbeat, rows: Sequence[Rows]) -> HeartbeatPlacement:
    """Algorithm 1: each request in turn to the fullest worker that keeps its rows, else held.

    Fullest by capacity_norm, the L2 norm of the batch and of the context, each as a share of what an
    otherwise empty worker could have. `rows` are those of `worker_rows`, one per worker.
    """
    # Eq 4 at one sequence: the context at which a batch of one is just within TPOT.
    context_scale = min(beat.step.context_limit(1, beat.slo.tpot_s), float(beat.kv_capacity_tokens))
    context_scale = max(context_scale, 1.0)
    batch = [len(s.held_tokens) for s in beat.workers]
    context = [sum(s.held_tokens) for s in beat.workers]
    left = [r.limits.copy() for r in rows]

    def emptiness(j: int) -> float:
        return -hypot(batch[j] / beat.max_seqs, context[j] / context_scale)

    placed: list[int | None] = []
    for i, request in enumerate(beat.requests):
        chosen = None
        for j in sorted(range(len(rows)), key=emptiness):
            if rows[j].open and (rows[j].weights[:, i] <= left[j]).all():
                chosen = j
                left[j] -= rows[j].weights[:, i]
                batch[j] += 1
                context[j] += request.prompt_tokens
                break
        placed.append(chosen)
    used, cost = cost_of(beat, placed)
    busy = sum(not s.idle for s in beat.workers)
    return HeartbeatPlacement(tuple(placed), used, cost, busy, cost == busy)


def _pieces(slope: float, base_s: float, hinges: tuple[Hinge, ...], of: str) -> list[tuple[float, float]]:
    """(slope, base) of each line whose maximum is slope·x + base + Σ hinges, a convex function of x."""
    pieces = [(slope, base_s)]
    for hinge in sorted((h for h in hinges if h.of == of), key=lambda h: h.start):
        slope, base_s = slope + hinge.per_unit_s, base_s - hinge.per_unit_s * hinge.start
        pieces.append((slope, base_s))
    return pieces


def _times(weights_s: NDArray[np.float64], limit_s: float) -> tuple[Ints, int]:
    weights = np.ceil(weights_s * _NS - _ROUNDING).astype(np.int64)
    return weights, floor(limit_s * _NS + _ROUNDING) if isfinite(limit_s) else _UNLIMITED


def _kv_rows(beat: Heartbeat, state: WorkerState) -> list[tuple[Ints, int]]:
    prompt = np.array([r.prompt_tokens for r in beat.requests], np.int64)
    lasts = np.array([r.predicted_tokens for r in beat.requests], np.int64)
    held = np.array(state.held_tokens, np.int64)
    remaining = np.array(state.remaining_tokens, np.int64)
    room = floor(beat.gamma * beat.kv_capacity_tokens + _ROUNDING)
    rows = []
    for n in np.unique(np.concatenate((lasts, remaining))):
        weights = np.where(lasts >= n, prompt + n, 0)
        rows.append((weights, room - int((held + n)[remaining >= n].sum())))
    return rows
