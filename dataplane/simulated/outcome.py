"""The outcome of a simulated run: when each request had its tokens, and the share of them in time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from controlplane.placement.ledger import Ledger
from controlplane.placement.outlook import clients_s
from controlplane.workload import Workload
from dataplane.simulated.records import Engines

ROWS = 1 << 16  # whose coefficients are looked up at once


def attained_by_class(met: NDArray[np.bool_], workload: Workload) -> NDArray[np.float64]:
    """[classes] the share of each SLO class's requests that are met; 1 for one without requests."""
    counts, missed = class_counts(met, workload)
    return np.asarray(1.0 - missed / np.where(counts > 0, counts, 1))


def class_counts(
    met: NDArray[np.bool_], workload: Workload
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """[classes] the requests of each SLO class, and those not met; of a sample, its whole's."""
    slo_class, classes = workload.slo_class, len(workload.slo_classes)
    weight = np.ones(len(met)) if workload.weight is None else workload.weight
    counts, missed = (np.bincount(slo_class, each, classes) for each in (weight, weight * ~met))
    return np.asarray(counts, np.float64), np.asarray(missed, np.float64)


def share_of(met: NDArray[np.bool_], workload: Workload) -> float:
    """The share of the requests that are met."""
    return float(np.average(met, weights=workload.weight)) if len(met) else 1.0


def joint(attained: NDArray[np.float64], asked: Sequence[float]) -> float:
    """The attainment of several classes as one number, A at least where each has what is asked of it.

    It is the attainment of the class that uses most of what it may miss, at the strictest class's scale:
    1 - (1 - A) · max (share missed / share that may miss). A is the highest attainment asked.
    """
    if len(asked) == 1:
        return float(attained[0])
    used = (1.0 - attained) / (1.0 - np.array(asked))
    return round(1.0 - (1.0 - max(asked)) * float(used.max()), 12)


@dataclass(frozen=True)
class Outcome:
    """The outcome of each request; columns of shape [requests], absolute seconds, NaN = did not happen.

    `arrival_s`: when each was sent: in a closed loop another time than the workload's. `finish_s` inf: turned
    away by a queue that was full, or by its time limit.
    """

    workload: Workload
    arrival_s: NDArray[np.float64]
    ttft_target_s: NDArray[np.float64]
    tpot_target_s: NDArray[np.float64]
    worker: NDArray[np.int64]
    first_token_s: NDArray[np.float64]
    engine_s: NDArray[np.float64]  # from its worker's queue to its first token, without the frontend
    finish_s: NDArray[np.float64]
    preemptions: NDArray[np.int64]
    migrations: NDArray[np.int64]
    busy_s: NDArray[np.float64]  # [workers]
    end_s: float  # when the last thing happened
    complete: bool  # False when the run was stopped early, see `max_misses`
    misses: float = 0.0  # requests outside their targets; of a sample those they tell of
    # Of each prompt, what its engine had when it first admitted it; -1: none did. None: nothing was cached.
    cached_tokens: NDArray[np.int64] | None = None
    loaded_tokens: NDArray[np.int64] | None = None  # of these: from host memory. None: there is no such tier
    session_target_s: float | None = None  # of whole sessions
    asked: tuple[float, ...] = ()  # attainment of each SLO class, where there are several
    pace: NDArray[np.float64] | float = 1.0  # see RunState; `finish_s` is without it

    @property
    def ttft_s(self) -> NDArray[np.float64]:
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> NDArray[np.float64]:
        """NaN for an output of one token, which has no gaps."""
        gaps = self.workload.output_tokens - 1
        tpot_s = (self.finish_s - self.first_token_s) / np.maximum(gaps, 1)
        return np.where(gaps > 0, tpot_s * self.pace, np.nan)

    @property
    def met(self) -> NDArray[np.bool_]:
        """Whether each request finished within both its targets."""
        slow = self.tpot_s > self.tpot_target_s  # NaN compares false: judged by TTFT alone
        return np.asarray(np.isfinite(self.finish_s) & (self.ttft_s <= self.ttft_target_s) & ~slow)

    @property
    def attainment(self) -> float:
        """Share of requests within both targets, or of sessions within theirs if that is less.

        With several SLO classes the share of requests is `joint` of them.
        """
        requests = share_of(self.met, self.workload)
        if self.asked:
            requests = joint(self.class_attainments, self.asked)
        sessions = self.session_attainment
        return requests if sessions is None else min(requests, sessions)

    @property
    def class_attainments(self) -> NDArray[np.float64]:
        """[classes] the share of each SLO class within its targets; 1 for one without requests."""
        return attained_by_class(self.met, self.workload)

    @property
    def session_attainment(self) -> float | None:
        """Share of sessions within their target; None where they have none."""
        if self.session_target_s is None:
            return None
        took_s = self.session_s
        return float((took_s <= self.session_target_s).mean()) if len(took_s) else 1.0

    @property
    def session_s(self) -> NDArray[np.float64]:
        """[sessions] from its first request to the end of its last answer; inf: one was turned away."""
        first_s, last_s = self._session_spans()
        with np.errstate(invalid="ignore"):
            return np.asarray(last_s - first_s, np.float64)

    def session_ends(self, agents: int) -> tuple[NDArray[np.float64], float]:
        """[sessions] when each ended, and until when all agents were at work."""
        first_s, last_s = self._session_spans()
        return last_s, float(first_s.max() if agents < len(first_s) else self.end_s)

    def _session_spans(self) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """[sessions] when the first request was sent, and the last answer complete."""
        if self.workload.sessions is None:
            return np.zeros(0), np.zeros(0)
        return self.workload.sessions.spans(self.arrival_s, self.finish_s)

    @property
    def utilisation(self) -> float:
        """Share of worker time spent in steps."""
        return float(self.busy_s.sum() / (len(self.busy_s) * self.end_s)) if self.end_s > 0 else 0.0

    @property
    def prefix_queries(self) -> int:
        """Tokens looked up in prefix caches, each request's once, as vllm:prefix_cache_queries counts."""
        if self.cached_tokens is None:
            return 0
        return int(self.workload.prompt_tokens[self.cached_tokens >= 0].sum())

    @property
    def prefix_hits(self) -> int:
        """Tokens of those that were found there, as vllm:prefix_cache_hits counts."""
        return 0 if self.cached_tokens is None else int(np.maximum(self.cached_tokens, 0).sum())

    @property
    def host_hit_rate(self) -> float | None:
        """The part of the hit rate that was loaded from host memory; None where there is no such tier."""
        if self.loaded_tokens is None or not self.prefix_queries:
            return None
        return int(self.loaded_tokens.sum()) / self.prefix_queries

    @property
    def prefix_hit_rate(self) -> float | None:
        """Hits by queries; None where nothing was looked up."""
        return self.prefix_hits / self.prefix_queries if self.prefix_queries else None


def outcome_of(
    workload: Workload, ledger: Ledger, engines: Engines, pace: NDArray[np.float64] | float
) -> Outcome:
    """The outcome, so far, of the requests of a run."""
    finish_s = engines.requests["finish_s"]
    ended, parts = finish_s[np.isfinite(finish_s)], range(0, max(len(finish_s), 1), ROWS)
    to_client_s = np.concatenate([clients_s(ledger, slice(at, at + ROWS)) for at in parts])
    # Copies: a view would keep the run's whole records for as long as its outcome is remembered.
    return Outcome(
        workload=workload,
        arrival_s=np.where(np.isinf(ledger.requests["arrival_s"]), np.nan, ledger.requests["arrival_s"]),
        ttft_target_s=ledger.requests["ttft_s"].copy(),
        tpot_target_s=engines.requests["tpot_s"] * pace,
        worker=ledger.requests["worker"].copy(),
        first_token_s=ledger.requests["first_s"] + to_client_s,
        engine_s=ledger.requests["first_s"] + ledger.requests["lag_s"] - engines.requests["placed_s"],
        finish_s=finish_s + to_client_s,
        preemptions=engines.requests["preemptions"].copy(),
        migrations=engines.requests["migrations"].copy(),
        busy_s=engines.workers["busy_s"],
        end_s=float(ended.max()) if len(ended) else 0.0,
        complete=not np.isnan(finish_s).any(),
        misses=float(engines.total["misses"][0]),
        cached_tokens=ledger.caches.requests["cached"].copy() if ledger.caches.tokens else None,
        loaded_tokens=engines.host.requests["tokens"].copy() if engines.host.chunks.tokens else None,
        pace=pace,
    )
