"""The accuracy of profiles on measured runs: each run is simulated and compared with its measurements.

A file of runs is YAML (`tokenfleet.runs/1`: model, GPUs, engine settings). It names a table of requests (CSV,
JSON lines or Parquet) with one row a request (docs/accuracy.md). Rows of one `rate_rps` are one run, which
begins with empty caches. A row without times is served, to warm the caches, but not judged.

    error of a figure = predicted / measured - 1         per run; of several runs the median of its size
    saturation point  = the highest rate up to which the share of requests in time holds the target

Rates past the measured saturation point are queues that grow until the run ends: their errors are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import polars as pl
from numpy.typing import NDArray
from pydantic import Field

from controlplane.errors import BadInput
from controlplane.perfmodel.engine import steps_ahead_of
from controlplane.perfmodel.profile import Profile
from controlplane.prefixes import Prefixes
from controlplane.workload import Workload
from dataplane.simulated.simulate import Outcome
from tokenfleet.field_errors import FilePart, parse_yaml, read_text
from tokenfleet.profiles.fit_log import calibrated, joined, replay
from tokenfleet.profiles.library import find_profiles
from tokenfleet.profiles.measurements import RequestLog

SCHEMA = "tokenfleet.runs/1"
ACCURACY = "tokenfleet.accuracy/1"
CALIBRATED_ON = 3  # runs of the lowest rates
NEEDED = ("rate_rps", "arrival_s", "prompt_tokens", "output_tokens", "ttft_s", "e2e_s")
STATISTICS = {"mean": None, "p50": 0.5, "p90": 0.9, "p99": 0.99}
LATENCIES = ("ttft", "tpot", "e2e")
# A limit where none is stated: what a tail of the lowest rates has to be exceeded by to be a queue's.
TIMES, MORE_S = 2.0, 0.25

Positive = Annotated[int, Field(ge=1)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Version = Annotated[str, Field(pattern=r"^\d+\.\d+")]
Name = Annotated[str, Field(min_length=1, max_length=200)]


class EngineSettings(FilePart):
    """What the engines were started with; what is left out is the profile's."""

    version: Version | None = None  # vLLM's: engines of before 0.14 plan no step ahead
    max_batched_tokens: Positive | None = None
    max_seqs: Positive | None = None
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    kv_tokens: Positive | None = None
    prefix_caching: bool = True
    block_tokens: Positive = 16


class RequestTarget(FilePart):
    """What a request must hold to be in time."""

    ttft_s: Seconds
    tpot_s: Seconds = math.inf


class RunsFile(FilePart):
    """The settings of a file of runs. `gateway_s`: what a proxy before the engines adds to a first token."""

    form: Literal["tokenfleet.runs/1"] = Field(alias="schema")
    requests: Name
    model: Name
    gpu: Name
    tp_degree: Positive = 1
    workers: Positive = 1
    placement: Literal["round-robin", "random", "least-request", "jsq"] = "round-robin"
    engine: EngineSettings = EngineSettings()
    gateway_s: Seconds = 0.0
    slo: RequestTarget | None = None
    attainment: Annotated[float, Field(gt=0, lt=1)] = 0.9
    source: str = ""
    licence: str = ""


@dataclass(frozen=True)
class Run:
    """The requests of one rate. `measured` [requests]: those whose times are known; the others' are NaN."""

    rate_rps: float
    log: RequestLog
    measured: NDArray[np.bool_]


@dataclass(frozen=True)
class Ladder:
    """The runs of one file, by rising rates."""

    name: str
    settings: RunsFile
    runs: tuple[Run, ...]

    def worker(self, profile: Profile | None = None) -> Profile:
        """The profile with the settings of the runs' engines; the library's by default. Raises BadInput."""
        asked, engine = self.settings, self.settings.engine
        found = profile or find_profiles(asked.model, [asked.gpu], [asked.tp_degree])[0]
        ahead = None if engine.version is None else steps_ahead_of(engine.version)
        found = found.with_kv(engine.gpu_memory_utilization, engine.kv_tokens)
        limits = (engine.max_batched_tokens, engine.max_seqs, ahead, engine.version)
        found = found.with_engine(None, *limits)
        front = replace(found.frontend, per_request_s=found.frontend.per_request_s + asked.gateway_s)
        return replace(found, frontend=front)


def read_ladder(path: Path) -> Ladder:
    """A file of runs and its requests. Raises BadInput naming the file, the row and the field."""
    no_runs = f"not a file of runs: expected `schema: {SCHEMA}` and its fields"
    settings = parse_yaml(read_text(path), str(path), RunsFile, no_runs)
    table = path.parent / settings.requests
    return Ladder(path.stem, settings, tuple(_runs(_table(table), table, settings.engine.block_tokens)))


