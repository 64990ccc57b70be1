"""Late requests where memory binds: with moves and without, and with errors of predictions fed back or not.

    python experiments/planning/memory_bound.py [--only moves|lengths|fragmentation|live] [--quick]
        [--resume FOLDER] [--format table|json]

Sixteen LLaMA-7B workers on A10s under vLLM 0.1.7, as Llumnix (OSDI '24) measured them: a memory of 13,616
tokens, decode steps that grow by 0.286 ms a sequence, prefill times of Figure 10's recompute curve. Targets
10 s, 100 ms. Power-law lengths (S, M and L: mean 128, 256 and 512 tokens), Poisson arrivals, or Gamma ones
where a CV is named; 4,000 requests, three streams of arrivals.

  moves     the default policy, `spread+migrate`, against `spread`
  lengths   the default policy with predictions from a wrong history: of answers half or twice as long; of one
            length where answers are short or long (120 and 1,700 tokens); of prompts whose answers are short
            where now they are long. Without and with placement.misprediction, and with the right history.
            2,500 requests. Its settings were chosen on streams 11 to 13; these are 21 to 23.
  fragmentation
            the memory that harness/fragmentation.py counts as fragmented (Llumnix' Figure 12), L-L 4/s, 2,500
            requests of one stream
  live      four such workers, emulated, L-L 1.3/s, 200 requests a stream, with moves and without, served and
            simulated. The client names no length; placement predicts it from 5,000 answers of another stream.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any
from urllib.request import urlopen

import numpy as np

from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.profile import Profile, Residuals, Source
from controlplane.perfmodel.step import PrefillModel, StepModel
from controlplane.placement.lengths import LengthTable
from controlplane.types import EngineMode, Slo
from controlplane.workload import Workload
from dataplane.history.files import HistoryLimits, HistoryWriter
from dataplane.simulated.control_loop import SimulatedPlane, drive
from dataplane.simulated.simulate import ControlSettings, WorkerSpec, prepare, simulate
from experiments.lib.results import bar, flags, show
from harness.fragmentation import MIGRATE, simulated
from harness.served import Server, fleet, tiny_model
from tokenfleet.compare.replay import replay, served_model
from tokenfleet.profiles.library import write_profile
from tokenfleet.traces.distributions import LONG, MEDIUM, PUBLISHED_SEED, SHORT, LengthMix, gamma, poisson

WORKERS, BLOCK, KV_BYTES = 16, 16, 524_288
PER_TOKEN_S = KV_BYTES / 600e9  # the A10's memory
PROFILE = Profile(
    "llama-7b",
    "a10",
    1,
    step=StepModel(0.0426 - 8192 * PER_TOKEN_S, 2.03e-4, 0.286e-3, PER_TOKEN_S),
    prefill=PrefillModel(0.0046, 2.03e-4, 5.1e-9),
    kv=KvModel(851 * BLOCK, BLOCK, KV_BYTES),
    engine=EngineLimits(mode=EngineMode.PREFILL_FIRST, max_batched_tokens=12_800, max_seqs=256),
    residuals=Residuals(0.0, 0.0, 0.0, 0),
    source=Source("published", "Llumnix (OSDI '24), Figure 10, and its artifact", "none", "2024-07-10"),
)
SIDES, DRAWN = {"S": SHORT, "M": MEDIUM, "L": LONG}, 10_000
TARGETS = Slo(10.0, 0.1)
STREAMS, REQUESTS = 3, 4000
FIRST, POORLY_PREDICTED = 21, 2500
POLICIES = ("spread", "spread+migrate")
LIVE_WORKERS, LIVE_RPS, LIVE_STREAMS = 4, 1.3, 4
WHYS = {"is forecast at": "corrected", "waits at the gateway": "made room"}  # by what a move's reason says


@dataclass(frozen=True)
class Setting:
    """A load: lengths of prompts and outputs, requests a second, and how bursty."""

    lengths: str
    rate_rps: float
    cv: float = 1.0

    def __str__(self) -> str:
        return f"{self.lengths} {self.rate_rps:g}/s" + (f" CV {self.cv:g}" if self.cv != 1.0 else "")


SETTINGS = (
    *(Setting("L-L", rate) for rate in (3.6, 3.8, 4.0)),
    Setting("M-M", 12.0),
    Setting("S-L", 5.5),
    Setting("L-L", 3.4, 2.0),
)


def workload(name: str, rate_rps: float, seed: int, cv: float, requests: int) -> Workload:
    """A generated trace such as `S-L`: prompts short, outputs long. The seed draws the gaps alone."""
    prompt, output = name.split("-")
    stream = np.random.RandomState(PUBLISHED_SEED)
    prompts, outputs = LengthMix(SIDES[prompt], SIDES[output]).draw(DRAWN, stream)
    stream = np.random.RandomState([PUBLISHED_SEED, seed])
    arrivals = poisson(rate_rps, DRAWN, stream) if cv == 1.0 else gamma(rate_rps, cv, DRAWN, stream)
    return Workload(arrivals, prompts, outputs).take(slice(0, requests))


def with_moves(asked: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows by setting, all streams together, and the bars; streams are compared one by one too."""
    rows, late, more = [], dict.fromkeys(POLICIES, 0), 0
    streams, requests = (1, 1500) if asked.quick else (STREAMS, REQUESTS)
    for setting in SETTINGS:
        row: dict[str, Any] = {"setting": str(setting)}
        by_stream: dict[str, list[int]] = {}
        for policy in POLICIES:
            outcomes = [
                simulate(
                    workload(setting.lengths, setting.rate_rps, asked.seed + 1 + i, setting.cv, requests),
                    [WorkerSpec(PROFILE)] * WORKERS,
                    TARGETS,
                    policy,
                )
                for i in range(streams)
            ]
            by_stream[policy] = [int((~o.met).sum()) for o in outcomes]
            late[policy] += sum(by_stream[policy])
            row |= {
                f"late, {policy}": sum(by_stream[policy]),
                f"preempted, {policy}": sum(int((o.preemptions > 0).sum()) for o in outcomes),
                f"moved, {policy}": sum(int((o.migrations > 0).sum()) for o in outcomes),
            }
        more += sum(b > a for a, b in zip(*by_stream.values(), strict=True))
        rows.append(row)
    bars = {
        "late requests, share of those without moves": bar(
            late[POLICIES[1]] / max(late[POLICIES[0]], 1), 0.5
        ),
        "streams with more late requests than without moves": bar(more, 0),
    }
    return rows, bars


