"""The answer beside its neighbours: other policies at the same target, other targets at the same policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from controlplane.types import Slo
from tokenfleet.planning.fleet import Fleet
from tokenfleet.planning.request import PlanRequest
from tokenfleet.planning.scenarios import Worlds
from tokenfleet.planning.search import smallest
from tokenfleet.planning.sizing import Sizing, ceiling, passes_on_trace
from tokenfleet.planning.threads import Threads

BASELINES = ("jsq", "p2c", "round-robin")
SLO_SCALES = (0.7, 0.85, 1.0, 1.25, 1.6, 2.0)
_HOPELESS = 3  # times the answer's count, where the search for a baseline ends


@dataclass(frozen=True, slots=True)
class Baseline:
    """The fleet another policy needs on the trace; None when `tried` workers are not enough."""

    policy: str
    fleet: Fleet | None
    tried: int


@dataclass(frozen=True, slots=True)
class Costed:
    """The fleet needed on the trace with both targets `scale` times what was asked; None: not possible."""

    scale: float
    slo: Slo
    fleet: Fleet | None


def baselines(worlds: Worlds, question: PlanRequest, sizing: Sizing, pool: Threads) -> tuple[Baseline, ...]:
    """The needs of the usual policies, sized like `sizing` on the trace as it is."""
    assert sizing.workers is not None
    cap = _HOPELESS * sizing.workers + 2

    def one(policy: str) -> Baseline:
        return Baseline(policy, _fewest(replace(worlds, policy=policy), question, sizing, cap), cap)

    return tuple(pool.map(one, [p for p in BASELINES if p != question.policy]))


def cost_by_slo(worlds: Worlds, question: PlanRequest, sizing: Sizing, pool: Threads) -> tuple[Costed, ...]:
    """The fleet's size as both targets are eased and tightened."""
    assert sizing.workers is not None
    found = sizing.workers

    def one(scale: float) -> Costed:
        slo = Slo(worlds.slo.ttft_s * scale, worlds.slo.tpot_s * scale)
        if scale == 1.0:
            return Costed(scale, slo, sizing.fleet(found))
        if ceiling(sizing.worker_type.profile, worlds.workload, slo) < question.attainment:
            return Costed(scale, slo, None)
        return Costed(scale, slo, _fewest(replace(worlds, slo=slo), question, sizing, 4 * found + 4))

    return tuple(pool.map(one, SLO_SCALES))


def _fewest(worlds: Worlds, question: PlanRequest, sizing: Sizing, cap: int) -> Fleet | None:
    """The smallest fleet of the sizing's kind on the trace, searched outwards from the answer's count."""
    assert sizing.workers is not None
    fresh = Sizing(sizing.worker_type, prefill_share=sizing.prefill_share, mix=sizing.mix)
    found = smallest(
        lambda n: passes_on_trace(worlds, question, fresh, n), sizing.fewest, sizing.workers, cap
    )
    return None if found is None else fresh.fleet(found)


def counts_around(sizing: Sizing, beyond: int = 2) -> Sequence[int]:
    """Worker counts worth drawing around the answer."""
    assert sizing.workers is not None
    count = sizing.confirmed or sizing.workers
    return range(max(min(count - beyond, sizing.workers - 1), sizing.fewest), count + beyond + 1)
