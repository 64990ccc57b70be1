"""HiGHS in the process against CBC as a program of its own, on the same mixes: optima, and seconds for each.

    python benchmarks/mix_solvers.py [--mixes 40]

Random types of worker with prices, limits, launches to pay for and, in every other mix, spot workers. Prints
how many mixes have the same cost by both, how many the same counts, and the median and longest solve.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import pulp

from controlplane.errors import Infeasible
from controlplane.scaler.limits import solver
from controlplane.scaler.mix import MixProgram, MixQuestion
from controlplane.scaler.weights import Weights
from controlplane.worker_type import WorkerType

SIZES = (2, 4, 12)


def question(rng: np.random.Generator, types: int, has_spot: bool) -> MixQuestion:
    """A random question to the mix, as an autoscaler asks it."""
    made, weights, there = [], {}, {}
    for i in range(types):
        one = WorkerType(
            f"gpu{i}",
            int(rng.choice([1, 2, 4, 8])),
            usd_per_h=round(float(rng.uniform(0.5, 20.0)), 2),
            limit=int(rng.integers(4, 40)),
            reclaims_per_h=float(rng.uniform(0.2, 3.0)) if has_spot and rng.random() < 0.5 else 0.0,
        )
        made.append(one)
        weights[one.name] = round(float(rng.uniform(1.0, 8.0)), 3)
        there[one.name] = int(rng.integers(0, 4))
    demand = round(float(rng.uniform(5.0, 40.0)), 1)
    reference = min(weights, key=weights.__getitem__)
    return MixQuestion(
        tuple(made), Weights(reference, weights), demand, there=there, cold_start_s=60.0, drain_s=20.0
    )


def solved(problem: pulp.LpProblem, by: pulp.LpSolver) -> tuple[float, float, tuple[int, ...]]:
    """Seconds, the objective, and every variable's value."""
    start_s = time.perf_counter()
    problem.solve(by)
    seconds = time.perf_counter() - start_s
    values = tuple(round(v.value()) for v in problem.variables() if v.cat == "Integer")
    return seconds, float(pulp.value(problem.objective)), values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--mixes", type=int, default=40, help="of each size")
    mixes = parser.parse_args().mixes
    cbc = pulp.COIN_CMD(path=pulp.PULP_CBC_CMD.pulp_cbc_path, msg=False, gapRel=0.0, threads=1)
    rng = np.random.default_rng(0)
    print("types  mixes  same cost  same counts   HiGHS ms (longest)    CBC ms (longest)")
    for types in SIZES:
        highs_s, cbc_s, costs, counts = [], [], 0, 0
        while len(highs_s) < mixes:
            program = MixProgram(question(rng, types, has_spot=len(highs_s) % 2 == 1))
            try:
                program.cheapest()
            except Infeasible:
                continue
            ours, theirs = solved(program.problem, solver()), solved(program.problem, cbc)
            highs_s.append(ours[0] * 1e3)
            cbc_s.append(theirs[0] * 1e3)
            costs += abs(ours[1] - theirs[1]) < 1e-9
            counts += ours[2] == theirs[2]
        row = [f"{np.median(ms):9.1f} ({max(ms):5.1f})" for ms in (highs_s, cbc_s)]
        print(f"{types:5}{mixes:7}{costs:11}{counts:13}   {row[0]:>20}{row[1]:>20}")


if __name__ == "__main__":
    main()
