"""What do moves cost the requests that are not moved?

    python experiments/migration_interference.py [--length N] [--pace ordinary|unbounded] [--pairs N]
        [--seconds S] [--kept FILE] [--quick] [--seed N] [--format table|json]

Four bystanders decode on each of two real vLLM engines while one more request, with 32 KB of KV per token,
is moved from one to the other. Every round begins afresh: the same bystanders and the same request, with an
empty prefix cache on the target, for what is cached there is not copied. In one round of a pair the request
is moved and in the other it is not (which comes first changes from pair to pair), and a worker's time for
the *same* steps of its bystanders, from the move's begin to its cut-over, is compared between the two. So
the batch that changes with the cut-over does not count, only the moving, and contexts, which grow by a token
a step, are equal. Halfway the workers change roles.

A figure is the median over the pairs of (source + target) / 2, with its 95 % bootstrap interval; the mean,
and source and target alone, stand beside it. `nothing moves` is the same figure for rounds without a move
against the next one: what the machine does by itself, 1 if the method is sound. (Once this script compared a
move with the stretch before it, and moved a request to and fro between workers that had most of it cached.)

`ordinary` is how `tokenfleet serve` moves on a CPU host, `unbounded` as fast as it goes. Runs can be added up
in a file (`--kept`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
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
PAIRS, QUICK_PAIRS = 24, 4
LENGTHS, QUICK_LENGTHS = (1024, 4096), (1024,)
PACES = ("ordinary", "unbounded")
BAR = 1.02
BEFORE_STEPS = 16
SPARE_STEPS = 12


@dataclass(frozen=True, slots=True)
class Round:
    """When each worker's bystanders got their tokens (s), and when the request was moved, if it was."""

    times: dict[WorkerId, NDArray[np.float64]]
    begun_s: float = 0.0
    cut_s: float = 0.0
    bytes: int = 0

    def window(self, worker: WorkerId) -> tuple[int, int]:
        """Tokens [first, last) that came while the request was moved."""
        first, last = np.searchsorted(self.times[worker], [self.begun_s, self.cut_s], side="right")
        return int(first), int(last)

    def took_s(self, worker: WorkerId, first: int, last: int) -> float:
        """Time of the steps that gave tokens [first, last)."""
        times = self.times[worker]
        return float(times[last - 1] - times[first - 1])


@dataclass(frozen=True, slots=True)
class Scene:
    """Who decodes where, and what is moved; `source` to `target`."""

    pair: Pair
    source: WorkerId
    target: WorkerId
    bystanders: dict[WorkerId, list[list[int]]]
    mover: list[int]

    async def play(self, steps: int | None) -> Round:
        """One round: with a move, or without one for this many tokens of each bystander."""
        fleet = self.pair.fleet
        params = {"max_tokens": 8000}
        streams = {w: [await fleet.start(w, p, params) for p in self.bystanders[w]] for w in (A, B)}
        mover = await fleet.start(self.source, self.mover, params)
        await mover.until(BEFORE_STEPS)
        begun_s = cut_s = time.monotonic()
        moved_bytes = 0
        if steps is None:
            move = await fleet.move(mover, self.target)
            if not move.moved or move.downtime_s is None:
                raise RuntimeError(f"{move.outcome}: {move.reason}")
            cut_s, moved_bytes = time.monotonic() - move.downtime_s, move.bytes
        else:
            await asyncio.gather(*(streams[w][0].until(steps) for w in (A, B)))
        times = {w: np.array(streams[w][0].times) for w in (A, B)}
        for stream in (mover, *streams[A], *streams[B]):
            await fleet.abort(stream)
        await self.pair.forget(self.target)
        return Round(times, begun_s, cut_s, moved_bytes)


@dataclass(frozen=True, slots=True)
class Found:
    """A pair's figures: time over time for the steps of the move, on the source, on the target, and, where a
    round without a move came before, on both between two such rounds."""

    pace: str
    tokens: int
    source: float
    target: float
    still: float | None
    steps: float
    span_s: float
    bytes: int


def found(scene: Scene, pace: str, moving: Round, still: Round, earlier: Round | None) -> Found:
    """Compare a round with a move to those without."""

    def ratio(above: Round, worker: WorkerId) -> float:
        first, last = moving.window(worker)
        last = min(last, len(above.times[worker]), len(still.times[worker]))
        return above.took_s(worker, first, last) / still.took_s(worker, first, last)

    return Found(
        pace,
        len(scene.mover),
        ratio(moving, scene.source),
        ratio(moving, scene.target),
        None if earlier is None else float(np.mean([ratio(earlier, w) for w in (A, B)])),
        float(np.mean([last - first for first, last in map(moving.window, (A, B))])),
        moving.cut_s - moving.begun_s,
        moving.bytes,
    )


