"""A week of ten million requests, planned; and whether samples find the fleet that full replays find.

    python experiments/planning/weeks.py [--quick] [--requests 10000000] [--part week|same|history]
        [--resume FOLDER]

*week*: seven days at the rates of ServeGen's m-mid (its first week; Poisson within ten minutes), scaled to so
many requests. Lengths are pairs of the Azure conversation hour and of ShareGPT, more of the first by day
(a share of 0.5 + 0.3 sin, a day round). The trace is written in seven files, one a day (CSV), and planned
by `tokenfleet plan` for Llama-3.1-8B on A100 and H100, 99 % within 1.6 s and 50 ms at confidence 0.95: wall
and processor time, peak memory, the sample's bound and what the full replay found.

*same*: twenty stretches of three hours and 200,000 requests (ten of m-mid's second week, ten of m-small, six
hours apart; windows of a minute), Llama-2-70B on four H100s, 99 % within 1.6 s and 75 ms, planned once by
replays of all requests and once by samples of 40,000. `same` counts fleets that are equal; `held` those whose
full replay is not below the sample's bound.

*history*: as many requests that a fleet has served in thirty days, in the files that it keeps of them, made a
trace as `--since 30d` does: wall time and peak memory of that.
"""

from __future__ import annotations

import math
import resource
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import polars as pl
from numpy.typing import NDArray

from controlplane.types import Slo
from controlplane.worker_type import WorkerType
from controlplane.workload import Workload
from dataplane.history.files import SCHEMA, HistoryLimits
from experiments.lib.command import timed_plan
from experiments.lib.held_out_windows import sharegpt
from experiments.lib.public_data import AZURE_HOUR, SERVEGEN, SHAREGPT, azure_hour
from experiments.lib.results import bar, flags, show
from tokenfleet.planning import planner
from tokenfleet.planning.fleet import of_one_kind
from tokenfleet.planning.inputs import described
from tokenfleet.planning.planner import make_plan
from tokenfleet.planning.request import PlanRequest
from tokenfleet.planning.search import Search
from tokenfleet.planning.threads import open_threads
from tokenfleet.planning.traffic.sample import Sampler
from tokenfleet.profiles.library import find_profiles

STANDS_S, DAY, STRETCH, APART = 600.0, 144, 18, 36  # the latter three in rates
MOST_S, MOST_GB, SAME = 600.0, 2.0, 0.95
BEGINS = "2025-06-02"  # a Monday
CASES, OF_CASE, OF_SAMPLE = 20, 200_000, 40_000
SLO_8B, SLO_70B = "ttft=1.6s,tpot=50ms", Slo(1.6, 0.075)


def rates(data: Path, name: str) -> NDArray[np.float64]:
    """A series of ServeGen, its silent windows as the least that there was."""
    found = pl.read_csv(data / SERVEGEN[name])["total_rate_rps"].to_numpy()
    return np.asarray(np.where(found > 0, found, found[found > 0].min()), float)


def made(data: Path, series: NDArray[np.float64], requests: int, seed: int) -> Workload:
    """So many requests at these rates, ten minutes each."""
    rng = np.random.default_rng(seed)
    counts = rng.poisson(series / series.sum() * requests)
    begin_s = np.repeat(np.arange(len(series)) * STANDS_S, counts)
    arrival_s = np.sort(begin_s + rng.random(len(begin_s)) * STANDS_S)
    hour, short = azure_hour(data), sharegpt(data)
    long = np.column_stack([hour.prompt_tokens, hour.output_tokens])
    is_long = rng.random(len(arrival_s)) < 0.5 + 0.3 * np.sin(2 * math.pi * arrival_s / (DAY * STANDS_S))
    tokens = np.where(
        is_long[:, None],
        long[rng.integers(len(long), size=len(arrival_s))].astype(np.int32),
        short[rng.integers(len(short), size=len(arrival_s))].astype(np.int32),
    )
    return Workload(arrival_s, tokens[:, 0].copy(), tokens[:, 1].copy())


