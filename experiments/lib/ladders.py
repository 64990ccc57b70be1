"""LMBench's measured ladders of rates on vLLM with prefix caching, as files of runs have them.

A run is one rate of a ladder: first the requests that warm its caches, of which no times are known, then
those that were measured. ShareGPT's blocks are in the data. A user of `long` and `short` goes on with all
that was said before, answers included, after a beginning that all users share.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
from numpy.typing import NDArray

from controlplane.workload import Workload
from tokenfleet.profiles.accuracy import EngineSettings, Ladder, Run, RunsFile, prefixes_of
from tokenfleet.profiles.measurements import RequestLog

LMBENCH = "lmbench"
BLOCK = 16
WARM_EVERY_S = 5.0  # so that each is answered before the next, as a run begins with all of them cached
SHARED = {"long": 1041, "short": 42}  # tokens with which every user's prompt begins
# Model, GPUs and the share of their memory that vLLM was given: the manifests' where there are any, else its
# default of the time. The order matters: the first that a ladder's name begins with.
STACKS = {
    "l70-h100": ("llama-3.1-70b", "h100-sxm", 2, 0.95),
    "l70": ("llama-3.1-70b", "a100-sxm", 2, 0.95),
    "l8": ("llama-3.1-8b", "a100-sxm", 1, 0.95),
    "apr29": ("llama-3.1-8b", "a100-sxm", 1, 0.9),
    "scout": ("llama-4-scout-17b-16e-fp8", "h100-sxm", 4, 0.9),
}
VERSION = "0.8"  # "latest" of April and May 2025
GATEWAY_S = 0.0125  # llm-d's gateway, on the development ladder behind it


def ladder(data: Path, name: str) -> Ladder:
    """The runs of one experiment."""
    family = "llama4" if name.startswith("scout") else "llama3"
    files = (data / LMBENCH / f"{of}.parquet" for of in (name, f"sharegpt_blocks16_{family}"))
    rows, blocks = (pd.DataFrame(pl.read_parquet(file).to_dict(as_series=False)) for file in files)
    kind = name.rsplit("-", 1)[1] if name.endswith(("sharegpt", "short", "long")) else "long"
    in_order = rows[rows.run == 0].sort_values(["launch_s", "request"], kind="stable")
    runs = [
        _sharegpt(float(rate), run, blocks)
        if kind == "sharegpt"
        else _users(float(rate), run, SHARED[kind], kind == "long")
        for rate, run in in_order.groupby("qps")
    ]
    model, gpu, tp_degree, share = next(of for stack, of in STACKS.items() if name.startswith(stack))
    settings = RunsFile(
        schema="tokenfleet.runs/1",
        requests=f"{name}.parquet",
        model=model,
        gpu=gpu,
        tp_degree=tp_degree,
        workers=2 if "-x2-" in name else 1,
        placement="random" if "-vllm-x2-" in name else "round-robin",  # a Kubernetes Service picks by chance
        engine=EngineSettings(version=VERSION, gpu_memory_utilization=share, block_tokens=BLOCK),
        gateway_s=GATEWAY_S if "-llmd-" in name else 0.0,
    )
    return Ladder(name, settings, tuple(runs))


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
    work = Workload(
        np.concatenate([warm_s, launch_s]),
        np.concatenate([warm_prompts, run.prompt_tokens]).astype(np.int64),
        np.concatenate([warm_outputs, np.maximum(run.generation_tokens, 1)]).astype(np.int64),
        prefixes=prefixes_of([[int(block) for block in one] for one in lists], BLOCK),
    )
    first_s = np.concatenate([unknown, launch_s + run.ttft_s.to_numpy()])
    last_s = np.concatenate([unknown, begin_s + run.finish_s.to_numpy()])
    return Run(rate_rps, RequestLog(work, first_s, last_s), np.arange(len(work)) >= len(warm_s))
