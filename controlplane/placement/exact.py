"""The exact policy's heartbeat: the requests that wait are placed together, by the MIP of Aladdin §4.2.

Both data planes run it by `waiting_line` and `place_together`. Requests that can no longer meet their TTFT
are no part of the program: each plane offers them by itself where they do no harm (queue.offer_late).

The solver is CP-SAT rather than a MIP solver on floats. Every variable is binary and every row a knapsack of
whole numbers (see `heartbeat`), so feasibility is exact, with no tolerance to argue about. Its clause
learning and symmetry detection suit bins that are alike. It takes a warm start, and reports a bound when
time is up.

    minimise  (m + 1)·Σ z_i + Σ y_j     z_i: request i is held; y_j: worker j of m is used
    Σ_j x_ij + z_i = 1                  (a); ongoing requests stay and are constants of the rows
    Σ_i weight_i·x_ij <= limit·y_j      (b) to (e), one row each; y_j = 1 where something is ongoing
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING

import numpy as np

from controlplane.perfmodel.profile import Profile
from controlplane.placement import heartbeat
from controlplane.placement.heartbeat import Heartbeat, HeartbeatPlacement, Rows
from controlplane.placement.ledger import Ints, Ledger
from controlplane.placement.policies import PlacementSettings
from controlplane.placement.queue import Queue, line_up

if TYPE_CHECKING:
    from ortools.sat.python import cp_model


HEARTBEAT_S = 0.05  # between two heartbeats, at least
SOLVE_LIMIT_S = 0.25  # for one heartbeat


def waiting_line(ledger: Ledger, queue: Queue, now_s: float) -> tuple[Ints, Ints]:
    """The requests of a heartbeat, in order, and those found to have lost their TTFT."""
    line, lost = np.empty(heartbeat.MOST_REQUESTS, np.int64), np.empty(queue.waiting, np.int64)
    n, m = line_up(ledger, queue, now_s, line, lost)
    return line[:n], lost[:m]


def place_together(
    ledger: Ledger, line: Ints, workers: Ints, profile: Profile, settings: PlacementSettings, now_s: float
) -> tuple[list[tuple[int, int]], bool]:
    """(request, worker) for those of `line` that find a place among `workers`; whether it is proven best.

    When the time is up the best placement found holds: it keeps every constraint and is never worse than
    `best_fit`. The others stay in the queue.
    """
    if not len(line) or not len(workers):
        return [], True
    found = solve(heartbeat.heartbeat_of(ledger, line, workers, profile, settings, now_s), SOLVE_LIMIT_S)
    placed = zip(line.tolist(), found.worker, strict=True)
    return [(r, int(workers[j])) for r, j in placed if j is not None], found.proven


def solve(beat: Heartbeat, time_limit_s: float = SOLVE_LIMIT_S) -> HeartbeatPlacement:
    """The cheapest placement of a heartbeat, or the best found when the time is up.

    Never worse than `best_fit`, which is the warm start and the answer if nothing better turns up. On one
    thread a proven answer is the same in every run; an unproven one may depend on the machine's speed.
    """
    shared: dict[object, Rows] = {}
    for state in beat.workers:
        if state not in shared:
            shared[state] = heartbeat.worker_rows(beat, state)
    rows = [shared[state] for state in beat.workers]
    start = heartbeat.best_fit(beat, rows)
    if start.proven:
        return start
    from ortools.sat.python import cp_model  # here, since it takes long to import and few heartbeats need it

    model, put = _program(beat, rows, start)
    solver = cp_model.CpSolver()
    solver.parameters.max_time_in_seconds = time_limit_s
    # The same limit in CP-SAT's own count of work: reached first, it stops every run at the same point.
    solver.parameters.max_deterministic_time = time_limit_s
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    status = solver.solve(model)
    # Before CP-SAT has any bound it says minus infinity.
    bound = max(start.bound, ceil(max(0.0, solver.best_objective_bound) - 1e-6))
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return HeartbeatPlacement(start.worker, start.workers_used, start.cost, bound, start.cost == bound)
    chosen: list[int | None] = [None] * len(beat.requests)
    for (i, j), x in put.items():
        if solver.boolean_value(x):
            chosen[i] = j
    workers_used, cost = heartbeat.cost_of(beat, chosen)
    if cost >= start.cost:
        chosen, workers_used, cost = list(start.worker), start.workers_used, start.cost
    return HeartbeatPlacement(tuple(chosen), workers_used, cost, min(bound, cost), cost <= bound)


def _program(
    beat: Heartbeat, rows: Sequence[Rows], start: HeartbeatPlacement
) -> tuple[cp_model.CpModel, dict[tuple[int, int], cp_model.IntVar]]:
    """The program of a heartbeat with its warm start, and its variables x_ij."""
    from ortools.sat.python import cp_model

    model = cp_model.CpModel()
    held = [model.new_bool_var(f"held_{i}") for i in range(len(beat.requests))]
    used = [1 if not s.idle else model.new_bool_var(f"used_{j}") for j, s in enumerate(beat.workers)]
    put: dict[tuple[int, int], cp_model.IntVar] = {}
    for j, worker in enumerate(rows):
        if worker.open:
            _keep_rows(model, put, used[j], j, worker)
    for i, z in enumerate(held):
        model.add_exactly_one([z, *(x for (request, _), x in put.items() if request == i)])
    _order_alike(model, beat, used)
    spare = [y for y, s in zip(used, beat.workers, strict=True) if s.idle]
    busy = len(beat.workers) - len(spare)
    model.minimize((len(beat.workers) + 1) * sum(held) + sum(spare) + busy)
    _hint(model, beat, start, put, held, used)
    return model, put


def _keep_rows(
    model: cp_model.CpModel,
    put: dict[tuple[int, int], cp_model.IntVar],
    used: cp_model.LinearExprT,
    j: int,
    rows: Rows,
) -> None:
    """Variables x_ij for the requests that could stand on worker `j` alone, and its rows over them."""
    from ortools.sat.python import cp_model

    able = np.flatnonzero((rows.weights <= rows.limits[:, None]).all(axis=0))
    for i in able:
        put[int(i), j] = model.new_bool_var(f"put_{i}_{j}")
        model.add(put[int(i), j] <= used)
    x = [put[int(i), j] for i in able]
    for weights, limit in zip(rows.weights[:, able].tolist(), rows.limits.tolist(), strict=True):
        if sum(weights) > limit:  # otherwise all of them together keep it
            model.add(cp_model.LinearExpr.weighted_sum(x, weights) <= limit * used)


def _order_alike(model: cp_model.CpModel, beat: Heartbeat, used: list[cp_model.LinearExprT]) -> None:
    """Idle workers in the same state are used in order, so that their permutations are not searched."""
    last: dict[object, cp_model.LinearExprT] = {}
    for y, state in zip(used, beat.workers, strict=True):
        if state.idle:
            if state in last:
                model.add(last[state] >= y)
            last[state] = y


def _hint(
    model: cp_model.CpModel,
    beat: Heartbeat,
    start: HeartbeatPlacement,
    put: dict[tuple[int, int], cp_model.IntVar],
    held: list[cp_model.IntVar],
    used: list[cp_model.LinearExprT],
) -> None:
    for (i, j), x in put.items():
        model.add_hint(x, start.worker[i] == j)
    for i, z in enumerate(held):
        model.add_hint(z, start.worker[i] is None)
    for j, (y, state) in enumerate(zip(used, beat.workers, strict=True)):
        if state.idle:
            model.add_hint(y, j in start.worker)
