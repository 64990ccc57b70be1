"""What rate do 16 workers carry where prefixes are cached, by placement policy? Llama-3.1 8B and 70B on H100.

    python experiments/planning/prefix_policies.py [--quick] [--data-set mooncake|weka] [--model 8b|70b]
        [--resume FOLDER] [--format table|json]

Mooncake's synthetic trace: prompts of at most 32,768 tokens, in the order of the trace, Poisson arrivals; the
rate is given in multiples of the trace's own, and 99 % must meet both targets. Weka's agent sessions: each
request of at most 65,536 tokens comes as long after its session's first as it was recorded, pauses cut to a
minute; sessions begin as a Poisson process, each six times with text of its own; the rate is in sessions a
second, and 90 % must meet both targets (the first requests of sessions are cold and long).

`no cache` is `spread` on workers that cache nothing. `ideal`: every worker hits whatever any of them has ever
computed: one cache, without bound, that all of them use. `pooled`: such a cache with as much memory as
all workers have; nothing that copies KV between workers, ahead of a turn or for it, is worth more. The way
from *cache, least-prefill* to *ideal* is what knowing caches could be worth. A rate is found by bisection to
1.5 %, for each seed. `cached elsewhere`: what other workers than the one that `spread` chose had of prompts.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from pathlib import Path
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from controlplane.migration.loads import kept_everywhere
from controlplane.perfmodel.profile import Profile
from controlplane.placement.caches import new_caches
from controlplane.placement.policies import Policy
from controlplane.prefixes import Prefixes, Sessions
from controlplane.types import Slo
from controlplane.workload import Workload
from dataplane.simulated.cluster import advance
from dataplane.simulated.simulate import Outcome, RunState, WorkerSpec, prepare
from experiments.lib.results import bar, flags, show
from tokenfleet.profiles.library import library_folder, read_profile
from tokenfleet.traces import read_trace

WORKERS = 16
MOONCAKE, WEKA = "mooncake/synthetic_trace.jsonl", "weka/requests.parquet"
LONGEST = {"mooncake": 32_768, "weka": 65_536}
GOAL = {"mooncake": 0.99, "weka": 0.9}
BETWEEN = {"mooncake": (0.3, 32.0), "weka": (0.02, 8.0)}  # rates that are surely carried, and surely not
PAUSE_S, COPIES = 60.0, 6
PRECISION = 1.015
LOOK_S = 0.25
FIELD = tuple(map(Policy, ("round-robin", "jsq", "least-prefill", "longest-prefix", "llm-d", "sglang")))
ONE_CACHE = ("pooled", "ideal")
WAYS = ("no cache", *FIELD, Policy.SPREAD, *ONE_CACHE)


@dataclass(frozen=True)
class Model:
    """A model on its workers, and its targets."""

    profile: Profile
    slo: Slo


def models() -> dict[str, Model]:
    """By name, from the profile library."""
    folder = library_folder() / "h100-sxm"
    return {
        "8b": Model(read_profile(folder / "llama-3.1-8b_tp1.yaml"), Slo(2.0, 0.04)),
        "70b": Model(read_profile(folder / "llama-3.1-70b_tp4.yaml"), Slo(3.0, 0.06)),
    }


def mooncake_at(trace: Workload, times: float, seed: int) -> Workload:
    """The trace's requests in their order, at so many times its rate."""
    rng = np.random.default_rng(seed)
    return replace(trace, arrival_s=np.cumsum(rng.exponential(1 / (trace.rate_rps * times), len(trace))))


