"""The simulation of a fleet on a trace: which worker served each request, and when it had its tokens.

**A stream** is simulated part after part, in memory for one part at a time. What has not ended when the next
part begins goes along with it, at the head of its rows and in its order. So the outcome of every request is
the one that a run of all of them at once would give it. Requests that share prefixes or wait for each other
need the whole. So do policies that move requests, place them together or use their number.

**A still fleet** is one in which no request can move: requests are placed by targets, and each worker is
alone of its type. Heartbeats still bring its ledger up to date for placement. The rules that would decline
every move are left out, and the loads that they compare with limits.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Unpack

import numpy as np
from numpy.typing import NDArray

from controlplane.errors import BadInput
from controlplane.placement.ledger import NONE
from controlplane.placement.policies import BY_TARGETS, EXACT, Policy, read_policy
from controlplane.types import Slo
from controlplane.worker_type import name_in_role
from controlplane.workload import Workload
from dataplane.simulated.beats import pass_beats
from dataplane.simulated.cluster import advance
from dataplane.simulated.control_loop import ControlSettings, SimulatedPlane, drive
from dataplane.simulated.outcome import Outcome
from dataplane.simulated.run import ENDLESS, OFFER_EVERY_S, RunOptions, RunState, WorkerSpec, prepare

__all__ = [
    "OFFER_EVERY_S",
    "ControlSettings",
    "Outcome",
    "RunState",
    "WorkerSpec",
    "can_stream",
    "prepare",
    "simulate",
    "simulate_stream",
]

COLUMNS = ("arrival_s", "ttft_target_s", "tpot_target_s", "worker", "first_token_s", "engine_s", "finish_s",
           "preemptions", "migrations")  # fmt: skip
NO_LIMITS = np.full(3, np.nan)  # no load is past them


def simulate(
    workload: Workload,
    workers: Sequence[WorkerSpec],
    slo: Slo | Sequence[Slo],
    policy: Policy | str = Policy.SPREAD,
    *,
    control: ControlSettings | None = None,
    **options: Unpack[RunOptions],
) -> Outcome:
    """Run `workload` on `workers` to the end and return the outcome of every request.

    `slo`: one, or one for each of the workload's SLO classes. `control`: what tick gets, and what moves cost,
    under a policy with `+migrate`. The options are those of `RunOptions`.
    """
    state = prepare(workload, workers, slo, policy, **options)
    if state.rules.policy != EXACT and not state.migrates:
        advance(state.ledger, state.engines, state.cluster, state.rules, np.inf)
    elif control is None and is_still(state, workers):
        beat_s = ControlSettings().beat_s
        pass_beats(state.ledger, state.engines, state.cluster, state.rules, NO_LIMITS, beat_s, beat_s)
    else:
        drive(SimulatedPlane(state, control or ControlSettings()))
    return state.outcome()


def is_still(run: RunState, workers: Sequence[WorkerSpec]) -> bool:
    """Whether no request can move: each worker is alone of its type and role, and none comes or goes."""
    if not run.migrates or run.policy not in BY_TARGETS - {Policy.EXACT}:
        return False
    names = [name_in_role(spec.profile.type_name, spec.role) for spec in workers]
    stays = all(spec.ready_s <= 0 and not spec.fails_s and spec.drain_s is None for spec in workers)
    return stays and len(set(names)) == len(names)


def can_stream(workload: Workload, policy: Policy | str) -> bool:
    """Whether these requests can be simulated part by part under a policy."""
    placement, migrates = read_policy(policy)
    if workload.prefixes is not None or workload.sessions is not None:
        return False
    return not migrates and placement not in (Policy.EXACT, Policy.ROUND_ROBIN)


def simulate_stream(
    parts: Iterable[Workload],
    workers: Sequence[WorkerSpec],
    slo: Slo | Sequence[Slo],
    policy: Policy | str = Policy.SPREAD,
    **options: Unpack[RunOptions],
) -> Iterator[Outcome]:
    """Run the parts, none empty, one behind the other in time; with each the outcome of what has ended since.

    `predictor` is needed: a part alone does not know the others' lengths. `busy_s` and `end_s` are of the run
    so far. Raises BadInput for what cannot be simulated in parts, and for a part that begins before the last.
    """
    if options.get("predictor") is None:
        raise BadInput("simulate: predictor: a stream needs one of all its requests")
    draws = np.random.default_rng(options.get("seed", 0))
    options["max_misses"] = ENDLESS
    state: RunState | None = None
    waiting = iter(parts)
    part = next(waiting, None)
    while part is not None:
        if not can_stream(part, policy):
            raise BadInput("simulate: requests that are moved, or that share or wait, are no stream")
        after = next(waiting, None)
        if after is not None and after.arrival_s[0] < part.arrival_s[-1]:
            raise BadInput(f"simulate: a part begins at {after.arrival_s[0]:g} s, before the last has ended")
        fresh = draws.random((len(part), 2))
        state = _begun(state, part, workers, slo, policy, fresh, options)
        until_s = np.inf if after is None else np.nextafter(after.arrival_s[0], -np.inf)
        advance(state.ledger, state.engines, state.cluster, state.rules, until_s)
        outcome = state.outcome()
        yield picked(outcome, ~np.isnan(outcome.finish_s) | (after is None))
        part = after
        options["seed"] = options.get("seed", 0) + 1  # how far drafts are accepted differs from part to part


def _begun(
    before: RunState | None,
    part: Workload,
    workers: Sequence[WorkerSpec],
    slo: Slo | Sequence[Slo],
    policy: Policy | str,
    draws: NDArray[np.float64],
    options: RunOptions,
) -> RunState:
    """A run of what the one before left unfinished and of a part, at the moment where that one stands."""
    if before is None:
        state = prepare(part, workers, slo, policy, **options)
        return replace(state, rules=state.rules._replace(draws=draws))
    alive = np.flatnonzero(np.isnan(before.engines.requests["finish_s"]))
    state = prepare(_joined(before.workload.take(alive), part), workers, slo, policy, **options)
    place = np.full(len(before.workload) + 1, NONE, np.int64)  # the last row is that of NONE
    place[alive] = np.arange(len(alive))
    old, ledger = before.ledger, state.ledger
    ledger.requests[: len(alive)] = old.requests[alive]
    ledger.requests["next"][: len(alive)] = place[old.requests["next"][alive]]
    ledger.workers[:], ledger.runs[:] = old.workers, old.runs
    for name in ("queue_head", "queue_tail", "running"):
        getattr(ledger, name)[:] = place[np.minimum(getattr(old, name), len(before.workload))]
    for was_known, known in zip(old.errors, ledger.errors, strict=True):
        known[:] = was_known
    engines = state.engines
    engines.requests[: len(alive)] = before.engines.requests[alive]
    engines.workers[:] = before.engines.workers
    engines.total["misses"] = before.engines.total["misses"]
    cluster, was = state.cluster, before.cluster
    cluster.clock[:] = was.clock
    # Those of the part's last instant are sent with the next part, if that begins at the same one.
    cluster.sending.counts["sent"] = np.searchsorted(alive, was.sending.counts["sent"][0])
    for name in ("head", "tail", "refused"):
        getattr(cluster.queue, name)[:] = place[getattr(was.queue, name)]
    cluster.queue.counts[:] = was.queue.counts
    passing = int(was.clock["transit_n"][0])
    cluster.transit[:passing] = place[was.transit[:passing]]
    cluster.transit_s[:passing] = was.transit_s[:passing]
    kept = np.concatenate([before.rules.draws[alive], draws])
    pace = state.pace
    if isinstance(pace, np.ndarray) and isinstance(before.pace, np.ndarray):
        pace[: len(alive)] = before.pace[alive]
    return replace(state, rules=state.rules._replace(draws=kept), pace=pace)


def _joined(left: Workload, part: Workload) -> Workload:
    """The requests that are left, and those of a part behind them."""
    columns = ("arrival_s", "prompt_tokens", "output_tokens", "priority", "slo_class")
    both = {name: np.concatenate([getattr(left, name), getattr(part, name)]) for name in columns}
    return Workload(**both, slo_classes=part.slo_classes)


def picked(outcome: Outcome, rows: NDArray[np.bool_]) -> Outcome:
    """The outcome of some of the requests."""
    columns = {name: getattr(outcome, name)[rows] for name in COLUMNS}
    pace = outcome.pace[rows] if isinstance(outcome.pace, np.ndarray) else outcome.pace
    return replace(outcome, workload=outcome.workload.take(rows), cached_tokens=None, pace=pace, **columns)
