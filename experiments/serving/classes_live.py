"""Classes of requests, live: each one's attainment beside its simulation, near the fleet's limit.

    python experiments/serving/classes_live.py [--quick] [--resume FOLDER] [--seed 0]
        [--format table|json]

The requests of the sample trace are dealt to classes at random, by the shares of `planning/classes.py`:

  two    chat (half; 1.6 s and 75 ms, 99 %) and batch (half; 30 s, 200 ms, 95 %)
  four   chat (0.4), code (0.2; twice as loose, 98 %), agents (0.2; 10 s, 100 ms, 95 %), batch (0.2)

`tokenfleet plan` sizes a fleet for minutes of it. `serve --plan` runs that fleet on emulated engines, which
keep the plan's step times on the real clock. Other minutes are sent to it, at the rate at which the simulated
fleet has NEAR times as many requests of a class late as may be (found by halving RATES). A client says its
class as users do: by the header, by the body's field, or by its key. Attainment of each class is counted by
the client's own clock and by the fleet's /metrics. `tokenfleet simulate` then replays the requests as they
were sent, on the same fleet under the same policy. All of it once more for placement by load alone (`jsq`),
which knows no targets.
"""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
import urllib.request
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from controlplane.types import SloClass
from controlplane.workload import Workload
from dataplane.simulated.simulate import WorkerSpec, simulate
from experiments.lib.command import timed_plan, tokenfleet
from experiments.lib.public_data import ROOT
from experiments.lib.results import bar, flags, show
from experiments.planning.classes import SHARES, dealt, slos
from harness.served import Server, Stream, fleet, session, stream, tiny_model
from tokenfleet.planning.plan_file import PlanFile, parse_plan
from tokenfleet.profiles.library import write_profile
from tokenfleet.traces import read_trace

TRACE = ROOT / "examples" / "sample_trace.csv"
MODEL = "llama-3.1-70b"
MODEL_FLAGS = ("--model", MODEL, "--gpu", "a100", "--tp", "4")
PLANNED_MIN, SENT_MIN, QUICK_MIN = (15, 30), (20.0, 21.4), (20.0, 20.5)
SCALE = 0.3  # of the trace's rate, that plans are made for
NEAR = 2.0  # times as many late as may be, of the class that misses most
RATES = (0.5, 5.0)  # times the planned rate, between which that is looked for
WITHIN = 0.02
BY_LOAD = "jsq"
LAST_ID = 1000  # of tokens sent; any vocabulary has them
WAYS = ("header", "field", "key")


def classed(classes: str, seed: int) -> Workload:
    """The sample trace with its requests dealt to classes."""
    rng = np.random.default_rng([seed, len(classes)])
    return dealt(read_trace(TRACE).workload, SHARES[classes], slos(MODEL, classes), rng)


def written(workload: Workload, path: Path) -> Path:
    names = np.array(workload.slo_classes)[workload.slo_class]
    columns = (workload.arrival_s, workload.prompt_tokens, workload.output_tokens, names)
    rows = [f"{t:.4f},{p},{o},{c}" for t, p, o, c in zip(*columns, strict=True)]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens,slo_class", *rows]) + "\n")
    return path


def asked_of(classes: str) -> list[str]:
    return [word for slo in slos(MODEL, classes) for word in ("--slo", slo)]


def planned(classes: str, seed: int) -> dict[str, Any]:
    """The plan's JSON."""
    with tempfile.TemporaryDirectory(prefix="tokenfleet-") as folder:
        trace = written(classed(classes, seed), Path(folder) / "trace.csv")
        words = ["--confidence", "0.8", "--window", "{}m..{}m".format(*PLANNED_MIN)]
        words += ["--trace", str(trace), *MODEL_FLAGS, *asked_of(classes), "--rate-scale", repr(SCALE)]
        return timed_plan(*words)[0]


def near_its_limit(plan: PlanFile, load: Workload) -> float:
    """The times of the planned rate at which a class of the simulated fleet has NEAR times as many late."""
    workers = [WorkerSpec(g.worker_type.profile) for g in plan.groups for _ in range(g.workers)]
    may_miss = np.array([1.0 - one.attainment for one in plan.slo_classes])

    def late(rate: float) -> float:
        outcome = simulate(load.scaled(rate), workers, [c.slo for c in plan.slo_classes], plan.policy)
        return float(((1.0 - outcome.class_attainments) / may_miss).max())

    low, high = RATES
    for _ in range(7):
        rate = (low + high) / 2
        low, high = (rate, high) if late(rate) <= NEAR else (low, rate)
    return round(low, 3)


async def sent(load: Workload, url: str, keys: list[str], seed: int) -> list[Stream]:
    """What the client got of each request, sent at its time under its class."""
    rng = np.random.default_rng(seed)
    prompts = [rng.integers(3, LAST_ID, int(p)).tolist() for p in load.prompt_tokens]
    # A first connection and what is loaded then would count as the first requests' time.
    async with session() as client:
        await stream(
            client, url, {"prompt": [5] * 8, "max_tokens": 2}, {"authorization": f"Bearer {keys[-1]}"}
        )
        begun = time.perf_counter() - float(load.arrival_s[0])

        async def one(i: int) -> Stream:
            await asyncio.sleep(max(0.0, begun + float(load.arrival_s[i]) - time.perf_counter()))
            of = int(load.slo_class[i])
            way, name = WAYS[of % len(WAYS)], load.slo_classes[of]
            headers = {"authorization": f"Bearer {keys[of] if way == 'key' else keys[-1]}"}
            headers |= {"x-slo-class": name} if way == "header" else {}
            body = {"prompt": prompts[i], "max_tokens": int(load.output_tokens[i])}
            return await stream(client, url, body | ({"slo_class": name} if way == "field" else {}), headers)

        return list(await asyncio.gather(*(one(i) for i in range(len(load)))))