WRONG = {"halved": (4.0, 4.4), "doubled": (4.0, 4.4), "bimodal": (5.6, 6.0), "reversed": (1.8, 2.0)}


def mispredicted(how: str, rate_rps: float, seed: int, requests: int) -> tuple[Workload, LengthTable]:
    """A load of L-L, and the length table of the wrong history."""
    load, rng = workload("L-L", rate_rps, seed, 1.0, requests), np.random.default_rng([seed, 7])
    prompts, outputs = load.prompt_tokens, load.output_tokens
    seen = np.maximum(outputs // 2, 1) if how == "halved" else outputs * 2
    if how == "bimodal":
        outputs = np.where(rng.random(requests) < 0.25, 1700, 120)
        seen = np.full(requests, int(outputs.mean()))
    if how == "reversed":
        rank = np.argsort(np.argsort(np.log(prompts) + rng.normal(0, 1.0, requests)))
        outputs = np.sort(outputs)
        outputs, seen = outputs[rank], outputs[requests - 1 - rank]
    load = Workload(load.arrival_s, prompts, outputs.astype(np.int64))
    return load, LengthTable.from_history(prompts, seen)


def late_requests(load: Workload, lengths: LengthTable, is_fed: bool) -> int:
    """Late requests of the default policy with these predictions."""
    run = prepare(load, [WorkerSpec(PROFILE)] * WORKERS, TARGETS, POLICIES[1], predictor=lengths)
    if not is_fed:
        run.ledger.requests["turn"] = -1  # so that none is counted
    drive(SimulatedPlane(run, ControlSettings()))
    return int((~run.outcome().met).sum())


def with_errors(asked: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows by load, all streams together, and the bars."""
    rows, without, fed = [], 0, 0
    streams, requests = (1, 1000) if asked.quick else (STREAMS, POORLY_PREDICTED)
    for how, rates in WRONG.items():
        for rate in rates:
            late = np.zeros(3, np.int64)
            for i in range(streams):
                load, lengths = mispredicted(how, rate, asked.seed + FIRST + i, requests)
                right = LengthTable.from_history(load.prompt_tokens, load.output_tokens)
                tried = ((lengths, False), (lengths, True), (right, False))
                late += [late_requests(load, table, is_fed) for table, is_fed in tried]
            names = ("late without", "late with", "late, right history")
            rows.append({"history": how, "rps": rate} | dict(zip(names, late.tolist(), strict=True)))
            print(rows[-1], file=sys.stderr, flush=True)
            without, fed = without + int(late[0]), fed + int(late[1])
    worst = max((row["late with"] - row["late without"] for row in rows), default=0)
    return rows, {
        "late with errors fed back, share of those without": bar(fed / max(without, 1), 0.8),
        "most more of one load": bar(worst, 5 * streams),
    }


def with_fragmentation(asked: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows by policy, and the bars: the mean with moves over that without."""
    rows, bars = [], {}
    for base in ("freeness", "spread"):
        means = []
        for policy in (base, base + MIGRATE):
            load = workload("L-L", 4.0, asked.seed + 1, 1.0, 1000 if asked.quick else 2500)
            run = simulated(PROFILE, WORKERS, load, policy)
            seen = run.memory
            means.append(seen.mean(seen.fragmented))
            row = {"policy": policy, "fragmented": means[-1], "free": seen.mean(seen.free)}
            rows.append(row | {"p99": float(np.percentile(seen.fragmented, 99)), "moves": run.moves})
        bars[f"{base}: fragmented without moves"] = bar(means[0], 0.001, at_least=True)
        bars[f"{base}: fragmented with moves, share of without"] = bar(means[1] / max(means[0], 1e-9), 0.5)
    return rows, bars


def told_moves(server: Server) -> list[str]:
    """What the fleet says of each move: why, and how it ended."""
    said = []
    with suppress(TimeoutError), urlopen(f"{server.control}/v1/events", timeout=3.0) as lines:
        for line in lines:
            event = json.loads(line[6:]) if line.startswith(b"data: ") else {}
            if event.get("kind") == "migrate":
                said.append(event["reason"])
    return said


def served(policy: str, load: Workload, before: Workload) -> dict[str, Any]:
    """What a fleet of LIVE_WORKERS does with a load, that remembers the lengths of `before`."""
    with tiny_model() as model:
        write_profile(PROFILE, model.parent / "profile.yaml")
        history = HistoryWriter(model.parent / "data" / "history", HistoryLimits())
        for prompt, output in zip(before.prompt_tokens.tolist(), before.output_tokens.tolist(), strict=True):
            row = {"prompt_tokens": prompt, "output_tokens": output, "outcome": "finished"}
            history.add({"arrival_s": 1.0, "model": str(model)} | row)  # as serve names it
        history.close()
        words = ["--engine", "emulated", "--workers", str(LIVE_WORKERS), "--queue-wait", "10m"]
        words += ["--profile", str(model.parent / "profile.yaml"), "--policy", policy]
        words += ["--slo", f"ttft={TARGETS.ttft_s:g}s,tpot={1000 * TARGETS.tpot_s:g}ms"]
        with fleet(model, *words, engine_flags=()) as server:
            to = replace(asyncio.run(served_model(server.gateway, None)), is_emulated=True)
            got = asyncio.run(replay(load, to, np.random.default_rng(7)))
            moves = told_moves(server)
            view = server.ask("GET", "/v1/fleet")
    tpot_s = (got.last_token_s - got.first_token_s) / np.maximum(got.output_tokens - 1, 1)
    met = (got.first_token_s - got.sent_s <= TARGETS.ttft_s) & (tpot_s <= TARGETS.tpot_s)
    done = [said for said in moves if said.endswith("; done")]
    whys = Counter(next((name for why, name in WHYS.items() if why in said), said) for said in done)
    return {
        "late": int((~met).sum()),
        "failed": int(((got.output_tokens != load.output_tokens) | ~got.finished).sum()),
        "preemptions": sum(worker["telemetry"]["preemptions"] for worker in view["workers"]),
        "moves": dict(whys),
        "not done": len(moves) - len(done),
        "steps": max(one["slowdown"] or 1.0 for one in view["step_times"]),
    }


def live(asked: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows by stream and policy, served and simulated, and the bars."""
    rows, streams = [], 1 if asked.quick else LIVE_STREAMS
    before = workload("L-L", 1.0, 99, 1.0, DRAWN).take(slice(DRAWN // 2, None))
    lengths = LengthTable.from_history(before.prompt_tokens, before.output_tokens)
    for seed in range(asked.seed + 1, asked.seed + 1 + streams):
        load = workload("L-L", LIVE_RPS, seed, 1.0, 40 if asked.quick else 200)
        off = np.abs(lengths.predict(load.prompt_tokens) - load.output_tokens).sum()
        for policy in POLICIES:
            made = asked.resume.part(f"{policy} {seed} {len(load)}", partial(served, policy, load, before))
            sim = simulate(load, [WorkerSpec(PROFILE)] * LIVE_WORKERS, TARGETS, policy, predictor=lengths)
            said = {"late": int((~sim.met).sum()), "preemptions": int(sim.preemptions.sum())}
            said["moves"] = int(sim.migrations.sum())
            told = {f"{name}, simulated": count for name, count in said.items()}
            row = {"stream": seed, "policy": policy, "lengths off": off / load.output_tokens.sum()}
            rows.append(row | made | told)
    with_moves = [row for row in rows if row["policy"] == POLICIES[1]]
    late = [sum(row["late"] for row in rows if row["policy"] == policy) for policy in POLICIES]
    return rows, {
        "late with moves, share of those without": bar(late[1] / max(late[0], 1), 1.0),
        "moves that correct, fewest in a stream": bar(
            min(row["moves"].get("corrected", 0) for row in with_moves), 1, at_least=True
        ),
        "failed, or of another length": bar(sum(row["failed"] for row in rows), 0),
    }


PARTS = {"moves": with_moves, "lengths": with_errors, "fragmentation": with_fragmentation, "live": live}


def main() -> int:
    parser = flags(__doc__, resumes=True)
    parser.add_argument("--only", choices=PARTS, default="moves")
    asked = parser.parse_args()
    return show(f"memory_bound, {asked.only}", *PARTS[asked.only](asked), asked)


if __name__ == "__main__":
    sys.exit(main())
