"""What do moves cost the requests that are not moved?

    python experiments/serving/migration_interference.py [--length N] [--share S] [--seconds S] [--runs N]
        [--resume FOLDER] [--quick] [--seed N] [--format table|json]

Four bystanders decode on each of two real vLLM engines while the KV of one more request, 32 KB a token, is
copied from one to the other as a move does it, at the pace of `tokenfleet serve` on a CPU host: begin, then a
loader that takes all of it. Then the next request, the other way, and so on.

The machine is 5 % faster in one second than in the next, so a copy is made in turns of 0.2 s: in one of
every two it works, in the other it waits (`copy_turns.py`). `copying` is how much longer steps are in the
turns that it works in, the mean of source and target. `sham` is the same figure while nothing is copied: 0,
if the method is sound.

What a copy costs once, its request's arrival and its end, does not fall into such turns. It is told from the
steps right after each, compared with those around them (`once`, ms of both workers' mean), and counted as if
the copy had taken all turns: step time = 1 + copying + once / (its time).

A figure is the mean of the middle half, with its 95 % bootstrap interval. `--runs` are added up.
`--share` is another share of a core than the product's: a large one shows that the method finds what there
is.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controlplane.types import WorkerId
from experiments.lib.copy_turns import (
    EXTENSION,
    TURN_S,
    Times,
    extra_s,
    growth,
    idle_pair,
    middle_mean,
    pairs,
    slower,
    working_s,
)
from experiments.lib.results import bar, flags, show
from harness.two_workers import A, B, Pair, on_two_workers

BYSTANDERS = 4  # on each worker
CONTEXT = 200
LENGTHS, QUICK_LENGTHS = (1024, 4096), (1024,)
SECONDS, QUICK_SECONDS = 180.0, 20.0
TOKENS_A_ROUND = 4096  # of requests that move, before all streams start anew
REST_S = 1.0  # before, between and after copies
BAR = 1.02
BEFORE_STEPS = 16
SIDES = ("both", "source", "target")


@dataclass(frozen=True, slots=True)
class Found:
    """Something measured on both workers.

    `what`: "copying" or "sham", the log ratio of two turns; "begin" or "end", the extra seconds of a copy's
    first or last message; "copy", the seconds that a copy worked, under both names.
    """

    share: float
    tokens: int
    what: str
    source: float
    target: float


@dataclass(slots=True)
class Spans:
    """When copies began and ended in a round, and the rests around them."""

    copies: list[tuple[float, float]] = field(default_factory=list)
    rests: list[tuple[float, float]] = field(default_factory=list)


class Copying:
    """A move's copy of one running request, without its cut-over."""

    def __init__(self, pair: Pair, mover: Any, target: WorkerId) -> None:
        from dataplane.live.engine_api.kv_messages import LOADER_PREFIX
        from dataplane.live.migration.move import MoveRecord

        self._moves, self._mover, self._target = pair.fleet.migrations, mover, target
        self._running = pair.fleet.running(mover.id)
        name = f"{LOADER_PREFIX}{secrets.token_hex(4)}"
        self._move = MoveRecord(name, mover.id, mover.worker, target, "live", time.time())
        self._loader: str | None = None

    async def begin(self) -> None:
        await self._moves._begin(self._move, self._running)

    async def copy(self, tokens: int) -> None:
        """Bring the KV of [0, tokens) to the target."""
        self._loader = await self._moves._copy(self._move, self._running, tokens, self._loader)

    async def release(self) -> None:
        if self._loader is not None:
            await self._moves._release(self._move, self._running, self._target, self._loader)
        await self._moves._release(self._move, self._running, self._mover.worker, self._mover.segment)


async def copies(pair: Pair, movers: list[Any], target: WorkerId, length: int) -> Spans:
    """Copy the movers one after the other, each from the beginning of two turns in which no copy works."""
    spans = Spans()
    rest_began_s = time.monotonic() + 0.5
    for mover in movers:
        copying = Copying(pair, mover, target)
        await copying.begin()
        start_s = idle_pair(time.monotonic() + REST_S, TURN_S)
        await asyncio.sleep(start_s - time.monotonic())
        spans.rests.append((rest_began_s, start_s))
        await copying.copy(length)
        spans.copies.append((start_s, time.monotonic()))
        rest_began_s = time.monotonic() + 0.1
        await asyncio.sleep(REST_S)
        spans.rests.append((rest_began_s, time.monotonic()))
        await copying.release()
        rest_began_s = time.monotonic() + 0.2
    await asyncio.sleep(0.2)
    return spans


def judge(times: dict[str, Times], spans: Spans, kind: tuple[float, int]) -> list[Found]:
    """What a round shows; `times` of the source's and the target's tokens."""
    shown: list[Found] = []

    def keep(what: str, figures: dict[str, float]) -> None:
        shown.append(Found(*kind, what, **figures))

    grows = {side: float(np.median([growth(t, *rest) for rest in spans.rests])) for side, t in times.items()}
    for what, found, lead_s in (("sham", spans.rests, 0.0), ("copying", spans.copies, 0.2)):
        for start_s, end_s in found:
            for at in pairs(start_s + lead_s, end_s, TURN_S):
                keep(what, {side: slower(t, at, TURN_S, grows[side]) for side, t in times.items()})
    for start_s, end_s in spans.copies:
        keep("begin", {side: extra_s(t, start_s) for side, t in times.items()})
        keep("end", {side: extra_s(t, end_s) for side, t in times.items()})
        keep("copy", dict.fromkeys(times, working_s(start_s, end_s, TURN_S)))
    return shown


