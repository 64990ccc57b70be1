"""Measured ladders of rates (LMBench on vLLM with prefix caching), as request logs with their blocks.

A run is one rate of a ladder: first the requests that warm its caches, of which no times are known, then
those that were measured. ShareGPT's blocks are in the data. A user of `long` and `short` goes on with all
that was said before, answers included, after a beginning that all users share.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from controlplane.prefixes import Prefixes
from controlplane.workload import Workload
from tokenfleet.profiles.measurements import RequestLog

LMBENCH = "lmbench"
BLOCK = 16
MOST_BLOCKS = 1 << 20  # of a request
WARM_EVERY_S = 5.0  # so that each is answered before the next, as a run begins with all of them cached
SHARED = {"long": 1041, "short": 42}  # tokens with which every user's prompt begins
CENSORED_S = 100.0  # `long` and `short` drop what is not answered by then


@dataclass(frozen=True)
class Run:
    """One rate of a ladder. `measured` [requests]: those whose times are known; the others' are NaN."""

    rate_rps: float
    log: RequestLog
    measured: NDArray[np.bool_]

    def hit_rate_alone(self, capacity_tokens: int) -> float:
        """The share of the measured prompts' tokens that a cache of so many has, one request after another.

        Of the blocks, those used longest ago are forgotten first; of one request's, the last ones. What is
        generated takes its blocks, too.
        """
        work = self.log.workload
        assert work.prefixes is not None
        kept: OrderedDict[int, None] = OrderedDict()
        hits = 0
        for i in range(len(work)):
            ids = work.prefixes.of(i).tolist()
            most = (int(work.prompt_tokens[i]) - 1) // BLOCK
            hit = next((n for n, block in enumerate(ids[:most]) if block not in kept), min(most, len(ids)))
            hits += hit * BLOCK * bool(self.measured[i])
            written = (int(work.prompt_tokens[i] + work.output_tokens[i]) - 1) // BLOCK
            own = [-(i * MOST_BLOCKS + n) - 1 for n in range(written - len(ids))]
            for block in reversed(ids[:written] + own):
                kept[block] = None
                kept.move_to_end(block)
            while len(kept) * BLOCK > capacity_tokens:
                kept.popitem(last=False)
        return float(hits / work.prompt_tokens[self.measured].sum())


def ladder(data: Path, name: str) -> list[Run]:
    """The runs of one experiment, by rising rates."""
    rows = pd.read_parquet(data / LMBENCH / f"{name}.parquet")
    blocks = pd.read_parquet(
        data / LMBENCH / f"sharegpt_blocks16_{'llama4' if 'scout' in name else 'llama3'}.parquet"
    )
    kind = name.rsplit("-", 1)[1] if name.endswith(("sharegpt", "short", "long")) else "long"
    return [
        _sharegpt(rate, run, blocks)
        if kind == "sharegpt"
        else _users(rate, run, SHARED[kind], kind == "long")
        for rate, run in _by_rate(rows)
    ]


def _by_rate(rows: pd.DataFrame) -> Iterator[tuple[float, pd.DataFrame]]:
    for rate, run in rows[rows.run == 0].groupby("qps"):
        yield float(rate), run.sort_values(["launch_s", "request"], kind="stable")


def _sharegpt(rate_rps: float, run: pd.DataFrame, blocks: pd.DataFrame) -> Run:
    warm = blocks[blocks.phase == "warmup"].sort_values("request")
    named = blocks[blocks.phase != "warmup"].set_index("request").loc[run.request]
    begin_s = len(warm) / rate_rps + 10.0
    lists = [*warm.block16_ids, *named.block16_ids]
    before = (np.arange(len(warm)) / rate_rps, warm.prompt_tokens, warm.max_output_tokens)
    return _run(rate_rps, run, begin_s, before, lists)


def _users(rate_rps: float, run: pd.DataFrame, shared: int, is_warmed: bool) -> Run:
    """`is_warmed`: the first twenty users have asked their first question before, one every few seconds."""
    first = int(run.session.min())
    warm = run[(run["round"] == 1) & (run.session < first + 20)] if is_warmed else run[:0]
    begin_s = WARM_EVERY_S * len(warm) + 10.0
    width = int((run.prompt_tokens + run.generation_tokens).max()) // BLOCK + 1
    both = pd.concat([warm, run])
    lists = []
    for session, tokens in zip(both.session, both.prompt_tokens + both.generation_tokens, strict=True):
        place = np.arange(int(tokens) // BLOCK)
        own = width * (1 + int(session) - first) + place
        lists.append(np.where((place + 1) * BLOCK <= shared, place, own))
    before = (WARM_EVERY_S * np.arange(len(warm)), warm.prompt_tokens, warm.generation_tokens)
    return _run(rate_rps, run, begin_s, before, lists)


def _run(
    rate_rps: float,
    run: pd.DataFrame,
    begin_s: float,
    before: tuple[NDArray[np.float64], pd.Series, pd.Series],
    lists: list[NDArray[np.int64]],
) -> Run:
    warm_s, warm_prompts, warm_outputs = before
    unknown = np.full(len(warm_s), np.nan)
    launch_s = begin_s + run.launch_s.to_numpy()
    _, ids = np.unique(np.concatenate(lists).astype(np.int64), return_inverse=True)
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in lists])])
    work = Workload(
        np.concatenate([warm_s, launch_s]),
        np.concatenate([warm_prompts, run.prompt_tokens]).astype(np.int64),
        np.concatenate([warm_outputs, np.maximum(run.generation_tokens, 1)]).astype(np.int64),
        prefixes=Prefixes(BLOCK, offsets, ids),
    )
    first_s = np.concatenate([unknown, launch_s + run.ttft_s.to_numpy()])
    last_s = np.concatenate([unknown, begin_s + run.finish_s.to_numpy()])
    return Run(rate_rps, RequestLog(work, first_s, last_s), np.arange(len(work)) >= len(warm_s))


def joined(runs: list[Run]) -> Run:
    """Runs one after the other on one server, which share no blocks, with rests of a minute between them."""
    begins, logs, ids, since_s, since_id = [], [], [], 0.0, 0
    for run in runs:
        work = run.log.workload
        assert work.prefixes is not None
        begins.append(since_s)
        logs.append(run.log)
        ids.append(work.prefixes.ids + since_id)
        since_s += float(np.nanmax(run.log.last_token_s)) + 60.0
        since_id += int(work.prefixes.ids.max()) + 1
    works = [log.workload for log in logs]
    lengths = [np.diff(work.prefixes.offsets) for work in works if work.prefixes is not None]
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(lengths))])
    work = replace(
        works[0],
        arrival_s=np.concatenate([b + w.arrival_s for b, w in zip(begins, works, strict=True)]),
        prompt_tokens=np.concatenate([w.prompt_tokens for w in works]),
        output_tokens=np.concatenate([w.output_tokens for w in works]),
        priority=np.zeros(0, np.int64),
        slo_class=np.zeros(0, np.int64),
        prefixes=Prefixes(BLOCK, offsets, np.concatenate(ids)),
    )
    first_s = np.concatenate([b + log.first_token_s for b, log in zip(begins, logs, strict=True)])
    last_s = np.concatenate([b + log.last_token_s for b, log in zip(begins, logs, strict=True)])
    return Run(0.0, RequestLog(work, first_s, last_s), np.concatenate([run.measured for run in runs]))