def _table(path: Path) -> pl.DataFrame:
    readers: dict[str, Callable[[Path], pl.DataFrame]] = {
        ".csv": pl.read_csv,
        ".parquet": pl.read_parquet,
        ".jsonl": pl.read_ndjson,
    }
    reader = readers.get(path.suffix)
    if reader is None:
        raise BadInput(f"{path}: expected a table in .csv, .jsonl or .parquet")
    try:
        table = reader(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise BadInput(f"{path}: cannot be read: {' '.join(str(error).split())[:200]}") from error
    missing = [name for name in NEEDED if name not in table.columns]
    if missing:
        raise BadInput(f"{path}: column {missing[0]} is missing; expected {', '.join(NEEDED)}")
    if table.is_empty():
        raise BadInput(f"{path}: no rows")
    return table


def _runs(table: pl.DataFrame, path: Path, block_tokens: int) -> Iterable[Run]:
    column = {name: _numbers(table, name, path) for name in NEEDED}
    blocks = _blocks(table, path) if "hash_ids" in table.columns else None
    for rate in np.unique(column["rate_rps"]):
        rows = np.flatnonzero(column["rate_rps"] == rate)
        rows = rows[np.argsort(column["arrival_s"][rows], kind="stable")]
        of = {name: values[rows] for name, values in column.items()}
        lists = None if blocks is None else [blocks[i] for i in rows]
        arrival_s = of["arrival_s"] - of["arrival_s"][0]
        try:
            work = Workload(
                arrival_s,
                of["prompt_tokens"].astype(np.int64),
                of["output_tokens"].astype(np.int64),
                prefixes=None if lists is None else prefixes_of(lists, block_tokens),
            )
        except BadInput as error:
            raise BadInput(f"{path}: rate {rate:g}: {error}") from error
        measured = ~np.isnan(of["ttft_s"])
        if not measured.any():
            raise BadInput(f"{path}: rate {rate:g}: ttft_s: no request has its times")
        log = RequestLog(work, arrival_s + of["ttft_s"], arrival_s + of["e2e_s"])
        yield Run(float(rate), log, measured)


def _blocks(table: pl.DataFrame, path: Path) -> list[list[int]]:
    """The ids of each request's full blocks: a list, or text with spaces between (CSV)."""
    lists: list[list[int]] = []
    for row, one in enumerate(table["hash_ids"].to_list()):
        words = one.split() if isinstance(one, str) else [one] if isinstance(one, int) else one
        try:
            lists.append([int(word) for word in words or ()])
        except (TypeError, ValueError):
            raise BadInput(
                f"{path}: row {row + 1}: hash_ids: expected whole numbers, got {one!r:.40}"
            ) from None
    return lists


def _numbers(table: pl.DataFrame, name: str, path: Path) -> NDArray[np.float64]:
    """A column; only times may be missing."""
    try:
        values = table[name].cast(pl.Float64).fill_null(np.nan).to_numpy()
    except pl.exceptions.PolarsError:
        raise BadInput(f"{path}: {name}: must be numbers, got {table[name].dtype}") from None
    may_miss = name in ("ttft_s", "e2e_s")
    odd = np.isinf(values) | (values < 0) | (np.isnan(values) & (not may_miss))
    if odd.any():
        row = int(np.flatnonzero(odd)[0])
        raise BadInput(f"{path}: row {row + 1}: {name}: must be at least 0, got {table[name][row]!r:.40}")
    return np.asarray(values, np.float64)


def prefixes_of(lists: Sequence[Sequence[int]], block_tokens: int) -> Prefixes:
    """The blocks of requests, numbered from 0."""
    named = [np.asarray(one, np.int64) for one in lists]
    _, ids = np.unique(np.concatenate(named), return_inverse=True)
    offsets = np.concatenate([[0], np.cumsum([len(one) for one in named])])
    return Prefixes(block_tokens, offsets, ids)


def figures_of(log: RequestLog | Outcome, measured: NDArray[np.bool_]) -> dict[str, dict[str, float]]:
    """Means and quantiles of the requests that were measured, in seconds, and what was served a second."""
    if isinstance(log, Outcome):
        arrival_s, ttft_s, tpot_s = log.arrival_s, log.ttft_s, log.tpot_s
        e2e_s = log.finish_s - log.arrival_s
    else:
        arrival_s, ttft_s, tpot_s, e2e_s = log.workload.arrival_s, log.ttft_s, log.tpot_s, log.e2e_s
    found: dict[str, dict[str, float]] = {}
    for name, values in zip(LATENCIES, (ttft_s, tpot_s, e2e_s), strict=True):
        seen = values[measured & ~np.isnan(values)]
        found[name] = {
            what: float(seen.mean() if q is None else np.quantile(seen, q)) if len(seen) else math.nan
            for what, q in STATISTICS.items()
        }
    lasted_s = float((arrival_s + e2e_s)[measured].max() - arrival_s[measured].min())
    tokens = float(log.workload.output_tokens[measured].sum())
    return found | {"throughput": {"tokens_per_s": tokens / max(lasted_s, 1e-9)}}


def _hits(outcome: Outcome, measured: NDArray[np.bool_]) -> dict[str, float] | None:
    """Shares of the prompts' tokens that were hit, and that some request before had; None without caches."""
    if outcome.cached_tokens is None:
        return None
    tokens = outcome.workload.prompt_tokens[measured].sum()
    hits = {"simulated": outcome.cached_tokens, "allowed": outcome.workload.ideal_hits}
    return {name: float(of[measured].sum() / tokens) for name, of in hits.items()}


def _in_time(ttft_s: NDArray[np.float64], tpot_s: NDArray[np.float64], target: RequestTarget) -> float:
    return float(np.mean((ttft_s <= target.ttft_s) & ~(tpot_s > target.tpot_s)))


def target_of(ladder: Ladder) -> RequestTarget:
    """The file's target, or one by the lowest rates: their tail of TTFT is not to double."""
    if ladder.settings.slo is not None:
        return ladder.settings.slo
    lowest = [run.log.ttft_s[run.measured] for run in ladder.runs[:CALIBRATED_ON]]
    p90_s = float(np.mean([np.quantile(one, 0.9) for one in lowest]))
    p50_s = float(np.mean([np.quantile(one, 0.5) for one in lowest]))
    return RequestTarget(ttft_s=max(TIMES * p90_s, p50_s + MORE_S))


def steady(ladder: Ladder) -> int:
    """The number of rates, from the lowest up, that held the target as measured."""
    target = target_of(ladder)
    shares = [_in_time(r.log.ttft_s[r.measured], r.log.tpot_s[r.measured], target) for r in ladder.runs]
    return _held(shares, ladder.settings.attainment)


def _held(shares: Sequence[float], attainment: float) -> int:
    """The number of rates, from the lowest up, that hold the target."""
    return next((i for i, share in enumerate(shares) if share < attainment), len(shares))


def accuracy_of(ladder: Ladder, profile: Profile, calibrates: bool) -> dict[str, Any]:
    """The errors of a sweep's runs under a profile (`Ladder.worker`), or one calibrated on the lowest rates.

    Runs that were calibrated on are not judged. Raises BadInput for a sweep with too few runs to judge any.
    """
    skipped, fit = CALIBRATED_ON if calibrates else 0, None
    if len(ladder.runs) <= skipped:
        raise BadInput(
            f"{ladder.name}: {len(ladder.runs)} rates; {CALIBRATED_ON} are calibrated on, others judged"
        )
    workers, caches = ladder.settings.workers, ladder.settings.engine.prefix_caching
    policy = ladder.settings.placement
    if calibrates:
        learn = ladder.runs[:CALIBRATED_ON]
        log = joined([run.log for run in learn])
        known = np.concatenate([run.measured for run in learn])
        profile, _, fit = calibrated(log, profile, known, workers, caches, policy)
    target = target_of(ladder)
    rows, said = [], []
    for run in ladder.runs:
        outcome = replay(run.log, profile, workers, caches, policy)
        m = run.measured
        measured, predicted = figures_of(run.log, m), figures_of(outcome, m)
        said.append(_in_time(outcome.ttft_s[m], outcome.tpot_s[m], target))
        errors = {
            name: {what: predicted[name][what] / value - 1.0 for what, value in row.items()}
            for name, row in measured.items()
        }
        told = {"rate_rps": run.rate_rps, "requests": int(m.sum()), "measured": measured, "errors": errors}
        rows.append(told | {"hits": _hits(outcome, m)})
    held = steady(ladder)
    expected = _held(said, ladder.settings.attainment)
    rates = [run.rate_rps for run in ladder.runs]
    judged = rows[skipped:held]
    return {
        "runs": ladder.name,
        "profile": profile.label,
        "calibrated": calibrates,
        "judged": len(judged),
        "errors": _medians(judged),
        "knee": {
            "measured_rps": rates[held - 1] if 0 < held < len(rates) else None,
            "predicted_rps": rates[expected - 1] if 0 < expected < len(rates) else None,
            "rates_apart": expected - held,
        },
        "rates": rows,
        "fit": None if fit is None else {"misfit": fit.misfit, "refused": fit.is_refused, "says": fit.text},
    }


def _medians(rows: Sequence[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """The median size of each error over runs; NaN over none."""
    names = {"throughput": ("tokens_per_s",)} | dict.fromkeys(LATENCIES, tuple(STATISTICS))
    return {
        name: {
            what: float(np.nanmedian([abs(row["errors"][name][what]) for row in rows])) if rows else math.nan
            for what in whats
        }
        for name, whats in names.items()
    }


def overall(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over sweeps. Of saturation points, seen or predicted, how many are met or one rate off."""
    knees = [one["knee"] for one in found]
    apart = [abs(k["rates_apart"]) for k in knees if k["measured_rps"] or k["predicted_rps"]]
    errors = {
        name: {what: float(np.nanmedian([one["errors"][name][what] for one in found])) for what in row}
        for name, row in found[0]["errors"].items()
    }
    near = {"met": sum(n == 0 for n in apart), "within_one": sum(n <= 1 for n in apart)}
    return {"errors": errors, "knees": {"ladders": len(apart)} | near}
