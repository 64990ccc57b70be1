"""The nearest feasible target to one that cannot be met, found by loosening as little as possible."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from controlplane.perfmodel.capacity import fluid_workers_of
from controlplane.types import Slo
from tokenfleet.planning.estimate import Estimate
from tokenfleet.planning.fleet import Fleet, of_one_kind
from tokenfleet.planning.replicates import Replicates
from tokenfleet.planning.request import PlanRequest
from tokenfleet.planning.search import smallest
from tokenfleet.planning.sizing import PER_REQUEST, Sizing, confirm, nearest_possible, size_on_trace
from tokenfleet.planning.threads import Threads

# Each step looser than the one before by about a tenth; the last is a hundred times what was asked.
LOOSER = tuple(1.1**i for i in range(49))
_PLENTY = 8  # times the fluid bound: as good as endless workers


@dataclass(frozen=True, slots=True)
class Nearest:
    """A target that can be met, with which fleet, and how much looser it is than what was asked."""

    slo: Slo
    fleet: Fleet
    estimate: Estimate
    looser: float


def nearest_feasible(
    replicates: Replicates, question: PlanRequest, sizings: Sequence[Sizing], pool: Threads
) -> Nearest | None:
    """Of all kinds the least loosened target, the cheaper fleet among equals; None if nothing helps."""
    found = pool.map(lambda sizing: nearest_of_kind(replicates, question, sizing, pool), sizings)
    return min((n for n in found if n is not None), key=lambda n: (n.looser, n.fleet.cost), default=None)


def nearest_of_kind(
    replicates: Replicates, question: PlanRequest, sizing: Sizing, pool: Threads
) -> Nearest | None:
    """The nearest target for one kind of worker, within the question's limits and at its confidence.

    First only what a lone request breaks is loosened; where that is not enough, both targets are.
    """
    asked, profile = replicates.slo, sizing.worker_type.profile
    base = nearest_possible(profile, replicates.workload, asked, question.attainment)
    broken = (base.ttft_s > asked.ttft_s, base.tpot_s > asked.tpot_s)
    limit = question.most_workers(sizing.worker_type)
    fewest = 2 if sizing.worker_type.is_split else 1
    if limit is not None and limit < fewest:
        return None
    bound = fluid_workers_of(replicates.workload, profile, base, question.attainment)
    plenty = max(min(_PLENTY * bound, PER_REQUEST * len(replicates.workload)), 2 * fewest)
    fleet = of_one_kind(
        sizing.worker_type, plenty if limit is None else min(limit, plenty), sizing.prefill_share or 0.5
    )
    for which in dict.fromkeys((broken, (True, True))):
        first = _first_step(replicates, question, fleet, base, which) if any(which) else None
        if first is None:
            continue
        sized: dict[int, Sizing] = {}

        def holds(step: int, which: tuple[bool, bool] = which, sized: dict[int, Sizing] = sized) -> bool:
            eased = replace(replicates, slo=_target(base, which, step))
            sized[step] = size_on_trace(eased, question, sizing.worker_type)
            if sized[step].workers is not None:
                confirm(eased, question, sized[step], pool)
            return sized[step].confirmed is not None

        # What holds on the trace may not hold in other replicates: looser still, it does.
        step = smallest(holds, first, first, len(LOOSER) - 1)
        if step is not None:
            slo, count = _target(base, which, step), sized[step].confirmed or 0
            looser = max(slo.ttft_s / asked.ttft_s, slo.tpot_s / asked.tpot_s)
            return Nearest(slo, sized[step].fleet(count), sized[step].sure[count], looser)
    return None


def _first_step(
    replicates: Replicates, question: PlanRequest, fleet: Fleet, base: Slo, which: tuple[bool, bool]
) -> int | None:
    """The least loosening of the targets in `which` that the fleet meets on the trace."""
    allowed = (1.0 - question.attainment) * len(replicates.workload)

    def passes(step: int) -> bool:
        eased = replace(replicates, slo=_target(base, which, step))
        outcome = eased.replay(fleet, max_misses=int(8 * allowed) + 1)
        return outcome.complete and outcome.attainment >= question.attainment

    return smallest(passes, 0, 1, len(LOOSER) - 1)


def _target(base: Slo, which: tuple[bool, bool], step: int) -> Slo:
    return Slo(
        _rounded_up(base.ttft_s * LOOSER[step]) if which[0] else base.ttft_s,
        _rounded_up(base.tpot_s * LOOSER[step]) if which[1] else base.tpot_s,
    )


def _rounded_up(seconds: float) -> float:
    """Two figures, so that the answer is one a person would type."""
    unit = 10.0 ** (math.floor(math.log10(seconds)) - 1)
    # Through text, so that 0.31 is 0.31 and not 0.31000000000000005.
    return float(f"{math.ceil(seconds / unit - 1e-9) * unit:.12g}")
