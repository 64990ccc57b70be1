"""The full replay of a long trace on the fleet that samples found, and what the sampling cost.

Every request of the trace is replayed once, as a stream. Where fewer than asked meet their targets, a worker
is added and the trace replayed again. The plan's figures for the trace (attainment, latencies, utilisation)
are those of that replay.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dataplane.simulated.outcome import class_counts, joint
from dataplane.simulated.simulate import can_stream, simulate_stream
from tokenfleet.planning.fleet import Fleet
from tokenfleet.planning.plan_file import TraceSample
from tokenfleet.planning.result import Candidate, latency
from tokenfleet.planning.search import Search
from tokenfleet.planning.sizing import Sizing
from tokenfleet.planning.traffic.sample import ROUGHLY

PART = 100_000  # requests in memory at once
MOST_MORE = 8  # workers


@dataclass(frozen=True)
class Whole:
    """The outcome of all requests: attainment, (requests, attainment) of each class, latencies."""

    attainment: float
    classes: tuple[tuple[int, float], ...]
    ttft_s: NDArray[np.float32]
    tpot_s: NDArray[np.float32]
    utilisation: float


def full_replay(search: Search, fleet: Fleet) -> Whole:
    """All requests of the trace on a fleet, part by part."""
    workload = search.workload
    counts = np.zeros((2, len(workload.slo_classes)))
    ttft_s, tpot_s = (np.empty(len(workload), np.float32) for _ in range(2))
    at, busy_s, end_s, engines = 0, 0.0, 0.0, 1
    outcomes = simulate_stream(
        (workload.take(slice(start, start + PART)) for start in range(0, len(workload), PART)),
        fleet.specs(),
        search.terms.slos,
        search.terms.policy,
        settings=search.terms.settings,
        predictor=search.predictor,
        seed=search.traffic.seed,
    )
    for outcome in outcomes:
        counts += class_counts(outcome.met, outcome.workload)
        upto = at + len(outcome.workload)
        ttft_s[at:upto], tpot_s[at:upto] = outcome.ttft_s, outcome.tpot_s
        at, busy_s, end_s = upto, float(outcome.busy_s.sum()), max(end_s, outcome.end_s)
        engines = len(outcome.busy_s)  # of a worker with ranks one each
    search.watch.simulated()
    requests, missed = counts
    shares = 1.0 - missed / np.maximum(requests, 1)
    met = (
        joint(shares, search.terms.asked) if search.terms.asked else float(1.0 - missed.sum() / len(workload))
    )
    classes = tuple(zip(requests.astype(int).tolist(), shares.tolist(), strict=True))
    return Whole(met, classes, ttft_s, tpot_s, busy_s / (engines * end_s))


def verified(search: Search, winner: Sizing, best: Candidate) -> tuple[Candidate | None, TraceSample]:
    """The smallest fleet from `best` on that meets the target on every request; sets `winner.confirmed`.

    None where up to `MOST_MORE` more workers do not suffice; `best` where the policy takes no stream.
    """
    assert search.traffic.sampler is not None
    assert winner.confirmed is not None
    sample = search.traffic.sampler.as_it_is
    outcome = search.replay(best.fleet)
    reach = sample.reach(outcome.met, search.request.confidence)

    def told(whole: float | None = None, added: int = 0) -> TraceSample:
        return TraceSample(
            requests=int((sample.window >= 0).sum()),
            windows=int((sample.stratum >= 0).sum()),
            binding_windows=int((sample.stratum == 0).sum()),
            of_windows=int(sample.windows.sum()),
            attainment=outcome.attainment,
            low=max(outcome.attainment - reach, 0.0),
            full_replay=whole,
            added_workers=added,
            explained_by_requests=ROUGHLY,
        )

    if not can_stream(search.workload, search.terms.policy):
        return best, told()
    limit = search.request.most_workers(winner.worker_type)
    for more in range(MOST_MORE + 1):
        count = winner.confirmed + more
        if more and winner.mix is None and limit is not None and count > limit:
            break
        fleet = best.fleet if more == 0 else winner.fleet(count)
        whole = full_replay(search, fleet)
        replayed = told(whole.attainment, more)
        if whole.attainment >= search.request.attainment:
            winner.confirmed = count
            winner.on_trace[count] = whole.attainment
            return replace(
                best,
                fleet=fleet,
                on_trace=whole.attainment,
                ttft=latency(whole.ttft_s),
                tpot=latency(whole.tpot_s),
                utilisation=whole.utilisation,
                classes=whole.classes,
            ), replayed
    return None, replayed
