"""How many requests a second the simulator gets through on one core, and how that changes with the fleet.

    python benchmarks/simulator.py [--quick] [--format table|json]

Aladdin's Llama-2 13B workers on A100s, ShareGPT lengths, Poisson arrivals in proportion to the fleet: 100 a
second for 120 workers. Requests a second by thread time (what one core does) and by wall time (what one
waits, whatever else the machine does). The reference is tests/builders/reference_engine.py: one worker, one
step at a time, plain Python, no placement.

`scale`: how that and one placement by `spread` grow with the fleet, at 40 requests a worker. A placement is
measured on a fleet some time into its load, arrivals at their distances, nothing else happening meanwhile: by
the kept order of workers, and in turns with it by tests/builders/full_scan.py, which looks at every worker.
Of each the exponent over the workers, fitted in logarithms.

With prefix caches: Mooncake's synthetic trace, whose blocks of 512 tokens say what prompts share, at 16 times
its rate on 32 Llama-3.1-8B workers (H100), placed by load; the same without caching; and with every block cut
into the engine's 32 of 16 tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from time import perf_counter, thread_time
from typing import Any

import numpy as np

from controlplane.compiled import compiled
from controlplane.perfmodel.profile import Profile
from controlplane.placement.assign import assign
from controlplane.placement.constraints import SettingsRow
from controlplane.placement.ledger import ANY_PHASE, Floats, Ledger, copied
from controlplane.placement.order import begin_keeping
from controlplane.placement.policies import SPREAD, Policy
from controlplane.prefixes import Prefixes
from controlplane.types import Slo
from controlplane.workload import Workload
from dataplane.simulated.cluster import advance
from dataplane.simulated.simulate import Outcome, RunState, WorkerSpec, prepare, simulate
from experiments.lib.fewest_workers import CASES, Lengths, sharegpt
from experiments.lib.public_data import ROOT, SHAREGPT
from experiments.lib.results import bar, flags, show
from tokenfleet.profiles.library import library_folder, read_profile
from tokenfleet.traces import read_trace

sys.path.insert(0, str(ROOT / "tests" / "builders"))

from full_scan import scan
from reference_engine import simulate_worker

MOONCAKE = "mooncake/synthetic_trace.jsonl"
RPS_PER_WORKER = 100 / 120
BAR_RPS = 20_000
FLEETS = (30, 120, 300, 1000)
SCALE = (60, 250, 1000, 4000)
OF_ROOT = 0.5  # the exponent that a placement's cost must stay below
WARM_S, STATES, SPAN_S, SPARE_S = 40.0, 40, 0.05, 6.0
POLICIES = (Policy.SPREAD, Policy.SLACK_FIT, Policy.BEST_FIT, Policy.JSQ)


def timed(work: Callable[[], object]) -> tuple[float, float]:
    """(thread seconds, wall seconds)."""
    wall_s, thread_s = perf_counter(), thread_time()
    work()
    return thread_time() - thread_s, perf_counter() - wall_s


def speed(requests: int, thread_s: float, wall_s: float) -> dict[str, int]:
    a_second = {"requests/s": round(requests / thread_s), "wall requests/s": round(requests / wall_s)}
    return {"requests": requests, **a_second}


def fleet_row(workers: int, policy: Policy, requests: int, lengths: Lengths, seed: int) -> dict[str, Any]:
    profile, slo = CASES[0].profile, CASES[0].slo
    workload, table = lengths.poisson(RPS_PER_WORKER * workers, requests, seed), lengths.table()
    attainment = []

    def work() -> None:
        seen = simulate(workload, [WorkerSpec(profile)] * workers, slo, policy, predictor=table, seed=seed)
        attainment.append(seen.attainment)

    thread_s, wall_s = timed(work)
    return {
        "what": policy.value,
        "workers": workers,
        "rps": round(RPS_PER_WORKER * workers, 1),
        **speed(requests, thread_s, wall_s),
        "attainment": attainment[0],
    }


@compiled
def place_many(
    led: Ledger,
    settings: SettingsRow,
    first: int,
    count: int,
    now_s: float,
    apart_s: float,
    draw: Floats,
    look_at_all: bool,
) -> int:
    """Choose workers for requests one after the other, none of which is put there; the sum of the choices."""
    chosen = 0
    for i in range(count):
        at_s = now_s + i * apart_s
        led.requests[first + i].arrival_s = at_s
        if look_at_all:
            w, _ = scan(led, SPREAD, settings, first + i, at_s, False, ANY_PHASE)
        else:
            w = assign(led, SPREAD, settings, first + i, at_s, False, ANY_PHASE, draw)
        chosen += w
    return chosen


def placement_us(run: RunState, apart_s: float) -> tuple[float, float]:
    """Thread time of one placement, in the kept order and by a look at all, without the call itself."""
    count = max(round(SPAN_S / apart_s), 1)
    settings, draw, spent = run.rules.settings, np.zeros(2), [0.0, 0.0]
    for state in range(-1, STATES):  # the first compiles
        now_s = float(run.cluster.clock["now_s"][0]) + 0.2
        advance(run.ledger, run.engines, run.cluster, run.rules, now_s)
        first = int(np.searchsorted(run.workload.arrival_s, now_s, "right"))
        assert first + count <= len(run.workload), "no request is left to place"
        chosen = []
        for look_at_all in (False, True):
            led = copied(run.ledger)
            begin_keeping(led.orders)
            place_many(led, settings, first, 1, now_s, 0.0, draw, look_at_all)  # makes the order
            began_s = thread_time()
            place_many(led, settings, first, 0, now_s, apart_s, draw, look_at_all)
            call_s = thread_time() - began_s
            chosen.append(place_many(led, settings, first, count, now_s, apart_s, draw, look_at_all))
            spent[look_at_all] += (thread_time() - began_s - 2.0 * call_s) * (state >= 0)
        assert chosen[0] == chosen[1], "the order chose other workers than a look at all"
    return spent[0] / STATES / count * 1e6, spent[1] / STATES / count * 1e6


def scale_row(workers: int, lengths: Lengths, seed: int, quick: bool) -> dict[str, Any]:
    """Requests a second at 40 requests a worker, and the cost of a placement there."""
    rate_rps = RPS_PER_WORKER * workers
    requests = max((5 if quick else 40) * workers, 2000 if quick else 20_000)
    whole = fleet_row(workers, Policy.SPREAD, requests, lengths, seed)
    load = lengths.poisson(rate_rps, round(rate_rps * (WARM_S + 0.2 * STATES + SPARE_S)), seed)
    profile, table = CASES[0].profile, lengths.table()
    run = prepare(load, [WorkerSpec(profile)] * workers, CASES[0].slo, Policy.SPREAD, predictor=table)
    advance(run.ledger, run.engines, run.cluster, run.rules, WARM_S)
    in_order_us, by_scan_us = placement_us(run, 1.0 / rate_rps)
    return {
        **whole,
        "what": "scale",
        "request µs": round(1e6 / whole["requests/s"], 2),
        "placement µs": round(in_order_us, 2),
        "by a look at all µs": round(by_scan_us, 2),
    }


def exponent(rows: list[dict[str, Any]], column: str) -> float:
    """That of a column over the workers."""
    workers, cost = (np.log([row[name] for row in rows]) for name in ("workers", column))
    return round(float(np.polyfit(workers, cost, 1)[0]), 2)


def cut(prefixes: Prefixes, parts: int) -> Prefixes:
    """Every block as so many smaller ones."""
    ids = np.repeat(prefixes.ids * parts, parts) + np.tile(np.arange(parts), len(prefixes.ids))
    return Prefixes(prefixes.block_tokens // parts, prefixes.offsets * parts, ids)


def cached_rows(data: Path) -> list[dict[str, Any]]:
    """Mooncake's trace with prefix caches of its own blocks, of the engine's, and without."""
    profile = read_profile(library_folder() / "h100-sxm" / "llama-3.1-8b_tp1.yaml")
    coarse = read_trace(data / MOONCAKE).workload.scaled(16.0)
    assert coarse.prefixes is not None
    parts = coarse.prefixes.block_tokens // profile.kv.block_tokens
    fine = replace(coarse, prefixes=cut(coarse.prefixes, parts))
    return [
        cached_row("mooncake, nothing cached", replace(coarse, prefixes=None), profile),
        cached_row("mooncake, blocks of 512", coarse, profile),
        cached_row("mooncake, blocks of 16", fine, profile),
    ]


def cached_row(what: str, workload: Workload, profile: Profile) -> dict[str, Any]:
    seen: list[Outcome] = []

    def work() -> None:
        seen.append(simulate(workload, [WorkerSpec(profile)] * 32, Slo(2.0, 0.04), Policy.JSQ))

    thread_s, wall_s = min(timed(work) for _ in range(5))
    return {
        "what": what,
        "workers": 32,
        "rps": round(workload.rate_rps, 1),
        **speed(len(workload), thread_s, wall_s),
        "attainment": seen[0].attainment,
        "prefix hits": seen[0].prefix_hit_rate,
    }


def reference_row(requests: int, lengths: Lengths, seed: int) -> dict[str, Any]:
    one = lengths.poisson(RPS_PER_WORKER, requests, seed)
    thread_s, wall_s = timed(
        lambda: simulate_worker(CASES[0].profile, one.arrival_s, one.prompt_tokens, one.output_tokens)
    )
    return {
        "what": "reference",
        "workers": 1,
        "rps": round(RPS_PER_WORKER, 2),
        **speed(requests, thread_s, wall_s),
    }


def main() -> int:
    asked = flags(__doc__, SHAREGPT, MOONCAKE).parse_args()
    lengths = sharegpt(asked.data)
    fleet_row(2, Policy.SPREAD, 10, lengths, asked.seed)  # compiles, or loads what was compiled
    rows = []
    for workers in FLEETS:
        for policy in POLICIES:
            requests = min(2000 if asked.quick else 20_000, 200 * workers)
            rows.append(fleet_row(workers, policy, requests, lengths, asked.seed))
    scale = [scale_row(workers, lengths, asked.seed, asked.quick) for workers in SCALE]
    costs = ("request µs", "placement µs", "by a look at all µs")
    exponents = {column: exponent(scale, column) for column in costs}
    rows += [*scale, {"what": "exponent over workers", **exponents}]
    rows.append(reference_row(20 if asked.quick else 100, lengths, asked.seed))
    fast = next(r for r in rows if r["workers"] == 120 and r["what"] == Policy.SPREAD)["requests/s"]
    rows += cached_rows(asked.data)
    cached = next(r for r in rows if r["what"] == "mooncake, blocks of 512")["requests/s"]
    for row in (r for r in rows if "requests/s" in r):
        row["spread at 120 is faster by"] = round(fast / row["requests/s"], 2)
    bars = {
        "requests/s on one core, spread, 120 workers, 100 rps": bar(fast, BAR_RPS, at_least=True),
        "exponent of a placement's cost over workers": bar(exponents["placement µs"], OF_ROOT),
        "requests/s on one core, prefix caches of blocks of 512": bar(cached, BAR_RPS, at_least=True),
    }
    return show("simulator", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
