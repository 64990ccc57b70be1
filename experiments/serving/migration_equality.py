"""Is a moved stream, token for token, the stream without moves?

    python experiments/serving/migration_equality.py [--quick] [--seed N] [--format table|json]

Greedy requests with prompts of 64 to 8000 tokens, moved one to five times between two real vLLM engines at
random moments, to and fro, some with logprobs, penalties, or stop tokens. In float32 four at a time; in
bfloat16 one at a time, since there the mere make-up of a batch decides near-ties. (Stop strings are judged
above the fleet, on the token stream: equal streams stop equally.)
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.lib.results import bar, flags, show
from harness.two_workers import A, B, Pair, on_two_workers

CASES = {"float32": 160, "bfloat16": 40}
QUICK_CASES = {"float32": 16}
LONGEST = 8000
TOGETHER = {"float32": 4, "bfloat16": 1}
LOGPROB_TOLERANCE = {"float32": 1e-4, "bfloat16": 0.05}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "logprobs": {"logprobs": 3},
    "frequency": {"frequency_penalty": 0.6},
    "presence": {"presence_penalty": 1.1},
    "all penalties": {"presence_penalty": 0.5, "frequency_penalty": 0.3, "repetition_penalty": 1.15},
    "stop tokens": {"stop_token_ids": list(range(100, 108)), "min_tokens": 30},
}


@dataclass(frozen=True)
class Case:
    """One request; `at` are the output lengths at which it is moved."""

    kind: str
    prompt: list[int]
    max_tokens: int
    at: list[int]

    @property
    def params(self) -> dict[str, Any]:
        return KINDS[self.kind] | {"max_tokens": self.max_tokens}


def cases(count: int, longest: int, seed: int) -> list[Case]:
    """Draw the cases; lengths are uniform on a log scale."""
    rng = np.random.default_rng(seed)
    drawn = []
    for number in range(count):
        length = int(np.exp(rng.uniform(np.log(64), np.log(longest))))
        outputs = int(rng.integers(80, 160))
        at = sorted(rng.choice(np.arange(5, outputs - 20), rng.integers(1, 6), replace=False).tolist())
        kind = list(KINDS)[number % len(KINDS)]
        drawn.append(Case(kind, rng.integers(5, 2000, length).tolist(), outputs, at))
    return drawn


async def forget_all(pair: Pair) -> None:
    """Empty both prefix caches."""
    await asyncio.gather(pair.forget(A), pair.forget(B))


async def compare(pair: Pair, case: Case, dtype: str) -> dict[str, Any]:
    """Run a case with and without moves."""
    if dtype == "bfloat16":
        await forget_all(pair)
    plain = await pair.fleet.start(A, case.prompt, case.params)
    await plain.ended()
    if dtype == "bfloat16":  # there a prompt found in the cache is enough to make a difference
        await forget_all(pair)
    stream = await pair.fleet.start(A, case.prompt, case.params)
    moves = []
    for at in case.at:
        await stream.until(at)
        if stream.finish is None:
            moves.append(await pair.fleet.move(stream, B if stream.worker == A else A))
    await stream.ended()
    same = stream.tokens == plain.tokens and stream.finish == plain.finish
    same &= len(stream.logprobs) == len(plain.logprobs)
    off = float(np.max(np.abs(np.subtract(stream.logprobs, plain.logprobs)), initial=0.0)) if same else 0.0
    return {
        "kind": case.kind,
        "same tokens": same,
        "logprobs off": off,
        "equal": same and off <= LOGPROB_TOLERANCE[dtype],
        "moves": sum(m.moved for m in moves),
        "not moved": [f"{m.outcome}: {m.reason}" for m in moves if not m.moved],
        "downtime_s": [m.downtime_s for m in moves if m.downtime_s is not None],
    }


def rows_of(dtype: str, results: list[dict[str, Any]]) -> list[dict[str, Any]]:
    rows = []
    for kind in KINDS:
        mine = [r for r in results if r["kind"] == kind]
        downtime = [d for r in mine for d in r["downtime_s"]]
        rows.append(
            {
                "dtype": dtype,
                "kind": kind,
                "requests": len(mine),
                "same tokens": sum(r["same tokens"] for r in mine),
                "logprobs off": max((r["logprobs off"] for r in mine), default=0.0),
                "equal": sum(r["equal"] for r in mine),
                "moves": sum(r["moves"] for r in mine),
                "moves not made": sum(len(r["not moved"]) for r in mine),
                "why": "; ".join(sorted({why for r in mine for why in r["not moved"]})),
                "downtime p50 (ms)": 1e3 * float(np.median(downtime)) if downtime else None,
            }
        )
    return rows


def main() -> int:
    parser = flags(__doc__)
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for dtype, count in (QUICK_CASES if asked.quick else CASES).items():
        drawn = cases(count, 2000 if asked.quick else LONGEST, asked.seed)

        async def story(pair: Pair, drawn: list[Case] = drawn, dtype: str = dtype) -> list[dict[str, Any]]:
            gate = asyncio.Semaphore(TOGETHER[dtype])

            async def one(case: Case) -> dict[str, Any]:
                async with gate:
                    return await compare(pair, case, dtype)

            return await asyncio.gather(*(one(case) for case in drawn))

        engine = {"dtype": dtype, "max_model_len": LONGEST + 256, "kv_cache_memory_bytes": 256 << 20}
        rows += rows_of(dtype, on_two_workers(story, **engine))
    requests = sum(r["requests"] for r in rows)
    unequal = requests - sum(r["equal"] for r in rows)
    return show("migration_equality", rows, {f"streams of {requests} that differ": bar(unequal, 0)}, asked)


if __name__ == "__main__":
    raise SystemExit(main())
