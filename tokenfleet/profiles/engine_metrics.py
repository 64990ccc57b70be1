"""vLLM's Prometheus metrics: the counters of each engine on a page, and what it did between two scrapes.

The page is any vLLM's `/metrics`, or a gateway's. Labels tell its engines apart (`engine`, `worker`). Names
differ by version: `NAMES` lists them, newest first. A counter that a version lacks is done without where
possible. Two scrapes give no figures if a counter fell between them (a restart), a number is not finite, or
more than LONGEST_S passed.

Only the lines that are used are read: a page has some thousand, and a hundred servers are looked at every few
seconds.
"""

from __future__ import annotations

import http.client
import math
import re
import time
import urllib.request
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from controlplane.errors import BadInput
from controlplane.perfmodel.calibration import Interval

EVERY_S = 3.0
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
    "waiting": ("num_requests_waiting",),
    "ended": ("request_success_total",),
    "ended_prompt_tokens": ("request_prompt_tokens_sum",),
    "ended_output_tokens": ("request_generation_tokens_sum",),
}
# Of each request: its tokens; its first token, and the mean of its gaps between tokens.
LENGTHS: Mapping[str, str] = {
    "prompt": "request_prompt_tokens_bucket",
    "output": "request_generation_tokens_bucket",
}
HISTOGRAMS: Mapping[str, str] = {
    "ttft": "time_to_first_token_seconds_bucket",
    "tpot": "request_time_per_output_token_seconds_bucket",
    **LENGTHS,
}
OTHERS = {"sglang:": "SGLang", "tgi_": "TGI", "trtllm_": "TensorRT-LLM", "llamacpp:": "llama.cpp"}
NEEDED = ("gaps", "gaps_s", "first_tokens", "first_tokens_s", "prompt_tokens", "running")
GAUGES = ("running", "waiting", "kv_share")
_CONFIG = "cache_config_info"
READ = sorted({_CONFIG, *HISTOGRAMS.values(), *(name for names in NAMES.values() for name in names)})
_LINE = re.compile(rf"^vllm:({'|'.join(READ)})(?:\{{(.*)\}})?[ \t]+(\S+)", re.M)
_HISTOGRAM_OF = {name: histogram for histogram, name in HISTOGRAMS.items()}
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_SAMPLE = re.compile(r"^[a-zA-Z_:][\w:]*(?:\{.*\})?[ \t]+[-+.\w]+", re.M)


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """What one engine told at `at_s`: values by the names of `NAMES`, and its KV (0 where it is not said).

    `buckets`: of each of `HISTOGRAMS` the requests up to each edge. `model`: the name that it is served by.
    `kind`: the place of its worker type among those of the fleet.
    """

    at_s: float
    values: Mapping[str, float]
    kv_tokens: int = 0
    block_tokens: int = 0
    buckets: Mapping[str, Mapping[float, float]] = field(default_factory=dict)
    model: str = ""
    kind: int = 0


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
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise BadInput(f"--metrics: {address}: does not answer: {getattr(error, 'reason', error)}") from None


def engine_counts(text: str, at_s: float, where: str = "metrics") -> dict[str, EngineCounts]:
    """The engines of a metrics page. Raises BadInput where it is none, or lacks what calibration needs."""
    found: defaultdict[str, defaultdict[str, float]] = defaultdict(lambda: defaultdict(float))
    buckets: defaultdict[str, dict[str, defaultdict[float, float]]] = defaultdict(
        lambda: {name: defaultdict(float) for name in HISTOGRAMS}
    )
    kv: dict[str, tuple[int, int, bool]] = {}
    models: dict[str, str] = {}
    known: dict[str, dict[str, str]] = {}
    of_fleet = False  # a fleet's gateway tells of a configuration of its own, for slots without a worker too
    try:
        for name, said, value in _LINE.findall(text):
            labels = known.get(said) or known.setdefault(said, _labels(said))
            engine = " ".join(labels[label] for label in ENGINE_LABELS if labels.get(label))
            of_fleet = of_fleet or "worker" in labels
            if name == _CONFIG:
                kv[labels.get("engine", "")] = _kv(labels)
            elif (histogram := _HISTOGRAM_OF.get(name)) is not None:
                buckets[engine][histogram][float(labels["le"])] += float(value)
            else:
                found[engine][name] += float(value)
                models[engine] = labels.get("model_name", "")
    except (ValueError, KeyError) as error:
        raise BadInput(f"{where}: not Prometheus metrics: {error}") from None
    if not found:
        _refuse_others(text, where)
    whole = _whole(found, where)
    tokens, block_tokens, is_sum = (0, 0, False) if of_fleet else next(iter(kv.values()), (0, 0, False))
    tokens = tokens // len(kv) if is_sum else tokens
    return {
        engine: EngineCounts(at_s, values, tokens, block_tokens, buckets[engine], models[engine])
        for engine, values in whole.items()
    }


