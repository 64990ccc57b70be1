"""A workload: requests as columns, in order of arrival."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import DTypeLike, NDArray

from controlplane.errors import BadInput
from controlplane.prefixes import Prefixes, Sessions

INSTANT_S = 1e-9
LONGEST_S = 1e9  # 31 years; much later, the milliseconds of a step are lost in rounding
LONGEST_TOKENS = 2**30


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival; every column has shape [requests].

    `arrival_s` seconds since the workload's start, `prompt_tokens` and `output_tokens` at least 1, `priority`
    0 normal or 1 high, `slo_class` an index into `slo_classes`. `prefixes`: what the requests share, None
    where it is not known. `sessions`: what they wait for, None where all come at their times. Whole numbers
    are int64, or as narrow as they were given: a long trace takes less memory. `weight` of a sample: how many
    requests of the whole each stands for, 0 for one that only runs along with others. None: each stands for
    itself.
    """

    arrival_s: NDArray[np.float64]
    prompt_tokens: NDArray[np.int64]
    output_tokens: NDArray[np.int64]
    priority: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    slo_class: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    slo_classes: tuple[str, ...] = ("default",)
    prefixes: Prefixes | None = None
    sessions: Sessions | None = None
    weight: NDArray[np.float64] | None = None

    def __post_init__(self) -> None:
        n = len(self.arrival_s)
        for name in ("priority", "slo_class"):
            if len(getattr(self, name)) == 0:
                object.__setattr__(self, name, np.zeros(n, np.int8))
        for name, kind in (
            ("arrival_s", np.float64),
            ("prompt_tokens", np.int64),
            ("output_tokens", np.int64),
            ("priority", np.int64),
            ("slo_class", np.int64),
        ):
            column = np.ascontiguousarray(getattr(self, name), dtype=_kept(getattr(self, name), kind))
            if column.shape != (n,):
                raise BadInput(f"workload: {name}: {column.shape[0]} rows, arrival_s has {n}")
            object.__setattr__(self, name, column)
        beside = (("prefixes", self.prefixes), ("sessions", self.sessions), ("weight", self.weight))
        for name, rows in beside:
            if rows is not None and len(rows) != n:
                raise BadInput(f"workload: {name}: {len(rows)} rows, arrival_s has {n}")
        if n == 0:
            return
        if not np.isfinite(self.arrival_s).all() or self.arrival_s[0] < 0:
            raise BadInput("workload: arrival_s: must be finite and not negative")
        if self.arrival_s.max() > LONGEST_S:
            raise BadInput(
                f"workload: arrival_s: at most {LONGEST_S:g} s (31 years), got {self.arrival_s.max():g};"
                " are they in another unit?"
            )
        if (np.diff(self.arrival_s) < 0).any():
            raise BadInput("workload: arrival_s: must be in order")
        if self.prompt_tokens.min() < 1 or self.output_tokens.min() < 1:
            raise BadInput("workload: prompt_tokens and output_tokens must be at least 1")

    def __len__(self) -> int:
        return len(self.arrival_s)

    @property
    def requests(self) -> float:
        """How many requests it tells of: all that it has, or of a sample's whole."""
        return float(len(self)) if self.weight is None else float(self.weight.sum())

    @property
    def duration_s(self) -> float:
        """Time from the first arrival to the last."""
        return float(self.arrival_s[-1] - self.arrival_s[0]) if len(self) else 0.0

    @cached_property
    def ideal_hits(self) -> NDArray[np.int64]:
        """Tokens of each prompt that a request before it had, too: what endless caches would not compute."""
        if self.prefixes is None:
            return np.zeros(len(self), np.int64)
        return np.minimum(self.prefixes.seen_before() * self.prefixes.block_tokens, self.prompt_tokens - 1)

    @property
    def rate_rps(self) -> float:
        """Mean arrival rate; 0 where all arrive within an instant, which is no duration to divide by."""
        return (len(self) - 1) / self.duration_s if self.duration_s > INSTANT_S else 0.0

    def scaled(self, rate_scale: float) -> Workload:
        """The same requests arriving `rate_scale` times as fast; think times in sessions do not change."""
        if not rate_scale > 0:
            raise BadInput(f"rate scale: must be positive, got {rate_scale:g}")
        return replace(self, arrival_s=self.arrival_s / rate_scale)

    def longer(self, prompt_scale: float, output_scale: float) -> Workload:
        """The same arrivals with prompts and outputs scaled in length, at least one token each.

        What requests share grows as prompts do.
        """
        if prompt_scale == output_scale == 1.0:
            return self
        return replace(
            self,
            prompt_tokens=_times(self.prompt_tokens, prompt_scale),
            output_tokens=_times(self.output_tokens, output_scale),
            prefixes=None if self.prefixes is None else self.prefixes.stretched(prompt_scale),
        )

    def window(self, start_s: float, end_s: float) -> Workload:
        """Requests that arrive in [start_s, end_s), with time restarting at `start_s`."""
        lo, hi = np.searchsorted(self.arrival_s, [start_s, end_s])
        part = self.take(slice(int(lo), int(hi)))
        return replace(part, arrival_s=part.arrival_s - start_s)

    def take(self, rows: slice | NDArray[np.bool_] | NDArray[np.int64]) -> Workload:
        """Some of the requests, in their order, times unchanged."""
        shared = self.prefixes is not None or self.sessions is not None
        which = np.arange(len(self))[rows] if shared else np.zeros(0, np.int64)
        return replace(
            self,
            arrival_s=self.arrival_s[rows],
            prompt_tokens=self.prompt_tokens[rows],
            output_tokens=self.output_tokens[rows],
            priority=self.priority[rows],
            slo_class=self.slo_class[rows],
            prefixes=None if self.prefixes is None else self.prefixes.pick(which),
            sessions=None if self.sessions is None else self.sessions.pick(which),
            weight=None if self.weight is None else self.weight[rows],
        )

    def thinned(self, most: int) -> Workload:
        """At most `most` of the requests, each standing for its neighbours; itself where it has no more."""
        every = -(-len(self) // most)
        if every <= 1:
            return self
        part = self.take(slice(None, None, every))
        return replace(part, weight=np.full(len(part), len(self) / len(part)))


def _kept(column: NDArray[np.generic], kind: type[np.generic]) -> DTypeLike:
    """The type of a column: where it is of whole numbers, the one that it has."""
    of = getattr(column, "dtype", kind)
    return of if kind is np.int64 and np.issubdtype(of, np.signedinteger) else kind


def _times(tokens: NDArray[np.int64], scale: float) -> NDArray[np.int64]:
    # Beyond any context the length does not matter, but it must stay a number that fits.
    return np.asarray(np.clip(np.rint(tokens * scale), 1, LONGEST_TOKENS), tokens.dtype)
