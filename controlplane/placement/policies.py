"""The placement policies: compiled functions that choose a worker, the same in both planes.

`spread`, `best-fit` and `slack-fit` consider only workers that satisfy the constraints and differ in the
order: least or most loaded by capacity_norm (Algorithm 1), or least to spare in (d), so that workers with
much to spare are kept for long prompts. Where no worker satisfies them the request is held in the cluster's
queue. The baselines never hold and know no constraint. A policy's name with the suffix `+migrate` says that
running requests may also be moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from controlplane.compiled import compiled
from controlplane.errors import BadInput
from controlplane.perfmodel.coefficients import (
    BLOCK_TOKENS,
    KV_BLOCKS,
    MAX_SEQS,
    PER_CONTEXT,
    decode_base_s,
)
from controlplane.placement.constraints import (
    AS_REPORTED,
    CONTEXT_WEIGHT,
    GAMMA,
    HEADROOM,
    KNOBS,
    THETA,
    TOLERANCE,
    USE_B,
    USE_C,
    USE_D,
    USE_E,
    Knobs,
    fits,
    harm,
    spare_s,
)
from controlplane.placement.ledger import ANY_PHASE, DECODE_ONLY, NONE, SERVING, Ledger
from controlplane.placement.queue import QueueSettings


class Policy(StrEnum):
    """Placement policies by name; `exact` solves a heartbeat's requests together (placement.exact)."""

    SPREAD = "spread"
    BEST_FIT = "best-fit"
    EXACT = "exact"
    JSQ = "jsq"
    P2C = "p2c"
    ROUND_ROBIN = "round-robin"
    LEAST_KV = "least-kv"
    FREENESS = "freeness"
    SLACK_FIT = "slack-fit"


SPREAD, BEST_FIT, JSQ, P2C, ROUND_ROBIN, LEAST_KV, FREENESS, EXACT, SLACK_FIT = range(9)
CONSTRAINED = (SPREAD, BEST_FIT, SLACK_FIT)
BY_TARGETS = frozenset((Policy.SPREAD, Policy.BEST_FIT, Policy.SLACK_FIT, Policy.EXACT))
POLICY_CODE = {
    Policy.SPREAD: SPREAD,
    Policy.BEST_FIT: BEST_FIT,
    Policy.JSQ: JSQ,
    Policy.P2C: P2C,
    Policy.ROUND_ROBIN: ROUND_ROBIN,
    Policy.LEAST_KV: LEAST_KV,
    Policy.FREENESS: FREENESS,
    Policy.EXACT: EXACT,
    Policy.SLACK_FIT: SLACK_FIT,
}


@dataclass(frozen=True, slots=True)
class PlacementSettings:
    """The strictness of the constraints.

    `theta` in [0, 1]: how much of the expected outputs counts in (b). `gamma` in (0, 1]: share of KV that
    may be promised in (e). `tolerance`, at least 0: how many others' failures (expected, fractional) a
    request's last chance to meet its TTFT is worth in (d); 0 is the paper. `context_weight`: w of
    capacity_norm. `headroom`:
    the share of KV by which a worker with a high-priority request counts as fuller for normal ones, and one
    without for high ones, so that the high keep together where `spread` and `freeness` rank workers (see
    migration.usage); 0: all are alike. `queue`: of requests that no worker takes.
    """

    theta: float = 0.5
    gamma: float = 0.95
    tolerance: float = 0.5
    context_weight: float = 1.0
    headroom: float = 0.0
    queue: QueueSettings = QueueSettings()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        if not 0.0 <= self.theta <= 1.0:
            raise BadInput(f"placement: theta: must be within 0 and 1, got {self.theta:g}")
        if not self.tolerance >= 0.0:
            raise BadInput(f"placement: tolerance: must not be negative, got {self.tolerance:g}")
        if not 0.0 < self.gamma <= 1.0:
            raise BadInput(f"placement: gamma: must be above 0 and at most 1, got {self.gamma:g}")
        if not 0.0 <= self.headroom < 1.0:
            raise BadInput(f"placement: headroom: must be at least 0 and below 1, got {self.headroom:g}")
        if not self.context_weight >= 0.0:
            raise BadInput(f"placement: context_weight: must not be negative, got {self.context_weight:g}")

    def knobs(self) -> NDArray[np.float64]:
        """The settings as the row that compiled code reads."""
        row = np.zeros(KNOBS)
        row[THETA], row[GAMMA], row[TOLERANCE] = self.theta, self.gamma, self.tolerance
        row[CONTEXT_WEIGHT] = self.context_weight
        row[HEADROOM] = self.headroom
        row[[USE_B, USE_C, USE_D, USE_E]] = True
        return row