async def measure(pair: Pair, kind: tuple[float, int], seed: tuple[int, ...], seconds: float) -> list[Found]:
    """Copy the KV of requests of one length again and again, either way."""
    _, length = kind
    rng = np.random.default_rng(seed)
    draw = lambda n: rng.integers(5, 2000, n).tolist()  # noqa: E731
    bystanders = {w: [draw(CONTEXT) for _ in range(BYSTANDERS)] for w in (A, B)}
    prompts, params = [draw(length) for _ in range(max(1, TOKENS_A_ROUND // length))], {"max_tokens": 8000}
    source, target = A, B
    found: list[Found] = []
    ends_s = time.monotonic() + seconds
    while time.monotonic() < ends_s:
        streams = {w: [await pair.fleet.start(w, p, params) for p in bystanders[w]] for w in (A, B)}
        movers = [await pair.fleet.start(source, prompt, params) for prompt in prompts]
        for mover in movers:
            await mover.until(BEFORE_STEPS)
        spans = await copies(pair, movers, target, length)
        times = {"source": streams[source][0].times, "target": streams[target][0].times}
        found += judge({side: np.array(t) for side, t in times.items()}, spans, kind)
        for stream in (*movers, *streams[A], *streams[B]):
            await pair.fleet.abort(stream)
        for worker in (A, B):
            await pair.forget(worker)
        source, target = target, source
    return found


def drawn(found: list[Found], what: str, side: str) -> NDArray[np.float64]:
    """What was found of a kind, at one worker or the mean of both."""
    of = [f for f in found if f.what == what]
    if side == "both":
        return np.array([(f.source + f.target) / 2 for f in of])
    return np.array([getattr(f, side) for f in of])


def row(found: list[Found], seed: int) -> dict[str, Any]:
    """What copies of one length at one pace cost."""
    rng = np.random.default_rng(seed)
    copy_s = float(drawn(found, "copy", "both").mean())

    def figures(what: str, side: str = "both") -> tuple[float, NDArray[np.float64]]:
        """The figure, and what it would be in other draws."""
        all_of = drawn(found, what, side)
        return float(middle_mean(all_of)), middle_mean(rng.choice(all_of, (4000, len(all_of))))

    def text(one: tuple[float, NDArray[np.float64]], scale: float = 100.0) -> str:
        low, high = np.quantile(one[1], [0.025, 0.975]) * scale
        return f"{one[0] * scale:.2f} [{low:.2f}, {high:.2f}]"

    parts = {side: [figures(what, side) for what in ("copying", "begin", "end")] for side in SIDES}
    whole = {
        side: (c[0] + (b[0] + e[0]) / copy_s, c[1] + (b[1] + e[1]) / copy_s)
        for side, (c, b, e) in parts.items()
    }
    copying, begin, end = parts["both"]
    low, high = np.quantile(whole["both"][1], [0.025, 0.975])
    return {
        "share": found[0].share,
        "tokens": found[0].tokens,
        "copies": sum(f.what == "copy" for f in found),
        "pairs": sum(f.what == "copying" for f in found),
        "copy s": copy_s,
        "step time": 1 + whole["both"][0],
        "low": 1 + float(low),
        "high": 1 + float(high),
        "target %": text(whole["target"]),
        "source %": text(whole["source"]),
        "copying %": text(copying),
        "once ms": text((begin[0] + end[0], begin[1] + end[1]), 1e3),
        "sham %": text(figures("sham")),
        "shams": sum(f.what == "sham" for f in found),
    }


def main() -> int:
    parser = flags(__doc__, resumes=True)
    parser.add_argument("--length", type=int, action="append", help="tokens of the request that moves")
    parser.add_argument("--share", type=float, help="of a core that copies take, if not the product's")
    parser.add_argument("--seconds", type=float, help="of measuring, for each run of a row")
    parser.add_argument("--runs", type=int, default=1, help="added up in each row")
    asked = parser.parse_args()
    from dataplane.live.control.fleet import CPU_MOVES  # vLLM is slow to import

    seconds = asked.seconds or (QUICK_SECONDS if asked.quick else SECONDS)
    budget = {name: getattr(CPU_MOVES, name) for name in ("bytes_per_s", "share", "stage_s")}
    if asked.share is not None:
        budget |= {"share": asked.share, "bytes_per_s": 0.0}
    kinds = [(budget["share"], n) for n in asked.length or (QUICK_LENGTHS if asked.quick else LENGTHS)]
    runs = {(kind, i): f"{kind[0]:g} {kind[1]} run {i}" for kind in kinds for i in range(asked.runs)}
    found = {run: asked.resume.read(name) for run, name in runs.items()}

    async def story(pair: Pair) -> None:
        pair = await pair.budgeted(**budget)
        for (kind, i), name in runs.items():
            if found[kind, i] is None:
                measured = await measure(pair, kind, (asked.seed, kind[1], i), seconds)
                found[kind, i] = asked.resume.write(name, [asdict(one) for one in measured])

    if None in found.values():
        on_two_workers(
            story,
            fat=True,
            dtype="bfloat16",
            max_model_len=16000,
            kv_cache_memory_bytes=1280 << 20,
            worker_extension_cls=EXTENSION,
        )
    pooled = [[Found(**f) for i in range(asked.runs) for f in found[kind, i]] for kind in kinds]
    rows = [row(of, asked.seed) for of in pooled]
    bars = {
        f"step time at {r['tokens']} tokens, {r['share']:g} of a core": bar(r["step time"], BAR) for r in rows
    }
    return show("migration_interference", rows, bars, asked)


if __name__ == "__main__":
    raise SystemExit(main())