def weka_at(trace: Workload, sessions_s: float, seed: int) -> Workload:
    """The sessions of the trace, so many of them begun a second; their order is drawn."""
    told, prefixes = trace.sessions, trace.prefixes
    assert told is not None
    assert prefixes is not None
    rng = np.random.default_rng(seed)
    by_session = np.argsort(told.session, kind="stable")  # in order of time within each
    of = np.split(by_session, np.flatnonzero(np.diff(told.session[by_session])) + 1)
    order = np.concatenate([rng.permutation(len(of)) for _ in range(COPIES)])
    lengths = [len(of[n]) for n in order]
    rows = np.concatenate([of[n] for n in order])
    copy = np.repeat(np.arange(len(order)) // len(of), lengths)
    begin_s = np.repeat(np.cumsum(rng.exponential(1 / sessions_s, len(order))), lengths)
    first_s = np.repeat([trace.arrival_s[of[n][0]] for n in order], lengths)
    arrival_s = begin_s + trace.arrival_s[rows] - first_s
    by_time = np.argsort(arrival_s, kind="stable")
    rows, copy = rows[by_time], copy[by_time]
    place = np.empty(COPIES * len(trace), np.int64)
    place[copy * len(trace) + rows] = np.arange(len(rows))
    waits = Prefixes(1, told.offsets, told.before).pick(rows)  # lists as any
    before = place[np.repeat(copy, np.diff(waits.offsets)) * len(trace) + waits.ids]
    picked = prefixes.pick(rows)
    own = np.repeat(copy, np.diff(picked.offsets)) * (int(prefixes.ids.max()) + 1)
    return Workload(
        arrival_s=arrival_s[by_time],
        prompt_tokens=trace.prompt_tokens[rows],
        output_tokens=trace.output_tokens[rows],
        prefixes=Prefixes(picked.block_tokens, picked.offsets, picked.ids + own),
        sessions=Sessions(
            copy * (int(told.session.max()) + 1) + told.session[rows],
            waits.offsets,
            before,
            np.minimum(told.think_s[rows], PAUSE_S),
        ),
    )


def with_one_cache(state: RunState, way: str) -> RunState:
    """The run with one cache in the place of every worker's: as large as all of these, or as all there is."""
    load, kv = state.workload, state.profiles[0].kv
    block = kv.block_tokens
    assert load.prefixes is not None
    tokens = load.prompt_tokens + load.output_tokens
    endless = int((tokens // block + 2).sum())
    room = np.array([endless if way == "ideal" else WORKERS * (kv.capacity_tokens // block)])
    one = new_caches(load.prefixes, room, np.array([block]), tokens)

    def everywhere(rows: Any) -> Any:
        return as_strided(rows, (WORKERS, *rows.shape[1:]), (0, *rows.strides[1:]))

    shared = {name: everywhere(getattr(one, name)) for name in ("workers", "copies", "table")}
    return replace(state, ledger=state.ledger._replace(caches=one._replace(**shared)))


def elsewhere(load: Workload, model: Model, seed: int) -> float:
    """The share of prompts that another worker had cached, and not the one that `spread` chose."""
    state = begun(load, model, Policy.SPREAD, 0.0, seed)
    led, kept = state.ledger, np.zeros(len(load))
    is_placed, now_s = np.zeros(len(load), bool), 0.0
    while not is_placed.all():
        now_s += LOOK_S
        advance(led, state.engines, state.cluster, state.rules, now_s)
        for r in np.flatnonzero((led.requests["worker"][: len(load)] >= 0) & ~is_placed).tolist():
            others = np.delete(kept_everywhere(led, r), led.requests["worker"][r])
            kept[r], is_placed[r] = min(int(others.max()), int(load.prompt_tokens[r])), True
    advance(led, state.engines, state.cluster, state.rules, np.inf)
    more = np.maximum(kept - state.outcome().cached_tokens, 0.0)
    return float(more.sum() / load.prompt_tokens.sum())


def run(load: Workload, model: Model, way: str, goal: float, seed: int) -> Outcome:
    """One run; it stops once more have missed than may."""
    state = begun(load, model, way, goal, seed)
    advance(state.ledger, state.engines, state.cluster, state.rules, np.inf)
    return state.outcome()


def begun(load: Workload, model: Model, way: str, goal: float, seed: int) -> RunState:
    """A run at its beginning."""
    policy = Policy.SPREAD if way in ("no cache", *ONE_CACHE) else Policy(way)
    state = prepare(
        load,
        [WorkerSpec(model.profile)] * WORKERS,
        model.slo,
        policy,
        seed=seed,
        max_misses=int((1 - goal) * len(load)),
        prefix_caching=way != "no cache",
    )
    if way in ONE_CACHE:
        state = with_one_cache(state, way)
    return state


def carried(
    load_at: Callable[[float, int], Workload], model: Model, way: str, name: str, seed: int
) -> dict[str, float]:
    """The highest rate at which the goal is met, and the hit rate at it."""
    low, high = BETWEEN[name]
    hit = 0.0
    while high / low > PRECISION:
        rate = sqrt(low * high)
        outcome = run(load_at(rate, seed), model, way, GOAL[name], seed)
        if outcome.complete and outcome.attainment >= GOAL[name]:
            low, hit = rate, outcome.prefix_hit_rate or 0.0
        else:
            high = rate
    return {"rate": low, "hit": hit}


def loads(data: Path, quick: bool) -> dict[str, Callable[[float, int], Workload]]:
    """By data set: the load at a rate, for a seed."""
    found: dict[str, Callable[[float, int], Workload]] = {}
    for name, file, at in (("mooncake", MOONCAKE, mooncake_at), ("weka", WEKA, weka_at)):
        trace = read_trace(data / file).workload
        trace = trace.take(trace.prompt_tokens <= LONGEST[name])
        if quick:
            trace = trace.take(slice(0, len(trace) // 3))
        found[name] = partial(at, trace)
    return found


def rows_of(asked: argparse.Namespace, name: str, model: str, load_at: Any) -> list[dict[str, Any]]:
    """One row a way to place, over the seeds."""
    seeds = range(asked.seed, asked.seed + (1 if asked.quick else 3))
    rows = []
    for way in WAYS:
        found = [
            asked.resume.part(
                f"{name} {model} {way} {seed}", partial(carried, load_at, models()[model], way, name, seed)
            )
            for seed in seeds
        ]
        rates = [each["rate"] for each in found]
        told = {}
        if way == Policy.SPREAD:
            shares = [
                asked.resume.part(
                    f"{name} {model} elsewhere {seed}",
                    partial(elsewhere, load_at(rate, seed), models()[model], seed),
                )
                for seed, rate in zip(seeds, rates, strict=True)
            ]
            told = {"cached elsewhere": float(np.mean(shares))}
        rows.append(
            {
                "data": name,
                "model": model,
                "way": str(way) if way in ("no cache", *ONE_CACHE) else f"cache, {way}",
                "rate": float(np.mean(rates)),
                "seeds": " ".join(f"{rate:.2f}" for rate in rates),
                "hit": float(np.mean([each["hit"] for each in found])),
            }
            | told
        )
    return rows


def main() -> int:
    parser = flags(__doc__, MOONCAKE, WEKA, resumes=True)
    parser.add_argument("--data-set", choices=list(GOAL), help="only one of the two")
    parser.add_argument("--model", choices=list(models()), help="only one of the two")
    asked = parser.parse_args()
    rows, bars = [], {}
    for name, load_at in loads(asked.data, asked.quick).items():
        for model in models():
            if asked.data_set not in (None, name) or asked.model not in (None, model):
                continue
            rows += rows_of(asked, name, model, load_at)
            rate = dict(zip(WAYS, (row["rate"] for row in rows[-len(WAYS) :]), strict=True))
            least, spread = rate[Policy.LEAST_PREFILL], rate[Policy.SPREAD]
            best = max(FIELD, key=lambda policy: rate[policy])
            for end in ONE_CACHE:
                way = (spread - least) / (rate[end] - least)
                bars[f"{name}, {model}: share of the way from cache, least-prefill to {end}"] = bar(
                    way, 0.65, True
                )
            bars[f"{name}, {model}: spread by the best of the field ({best})"] = bar(
                spread / rate[best], 1.0, True
            )
    return show("prefix_policies", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