@compiled
def assign(
    led: Ledger,
    policy: int,
    knobs: Knobs,
    r: int,
    now_s: float,
    late: bool,
    phase_role: int,
    draw: NDArray[np.float64],
) -> int:
    """Return the worker for request `r`, or NONE to hold it in the cluster's queue.

    `late`: its TTFT cannot be met any more, so (c) no longer matters. `phase_role`: PREFILL_ONLY or
    DECODE_ONLY restricts the choice to that pool in split mode, ANY_PHASE does not. `draw` [2] uniform in
    [0, 1), used by p2c and to start round-robin's turn.
    """
    if policy == P2C:
        return two_choices(led, phase_role, draw)
    if policy == ROUND_ROBIN:
        return in_turn(led, r, phase_role)
    constrained = policy in CONSTRAINED
    best, best_score = NONE, np.inf
    for w in range(len(led.workers)):
        if led.workers[w].status != SERVING or not serves(led, w, phase_role):
            continue
        if policy == SLACK_FIT and led.workers[w].role == ANY_PHASE:
            score = spare_s(led, w, r, now_s)
        else:
            score = load(led, policy, knobs, w, r)
        if score < best_score and (not constrained or fits(led, knobs, w, r, now_s, late)):
            best, best_score = w, score
    return best


@compiled
def last_chance(led: Ledger, knobs: Knobs, r: int, now_s: float, phase_role: int) -> int:
    """Return the worker where `r`, about to lose its TTFT, does least harm; NONE past the tolerance."""
    best, least = NONE, knobs[TOLERANCE]
    for w in range(len(led.workers)):
        if led.workers[w].status == SERVING and serves(led, w, phase_role):
            harmed = harm(led, knobs, w, r, now_s, False, least)
            if harmed < least:
                best, least = w, harmed
    return best


@compiled
def serves(led: Ledger, w: int, phase_role: int) -> bool:
    """Whether a worker belongs to the pool that is asked for."""
    role = led.workers[w].role
    if phase_role == DECODE_ONLY:
        return role == DECODE_ONLY
    return role != DECODE_ONLY


@compiled
def load(led: Ledger, policy: int, knobs: Knobs, w: int, r: int) -> float:
    """The policy's rank of a worker; the least is taken."""
    requests = float(led.workers[w].decoding + led.workers[w].queued)
    if policy == JSQ:
        return requests
    k = led.coefficients[led.workers[w].variant]
    tokens = float(led.workers[w].context + led.workers[w].queued_context)
    if policy == LEAST_KV:
        return tokens / (k[KV_BLOCKS] * k[BLOCK_TOKENS])
    if policy == FREENESS:  # Llumnix: free memory per request; the more the better
        if knobs[AS_REPORTED] > 0:
            requests -= led.workers[w].unreported
            tokens -= led.workers[w].unreported_context
        free = k[KV_BLOCKS] * k[BLOCK_TOKENS] - tokens
        return -(free - kept_free(led, k, knobs, w, r)) / requests if requests > 0 else -np.inf
    if policy == SPREAD:
        tokens += kept_free(led, k, knobs, w, r)
    norm = capacity_norm(k, knobs, requests, tokens, led.requests[r].tpot_s)
    return -norm if policy == BEST_FIT else norm


