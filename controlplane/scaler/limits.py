"""Limits of integer programs: GPUs of a type, of a zone, of all, and dollars an hour.

Things that a program counts (workers of a type, of a model, offers) take something of each limit l, in each
window w of time:

    Σ takes_l(thing, w) · count(thing) <= most_l

Workers that have a part of a GPU are on it with others of their group g. Limits and dollars count whole GPUs:
an integer for each group takes the place of the parts,

    Σ parts_g(thing, w) · count(thing) <= G_gw < 1 + Σ parts_g(thing, w) · count(thing)

Programs are written with PuLP because they then read as in a book. HiGHS solves them inside the process. The
counts are the same as by CBC, which PuLP ships as a program. HiGHS needs no process and no files for
each solve, and takes a third of the time or less.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pulp
from numpy.typing import NDArray

from controlplane.errors import Infeasible

HAIR = 1e-9  # GPUs, dollars or shares that are none
PART = 0.01  # of a GPU: no part is as small
_TIME_LIMIT_S = 10.0

Takes = NDArray[np.float64]  # [windows, things], or [things]


def keep_to(problem: Any, takes: Takes, counts: Sequence[Any], most: Any) -> None:
    """Let what these counts take be `most` at most in each window; windows that are alike are one."""
    for row in np.unique(np.atleast_2d(takes), axis=0):
        problem += pulp.lpSum(float(u) * n for u, n in zip(row, counts, strict=True)) <= most + HAIR


def whole_gpus(
    problem: Any, parts: Takes, counts: Sequence[Any], first: int
) -> Iterator[tuple[NDArray[np.float64], Any]]:
    """The whole GPUs that parts lie on: for each way in which windows differ, 1 in its windows, and a count.

    Their variables are numbered from `first`.
    """
    rows, row_of = np.unique(np.atleast_2d(parts), axis=0, return_inverse=True)
    for number, row in enumerate(rows):
        taken = pulp.lpSum(float(u) * n for u, n in zip(row, counts, strict=True) if u)
        whole = problem.add_variable(f"gpus{first + number}", lowBound=0, cat="Integer")
        problem += taken <= whole
        problem += whole <= taken + 1.0 - PART
        yield np.asarray(row_of.ravel() == number, np.float64), whole


def bought(parts: Takes) -> Takes:
    """The whole GPUs that hold these parts of a group."""
    return np.ceil(parts - HAIR)


def solve(problem: Any, why: str) -> None:
    """Solve a program. Raises Infeasible with the reason, in which {} stands for the solver's word."""
    problem.solve(solver())
    if (status := pulp.LpStatus[problem.status]) != "Optimal":
        raise Infeasible(why.format(status.lower()))


def solver() -> Any:
    """HiGHS in this process, to the last digit, on one thread and the same way every time.

    Its feasibility jump, a heuristic for large programs, takes 16 ms whatever the size.
    """
    return pulp.HiGHS(
        msg=False,
        timeLimit=_TIME_LIMIT_S,
        gapRel=0.0,
        gapAbs=0.0,
        threads=1,
        random_seed=0,
        mip_heuristic_run_feasibility_jump=False,
    )
