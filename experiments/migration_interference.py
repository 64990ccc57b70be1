"""What do moves cost the requests that are not moved?

    python experiments/migration_interference.py [--length N] [--pace ordinary|unbounded] [--turns N]
        [--seconds S] [--kept FILE] [--quick] [--seed N] [--format table|json]

Four bystanders decode on each of two real vLLM engines while the KV of one more request, 32 KB a token, is
copied from one to the other as a move does it: begin, then loaders, each taking over from the last. The copy
is made in turns: a stretch of it, a stretch of rest as long, and so on, while the same batches decode. The
bystanders' time per step in a stretch with copying (every step that it touches) is compared with that of the
rests before and after it. So neither the cut-over's change of batch counts, nor contexts that grow by a
token a step, nor a machine that is 10 % faster in one second than in the next, as ours is. Every third
stretch is a sham, in which nothing is copied: `sham` is the same figure for those, 1 if the method is sound.

A figure is the median over the stretches of (source + target) / 2, with its 95 % bootstrap interval; the
mean, and source and target alone, stand beside it. (Before, a whole move was compared with the stretch before
it, between workers that had most of the request cached: that was good to 5 %, and copied little.)

`ordinary` is how `tokenfleet serve` moves on a CPU host, `unbounded` as fast as it goes. Runs can be added up
in a file (`--kept`).
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from results import bar, flags, show
from two_workers import A, B, Pair, on_two_workers

from controlplane.types import WorkerId

BYSTANDERS = 4  # on each worker
CONTEXT = 200
TURNS, QUICK_TURNS = 60, 12
LENGTHS, QUICK_LENGTHS = (1024, 4096), (1024,)
STAGE_TOKENS = {"ordinary": 1024, "unbounded": 1 << 20}  # a whole copy is few steps long when unbounded
LEAST_REST_S = 0.25
BAR = 1.02
BEFORE_STEPS = 16


@dataclass(frozen=True, slots=True)
class Found:
    """A stretch's time per step over that of the rests around it, by worker. `sham`: nothing was copied."""

    pace: str
    tokens: int
    sham: bool
    source: float
    target: float
    steps: float
    span_s: float
    copied_tokens: int


@dataclass(slots=True)
class Asked:
    """How much to measure, and what was found; `kept` is a file of earlier runs to go on with, if any."""

    turns: int
    seconds: float
    seed: int
    kept: Path | None
    found: list[Found] = field(default_factory=list)

    def keep(self, one: Found) -> None:
        self.found.append(one)
        if self.kept is not None:
            with self.kept.open("a") as file:
                file.write(json.dumps(asdict(one)) + "\n")

    def rows(self) -> list[dict[str, Any]]:
        kinds = dict.fromkeys((f.pace, f.tokens) for f in self.found)
        return [row([f for f in self.found if (f.pace, f.tokens) == kind], self.seed) for kind in kinds]


class Copying:
    """A move's copies of one running request, a stage at a time, without its cut-over."""

    def __init__(self, pair: Pair, mover: Any, target: WorkerId) -> None:
        from dataplane.live.migration import Move
        from dataplane.live.transfer import LOADER_PREFIX

        self._moves, self._mover, self._target = pair.fleet.migrations, mover, target
        self._running = pair.fleet.running(mover.id)
        name = f"{LOADER_PREFIX}{secrets.token_hex(4)}"
        self._move = Move(name, mover.id, mover.worker, target, "live", time.time())
        self._loader: str | None = None

    async def begin(self) -> None:
        await self._moves._begin(self._move, self._running)

    async def copy(self, tokens: int) -> None:
        """Bring the KV of [0, tokens) to the target."""
        self._loader = await self._moves._copy(self._move, self._running, tokens, self._loader)
        self._move.stages.append(tokens)

    async def release(self) -> None:
        if self._loader is not None:
            await self._moves._release(self._move, self._running, self._target, self._loader)
        await self._moves._release(self._move, self._running, self._mover.worker, self._mover.segment)


def step_s(times: NDArray[np.float64], start_s: float, end_s: float, touched: bool) -> tuple[float, int]:
    """Mean time of the steps within [start, end], or of all that it touches; and how many they are."""
    begins, ends = times[:-1], times[1:]
    inside = (ends > start_s) & (begins < end_s) if touched else (begins >= start_s) & (ends <= end_s)
    return float((ends - begins)[inside].mean()), int(inside.sum())


def compare(times: NDArray[np.float64], spans: list[tuple[float, float]], at: int) -> tuple[float, int]:
    """Stretch `at` over the rests around it; `spans` are the stretches, and an end at either side."""
    start_s, end_s = spans[at]
    one, steps = step_s(times, start_s, end_s, touched=True)
    rests = [
        step_s(times, spans[at - 1][1], start_s, touched=False)[0],
        step_s(times, end_s, spans[at + 1][0], touched=False)[0],
    ]
    return one / float(np.mean(rests)), steps