@compiled
def kept_free(led: Ledger, k: NDArray[np.float64], knobs: Knobs, w: int, r: int) -> float:
    """The tokens by which a worker counts as fuller for a request of another priority than it has."""
    if knobs[HEADROOM] == 0 or has_high(led, w) == (led.requests[r].priority > 0):
        return 0.0
    return float(knobs[HEADROOM] * k[KV_BLOCKS] * k[BLOCK_TOKENS])


@compiled
def has_high(led: Ledger, w: int) -> bool:
    """Whether a worker has a request of high priority, running or in its queue."""
    for i in range(led.workers[w].running_n):
        if led.requests[led.running[w, i]].priority > 0:
            return True
    return led.queue_head[1, w] != NONE


@compiled
def capacity_norm(
    k: NDArray[np.float64], knobs: Knobs, requests: float, tokens: float, tpot_s: float
) -> float:
    """Algorithm 1's L2 norm, squared, of batch and weighted context, each in shares of its own limit.

    The paper leaves the weight open; dividing by max_seqs and by Eq 4's l(1) makes 1 its natural value.
    """
    limit = (tpot_s - decode_base_s(k, 1.0)) / k[PER_CONTEXT] if k[PER_CONTEXT] > 0 else np.inf
    limit = min(max(limit, 1.0), k[KV_BLOCKS] * k[BLOCK_TOKENS])
    batch = requests / k[MAX_SEQS]
    context = knobs[CONTEXT_WEIGHT] * tokens / limit
    return batch * batch + context * context


@compiled
def two_choices(led: Ledger, phase_role: int, draw: NDArray[np.float64]) -> int:
    """The less loaded of two workers drawn at random: by requests, then tokens held, then the first drawn."""
    count = 0
    for w in range(len(led.workers)):
        if led.workers[w].status == SERVING and serves(led, w, phase_role):
            count += 1
    if count == 0:
        return NONE
    first = int(draw[0] * count)
    second = int(draw[1] * max(count - 1, 1))
    if count > 1 and second >= first:
        second += 1
    one, other, at = NONE, NONE, 0
    for w in range(len(led.workers)):
        if led.workers[w].status == SERVING and serves(led, w, phase_role):
            if at == first:
                one = w
            elif at == second:
                other = w
            at += 1
    return one if other == NONE or not is_less_loaded(led, other, one) else other


@compiled
def is_less_loaded(led: Ledger, a: int, b: int) -> bool:
    """Whether worker `a` has fewer requests than `b`, or as many that hold fewer tokens."""
    more = led.workers[b].decoding + led.workers[b].queued - led.workers[a].decoding - led.workers[a].queued
    if more != 0:
        return more > 0
    return (
        led.workers[a].context + led.workers[a].queued_context
        < led.workers[b].context + led.workers[b].queued_context
    )


@compiled
def in_turn(led: Ledger, r: int, phase_role: int) -> int:
    """Round-robin by the request's number."""
    count = 0
    for w in range(len(led.workers)):
        if led.workers[w].status == SERVING and serves(led, w, phase_role):
            count += 1
    if count == 0:
        return NONE
    turn = r % count
    for w in range(len(led.workers)):
        if led.workers[w].status == SERVING and serves(led, w, phase_role):
            if turn == 0:
                return w
            turn -= 1
    return NONE


MIGRATE = "+migrate"


def read_policy(name: str) -> tuple[Policy, bool]:
    """The placement policy, and whether tick moves requests. Raises BadInput listing the names."""
    placement = name.removesuffix(MIGRATE)
    try:
        return Policy(placement), name.endswith(MIGRATE)
    except ValueError:
        raise BadInput(
            f"policy: one of {', '.join(Policy)}, each also with {MIGRATE}, got {name!r}"
        ) from None


def policy_names() -> list[str]:
    """Every name `read_policy` knows."""
    return [name + suffix for name in Policy for suffix in ("", MIGRATE)]
