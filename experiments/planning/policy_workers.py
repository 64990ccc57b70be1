"""How many workers does each placement policy need at 99 % and 99.9 %? Llama-2 13B and 70B on A100.

    python experiments/planning/policy_workers.py [--quick] [--exact] [--format table|json]

The setting of Aladdin's evaluation: one A100 (13B, 600/30 ms) or two (70B, 1600/75 ms) a worker, engines
prefill-first with the coefficients of profiles/aladdin (prefill batches of at most the profile's 4096
tokens), Poisson arrivals, ShareGPT lengths with prompts of at most 2048 tokens. Attainment is pooled over
the seeds.

  policies   every policy at 5, 10 and 20 requests a second; `exact` solves a program each heartbeat, some
             200 requests a second, so it is asked at 5 only, over fewer requests, and judged by them
  ablation   `spread` at 20 requests a second with a constraint off or a knob turned
  --exact    instead: the exact heartbeat next to the default policy, each on the same fleet and load

`bound` is perfmodel.capacity's: no policy can need less. `steady` is a noiseless fleet (fewest_workers.py).
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controlplane.perfmodel.capacity import worker_seconds
from controlplane.placement.constraints import USE_B, USE_C, USE_D, USE_E
from controlplane.placement.policies import PlacementSettings, Policy
from dataplane.simulated import control_loop
from dataplane.simulated.simulate import WorkerSpec, simulate
from experiments.lib.fewest_workers import CASES, TARGETS, Case, Lengths, Question, sharegpt, steady_workers
from experiments.lib.public_data import SHAREGPT
from experiments.lib.results import bar, flags, show

RATES = (5.0, 10.0, 20.0)
POLICIES = tuple(p for p in Policy if p != Policy.EXACT)
EXACT_RATE = 5.0
CONSTRAINTS = {"b": USE_B, "c": USE_C, "d": USE_D, "e": USE_E}


@dataclass(frozen=True)
class Without(PlacementSettings):
    """A constraint switched off."""

    constraint: str = ""

    def row(self) -> NDArray[np.float64]:
        row = super().row()
        row[CONSTRAINTS[self.constraint]] = False
        return row


ABLATION = {
    **{f"without ({name})": Without(constraint=name) for name in CONSTRAINTS},
    "tolerance 0 (the paper's d)": PlacementSettings(tolerance=0.0),
    "theta 0": PlacementSettings(theta=0.0),
    "theta 1": PlacementSettings(theta=1.0),
    "gamma 1": PlacementSettings(gamma=1.0),
}


@dataclass(frozen=True)
class Size:
    """How much is simulated: seconds of arrivals, and how many draws of them."""

    seconds: float
    seeds: int
    exact_requests: int


QUICK, USUAL = Size(150, 1, 300), Size(300, 2, 600)


def row(
    part: str, case: Case, rate: float, what: str, question: Question, lengths: Lengths
) -> dict[str, Any]:
    """The question's answer at both targets beside what bounds it."""
    bound = [
        rate * worker_seconds(lengths.prompt, lengths.output, case.profile, case.slo, target)
        for target in TARGETS
    ]
    needed = [question.fewest(target, first) for target, first in zip(TARGETS, bound, strict=True)]
    return {
        "part": part,
        "model": case.model,
        "rps": rate,
        "policy": what,
        "99%": needed[0] or f">{question.most}",
        "bound": round(bound[0], 2),
        "99.9%": needed[1] or f">{question.most}",
        "bound ": round(bound[1], 2),
        "steady": round(steady_workers(rate, lengths, case.profile, case.slo), 2),
        "requests": f"{len(question.workloads)} × {len(question.workloads[0])}",
    }


def ask(
    case: Case,
    lengths: Lengths,
    rate: float,
    policy: Policy,
    size: Size,
    seed: int,
    settings: PlacementSettings | None = None,
) -> Question:
    """The question of one row; the same seeds give every policy the same arrivals."""
    requests, seeds = round(rate * size.seconds), size.seeds
    if policy == Policy.EXACT:
        requests, seeds = size.exact_requests, 1
    workloads = [lengths.poisson(rate, requests, seed + i) for i in range(seeds)]
    table = lengths.table()
    return Question(workloads, case.profile, case.slo, table, policy, settings or PlacementSettings())


EQUAL = ((0, 5.0, 5), (0, 10.0, 9), (1, 5.0, 6), (1, 10.0, 11))  # case, requests a second, workers


def equal_load(lengths: Lengths, size: Size, seed: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows of the exact heartbeat and the default on equal fleets, and what the first gains at most."""
    rows, gains = [], []
    for at, rate, workers in EQUAL:
        case, attained = CASES[at], {}
        workload = lengths.poisson(rate, size.exact_requests, seed)
        row: dict[str, Any] = {
            "model": case.model,
            "rps": rate,
            "workers": workers,
            "requests": len(workload),
        }
        for policy in ("spread+migrate", "best-fit", "exact"):
            fleet = [WorkerSpec(case.profile)] * workers
            simulate(workload.take(slice(0, 20)), fleet, case.slo, policy)  # compiles, imports the solver
            began = time.perf_counter()
            with beats() as seen:
                outcome = simulate(workload, fleet, case.slo, policy, predictor=lengths.table())
            took_s = time.perf_counter() - began
            attained[policy] = outcome.attainment
            row |= {policy: outcome.attainment, f"ms a request, {policy}": took_s / len(workload) * 1e3}
        row |= {"beats": len(seen), "ms a beat": np.mean(seen) * 1e3, "longest": max(seen) * 1e3}
        gains.append(attained["exact"] - attained["spread+migrate"])
        rows.append(row)
    return rows, {"exact: most attainment gained over the default": bar(max(gains), 0.001, at_least=True)}


@contextmanager
def beats() -> Iterator[list[float]]:
    """The seconds of each exact heartbeat within."""
    seconds: list[float] = []
    names = vars(control_loop)
    place = names["place_together"]

    def timed(*given: Any) -> Any:
        began = time.perf_counter()
        placed = place(*given)
        seconds.append(time.perf_counter() - began)
        return placed

    names["place_together"] = timed
    try:
        yield seconds
    finally:
        names["place_together"] = place


def main() -> int:
    parser = flags(__doc__, SHAREGPT)
    parser.add_argument("--exact", action="store_true", help="the exact heartbeat next to the default")
    asked = parser.parse_args()
    size = QUICK if asked.quick else USUAL
    lengths = sharegpt(asked.data)
    if asked.exact:
        return show("policy_workers", *equal_load(lengths, size, asked.seed), asked)
    rows, bars = [], {}
    for case in CASES:
        best: dict[str, int] = {}
        for rate in RATES:
            policies = (*POLICIES, Policy.EXACT) if rate == EXACT_RATE else POLICIES
            for policy in policies:
                question = ask(case, lengths, rate, policy, size, asked.seed)
                rows.append(row("policies", case, rate, policy, question, lengths))
                if rate == RATES[-1] and isinstance(rows[-1]["99.9%"], int):
                    best[policy] = rows[-1]["99.9%"]
        for name, settings in ABLATION.items():
            question = ask(case, lengths, RATES[-1], Policy.SPREAD, size, asked.seed, settings)
            rows.append(row("ablation", case, RATES[-1], f"spread {name}", question, lengths))
        least = min(best, key=lambda policy: best[policy])
        says = f"{case.model}: workers at 20 rps and 99.9 %, best policy ({least}; stretch {case.stretch})"
        bars[says] = bar(best[least], case.bar)
    return show("policy_workers", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