def is_met(got: Stream, one: SloClass) -> bool:
    """Whether a client had its tokens within the targets of its class, by its own clock."""
    if got.error or not got.is_done or not got.chunks_s:
        return False
    tpot_s = (got.chunks_s[-1] - got.chunks_s[0]) / max(got.tokens - 1, 1)
    return got.ttft_s <= one.slo.ttft_s and (got.tokens < 2 or tpot_s <= one.slo.tpot_s)


def counted(server: Server, name: str) -> int:
    """The requests of a class within their targets by the fleet's own count, which has what ended alone."""
    with urllib.request.urlopen(f"{server.control}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    wanted = ('met="true"', f'slo_class="{name}"', 'target="both"')
    found = [line for line in lines if line.startswith("tokenfleet_slo_requests_total{")]
    return int(sum(float(line.split()[-1]) for line in found if all(one in line for one in wanted)))


def served(document: dict[str, Any], load: Workload, seed: int, policy: str) -> list[dict[str, Any]]:
    """Each class's attainment on the plan's fleet, live and simulated."""
    plan = parse_plan(document, "plan.json")
    classes, (group,) = plan.slo_classes, plan.groups
    keys = [f"key-of-{one.name}" for one in classes] + ["key-of-no-class"]
    with tempfile.TemporaryDirectory(prefix="tokenfleet-") as name, tiny_model() as model:
        folder = Path(name)
        (folder / "plan.json").write_text(json.dumps(document))
        known = [
            f"- {{name: {one.name}, key: {key}, slo_class: {one.name}}}"
            for one, key in zip(classes, keys[:-1], strict=True)
        ]
        (folder / "keys.yaml").write_text("\n".join([*known, f"- {{name: all, key: {keys[-1]}}}"]) + "\n")
        words = ["--plan", str(folder / "plan.json"), "--fixed", "--engine", "emulated", "--policy", policy]
        words += ["--api-keys", str(folder / "keys.yaml")]
        with fleet(model, *words, engine_flags=()) as server:
            got = asyncio.run(sent(load, server.gateway, keys, seed))
            told = [counted(server, one.name) for one in classes]
        begun_s = np.array([one.begun_s for one in got])
        order = np.argsort(begun_s, kind="stable")
        row = load.take(order)
        as_sent = replace(row, arrival_s=begun_s[order] - begun_s.min())
        write_profile(group.worker_type.profile, folder / "profile.yaml")
        words = ["simulate", "--trace", str(written(as_sent, folder / "sent.csv"))]
        words += ["--workers", str(plan.workers), "--profile", str(folder / "profile.yaml")]
        words += ["--policy", policy, "--format", "json"]
        slo = [
            f"{c.name}:ttft={c.slo.ttft_s!r}s,tpot={c.slo.tpot_s!r}s,attainment={c.attainment}"
            for c in classes
        ]
        said = json.loads(tokenfleet(*words, *(word for one in slo for word in ("--slo", one))))
    simulated = {row["name"]: row["attainment"] for row in said["classes"]}
    rows = []
    for c, one in enumerate(classes):
        own = [g for g, of in zip(got, load.slo_class, strict=True) if of == c]
        rows.append(
            {
                "class": one.name,
                "asked %": 100 * one.attainment,
                "requests": len(own),
                "live %": round(100 * sum(is_met(g, one) for g in own) / len(own), 2),
                "by /metrics %": round(100 * told[c] / len(own), 2),
                "simulated %": round(100 * simulated[one.name], 2),
                "turned away": sum(g.error.startswith("HTTP 429") for g in own),
                "failed": sum(bool(g.error) and not g.error.startswith("HTTP 429") for g in own),
            }
        )
    return rows


def main() -> int:
    parser = flags(__doc__, resumes=True)
    asked = parser.parse_args()
    begin_min, end_min = QUICK_MIN if asked.quick else SENT_MIN
    rows: list[dict[str, Any]] = []
    bars: dict[str, Any] = {}
    for classes in SHARES:
        document = asked.resume.part(f"plan {classes} {asked.seed}", partial(planned, classes, asked.seed))
        plan = parse_plan(document, "plan.json")
        # So many seconds of the planned rate, whatever the rate that they are sent at.
        load = classed(classes, asked.seed).scaled(SCALE).window(begin_min * 60 / SCALE, end_min * 60 / SCALE)
        rate = near_its_limit(plan, load)
        found = {}
        for policy in (plan.policy, BY_LOAD):
            part = f"{classes} {policy} {rate} {end_min} {asked.seed}"
            work = partial(served, document, load.scaled(rate), asked.seed, policy)
            found[policy] = asked.resume.part(part, work)
            about = {"classes": classes, "placed by": policy, "workers": plan.workers, "times the rate": rate}
            rows += [about | row for row in found[policy]]
        gaps = [abs(row["live %"] - row["simulated %"]) for row in found[plan.policy]]
        bars[f"{classes}: live beside simulated, the class furthest off"] = bar(
            round(max(gaps) / 100, 4), WITHIN
        )
        counted_off = [abs(row["live %"] - row["by /metrics %"]) for row in found[plan.policy]]
        bars[f"{classes}: by the client's clock beside /metrics"] = bar(
            round(max(counted_off) / 100, 4), WITHIN
        )
    return show("classes live", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
