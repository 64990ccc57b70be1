"""Streams while processes are killed and stopped, links cut, workers moved away, and clients leave.

    python experiments/serving/fault_rounds.py [--schedules N] [--served N] [--clocks N] [--real N]
        [--hung N [--tp N]] [--seed N]

Seeded schedules of ten faults each, and a judge that reads what every client saw. It names the seed of each
violation, which `--seed` and a single schedule play again. `--schedules`: over a FleetCore and emulated
engines in this process (harness/fault_schedules.py). `--served`: over the processes of `tokenfleet serve`
with three emulated workers and two gateways (harness/served_faults.py), two fleets at a time. `--clocks`: one
such fleet, the wall clocks of whose processes jump by an hour among other faults; it needs a C compiler.
`--real`: two vLLM workers, whose streams are compared with undisturbed ones. `--hung`: rounds without a
seed, on three vLLM workers or two of `--tp` ranks; each stops one engine, or one rank, for good.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from typing import Any

from experiments.lib.results import bar, flags, show
from harness.clocks import Clocks
from harness.fault_schedules import History, played, schedule_of, violations
from harness.hung_engines import STREAMS, Hang, hung, undisturbed_round
from harness.served import Server, fleet, tiny_model
from harness.served_faults import CLOCKS, REAL, SERVED, TOGETHER, played_served, undisturbed

AT_A_TIME, FLEETS = 6, 2
PATIENT = ("--gateways", "2", "--slo", "ttft=600s,tpot=60s", "--queue-wait", "10m")
EMULATED = ("--engine", "emulated", "--workers", "3", *PATIENT)
VLLM = ("--workers", "2", *PATIENT)


@dataclass(slots=True)
class Judged:
    """What happened in schedules of one kind, and what the judge found."""

    of: str
    seeds: int = 0
    happened: Counter[str] = field(default_factory=Counter)
    ends: Counter[str] = field(default_factory=Counter)
    broken: list[str] = field(default_factory=list)

    def add(self, seed: int, history: History) -> None:
        """Judge a history. Each violation goes to stderr at once."""
        self.seeds += 1
        self.happened += history.happened
        ends = Counter(end for each in history.ends.values() for end in each)
        self.ends += ends
        print(f"{self.of}: seed {seed}: {dict(history.happened | ends) | history.lost}", file=sys.stderr)
        for what in violations(history):
            self.broken.append(f"{self.of}: seed {seed}: {what}")
            print(self.broken[-1], file=sys.stderr, flush=True)

    def rows(self) -> list[dict[str, Any]]:
        """A row for each kind of fault, and one for all."""
        faults = sum(times for fault, times in self.happened.items() if not fault.startswith("nothing"))
        total = {"fault": f"all, {self.of}", "times": faults, "seeds": self.seeds}
        total |= {"complete": self.ends["LENGTH"], "explicit error": self.ends["ERROR"]}
        total |= {"left or cut": self.ends["ABORT"], "violations": len(self.broken)}
        each = sorted(self.happened.items())
        return [*({"fault": f"{fault}, {self.of}", "times": times} for fault, times in each), total]


async def schedules(seeds: Sequence[int]) -> Judged:
    """Play the schedules of seeds in this process."""
    judged = Judged("in process")
    for i in range(0, len(seeds), AT_A_TIME):
        some = seeds[i : i + AT_A_TIME]
        for seed, history in zip(
            some, await asyncio.gather(*(played(schedule_of(s)) for s in some)), strict=True
        ):
            judged.add(seed, history)
    return judged


async def served(
    servers: Sequence[Server], seeds: Sequence[int], of: str, clocks: Clocks | None = None
) -> Judged:
    """Play the schedules of seeds on served fleets, each fleet one after another."""
    judged, left, is_real = Judged(of), iter(seeds), of == "real"
    whats = {"real": REAL, "clocks": CLOCKS}.get(of, SERVED)

    async def on(server: Server) -> None:
        for seed in left:
            schedule = schedule_of(seed, whats, TOGETHER)
            expected = await undisturbed(server, schedule) if is_real else None
            workers, settle_s = (2, 600.0) if is_real else (3, 120.0)
            history = await played_served(server, schedule, workers, settle_s, clocks)
            history.expected = expected
            judged.add(seed, history)

    await asyncio.gather(*(on(server) for server in servers))
    return judged


def hangs(server: Server, rounds: int) -> list[Hang]:
    """Rounds on one fleet. Each goes to stderr at once."""
    found, expected = [], undisturbed_round(server)
    for _ in range(rounds):
        found.append(hung(server, expected))
        print(found[-1], f"load {os.getloadavg()[0]:.1f}", file=sys.stderr, flush=True)
    return found


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--schedules", type=int, help="in this process (default: 1000, quick 20)")
    parser.add_argument("--served", type=int, help="over processes (default: 40, quick 4)")
    parser.add_argument("--clocks", type=int, default=0, help="with clocks that jump (default: 0)")
    parser.add_argument("--real", type=int, help="on real vLLM workers (default: 4, quick 0)")
    parser.add_argument("--hung", type=int, default=0, help="rounds of engines stopped for good (default: 0)")
    parser.add_argument("--tp", type=int, default=1, help="ranks of an engine of --hung (default: 1)")
    asked = parser.parse_args()

    def seeds(count: int | None, usual: int, quick: int) -> range:
        return range(asked.seed, asked.seed + ((quick if asked.quick else usual) if count is None else count))

    found, stopped = [asyncio.run(schedules(seeds(asked.schedules, 1000, 20)))], list[Hang]()
    with tiny_model() as model, ExitStack() as stack:
        if emulated := seeds(asked.served, 40, 4):
            data = [("--data", str(model.parent / f"data-{i}")) for i in range(min(FLEETS, len(emulated)))]
            fleets = [stack.enter_context(fleet(model, *EMULATED, *at, engine_flags=())) for at in data]
            found.append(asyncio.run(served(fleets, emulated, "served")))
            stack.pop_all().close()
        if jumps := seeds(asked.clocks, 0, 0):
            clocks = Clocks(model.parent)
            began = fleet(model, *EMULATED, engine_flags=(), environment=clocks.environment)
            found.append(asyncio.run(served([stack.enter_context(began)], jumps, "clocks", clocks)))
            stack.pop_all().close()
        if real := seeds(asked.real, 4, 0):
            server = stack.enter_context(fleet(model, *VLLM))
            found.append(asyncio.run(served([server], real, "real")))
            stack.pop_all().close()
        if asked.hung:
            workers = ("--workers", "3") if asked.tp == 1 else ("--kind", f"tp={asked.tp},workers=2")
            stopped = hangs(stack.enter_context(fleet(model, *workers, *PATIENT)), asked.hung)
    bars = {"violations": bar(sum(len(one.broken) for one in found), 0)}
    if stopped:
        bars["noticed_s"] = bar(max(one.noticed_s for one in stopped), 15)
        bars["streams lost or changed"] = bar(sum(STREAMS - one.same for one in stopped), 0)
    rows = [*(row for one in found for row in one.rows()), *map(asdict, stopped)]
    return show("fault_rounds", rows, bars, asked)


if __name__ == "__main__":
    raise SystemExit(main())