async def measure(pair: Pair, pace: str, length: int, asked: Asked) -> None:
    """Play pairs of rounds, and keep what is found."""
    rng = np.random.default_rng((asked.seed, length))
    draw = lambda n: rng.integers(5, 2000, n).tolist()  # noqa: E731
    bystanders = {w: [draw(CONTEXT) for _ in range(BYSTANDERS)] for w in (A, B)}
    prompt = draw(length)
    for source, target in ((A, B), (B, A)):
        scene = Scene(pair, source, target, bystanders, prompt)
        await scene.play(None)  # connections, and the request's prompt into the source's cache
        ends_s = time.monotonic() + asked.seconds / 2
        earlier: Round | None = None
        steps = 0
        for number in range((asked.pairs + 1) // 2):
            if time.monotonic() > ends_s:
                break
            first = await scene.play(None if number % 2 == 0 else steps)
            if number % 2 == 0:
                steps = max(steps, max(first.window(w)[1] for w in (A, B)) + SPARE_STEPS)
            second = await scene.play(None if number % 2 else steps)
            moving, still = (first, second) if number % 2 == 0 else (second, first)
            asked.keep(found(scene, pace, moving, still, earlier))
            earlier = still
        await pair.forget(source)


def interval(figures: NDArray[np.float64], seed: int) -> tuple[float, float]:
    """95 % bootstrap interval of the median."""
    rng = np.random.default_rng(seed)
    medians = np.median(rng.choice(figures, (4000, len(figures))), axis=1)
    low, high = np.quantile(medians, [0.025, 0.975])
    return float(low), float(high)


def row(pairs: Sequence[Found], seed: int) -> dict[str, Any]:
    """What moves of one length at one pace cost."""
    source, target = (np.array([getattr(f, name) for f in pairs]) for name in ("source", "target"))
    both = (source + target) / 2
    low, high = interval(both, seed)
    return {
        "pace": pairs[0].pace,
        "tokens": pairs[0].tokens,
        "pairs": len(pairs),
        "steps": float(np.median([f.steps for f in pairs])),
        "move (s)": float(np.median([f.span_s for f in pairs])),
        "MB": float(np.median([f.bytes for f in pairs])) / 1e6,
        "step time, moving over not": float(np.median(both)),
        "low": low,
        "high": high,
        "mean": float(both.mean()),
        "source": float(np.median(source)),
        "target": float(np.median(target)),
        "nothing moves": float(np.median([f.still for f in pairs if f.still is not None] or [np.nan])),
    }


@dataclass(slots=True)
class Asked:
    """How much to measure, and what was found; `kept` is a file of earlier runs to go on with, if any."""

    pairs: int
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
        groups: dict[tuple[str, int], list[Found]] = {}
        for one in self.found:
            groups.setdefault((one.pace, one.tokens), []).append(one)
        return [row(group, self.seed) for group in groups.values()]


def main() -> int:
    parser = flags(__doc__.splitlines()[0])
    parser.add_argument("--length", type=int, action="append", help="tokens of the request that moves")
    parser.add_argument("--pace", choices=PACES, action="append")
    parser.add_argument("--pairs", type=int, help="of rounds, for each row")
    parser.add_argument("--seconds", type=float, default=1e9, help="of measuring, for each row")
    parser.add_argument("--kept", type=Path, help="a file to add pairs to; its earlier ones count, too")
    given = parser.parse_args()
    pairs = given.pairs if given.pairs is not None else (QUICK_PAIRS if given.quick else PAIRS)
    asked = Asked(pairs, given.seconds, given.seed, given.kept)
    if given.kept is not None and given.kept.exists():
        asked.found = [Found(**json.loads(line)) for line in given.kept.read_text().splitlines()]

    async def story(pair: Pair) -> None:
        from dataplane.live.fleet import CPU_MOVES

        budgets = {
            "ordinary": {"bytes_per_s": CPU_MOVES.bytes_per_s, "share": CPU_MOVES.share},
            "unbounded": {},
        }
        for pace in given.pace or PACES:
            pair = await pair.budgeted(**budgets[pace])
            for length in given.length or (QUICK_LENGTHS if given.quick else LENGTHS):
                await measure(pair, pace, length, asked)

    if pairs > 0:
        on_two_workers(
            story, fat=True, dtype="bfloat16", max_model_len=16000, kv_cache_memory_bytes=1280 << 20
        )
    rows = asked.rows()
    bars = {
        f"step time at {r['tokens']} tokens, {r['pace']}": bar(r["step time, moving over not"], BAR)
        for r in rows
    }
    return show("migration_interference", rows, bars, given)


if __name__ == "__main__":
    raise SystemExit(main())
