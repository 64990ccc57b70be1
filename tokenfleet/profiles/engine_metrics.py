"""vLLM's Prometheus metrics: the counters of each engine on a page, and what it did between two scrapes.

Any vLLM's `/metrics`, a gateway's too: engines are told apart by their labels (`engine`, `worker`). Names
differ by version, and counters that a version does not have are done without where that can be: `NAMES` lists
them, newest first. Two scrapes between which a counter fell (a restart), a number is not finite or more than
LONGEST_S passed say nothing.
"""

from __future__ import annotations

import math
import urllib.error
import urllib.request
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from controlplane.errors import BadInput
from controlplane.perfmodel.calibration import Interval

LONGEST_S = 60.0
TIMEOUT_S = 10.0
MOST_BYTES = 50_000_000
ENGINE_LABELS = ("engine", "worker", "model_name")
NAMES: Mapping[str, tuple[str, ...]] = {
    "gaps": ("inter_token_latency_seconds_count", "time_per_output_token_seconds_count"),
    "gaps_s": ("inter_token_latency_seconds_sum", "time_per_output_token_seconds_sum"),
    "first_tokens": ("time_to_first_token_seconds_count",),
    "first_tokens_s": ("time_to_first_token_seconds_sum",),
    "prompt_tokens": ("prompt_tokens_total",),
    "cached_tokens": ("prompt_tokens_cached_total", "prefix_cache_hits_total", "gpu_prefix_cache_hits_total"),
    "running": ("num_requests_running",),
    "kv_share": ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
    "finished": ("request_prefill_time_seconds_count",),
    "finished_prefill_s": ("request_prefill_time_seconds_sum",),
    "finished_prefill_tokens": ("request_prefill_kv_computed_tokens_sum",),
    "finished_queue_s": ("request_queue_time_seconds_sum",),
    "drafted": ("spec_decode_num_draft_tokens_total",),
}
NEEDED = ("gaps", "gaps_s", "first_tokens", "first_tokens_s", "prompt_tokens", "running")
GAUGES = ("running", "kv_share")


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """What one engine told at `at_s`: values by the names of `NAMES`, and its KV (0 where it is not said)."""

    at_s: float
    values: Mapping[str, float]
    kv_tokens: int = 0
    block_tokens: int = 0


def scraped(url: str) -> str:
    """The text of a metrics page. Raises BadInput for an address that does not answer with one."""
    address = url if "://" in url else f"http://{url}"
    if not address.startswith(("http://", "https://")):
        raise BadInput(f"--metrics: {url}: expected an http:// or https:// address")
    if address.count("/") == 2:
        address += "/metrics"
    try:
        with urllib.request.urlopen(address, timeout=TIMEOUT_S) as reply:
            return str(reply.read(MOST_BYTES).decode("utf-8", "replace"))
    except (OSError, ValueError, urllib.error.URLError) as error:
        raise BadInput(f"--metrics: {address}: does not answer: {error}") from None


