"""A pipeline simulated as ranks in lockstep, beside one whose batches form as vLLM's scheduler forms them.

    python experiments/profiling/pipeline_batches.py [--quick] [--format table|json]

The second is literal: whenever fewer batches than stages are under way, one of all that can be scheduled sets
off (decoding requests that are in none, next chunks, waiting requests, up to the step's budget); else the
oldest is waited for (vLLM 0.32, `step_with_batch_queue`). A batch passes the stages one after another and no
other overtakes it. Requests do not keep to a batch: where the budget does not part them, all go in one.
Poisson arrivals, 100 to 1,500 tokens of prompt and 20 to 300 of answer, steps of an 8B model's size.
"""

from __future__ import annotations

import sys
from collections import deque
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controlplane.perfmodel.profile import EngineLimits, KvModel, Profile, Residuals, Source
from controlplane.perfmodel.ranks import Ranks
from controlplane.perfmodel.step import StepModel
from controlplane.types import Slo
from controlplane.workload import Workload
from dataplane.simulated.simulate import WorkerSpec, simulate
from experiments.lib.results import bar, flags, show

STEP = StepModel(0.014, 6e-5, 5e-5, 1.5e-7)
BUDGET, SEQS = 2048, 256
RATES, STAGES = (2, 6, 10, 14), (2, 4)
MOST = 0.10
NEVER = Slo(9e9, 9e9)


class Pipeline:
    """The literal one: every batch at every stage."""

    def __init__(self, work: Workload, stages: int) -> None:
        self.work, self.stages = work, stages
        n = len(work)
        self.made, self.computed = np.zeros(n, int), np.zeros(n, int)
        self.first_s, self.end_s = np.full(n, np.nan), np.full(n, np.nan)
        self.waiting: deque[int] = deque()
        self.running: list[int] = []
        self.away: set[int] = set()  # whose next token is being made
        self.batches: deque[tuple[float, list[int]]] = deque()
        self.free_s = np.zeros(stages)

    def run(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """When each request had its first token, and its last."""
        now_s, coming = 0.0, 0
        while coming < len(self.work) or self.waiting or self.running:
            while coming < len(self.work) and self.work.arrival_s[coming] <= now_s:
                self.waiting.append(coming)
                coming += 1
            batch = self.scheduled() if len(self.batches) < self.stages else {}
            if batch:
                self.send(batch, now_s)
            elif self.batches:
                now_s = max(now_s, self.receive())
            else:
                now_s = float(self.work.arrival_s[coming])
        return self.first_s, self.end_s

    def scheduled(self) -> dict[int, int]:
        """The next batch: requests and their tokens."""
        batch: dict[int, int] = {}
        left = BUDGET
        for r in self.running:
            rest = int(self.work.prompt_tokens[r] - self.computed[r])
            tokens = min(rest, left) if rest else min(int(r not in self.away), left)
            if tokens:
                batch[r] = tokens
                left -= tokens
        while self.waiting and left > 0 and len(self.running) < SEQS:
            r = self.waiting.popleft()
            self.running.append(r)
            batch[r] = min(int(self.work.prompt_tokens[r]), left)
            left -= batch[r]
        return batch

    def send(self, batch: dict[int, int], now_s: float) -> None:
        prompts = self.work.prompt_tokens
        decode = [r for r in batch if self.computed[r] == prompts[r]]
        chunks = [(self.computed[r], self.computed[r] + n) for r, n in batch.items() if r not in decode]
        context = sum(int(prompts[r] + self.made[r]) for r in decode)
        squares = sum(b * b - a * a for a, b in chunks)
        step_s = float(STEP.step_s(sum(b - a for a, b in chunks), len(decode), context, squares))
        at_s = now_s
        for stage in range(self.stages):
            at_s = self.free_s[stage] = max(at_s, self.free_s[stage]) + step_s / self.stages
        for r, tokens in batch.items():
            self.computed[r] = min(self.computed[r] + tokens, prompts[r])
        makes = [r for r in batch if self.computed[r] == prompts[r]]
        self.away.update(makes)
        self.batches.append((float(at_s), makes))

    def receive(self) -> float:
        """The oldest batch comes back; when."""
        at_s, makes = self.batches.popleft()
        self.away.difference_update(makes)
        for r in makes:
            self.made[r] += 1
            if self.made[r] == 1:
                self.first_s[r] = at_s
            if self.made[r] == self.work.output_tokens[r]:
                self.end_s[r] = at_s
                self.running.remove(r)
        return at_s


def profile(stages: int) -> Profile:
    """The same worker as ranks."""
    return Profile(
        "made",
        "made",
        1,
        STEP,
        KvModel(10_000_000),
        EngineLimits(max_batched_tokens=BUDGET, max_seqs=SEQS),
        Residuals(0.0, 0.0, 0.0, 0),
        Source("composed", "made up", "none", "2026-01-01"),
        ranks=Ranks("pipeline", stages),
    )


def main() -> int:
    asked = flags(__doc__).parse_args()
    rng = np.random.default_rng(asked.seed)
    n = 300 if asked.quick else 800
    rows: list[dict[str, Any]] = []
    for stages in STAGES:
        for rate in RATES:
            arrival_s = np.cumsum(rng.exponential(1.0 / rate, n))
            work = Workload(arrival_s, rng.integers(100, 1500, n), rng.integers(20, 300, n))
            first_s, end_s = Pipeline(work, stages).run()
            tpot_s = (end_s - first_s) / (work.output_tokens - 1)
            seen = simulate(work, [WorkerSpec(profile(stages))], NEVER, "jsq")
            rows.append(
                {
                    "stages": stages,
                    "rate_rps": rate,
                    "TPOT, ms": float(tpot_s.mean() * 1e3),
                    "TPOT, error": float(seen.tpot_s.mean() / tpot_s.mean() - 1),
                    "TPOT p99, error": float(np.quantile(seen.tpot_s, 0.99) / np.quantile(tpot_s, 0.99) - 1),
                    "TTFT, error": float(seen.ttft_s.mean() / (first_s - arrival_s).mean() - 1),
                }
            )
    bars = {
        f"{stages} stages: mean error of TPOT": bar(
            float(np.mean([abs(row["TPOT, error"]) for row in rows if row["stages"] == stages])), MOST
        )
        for stages in STAGES
    }
    return show("pipeline_batches", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
