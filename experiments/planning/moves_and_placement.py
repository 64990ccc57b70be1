"""Aladdin's placement with moves, without them, and Llumnix: workers for the same attainment.

    python experiments/planning/moves_and_placement.py [--quick] [--setting NAME] [--resume FOLDER]
        [--format table|json]

The setting of policy_workers.py (Llama-2 13B on an A100, 600/30 ms, ShareGPT lengths), lengths mispredicted
and arrivals bursty:

    exact      every length known
    bias x     predictions are the truth times x (0.5: outputs outlive them; 2: they end early)
    noise 1    log-normal of mean 1 and a standard deviation of 1 in the logarithm
    CV 4       Gamma gaps, lengths predicted from history (as in all CV rows)

    Aladdin             `spread` under the constraints, nobody moves
    Aladdin + moves     the same; room and shedding by tick, waiting requests by Algorithm 2
    Aladdin + Alg 2     only requests that have not started move: Algorithm 2 alone
    Llumnix             dispatch by freeness, the published moves (no constraint, no errors)

The fewest workers at 99 % and at 99.9 %, over ten draws of 3,000 requests pooled: of 30,000 requests 30 may
be late at 99.9 %, of 6,000 only six, and then chance decides by a worker or two. Where Aladdin with and
without moves stand, their misses are compared draw by draw. A move's copy takes KV bytes / 2.4 GB/s, both
ends 2 % slower. `--resume` keeps runs that are done.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from controlplane.control import Settings
from controlplane.migration.balance import MoveSettings
from controlplane.workload import Workload
from dataplane.simulated.simulate import ControlSettings, WorkerSpec, simulate
from experiments.lib.fewest_workers import CASES, TARGETS, Lengths, sharegpt
from experiments.lib.llumnix import published_moves
from experiments.lib.public_data import SHAREGPT
from experiments.lib.results import bar, flags, show
from experiments.lib.resume import Parts
from tokenfleet.traces.distributions import gamma

CASE = CASES[0]
RATE = 10.0
SYSTEMS = ("Aladdin", "Aladdin + moves", "Aladdin + Alg 2", "Llumnix")
MOST = 60
DRAWS = 10


@dataclass(frozen=True)
class Setting:
    """How lengths are predicted, and how bursty arrivals are. `bias`, `sigma` None: from history."""

    name: str
    bias: float | None = None
    sigma: float = 0.0
    cv: float = 1.0


SETTINGS = (
    Setting("exact", 0.0),
    Setting("from history"),
    Setting("bias x0.5", -0.5),
    Setting("bias x2", 1.0),
    Setting("noise 1", 0.0, 1.0),
    Setting("CV 4", None, 0.0, 4.0),
    Setting("CV 4, bias x0.5", -0.5, 0.0, 4.0),
)


def control_of(system: str) -> tuple[str, ControlSettings | None]:
    """Policy and moves of a system."""
    if system == "Aladdin":
        return "spread", None
    if system == "Llumnix":
        return "freeness+migrate", published_moves(3, False)
    if system == "Aladdin + Alg 2":
        # Pairing on, so that errors are kept, but with nothing that it may move.
        return "spread+migrate", ControlSettings(Settings(MoveSettings(most=0), None), beat_s=0.2)
    return "spread+migrate", ControlSettings(beat_s=0.2)


@dataclass
class Asked:
    """One system in one setting: misses by worker count, remembered, and kept by seed."""

    setting: Setting
    system: str
    pairs: Sequence[tuple[Workload, Any]]  # by seed: a workload, and what is predicted for it
    lengths: Lengths
    first_seed: int
    parts: Parts
    _missed: dict[int, list[int]] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        return sum(len(workload) for workload, _ in self.pairs)

    def misses(self, workers: int) -> list[int]:
        """By seed; counting stops where one seed alone misses all that the laxest target allows."""
        if workers not in self._missed:
            self._missed[workers] = [
                self.parts.part(self._part(workers, i), partial(self._simulated, workers, i))
                for i in range(len(self.pairs))
            ]
        return self._missed[workers]

    def _part(self, workers: int, i: int) -> str:
        drawn = f"seed {self.first_seed + i} of {len(self.pairs[i][0])}"
        return f"{self.setting.name} {self.system} {workers} {drawn} in {len(self.pairs)}"

    def _simulated(self, workers: int, i: int) -> int:
        policy, control = control_of(self.system)
        workload, predicted = self.pairs[i]
        outcome = simulate(
            workload,
            [WorkerSpec(CASE.profile)] * workers,
            CASE.slo,
            policy,
            predictor=self.lengths.table(),
            predicted_tokens=predicted,
            seed=i,
            max_misses=allowed(min(TARGETS), self.requests),
            control=control,
        )
        return int(outcome.misses)

    def fewest(self, target: float, first: int) -> int | None:
        """The fewest workers at which pooled attainment reaches the target, looked for from `first` on."""
        enough = allowed(target, self.requests)
        low, high, stride = 0, max(first, 1), 1
        while sum(self.misses(high)) > enough:
            if high >= MOST:
                return None
            low, high, stride = high, min(high + stride, MOST), stride * 2
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if sum(self.misses(middle)) > enough else (low, middle)
        return high


def allowed(target: float, requests: int) -> int:
    """The misses that a target allows."""
    return math.floor((1.0 - target) * requests + 1e-9)


def mispredicted(
    output_tokens: ArrayLike, bias: float, sigma: float, rng: np.random.Generator
) -> NDArray[np.float64]:
    """The truth, times 1 + `bias`, times log-normal noise of mean 1; at least one token.

    `sigma` is the noise's standard deviation in the logarithm.
    """
    truth = np.asarray(output_tokens, float)
    noise = np.exp(sigma * rng.standard_normal(truth.shape) - sigma * sigma / 2)
    return np.asarray(np.maximum(truth * (1.0 + bias) * noise, 1.0))


def drawn(lengths: Lengths, setting: Setting, seconds: float, seed: int) -> tuple[Workload, Any]:
    """A workload, and what is predicted for it."""
    workload = lengths.poisson(RATE, round(RATE * seconds), seed)
    rng = np.random.default_rng([seed, 4])
    if setting.cv != 1.0:
        arrivals = gamma(RATE, setting.cv, len(workload), rng)
        workload = Workload(arrivals, workload.prompt_tokens, workload.output_tokens)
    if setting.bias is None:
        return workload, None
    predicted = mispredicted(workload.output_tokens, setting.bias, setting.sigma, rng)
    return workload, np.maximum(np.rint(predicted), 1).astype(np.int64)


def excess(ours: Sequence[int], theirs: Sequence[int]) -> str:
    """Misses of ours less theirs over all seeds, the same arrivals for both, and its 95 % interval."""
    d = np.array(ours) - np.array(theirs)
    doubt = 1.96 * float(d.std(ddof=1)) * math.sqrt(len(d)) if len(d) > 1 else math.inf
    return f"{int(d.sum()):+d} ± {doubt:.0f}"


def run(asked: argparse.Namespace) -> int:
    lengths = sharegpt(asked.data)
    seconds, seeds = (120.0, 1) if asked.quick else (300.0, asked.draws)
    rows: list[dict[str, Any]] = []
    never_worse, compared = 0, 0
    chosen = SETTINGS[1:3] if asked.quick else SETTINGS
    for setting in (s for s in chosen if asked.setting in (None, s.name)):
        pairs = [drawn(lengths, setting, seconds, asked.seed + i) for i in range(seeds)]
        needed: dict[str, list[int | None]] = {}
        questions: dict[str, Asked] = {}
        for system in SYSTEMS:
            question = Asked(setting, system, pairs, lengths, asked.seed, asked.resume)
            questions[system] = question
            first = round(RATE)
            counts = []
            for target in TARGETS:
                counts.append(question.fewest(target, first))
                first = counts[-1] or MOST
            needed[system] = counts
            print(setting.name, system, counts, file=sys.stderr)
        for at, target in enumerate(TARGETS):
            best = min(n for counts in needed.values() if (n := counts[at]) is not None)
            alone, mine = needed["Aladdin"][at], needed["Aladdin + moves"][at]
            others = [needed[s][at] or MOST for s in ("Aladdin", "Llumnix")]
            compared += 1
            never_worse += mine is not None and mine <= min(others)
            rows.append(
                {"setting": setting.name, "attainment": target}
                | {system: counts[at] or f">{MOST}" for system, counts in needed.items()}
                | {"fewest": " = ".join(s for s in SYSTEMS if needed[s][at] == best)}
            )
            if alone is not None and mine is not None:
                there = {
                    n: [questions[s].misses(n) for s in ("Aladdin + moves", "Aladdin")] for n in {alone, mine}
                }
                rows[-1]["misses with moves less without"] = ", ".join(
                    f"{n} workers: {excess(*pair)}" for n, pair in sorted(there.items())
                )
    says = "share of rows in which Aladdin + moves needs no more workers than either alone"
    return show(
        "moves_and_placement", rows, {says: bar(never_worse / max(compared, 1), 1.0, at_least=True)}, asked
    )


if __name__ == "__main__":
    parser = flags(__doc__, SHAREGPT, resumes=True)
    parser.add_argument("--draws", type=int, default=DRAWS, help="of 3,000 requests each")
    parser.add_argument("--setting", choices=[s.name for s in SETTINGS], help="only one")
    sys.exit(run(parser.parse_args()))
