"""The nouns of the system: what crosses from one package to another.

Everything here is frozen and holds plain numbers. Units are in the names: `_s` seconds, `_tokens`,
`_blocks`, `_rps` requests per second, `_usd_per_h`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, NewType

from controlplane.errors import BadInput

WorkerId = NewType("WorkerId", str)
RequestId = NewType("RequestId", str)
ABOVE_0 = {"above": 0}  # metadata of a field whose number is more than 0


@dataclass(frozen=True, slots=True)
class Slo:
    """A latency target, met by a request when both of its figures are within it.

    `ttft_s` counts from arrival, queueing included. `tpot_s` is (finish - first token) /
    (output_tokens - 1), the paper's ATGT; a one-token output has none and is judged by TTFT alone.
    """

    ttft_s: float
    tpot_s: float

    def __post_init__(self) -> None:
        for name, value in (("ttft", self.ttft_s), ("tpot", self.tpot_s)):
            if not 0 < value < float("inf"):
                raise BadInput(f"slo: {name}: must be a positive duration, got {value:g} s")


PLAIN_CLASS = "default"  # of requests that name none


@dataclass(frozen=True, slots=True)
class SloClass:
    """A class of requests with targets of its own, and `attainment`: the share that should meet them.

    `deadline_s`: set where whole answers are due; `slo` then has the targets that keep to it.
    `traffic_share`: the share of all requests that a plan gives it; None: that of the trace.
    """

    name: str
    slo: Slo
    attainment: float
    deadline_s: float | None = None
    traffic_share: float | None = None


@dataclass(frozen=True, slots=True)
class ClassArrivals:
    """Requests of one SLO class, and their tokens summed; of outputs, what is expected of them."""

    slo: Slo
    requests: float
    prompt_tokens: float
    output_tokens: float

    def __post_init__(self) -> None:
        if min(self.requests, self.prompt_tokens, self.output_tokens) < 0:
            raise BadInput(f"arrivals: requests and tokens must not be negative, got {self}")

    @property
    def mean_prompt_tokens(self) -> float:
        return self.prompt_tokens / self.requests if self.requests else 0.0

    @property
    def mean_output_tokens(self) -> float:
        return self.output_tokens / self.requests if self.requests else 0.0


@dataclass(frozen=True, slots=True)
class ClassOutcomes:
    """Requests of one SLO class that have ended since a plane began: counters, which only grow.

    `ended`: finished, or turned away by a full queue; those that clients gave up, or that failed, are left
    out. `ttft_met`, `tpot_met`, `met`: within TTFT, within TPOT, within both; turned away is none of them.
    """

    slo: Slo
    ended: int
    ttft_met: int
    tpot_met: int
    met: int


Role = Literal["any", "prefill", "decode"]  # of a worker; the latter two hand over and take over requests


class EngineMode(StrEnum):
    """The way in which an engine forms its batches (docs of each mode: dataplane/simulated/step.py)."""

    CHUNKED = "chunked"  # vLLM V1: decode tokens and prefill chunks share a step
    PREFILL_FIRST = "prefill-first"  # legacy vLLM, the paper's: a step is prefill or decode
    SPLIT = "split"  # prefill workers hand their KV to decode workers
