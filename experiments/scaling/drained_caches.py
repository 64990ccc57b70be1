"""What a drain and a launch do to cached conversations, with the caches brought along or left behind.

    python experiments/scaling/drained_caches.py [--quick] [--seed 0] [--format table|json]

100 conversations of ten turns on Llama-3.1-8B, one H100 a worker, in simulation at `spread+migrate`: a prompt
of 4,000 tokens, then some 1,500 more a turn, 15 s apart on average. At 150 s one of three workers is drained,
or a third joins two. Judged are the requests of the next 30 s: the share of their prompts that was cached,
their time to the first token, and how many the changed worker serves. Caches are brought at the pace that
Llumnix measured and at that of a 200 Gbit/s network. Means of five seeds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np

from controlplane.prefixes import Prefixes
from controlplane.types import Slo
from controlplane.workload import Workload
from dataplane.simulated.control_loop import Bringing, ControlSettings
from dataplane.simulated.simulate import WorkerSpec, simulate
from experiments.lib.results import bar, flags, show
from tokenfleet.profiles.library import find_profiles

BLOCK, TURNS, THINK_S, ANSWER = 16, 10, 15.0, 120
CONVERSATIONS, WORKERS, AT_S, AFTER_S = 100, 3, 150.0, 30.0
SLO = Slo(1.0, 0.05)


def conversations(rng: np.random.Generator, count: int, spread_s: float) -> Workload:
    """Turns at times of their own; an answer is part of the next prompt."""
    rows, known = [], 0
    for _ in range(count):
        at_s, said = float(rng.uniform(0.0, spread_s)), 0
        longest = 4000 + TURNS * 3200
        ids = np.arange(known, known + longest // BLOCK)
        known += len(ids)
        for turn in range(TURNS):
            prompt = said + (4000 if turn == 0 else int(rng.integers(500, 2500)))
            rows.append((at_s, prompt, ANSWER, ids[: (prompt + ANSWER) // BLOCK]))
            said, at_s = prompt + ANSWER, at_s + float(rng.exponential(THINK_S)) + 3.0
    rows.sort(key=lambda row: row[0])
    lists = [row[3] for row in rows]
    return Workload(
        np.array([row[0] for row in rows]),
        np.array([row[1] for row in rows]),
        np.array([row[2] for row in rows]),
        prefixes=Prefixes(BLOCK, np.cumsum([0, *map(len, lists)]), np.concatenate(lists)),
    )


@contextmanager
def caches_left_behind() -> Iterator[None]:
    """Workers leave and come as if nothing could be copied between caches."""
    look = Bringing.look
    Bringing.look = lambda *_: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        Bringing.look = look  # type: ignore[method-assign]


WAYS: dict[str, tuple[float, bool]] = {  # bytes a second, and whether caches are brought
    "left behind": (2.4e9, False),
    "brought, 2.4 GB/s": (2.4e9, True),
    "brought, 25 GB/s": (25e9, True),
}


def judged(workload: Workload, change: WorkerSpec, bytes_per_s: float) -> dict[str, float]:
    """Of the requests just after the change: hits, first tokens, and the share at the worker that changes."""
    others = [WorkerSpec(change.profile)] * (WORKERS - 1)
    control = ControlSettings(bytes_per_s=bytes_per_s)
    outcome = simulate(workload, [*others, change], SLO, "spread+migrate", control=control, seed=0)
    soon = (workload.arrival_s >= AT_S) & (workload.arrival_s < AT_S + AFTER_S)
    ttft_s = (outcome.first_token_s - workload.arrival_s)[soon]
    return {
        "hit rate": float(outcome.cached_tokens[soon].sum() / workload.prompt_tokens[soon].sum()),
        "TTFT mean, ms": 1e3 * float(ttft_s.mean()),
        "TTFT p90, ms": 1e3 * float(np.quantile(ttft_s, 0.9)),
        "there": float((outcome.worker[soon] == WORKERS - 1).mean()),
    }


def main() -> int:
    asked = flags(__doc__).parse_args()
    (profile,) = find_profiles("llama-3.1-8b", ["h100-sxm"], [1])
    loads = [
        conversations(np.random.default_rng(seed), CONVERSATIONS, 240.0)
        for seed in range(asked.seed, asked.seed + (1 if asked.quick else 5))
    ]
    changes = {
        "nothing changes": WorkerSpec(profile),
        "one is drained": WorkerSpec(profile, drain_s=AT_S),
        "one joins": WorkerSpec(profile, ready_s=AT_S),
    }
    rows: list[dict[str, Any]] = []
    for what, change in changes.items():
        for how, (bytes_per_s, brings) in (
            WAYS.items() if what != "nothing changes" else [("", (2.4e9, True))]
        ):
            with nullcontext() if brings else caches_left_behind():
                found = [judged(load, change, bytes_per_s) for load in loads]
            means = {name: float(np.mean([one[name] for one in found])) for name in found[0]}
            rows.append({"name": f"{what}, {how}" if how else what} | means)
    hits = {row["name"]: row["hit rate"] for row in rows}
    left = hits["one is drained, left behind"]
    lost = hits["nothing changes"] - left
    bars = {
        f"share of the lost hits kept, {how[9:]}": bar(
            (hits[f"one is drained, {how}"] - left) / lost, least, True
        )
        for how, least in (("brought, 2.4 GB/s", 0.2), ("brought, 25 GB/s", 0.5))
    }
    return show("drained_caches", rows, bars, asked)


if __name__ == "__main__":
    raise SystemExit(main())