def engine_counts(text: str, at_s: float, where: str = "metrics") -> dict[str, EngineCounts]:
    """The engines of a metrics page. Raises BadInput where it is none, or lacks what calibration needs."""
    from prometheus_client.parser import text_string_to_metric_families

    found: dict[str, dict[str, float]] = {}
    blocks: dict[str, tuple[int, int]] = {}
    by_name = {f"vllm:{alias}": name for name, aliases in NAMES.items() for alias in reversed(aliases)}
    rank = {f"vllm:{alias}": k for aliases in NAMES.values() for k, alias in enumerate(aliases)}
    ranks: dict[tuple[str, str], int] = {}
    try:
        for sample in (s for family in text_string_to_metric_families(text) for s in family.samples):
            engine = " ".join(sample.labels[name] for name in ENGINE_LABELS if sample.labels.get(name))
            if sample.name == "vllm:cache_config_info":
                blocks[sample.labels.get("engine", "")] = _blocks(sample.labels)
            name = by_name.get(sample.name)
            if name is None:
                continue
            best = ranks.setdefault((engine, name), rank[sample.name])
            if rank[sample.name] < best:
                found[engine].pop(name)
                ranks[engine, name] = rank[sample.name]
            if rank[sample.name] <= best:
                values = found.setdefault(engine, {})
                values[name] = values.get(name, 0.0) + float(sample.value)
    except (ValueError, KeyError, IndexError) as error:
        raise BadInput(f"{where}: not Prometheus metrics: {error}") from None
    whole = {e: values for e, values in found.items() if all(name in values for name in NEEDED)}
    if not whole:
        some = next(iter(found.values()), {})
        missing = next(name for name in NEEDED if name not in some)
        raise BadInput(f"{where}: no metrics of vLLM's: vllm:{NAMES[missing][0]} is missing")
    any_kv = next(iter(blocks.values()), (0, 0))
    return {
        engine: EngineCounts(at_s, values, *blocks.get(engine.split(" ")[0], any_kv))
        for engine, values in whole.items()
    }


def _blocks(labels: Mapping[str, str]) -> tuple[int, int]:
    """KV tokens and tokens of a block, as the engine allocates them; 0 where it does not say."""
    try:
        blocks, size = int(labels["num_gpu_blocks"]), int(labels["block_size"])
    except (KeyError, ValueError):
        return 0, 0
    return (blocks * size, size) if blocks > 0 and size > 0 else (0, 0)


def intervals_of(scrapes: Iterable[Mapping[str, EngineCounts]]) -> list[Interval]:
    """What each engine did between its scrapes, in order of time, without what a restart or gap spoilt."""
    last: dict[str, EngineCounts] = {}
    found = []
    for scrape in scrapes:
        for engine, now in scrape.items():
            before = last.get(engine)
            last[engine] = now
            one = None if before is None else _between(before, now)
            if one is not None:
                found.append(one)
    return found


def _between(before: EngineCounts, now: EngineCounts) -> Interval | None:
    seconds = now.at_s - before.at_s
    if not 0 < seconds <= LONGEST_S:
        return None
    more = {
        name: now.values[name] - before.values[name]
        for name in now.values
        if name in before.values and name not in GAUGES
    }
    ends = {name: [one.values.get(name, 0.0) for one in (before, now)] for name in GAUGES}
    if any(value < 0 for value in more.values()):
        return None
    if not all(map(math.isfinite, [*more.values(), *(x for pair in ends.values() for x in pair)])):
        return None
    running = sum(ends["running"]) / 2
    told = more.get("finished_prefill_tokens") is not None
    return Interval(
        seconds=seconds,
        gaps=more["gaps"],
        gaps_s=more["gaps_s"],
        first_tokens=more["first_tokens"],
        first_tokens_s=more["first_tokens_s"],
        prefill_tokens=max(more["prompt_tokens"] - more.get("cached_tokens", 0.0), more["first_tokens"]),
        running=running,
        running_change=ends["running"][1] - ends["running"][0],
        context_tokens=sum(ends["kv_share"]) / 2 * now.kv_tokens,
        finished=more.get("finished", 0.0) if told else 0.0,
        finished_prefill_s=more.get("finished_prefill_s", 0.0),
        finished_prefill_tokens=more.get("finished_prefill_tokens", 0.0),
        finished_queue_s=more.get("finished_queue_s", 0.0),
    )


def kv_of(scrape: Mapping[str, EngineCounts]) -> tuple[int, int]:
    """KV tokens and block of the engines, 0 where they do not say or differ."""
    told = {(one.kv_tokens, one.block_tokens) for one in scrape.values()}
    return told.pop() if len(told) == 1 else (0, 0)


def drafts(scrapes: Sequence[Mapping[str, EngineCounts]]) -> bool:
    """Whether engines decode speculatively: then a step makes more than the one token that profiles know."""
    return any(one.values.get("drafted", 0.0) > 0 for scrape in scrapes for one in scrape.values())
