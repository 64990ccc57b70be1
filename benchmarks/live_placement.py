"""What the gateway's placement of one request of 8,192 tokens costs, with mirrors of caches and without.

    python benchmarks/live_placement.py [--quick] [--format table|json]

A gateway's `Placement` of Llama-3.1 8B on 16 H100s, no HTTP and no engines: each request is a turn of one of
200 sessions, is placed, gets its first token and 15 more, and ends. `place`: from the request to the chosen
worker, its blocks' ids included; `rest`: the first token and the end, where the mirrors book what is stored.
"""

from __future__ import annotations

import sys
from time import perf_counter_ns
from types import SimpleNamespace
from typing import Any

import numpy as np

from controlplane.placement.lengths import LengthTable
from controlplane.types import Slo, WorkerId
from dataplane.live.engine_api.link import WorkerInfo
from dataplane.live.gateway.placement import Placement
from dataplane.live.gateway.request import Ticket, Tracked
from experiments.lib.results import bar, flags, show
from tokenfleet.profiles.library import library_folder, read_profile

WORKERS, SESSIONS, PROMPT = 16, 200, 8192
BAR_MS = 1.0


def placement_of(caches_prefixes: bool) -> Placement:
    """A fleet of workers that do, or do not, cache prefixes."""
    profile = read_profile(library_folder() / "h100-sxm" / "llama-3.1-8b_tp1.yaml")
    placement = Placement({"": profile}, WORKERS, LengthTable.constant(100), np.random.default_rng(0))
    for w in range(WORKERS):
        info = WorkerInfo(
            WorkerId(f"w{w}"),
            "vllm",
            "any",
            "",
            (),
            block_tokens=16,
            kv_blocks=profile.kv.capacity_tokens // 16,
            kv_bytes_per_token=1,
            max_model_len=131_072,
            max_seqs=256,
            max_batched_tokens=8192,
            tp_degree=1,
            vllm_version="",
            dtype="none",
            pid=0,
            caches_prefixes=caches_prefixes,
        )
        placement.attach(info, "")
    return placement


def measure(caches_prefixes: bool, requests: int, seed: int) -> dict[str, Any]:
    """Times of placing and of booking a request, in ms."""
    rng = np.random.default_rng(seed)
    placement = placement_of(caches_prefixes)
    texts = [rng.integers(0, 100_000, PROMPT).tolist() for _ in range(SESSIONS)]
    params = SimpleNamespace(prompt_logprobs=None, skip_reading_prefix_cache=False)
    place_ms, rest_ms = [], []
    for i in range(requests):
        text = texts[int(rng.integers(SESSIONS))]
        text[-200:] = rng.integers(0, 100_000, 200).tolist()
        request = SimpleNamespace(
            request_id=f"r{i}",
            prompt_token_ids=text,
            sampling_params=params,
            lora_request=None,
            cache_salt=None,
            mm_features=None,
            prompt_embeds=None,
        )
        tracked = Tracked(request, Ticket("", "", Slo(2.0, 0.05), 0), i / 50, 100)
        began = perf_counter_ns()
        worker = placement.choose(tracked, i / 50) or WorkerId("w0")
        placement.put(tracked, worker, has_kv=False, now_s=0.0)
        placed = perf_counter_ns()
        placement.advance(worker, [(tracked, 1)], i / 50 + 0.01)
        tracked.output_token_ids.extend(range(16))
        placement.forget(tracked)
        place_ms.append((placed - began) / 1e6)
        rest_ms.append((perf_counter_ns() - placed) / 1e6)
    warm = slice(min(20, requests // 2), None)
    return {
        "mirrors": "yes" if caches_prefixes else "no",
        "place p50 (ms)": float(np.median(place_ms[warm])),
        "place p99 (ms)": float(np.quantile(place_ms[warm], 0.99)),
        "rest p50 (ms)": float(np.median(rest_ms[warm])),
        "rest p99 (ms)": float(np.quantile(rest_ms[warm], 0.99)),
    }


def main() -> int:
    asked = flags(__doc__).parse_args()
    requests = 200 if asked.quick else 3000
    rows = [measure(caches, requests, asked.seed) for caches in (False, True)]
    more_ms = sum(rows[1][f"{part} p50 (ms)"] - rows[0][f"{part} p50 (ms)"] for part in ("place", "rest"))
    return show("live_placement", rows, {"mirrors add, ms a request": bar(more_ms, BAR_MS)}, asked)


if __name__ == "__main__":
    sys.exit(main())
