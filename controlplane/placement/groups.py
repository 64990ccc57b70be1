"""Grouped scheduling for high rates (Aladdin, Appendix A): G schedulers, each with its own workers.

    r_a / G <= f⁻¹(T_sched)      f(rate): seconds a scheduler takes at that arrival rate        (Eq 8)
    N_w / G >= 1 / (2·ε)         half of the groups need one worker more: (G/2) / N_w <= ε

Requests are dealt to groups in proportion to their workers: in turn by one router that counts, or by hash
where several routers must agree without talking.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from math import ceil, log

from controlplane.errors import BadInput, Infeasible
from controlplane.types import RequestId, WorkerId

_ROUNDING = 1e-9  # 1 / (2·0.1) must be 5 workers, not 6


def workers_per_group(extra: float) -> int:
    """Fewest workers of a group for grouping to cost at most the share `extra` (ε) of all workers."""
    if not 0 < extra <= 1:
        raise BadInput(f"groups: extra workers: must be a share above 0 and at most 1, got {extra:g}")
    return ceil(1 / (2 * extra) - _ROUNDING)


def highest_rate_rps(latency_s: Callable[[float], float], limit_s: float, most_rps: float) -> float:
    """f⁻¹(limit): the highest rate up to `most_rps` at which a scheduler keeps `limit_s`.

    `latency_s` (rate → seconds) must not fall as the rate grows. Raises Infeasible where even the slowest
    rate breaks the limit.
    """
    if latency_s(most_rps) <= limit_s:
        return most_rps
    low, high = 0.0, most_rps
    if latency_s(low) > limit_s:
        raise Infeasible(
            f"groups: a scheduler takes {latency_s(low):g} s when idle, the limit is {limit_s:g} s"
        )
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if latency_s(middle) <= limit_s else (low, middle)
    return low


def group_count(rate_rps: float, workers: int, group_limit_rps: float, extra: float) -> int:
    """The fewest groups that keep each scheduler within `group_limit_rps`; fewer groups waste less.

    Raises Infeasible where so many groups would be smaller than `workers_per_group(extra)`.
    """
    if not (rate_rps >= 0 and workers >= 1 and group_limit_rps > 0):
        raise BadInput(
            f"groups: need a rate of at least 0, a worker and a limit above 0, got {rate_rps:g} req/s,"
            f" {workers} and {group_limit_rps:g} req/s"
        )
    groups = max(ceil(rate_rps / group_limit_rps - _ROUNDING), 1)
    least = workers_per_group(extra)
    # One group is central scheduling: it costs no extra worker, however small.
    if groups > 1 and groups * least > workers:
        raise Infeasible(
            f"groups: {rate_rps:g} req/s needs {groups} groups of at most {group_limit_rps:g} req/s, and"
            f" {extra:.0%} extra needs {least} workers in each; there are {workers}, not {groups * least}"
        )
    return groups


def split_workers(workers: Sequence[WorkerId], groups: int) -> tuple[tuple[WorkerId, ...], ...]:
    """Deal workers to groups in turn; sizes differ by one at most."""
    if not 1 <= groups <= max(len(workers), 1):
        raise BadInput(f"groups: cannot make {groups} groups of {len(workers)} workers")
    return tuple(tuple(workers[g::groups]) for g in range(groups))


@dataclass(frozen=True, slots=True)
class Turns:
    """Weighted round robin over groups, as smooth as it can be; `credit` is what each is owed."""

    weights: tuple[int, ...]
    credit: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.weights or min(self.weights) < 0 or sum(self.weights) == 0:
            raise BadInput(f"groups: weights: at least 0 and not all 0, got {self.weights}")
        if not self.credit:
            object.__setattr__(self, "credit", (0,) * len(self.weights))


def next_group(turns: Turns) -> tuple[Turns, int]:
    """The group whose turn it is, and the turns after it.

    In every `sum(weights)` requests in a row from the start, group g gets exactly `weights[g]`.
    """
    owed = [c + w for c, w in zip(turns.credit, turns.weights, strict=True)]
    # A group of weight 0 never gains credit, but could tie at 0 with the others.
    group = max((g for g, w in enumerate(turns.weights) if w), key=lambda g: (owed[g], -g))
    owed[group] -= sum(turns.weights)
    return Turns(turns.weights, tuple(owed)), group


def group_of(request: RequestId, weights: Sequence[int]) -> int:
    """The group of a request by its id alone, in proportion to `weights` (rendezvous hashing).

    Every router gives the same answer, and a change of one group's weight moves requests only to or from it.
    """
    if not weights or min(weights) < 0 or sum(weights) == 0:
        raise BadInput(f"groups: weights: at least 0 and not all 0, got {tuple(weights)}")

    def score(g: int) -> float:
        digest = blake2b(f"{g}/{request}".encode(), digest_size=8).digest()
        uniform = (int.from_bytes(digest) + 0.5) / 2**64
        return -weights[g] / log(uniform)

    return max((g for g, w in enumerate(weights) if w), key=score)
