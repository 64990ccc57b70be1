"""The fewest workers a policy needs for a load: simulated, seeds pooled, by bisection.

The load is Aladdin's: Poisson arrivals, ShareGPT lengths (Llama-2 tokens), prompts of at most 2048 tokens.
Every seed is another draw of arrivals and lengths, the same for all policies (common random numbers).
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from controlplane.perfmodel.profile import Profile
from controlplane.placement.lengths import LengthTable
from controlplane.placement.policies import PlacementSettings, Policy
from controlplane.types import Slo
from controlplane.workload import Workload
from dataplane.simulated.simulate import WorkerSpec, simulate
from experiments.lib.public_data import SHAREGPT
from tokenfleet.profiles.library import library_folder, read_profile

LONGEST_PROMPT = 2048
TARGETS = (0.99, 0.999)


@dataclass(frozen=True)
class Case:
    """A model in Aladdin's Table 2, and the workers it should need at 20 requests a second and 99.9 %."""

    model: str
    file: str
    slo: Slo
    bar: int
    stretch: int

    @property
    def profile(self) -> Profile:
        return read_profile(library_folder() / "aladdin" / self.file)


CASES = (
    Case("13b TP1", "llama-2-13b_a100-80gb_tp1.yaml", Slo(0.6, 0.03), 20, 18),
    Case("70b TP2", "llama-2-70b_a100-80gb_tp2.yaml", Slo(1.6, 0.075), 26, 22),
)


@dataclass(frozen=True)
class Lengths:
    """A sample of requests; columns of shape [requests], tokens."""

    prompt: NDArray[np.int64]
    output: NDArray[np.int64]

    def poisson(self, rate_rps: float, requests: int, seed: int) -> Workload:
        """Draw `requests` of them with replacement, arriving at `rate_rps`."""
        rng = np.random.default_rng(seed)
        drawn = rng.integers(0, len(self.prompt), requests)
        arrival_s = np.cumsum(rng.exponential(1.0 / rate_rps, requests))
        return Workload(arrival_s, self.prompt[drawn], self.output[drawn])

    def table(self) -> LengthTable:
        """What a predictor knows that has seen this sample, but no draw from it."""
        return LengthTable.from_history(self.prompt, self.output)


def sharegpt(data: Path) -> Lengths:
    """ShareGPT's conversations, first turns (data/lengths); raises FileNotFoundError where it is not."""
    with (data / SHAREGPT).open(newline="") as lines:
        rows = [(int(r["num_prefill_tokens"]), int(r["num_decode_tokens"])) for r in csv.DictReader(lines)]
    prompt, output = np.array(rows, np.int64).T
    kept = (prompt > 0) & (output > 0) & (prompt <= LONGEST_PROMPT)
    return Lengths(prompt[kept], output[kept])


def steady_workers(rate_rps: float, lengths: Lengths, profile: Profile, slo: Slo) -> float:
    """Workers at which a perfectly even, never varying load takes each its whole TPOT.

    With x requests a second for each worker, D decode steps and L prompt tokens of a mean request:

        c3 + b·(c2 + k2·ctx) = T·(1 - x·(c1 + k1·L)),   b = x·D·T          every prompt prefilled alone
        b·ctx <= M,                                     b = x·D·(step time as it then is)

    ctx is the context averaged over decode steps. Not a bound (prompts prefilled together, or a request
    that is given up, cost less: see perfmodel.capacity), but where a fleet without any noise would stand.
    """
    step, prefill = profile.step, profile.prefill
    assert prefill is not None
    prompt, steps = lengths.prompt.astype(float), lengths.output - 1.0
    context = float((steps * prompt + steps * (steps + 1) / 2).sum() / steps.sum())
    per_sequence_s = step.per_sequence_s + step.per_context_token_s * context
    prefill_s = float(prefill.prefill_s(prompt).mean())
    d = float(steps.mean())
    slo_bound = (slo.tpot_s - step.base_s) / (slo.tpot_s * (d * per_sequence_s + prefill_s))
    full = profile.kv.capacity_tokens / context
    kv_bound = full / (d * (step.base_s + full * per_sequence_s) + full * prefill_s)
    return rate_rps / min(slo_bound, kv_bound)


@dataclass
class Question:
    """How many workers of `profile` does a policy need for these workloads? Answers are remembered."""

    workloads: Sequence[Workload]
    profile: Profile
    slo: Slo
    table: LengthTable
    policy: Policy
    settings: PlacementSettings = field(default_factory=PlacementSettings)
    most: int = 120
    _missed: dict[int, tuple[int, int]] = field(default_factory=dict)

    @property
    def requests(self) -> int:
        return sum(len(w) for w in self.workloads)

    def misses(self, workers: int, enough: int) -> int:
        """Requests outside their targets over all workloads; counting stops past `enough`."""
        missed, counted_to = self._missed.get(workers, (0, -1))
        if counted_to >= enough or missed > enough:
            return missed
        fleet = [WorkerSpec(self.profile)] * workers
        missed = 0
        for seed, workload in enumerate(self.workloads):
            outcome = simulate(
                workload,
                fleet,
                self.slo,
                self.policy,
                settings=self.settings,
                predictor=self.table,
                seed=seed,
                max_misses=enough - missed,
            )
            missed += outcome.misses
            if missed > enough:
                break
        self._missed[workers] = missed, enough
        return missed

    def fewest(self, target: float, first: float) -> int | None:
        """The fewest workers at which the pooled attainment reaches `target`; None past `most`.

        `first`: where to begin looking. Takes attainment to grow with workers, which best-fit's need not:
        its answer is the end of some interval of failure, not always the least count that succeeds.
        """
        enough = math.floor((1.0 - target) * self.requests + 1e-9)
        low, high, stride = 0, max(math.ceil(first), 1), 1
        while self.misses(high, enough) > enough:
            if high >= self.most:
                return None
            low, high = high, min(high + stride, self.most)
            stride *= 2
        while high - low > 1:
            middle = (low + high) // 2
            if self.misses(middle, enough) > enough:
                low = middle
            else:
                high = middle
        return high