def _refuse_others(text: str, where: str) -> None:
    """Raise BadInput for a page of another engine, and for what is no page of metrics."""
    for prefix, other in OTHERS.items():
        if re.search(rf"^{prefix}", text, re.M):
            raise BadInput(f"{where}: metrics of {other}, expected vLLM's")
    if _SAMPLE.search(text) is None:
        raise BadInput(f"{where}: not Prometheus metrics")


def _labels(said: str) -> dict[str, str]:
    return {label: _plain(quoted) for label, quoted in _LABEL.findall(said)}


def _plain(quoted: str) -> str:
    """A label's value without its escapes."""
    if "\\" not in quoted:
        return quoted
    return re.sub(r"\\(.)", lambda one: "\n" if one[1] == "n" else one[1], quoted)


def _whole(found: Mapping[str, Mapping[str, float]], where: str) -> dict[str, dict[str, float]]:
    """The engines that tell all that is needed. Raises BadInput where there is none."""
    named = {engine: _named(values) for engine, values in found.items()}
    whole = {engine: values for engine, values in named.items() if set(NEEDED) <= set(values)}
    if not whole:
        some = next(iter(named.values()), {})
        missing = next(name for name in NEEDED if name not in some)
        raise BadInput(f"{where}: no metrics of vLLM's: vllm:{NAMES[missing][0]} is missing")
    return whole


def _named(values: Mapping[str, float]) -> dict[str, float]:
    """An engine's counters by our names, each from the newest of theirs that there is."""
    newest = {name: next((a for a in aliases if a in values), None) for name, aliases in NAMES.items()}
    named = {name: values[alias] for name, alias in newest.items() if alias is not None}
    if named and not any(named.values()):
        # Several API servers leave gauges out until one is set: this engine has not stepped since its start.
        named.setdefault("running", 0.0)
    return named


def _kv(labels: Mapping[str, str]) -> tuple[int, int, bool]:
    """KV tokens (0: not said), tokens of a block, and whether the former are of all engines together."""
    size = _count(labels, "block_size")
    own = _count(labels, "kv_cache_size_tokens")
    return own or _count(labels, "num_gpu_blocks") * size, size, not own


def _count(labels: Mapping[str, str], name: str) -> int:
    text = labels.get(name, "")
    return int(text) if text.isdecimal() else 0


def intervals_of(scrapes: Iterable[Mapping[str, EngineCounts]]) -> list[Interval]:
    """What each engine did between its scrapes, in order of time, without what a restart or gap spoilt.

    Where an engine does not say what its KV holds, running requests hold mean prompts and half of mean
    answers.
    """
    last: dict[str, EngineCounts] = {}
    found = []
    prompts = 0.0
    for scrape in scrapes:
        for engine, now in scrape.items():
            before = last.get(engine)
            last[engine] = now
            one = None if before is None else _between(before, now)
            if one is not None and before is not None:
                found.append(one)
                prompts += now.values["prompt_tokens"] - before.values["prompt_tokens"]
    firsts, gaps = sum(one.first_tokens for one in found), sum(one.gaps for one in found)
    held = (prompts + gaps / 2) / max(firsts, 1.0)
    return [
        one._replace(context_tokens=held * one.running) if math.isnan(one.context_tokens) else one
        for one in found
    ]


def _between(before: EngineCounts, now: EngineCounts) -> Interval | None:
    seconds = now.at_s - before.at_s
    both = now.values.keys() & before.values.keys()
    more = {name: now.values[name] - before.values[name] for name in both}
    mean = {name: (now.values[name] + before.values[name]) / 2 for name in both}
    counted = [value for name, value in more.items() if name not in GAUGES]
    if not 0 < seconds <= LONGEST_S or not all(map(math.isfinite, more.values())) or min(counted) < 0:
        return None
    told = "finished_prefill_tokens" in more
    return Interval(
        seconds=seconds,
        gaps=more["gaps"],
        gaps_s=more["gaps_s"],
        first_tokens=more["first_tokens"],
        first_tokens_s=more["first_tokens_s"],
        prefill_tokens=max(more["prompt_tokens"] - more.get("cached_tokens", 0.0), more["first_tokens"]),
        running=mean["running"],
        running_change=more["running"],
        context_tokens=mean.get("kv_share", 0.0) * now.kv_tokens if now.kv_tokens else math.nan,
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


def watched(urls: Sequence[str], watch_s: float) -> tuple[list[dict[str, EngineCounts]], list[str]]:
    """Look at the engines every EVERY_S for so long; what they told each time, and which looks failed.

    Raises BadInput where the first look fails.
    """
    scrapes: list[dict[str, EngineCounts]] = []
    missed: list[str] = []
    until_s = time.monotonic() + watch_s
    while True:
        seen: dict[str, EngineCounts] = {}
        for url in urls:
            try:
                counts = engine_counts(scraped(url), time.monotonic(), url)
            except BadInput as error:
                if not scrapes:
                    raise
                missed.append(str(error))
            else:
                seen |= {f"{url} {engine}": one for engine, one in counts.items()}
        scrapes.append(seen)
        if time.monotonic() >= until_s:
            return scrapes, missed
        time.sleep(min(EVERY_S, until_s - time.monotonic()))