async def measure(pair: Pair, pace: str, length: int, asked: Asked) -> None:
    """Copy the KV of a request of `length` tokens again and again, either way, and keep what is found."""
    rng = np.random.default_rng((asked.seed, length))
    draw = lambda n: rng.integers(5, 2000, n).tolist()  # noqa: E731
    bystanders = {w: [draw(CONTEXT) for _ in range(BYSTANDERS)] for w in (A, B)}
    prompt, params = draw(length), {"max_tokens": 8000}
    stage = min(STAGE_TOKENS[pace], length)
    ends_s, turns = time.monotonic() + asked.seconds, 0
    source, target = A, B
    while turns < asked.turns and time.monotonic() < ends_s:
        if turns >= asked.turns / 2 or time.monotonic() > ends_s - asked.seconds / 2:
            source, target = B, A
        streams = {w: [await pair.fleet.start(w, p, params) for p in bystanders[w]] for w in (A, B)}
        mover = await pair.fleet.start(source, prompt, params)
        await mover.until(BEFORE_STEPS)
        copying = Copying(pair, mover, target)
        await copying.begin()
        spans, copied, took_s = [(0.0, time.monotonic())], [0], LEAST_REST_S
        for tokens in range(stage, length + 1, stage):
            # With every second copy a sham, before it or after it.
            both = [False, True][:: int(rng.choice([-1, 1]))]
            for is_sham in both if (tokens // stage + turns) % 2 else [False]:
                await asyncio.sleep(max(LEAST_REST_S, took_s))
                start_s = time.monotonic()
                if is_sham:
                    await asyncio.sleep(took_s)
                else:
                    await copying.copy(tokens)
                    took_s = time.monotonic() - start_s
                spans.append((start_s, time.monotonic()))
                copied.append(0 if is_sham else stage)
        await asyncio.sleep(max(LEAST_REST_S, took_s))
        spans.append((time.monotonic(), 0.0))
        await copying.release()
        times = {w: np.array(streams[w][0].times) for w in (A, B)}
        for at in range(1, len(spans) - 1):
            (on_source, n), (on_target, m) = (compare(times[w], spans, at) for w in (source, target))
            span_s, sham = spans[at][1] - spans[at][0], copied[at] == 0
            asked.keep(Found(pace, length, sham, on_source, on_target, (n + m) / 2, span_s, copied[at]))
            turns += not sham
        for stream in (mover, *streams[A], *streams[B]):
            await pair.fleet.abort(stream)
        await pair.forget(target)


def interval(figures: NDArray[np.float64], seed: int) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    rng = np.random.default_rng(seed)
    medians = np.median(rng.choice(figures, (4000, len(figures))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(low), float(high)


def row(found: list[Found], seed: int) -> dict[str, Any]:
    """What copies of one length at one pace cost."""
    real, sham = [f for f in found if not f.sham], [f for f in found if f.sham]
    source, target = (np.array([getattr(f, name) for f in real]) for name in ("source", "target"))
    both = (source + target) / 2
    low, high = interval(both, seed)
    return {
        "pace": real[0].pace,
        "tokens": real[0].tokens,
        "stretches": len(real),
        "steps": float(np.median([f.steps for f in real])),
        "tokens/s": float(np.median([f.copied_tokens / f.span_s for f in real])),
        "step time, copying over not": float(np.median(both)),
        "low": low,
        "high": high,
        "mean": float(both.mean()),
        "source": float(np.median(source)),
        "target": float(np.median(target)),
        "sham": float(np.median([(f.source + f.target) / 2 for f in sham])) if sham else None,
        "shams": len(sham),
    }


def main() -> int:
    parser = flags(__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, action="append", help="tokens of the request that moves")
    parser.add_argument("--pace", choices=STAGE_TOKENS, action="append")
    parser.add_argument("--turns", type=int, help="stretches with copying, for each row; 0 only adds up")
    parser.add_argument("--seconds", type=float, default=1e9, help="of measuring, for each row")
    parser.add_argument("--kept", type=Path, help="a file to add stretches to; its earlier ones count, too")
    given = parser.parse_args()
    turns = given.turns if given.turns is not None else (QUICK_TURNS if given.quick else TURNS)
    asked = Asked(turns, given.seconds, given.seed, given.kept)
    if given.kept is not None and given.kept.exists():
        asked.found = [Found(**json.loads(line)) for line in given.kept.read_text().splitlines()]

    async def story(pair: Pair) -> None:
        from dataplane.live.fleet import CPU_MOVES

        budgets = {
            "ordinary": {name: getattr(CPU_MOVES, name) for name in ("bytes_per_s", "share", "stage_s")},
            "unbounded": {},
        }
        for pace in given.pace or STAGE_TOKENS:
            pair = await pair.budgeted(**budgets[pace])
            for length in given.length or (QUICK_LENGTHS if given.quick else LENGTHS):
                await measure(pair, pace, length, asked)

    if turns > 0:
        on_two_workers(
            story, fat=True, dtype="bfloat16", max_model_len=16000, kv_cache_memory_bytes=1280 << 20
        )
    rows = asked.rows()
    bars = {
        f"step time at {r['tokens']} tokens, {r['pace']}": bar(r["step time, copying over not"], BAR)
        for r in rows
    }
    return show("migration_interference", rows, bars, given)


if __name__ == "__main__":
    raise SystemExit(main())