def week(data: Path, requests: int, seed: int) -> dict[str, Any]:
    """One plan of a whole week, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        workload = made(data, rates(data, "m-mid")[: 7 * DAY], requests, seed)
        files = []
        for day in range(7):
            part = workload.window(day * DAY * STANDS_S, (day + 1) * DAY * STANDS_S)
            start = np.datetime64(BEGINS, "us") + np.timedelta64(day, "D")
            frame = pl.DataFrame(
                {
                    "TIMESTAMP": start + (part.arrival_s * 1e6).astype("timedelta64[us]"),
                    "ContextTokens": part.prompt_tokens,
                    "GeneratedTokens": part.output_tokens,
                }
            )
            files.append(Path(folder) / f"day{day}.csv")
            frame.write_csv(files[-1], datetime_format="%Y-%m-%d %H:%M:%S%.6f")
        del workload, part, frame
        words = [word for file in files for word in ("--trace", str(file))]
        words += ["--model", "llama-3.1-8b", "--slo", SLO_8B, "--drop-too-long"]
        plan, row = timed_plan(*words, "--gpu", "a100", "--gpu", "h100", "--tp", "1")
    sampling = plan.get("sampling") or {}
    return row | {
        "sampled": sampling.get("requests"),
        "sample says": sampling.get("attainment"),
        "at least": sampling.get("low"),
        "full replay": sampling.get("full_replay"),
        "added": sampling.get("added_workers"),
    }


def history(requests: int, seed: int) -> dict[str, Any]:
    """A month of history made a trace, in a process of its own."""
    rng, days = np.random.default_rng(seed), 30
    with tempfile.TemporaryDirectory() as folder:
        (kept := Path(folder) / "history").mkdir()
        arrival_s = np.sort(time.time() - rng.random(requests) * days * 86_400)
        for number, at in enumerate(
            np.array_split(arrival_s, math.ceil(requests / HistoryLimits().segment_rows))
        ):
            rows = {"arrival_s": at, "prompt_tokens": rng.integers(1, 4000, len(at))}
            rows |= {"output_tokens": rng.integers(1, 800, len(at)), "ttft_s": rng.random(len(at))}
            rows["tenant"] = rng.choice([f"team-{n}" for n in range(20)], len(at))
            told = pl.DataFrame(rows).with_columns(
                model=pl.lit("llama"), outcome=pl.lit("finished"), priority=pl.lit("normal")
            )
            missing = [
                pl.lit(None, of).alias(name) for name, of in SCHEMA.items() if name not in told.columns
            ]
            told.with_columns(missing).select(*SCHEMA).write_parquet(kept / f"requests-{number:06}-1.parquet")
        words = f"from pathlib import Path; from tokenfleet.service.forks import fork; fork(Path({folder!r}),"
        began = time.perf_counter()
        subprocess.run(
            [sys.executable, "-c", f"{words} '{days}d', {time.time()}, Path({folder!r}))"], check=True
        )
        wall_s = time.perf_counter() - began
    peak_gb = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1e6
    return {
        "requests": requests,
        "history": f"{days}d",
        "wall_s": round(wall_s, 1),
        "peak_gb": round(peak_gb, 3),
    }


def case(data: Path, number: int, requests: int, seed: int) -> dict[str, Any]:
    """One stretch, planned by full replays and by samples."""
    name, first = ("m-mid", 7 * DAY) if number % 2 else ("m-small", 0)
    start = first + number // 2 * APART
    workload = made(data, rates(data, name)[start : start + STRETCH], requests, seed + number)
    profile = find_profiles("llama-2-70b", ["h100-80gb"], [4])[0]
    worker_type = WorkerType.of(profile, 8.0, "made")
    request = PlanRequest(SLO_70B, attainment=0.99, confidence=0.95, seed=seed + number, policy="spread")
    long = workload.take(workload.prompt_tokens + workload.output_tokens <= profile.context_limit_tokens)
    row: dict[str, Any] = {"case": f"{name} {start}"}
    with open_threads(2) as threads:
        for how, most in (("full", len(long) + 1), ("sample", len(long) - 1)):
            began = time.perf_counter()
            with patch.object(planner, "LONG", most), patch.object(planner, "SAMPLED", OF_SAMPLE):
                plan = make_plan(
                    long, [worker_type], request, described("made", long, ()), threads, explained=False
                )
            row[how] = plan.best.fleet.workers if plan.best else 0
            row[f"{how} s"] = round(time.perf_counter() - began, 1)
    fleet = of_one_kind(worker_type, row["sample"])
    whole = Search.of(request, long, (), threads)
    taken = Sampler(long, 1 - request.attainment, SLO_70B.tpot_s, request.seed, OF_SAMPLE)
    seen = replace(whole, traffic=replace(whole.traffic, sampler=taken)).replay(fleet)
    row["sample says"] = seen.attainment
    row["at least"] = seen.attainment - taken.as_it_is.reach(seen.met, request.confidence)
    row["full replay"] = whole.replay(fleet).attainment
    return row


def main() -> int:
    parser = flags(__doc__, AZURE_HOUR, SHAREGPT, *SERVEGEN.values(), resumes=True)
    parser.add_argument("--part", choices=("week", "same", "history"), help="only this part")
    asked = parser.parse_args()
    requests = 600_000 if asked.quick else 10_000_000
    bars: dict[str, Any] = {}
    rows = []
    if asked.part in (None, "history"):
        rows.append(history(requests, asked.seed))
        bars["history's peak_gb"] = bar(rows[0]["peak_gb"], MOST_GB)
    if asked.part in (None, "week"):
        rows.append(asked.resume.part(f"week {requests}", lambda: week(asked.data, requests, asked.seed)))
        bars["wall_s"] = bar(rows[-1]["wall_s"], MOST_S)
        bars["peak_gb"] = bar(rows[-1]["peak_gb"], MOST_GB)
        bars["full replay"] = bar(rows[-1]["full replay"] or 0.0, 0.99, at_least=True)
    if asked.part in (None, "same"):
        size, count = (60_000, 2) if asked.quick else (OF_CASE, CASES)
        cases = [
            asked.resume.part(f"case {i}", lambda i=i: case(asked.data, i, size, asked.seed))
            for i in range(count)
        ]
        rows += cases
        bars["same fleet"] = bar(
            float(np.mean([c["full"] == c["sample"] for c in cases])), SAME, at_least=True
        )
        held = [c["full replay"] >= c["at least"] for c in cases]
        bars["full replay above the sample's bound"] = bar(float(np.mean(held)), SAME, at_least=True)
    return show("a week of requests", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
