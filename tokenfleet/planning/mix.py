"""The search for a mixed fleet, taken where it is cheaper than any one kind of worker.

On this trace one worker of kind v carries the share 1/N_v, N_v being the count (with a fraction) at which
that kind alone just meets the target. The integer program picks the cheapest counts whose shares add up to
one; the pick is then replayed like any fleet, since kinds that serve one stream together are more than their
sum of shares, or less. A pick that fails is asked to carry more, until it passes or is no longer cheaper.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.errors import Infeasible
from controlplane.scaler.mix import MixQuestion, MixSettings, cheapest
from controlplane.scaler.weights import Weights
from controlplane.worker_type import WorkerGroup
from tokenfleet.planning.estimate import Estimate
from tokenfleet.planning.fleet import Fleet
from tokenfleet.planning.request import PlanRequest
from tokenfleet.planning.scenarios import Worlds
from tokenfleet.planning.sizing import Sizing, holds
from tokenfleet.planning.threads import Threads

MORE = 1.06  # demand grows by this much after each mix that fails
TRIES = 3


@dataclass(frozen=True, slots=True)
class Mixed:
    """A mix that meets the target at the asked confidence, cheaper than the fleet it was held against."""

    fleet: Fleet
    estimate: Estimate


def cheaper_mix(
    worlds: Worlds, question: PlanRequest, sizings: Sequence[Sizing], best: Fleet, pool: Threads
) -> Mixed | None:
    """A verified mix cheaper than `best`, or None. Split fleets are not mixed."""
    usable = [s for s in sizings if s.workers is not None and not s.worker_type.is_split]
    if len(usable) < 2:
        return None
    types = tuple(s.worker_type for s in usable)
    shares = {s.worker_type.name: 1.0 / fraction_needed(s, question) for s in usable}
    is_priced = all(t.usd_per_h is not None for t in types)
    limits = MixSettings(
        max_gpus=question.max_gpus, budget_usd_per_h=question.budget_usd_per_h if is_priced else None
    )
    demand = 1.0
    for _ in range(TRIES):
        try:
            counts = cheapest(MixQuestion(types, Weights(types[0].name, shares), demand, limits))
        except Infeasible:
            return None
        chosen = sorted((t for t in types if t.name in counts), key=lambda t: (t.gpu or "", t.tp_degree))
        mix = Fleet(tuple(WorkerGroup(t, counts[t.name]) for t in chosen))
        if not mix.cost < best.cost:
            return None
        if len(counts) > 1:
            allowed = (1.0 - question.attainment) * len(worlds.workload)
            outcome = worlds.replay(mix, max_misses=int(8 * allowed) + 1)
            if outcome.complete and outcome.attainment >= question.attainment:
                held, verdict = holds(worlds, question, mix, pool)
                if held:
                    return Mixed(mix, verdict)
        demand *= MORE
    return None


def fraction_needed(sizing: Sizing, question: PlanRequest) -> float:
    """Workers, with a fraction, at which a kind just meets the target on the trace."""
    assert sizing.workers is not None
    passed = sizing.on_trace[sizing.workers]
    failed = sizing.on_trace.get(sizing.workers - 1)
    if failed is None:
        return float(sizing.workers)
    few, many, target = (math.log(1.0 - a + 1e-6) for a in (failed, passed, question.attainment))
    share = (few - target) / (few - many) if few > many else 1.0
    return sizing.workers - 1 + min(max(share, 0.05), 1.0)
