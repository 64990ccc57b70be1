"""Autoscaling with a profile that is wrong by 1.3 either way: closed loop, open loop, hindsight optimum.

    python experiments/scaling/closed_loop.py [--quick] [--live] [--days 14,12,10]
        [--only-closed] [--resume FOLDER] [--format table|json]

Simulated. Two hours of ServeGen's m-mid from 06:00 on of several days, as in autoscaling.py (12 requests a
second in the mean, ShareGPT lengths, Llama-2 70B on 2 A100s, 1.6 s / 75 ms, cold starts of 60 s). The scaler
has a profile whose steps are 1 / 1.3, 1, or 1.3 times as long as the engines', and the line that a plan
would have drawn with it. Placement knows the true times. The product's loop (`closed`) sees steps: a refit
takes one decode step of each worker and heartbeat, with noise of 5 %. It is believed after as many steps as
live; from then on one worker's are enough. `attainment` sees the outcomes of requests alone, the open loop
neither.

Live (`--live`). `serve --autoscale` before emulated engines, Poisson arrivals for 20 minutes. The fleet
starts at the size that its wrong profile asks for. The engines' steps are 1.3 or 1 / 1.3 times as long as
the profile says, and targets scale alike. The refit corrects placement and scaler, and attainment corrects
the rest, as in the product. Attainment is counted over the fleet's history.

Hindsight optimum: the fewest workers with the true profile that serve each window of five minutes alone at
the target, without starts or drains. Requests count from 10 minutes after the start on; worker-hours (starts
and drains included) are compared with the optimum's of the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from controlplane.control import State, tick
from controlplane.perfmodel.refit import Refit
from controlplane.placement.policies import Policy
from controlplane.snapshot import Action, Snapshot
from controlplane.types import Slo
from controlplane.workload import Workload
from dataplane.history.files import read_history
from dataplane.live.control.step_times import BELIEVED_STEPS
from experiments.lib.autoscaling import CASE, SLOTS, TARGET, Bench, line_at, ours, remembered, servegen
from experiments.lib.fewest_workers import Lengths, Question, sharegpt
from experiments.lib.other_engines import times
from experiments.lib.public_data import SERVEGEN, SHAREGPT
from experiments.lib.results import bar, flags, show
from harness.served import Server, Stream, fleet, session, stream, tiny_model
from tokenfleet.advise.hindsight import WINDOW_S
from tokenfleet.profiles.library import library_folder

WRONG = (1 / 1.3, 1.0, 1.3)
SETTLED_S = 600.0
NOISE = 0.05  # of a step's time
LIVE_MIN = 20
LIVE_RPS, LIVE_MOST = 12.0, 32  # as simulated, so that one worker is less than a tenth of the fleet


def paid_s(changes: list[tuple[float, int]], from_s: float, end_s: float) -> float:
    """Worker-seconds between two times. `changes`: when, and how many there are from then on."""
    ends = [at_s for at_s, _ in changes[1:]] + [end_s]
    return sum(
        count * max(min(to_s, end_s) - max(at_s, from_s), 0.0)
        for (at_s, count), to_s in zip(changes, ends, strict=True)
    )


def simulated(asked: argparse.Namespace, lengths: Lengths) -> Iterator[dict[str, Any]]:
    for day in [int(day) for day in asked.days.split(",")][: 1 if asked.quick else None]:
        hours = 0.5 if asked.quick else 2.0
        traffic = servegen(asked.data, "m-mid", lengths, 12.0, hours, asked.seed, day)
        bench = Bench(traffic, lengths)
        end_s = float(traffic.workload.arrival_s[-1])
        known = bench.hindsight()
        fewest = asked.resume.part(f"{day} {hours} fewest", lambda: known.fewest()[0])  # noqa: B023
        least_s = paid_s(list(zip(known.starts, fewest, strict=True)), SETTLED_S, end_s)
        for wrong in WRONG:
            steps = times(CASE.profile, wrong)
            line = asked.resume.part(
                f"line {wrong:.3f}",
                lambda: line_at(lengths, (4.0, 8.0, 16.0), 200.0, asked.seed, steps),  # noqa: B023
            )
            for loop in ("closed",) if asked.only_closed else ("open", "attainment", "closed"):
                told = asked.resume.part(
                    f"{day} {hours} {wrong:.3f} {loop}",
                    lambda: one_run(bench, lengths, line, wrong, loop, asked.seed),  # noqa: B023
                )
                factors = " ".join(f"{factor:.2f}" for factor in told["factors"])
                yield row(f"simulated, day {day}", wrong, loop, told | {"least_s": least_s}, factors)


def row(what: str, believed: float, loop: str, told: dict[str, Any], factors: str) -> dict[str, Any]:
    return {
        "what": what,
        "steps believed": f"× {believed:.2f}",
        "loop": loop,
        "attainment": round(told["attainment"], 4),
        "of clairvoyant": round(told["paid_s"] / told["least_s"], 3),
        "late, by 10 min": " ".join(f"{share:.1%}" for share in told["late"]),
        "factors": factors,
    }


def one_run(
    bench: Bench, lengths: Lengths, line: tuple[float, float], wrong: float, loop: str, seed: int
) -> dict[str, Any]:
    """Two hours with a scaler that believes in `wrong` step times."""
    believed = times(CASE.profile, wrong)
    control = ours(line, lengths, True, believed)
    refit, rng = Refit(believed), np.random.default_rng([seed, 21])

    def decide(state: State, seen: Snapshot) -> tuple[State, list[Action]]:
        busy = [load for w in seen.workers if (load := w.counted()).running and loop == "closed"]
        for load in busy if refit.steps < BELIEVED_STEPS else busy[:1]:
            step_s = float(CASE.profile.step.step_s(0, load.running, load.held_tokens))
            refit.take(0, load.running, load.held_tokens, step_s * math.exp(NOISE * rng.normal()))
        step = refit.model if refit.steps >= BELIEVED_STEPS else believed.step
        seen = replace(seen, workers=tuple(replace(w, step=step) for w in seen.workers))
        return tick(control.tick, state, seen if loop != "open" else replace(seen, outcomes=()))

    arrival_s = bench.traffic.workload.arrival_s
    first = math.ceil(line[0] * float((arrival_s < WINDOW_S).sum()) / WINDOW_S + line[1])
    outcome, record = bench.run(first, control, decide, remembered(bench.traffic.past))
    end_s = float(arrival_s[-1])
    changes = [(at_s, there) for at_s, _, there in record.changes]
    notes = [note for _, note in record.notes if note.kind == "correction"]
    return {
        **judged(arrival_s, outcome.met),
        "paid_s": paid_s(changes, SETTLED_S, end_s),
        "factors": [note.facts["compared"]["factor"] for note in notes],
    }


def judged(arrival_s: NDArray[np.float64], met: NDArray[np.bool_]) -> dict[str, Any]:
    """Attainment once settled, and the share of late requests in each ten minutes."""
    part = (arrival_s // SETTLED_S).astype(int)
    late = [float((~met[part == n]).mean()) for n in range(int(part.max()) + 1) if (part == n).any()]
    return {"attainment": float(met[arrival_s >= SETTLED_S].mean()), "late": late}


Changes = list[tuple[float, tuple[str, ...]]]


async def played(server: Server, load: Workload) -> tuple[Changes, list[Stream]]:
    """Send the load. Return each change of the workers (its time, their kinds), and the streams."""
    changes: Changes = []
    loop = asyncio.get_running_loop()
    began_s = loop.time()

    async def watch() -> None:
        while True:
            view = await asyncio.to_thread(server.ask, "GET", "/v1/fleet")
            there = tuple(sorted(worker["kind"] for worker in view["workers"]))
            if not changes or changes[-1][1] != there:
                changes.append((loop.time() - began_s, there))
            await asyncio.sleep(2.0)

    watching = asyncio.create_task(watch())
    async with session() as http:

        async def one(i: int) -> Stream:
            await asyncio.sleep(max(float(load.arrival_s[i]) - (loop.time() - began_s), 0.0))
            prompt = [3 + (i + k) % 200 for k in range(int(load.prompt_tokens[i]))]
            body = {"prompt": prompt, "max_tokens": int(load.output_tokens[i])}
            return await stream(http, server.gateway, body)

        streams = await asyncio.gather(*(one(i) for i in range(len(load))))
    watching.cancel()
    return [(0.0, changes[0][1]), *changes[1:]], streams


def live(asked: argparse.Namespace, lengths: Lengths, slower: float) -> dict[str, Any]:
    """A fleet whose engines take `slower` times what its profile says."""
    truth = times(CASE.profile, slower)
    slo = Slo(CASE.slo.ttft_s * slower, CASE.slo.tpot_s * slower) if slower > 1 else CASE.slo
    load = lengths.poisson(LIVE_RPS, round(LIVE_RPS * 60.0 * LIVE_MIN), asked.seed)
    kept = load.output_tokens < 1500
    load = Workload(load.arrival_s[kept], load.prompt_tokens[kept], load.output_tokens[kept])
    end_s = float(load.arrival_s[-1])
    fewest, begin = (
        Question([load], profile, slo, lengths.table(), Policy.SPREAD, most=SLOTS).fewest(TARGET, LIVE_RPS)
        or SLOTS
        for profile in (truth, CASE.profile)
    )
    with tiny_model() as model:
        data = model.parent / "data"
        server_flags = (
            "--engine", "emulated", "--profile", str(library_folder() / "aladdin" / CASE.file),
            "--workers", str(min(begin, LIVE_MOST)), "--autoscale", f"1..{LIVE_MOST}", "--data", str(data),
            "--slo", f"ttft={slo.ttft_s:.3f}s,tpot={slo.tpot_s * 1000:.1f}ms",
        )  # fmt: skip
        program = ("-m", "experiments.lib.other_engines", str(slower))
        with fleet(model, *server_flags, program=program) as server:
            there, _ = asyncio.run(played(server, load))
            view = server.ask("GET", "/v1/fleet")
        rows = read_history(data / "history", 0.0, math.inf)
    began_s = float(rows["arrival_s"].min())  # type: ignore[arg-type]
    arrival_s = (rows["arrival_s"] - began_s).to_numpy()
    met = (rows["ttft_s"] <= rows["ttft_target_s"]) & (rows["tpot_s"].fill_null(0) <= rows["tpot_target_s"])
    told = judged(arrival_s, met.fill_null(False).to_numpy())
    least_s = fewest * (end_s - SETTLED_S)
    changes = [(at_s, len(kinds)) for at_s, kinds in there]
    return told | {
        "paid_s": paid_s(changes, SETTLED_S, end_s),
        "least_s": least_s,
        "workers": [there for _, there in changes],
        "slowdown": view["step_times"][0]["slowdown"],
        "said": [f"{e['at_s'] - began_s:.0f} s: {e['reason']}" for e in view["scaling"]],
    }


def run(asked: argparse.Namespace) -> int:
    lengths = sharegpt(asked.data)
    table: list[dict[str, Any]] = []
    if asked.live:
        for slower in (1.3, 1 / 1.3):
            told = asked.resume.part(
                f"live {slower:.3f} {LIVE_MIN}",
                lambda: live(asked, lengths, slower),  # noqa: B023
            )
            factors = f"refit {told['slowdown']:.2f}; workers {told['workers']}"
            table.append(row(f"live, {LIVE_MIN} min", 1 / slower, "closed", told, factors))
    else:
        table += simulated(asked, lengths)
    bars = {}
    for one in table:
        if one["loop"] == "closed":
            name = f"{one['what']}, {one['steps believed']}"
            bars[f"{name}: attainment after 10 minutes"] = bar(one["attainment"], TARGET, at_least=True)
            bars[f"{name}: worker-hours over the clairvoyant's"] = bar(one["of clairvoyant"], 1.10)
    return show("closed loop", table, bars, asked)


if __name__ == "__main__":
    parser = flags(__doc__, SHAREGPT, SERVEGEN["m-mid"], resumes=True)
    parser.add_argument("--live", action="store_true", help="a live fleet of emulated engines instead")
    parser.add_argument("--only-closed", action="store_true", help="the product's loop alone")
    parser.add_argument("--days", default="14,12,10", help="of ServeGen's 14")
    sys.exit(run(parser.parse_args()))
