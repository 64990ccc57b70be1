"""A request from its arrival to its last token, as the ledger, the queue and the history know it.

The token list here is the truth; what engines hold is replaceable.

vLLM's server stands between the ASGI middleware and FleetCore, and passes neither Tokenfleet's headers down
nor its refusals up. A `Ticket` in a context variable does: the handler of a request runs in the context that
its middleware set.
"""

from __future__ import annotations

import asyncio
from array import array
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from copy import copy
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from controlplane.types import RequestId, Slo, WorkerId
from dataplane.live.engine_api.link import PRIOR_TOKENS

if TYPE_CHECKING:
    from dataplane.live.engine_api.messages import EngineRequest


STAYS_OF_A_CORE = 1 << 20
# Headers of a request, by llm-d's name and an older one; the first that is there holds.
TTFT_HEADERS = ("x-llm-d-slo-ttft-ms", "x-slo-ttft-ms")
TPOT_HEADERS = ("x-llm-d-slo-tpot-ms", "x-slo-tpot-ms")
CLASS_HEADER = "x-slo-class"
# An objective of Kubernetes. It names a class where we have one of that name.
OBJECTIVE_HEADERS = ("x-llm-d-inference-objective", "x-gateway-inference-objective")


@dataclass(slots=True, eq=False)
class Tracked:
    """One request from arrival to its last token. Times are seconds of the gateway's monotonic clock.

    `stays` counts segments begun: the id of the present one is `segment`, empty while none is. `begun_s`:
    when the first one was sent to its worker. `cut` is the future of a cut-over whose first token has not
    come. `fruitless` counts segments in a row that ended without a token. `weights` are those that made its
    tokens; no others may go on with it. `ties`: whether it is fixed in its place, and who else had it cached;
    None after each change of place. `kept_tpot_s`: the TPOT target that placement keeps, once it has looked
    at the request.
    """

    request: EngineRequest
    ticket: Ticket
    arrival_s: float
    predicted_tokens: int
    output_token_ids: list[int] = field(default_factory=list)
    stays: int = 0
    segment: str = ""
    worker: WorkerId | None = None
    begun_s: float | None = None
    first_token_s: float | None = None
    last_token_s: float | None = None
    cut: asyncio.Future[bool] | None = None
    moves: int = 0
    replays: int = 0
    fruitless: int = 0
    weights: str = ""
    ties: tuple[bool, dict[WorkerId, int]] | None = None
    kept_tpot_s: float | None = None

    @property
    def id(self) -> RequestId:
        return RequestId(self.request.request_id)

    @property
    def slo(self) -> Slo:
        return self.ticket.slo

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_token_ids or ())

    @property
    def context_tokens(self) -> int:
        return self.prompt_tokens + len(self.output_token_ids)

    @property
    def state(self) -> str:
        """waiting (no worker yet), prefilling, or decoding."""
        if self.worker is None:
            return "waiting"
        return "decoding" if self.output_token_ids else "prefilling"

    @property
    def has_outlived(self) -> bool:
        """Whether the output is longer than predicted and may still grow."""
        params = self.request.sampling_params
        most = None if params is None else params.max_tokens
        output_tokens = len(self.output_token_ids)
        return output_tokens >= self.predicted_tokens and (most is None or output_tokens < most)

    def expect(self, tokens: int) -> None:
        """Take another prediction; what the client allows is still the most."""
        params = self.request.sampling_params
        most = None if params is None else params.max_tokens
        self.predicted_tokens = tokens if most is None else min(tokens, int(most))

    def next_segment(self) -> str:
        """Begin a new segment id: the request's own for the first stay, then `#1`, `#2`, …"""
        self.segment = self.id if self.stays == 0 else f"{self.id}#{self.stays}"
        self.stays += 1
        return self.segment

    def resume(self, tokens: Sequence[int], first_s: float | None, now_s: float, core: int) -> None:
        """Go on from these tokens, which an earlier core has passed on; no segment is named as one of its."""
        self.output_token_ids.extend(tokens)
        self.first_token_s, self.stays = first_s, core * STAYS_OF_A_CORE
        self.last_token_s = now_s if tokens else None

    def settle_cut(self, arrived: bool) -> None:
        """Resolve the cut-over that is under way."""
        if self.cut is not None:
            if not self.cut.done():
                self.cut.set_result(arrived)
            self.cut = None

    def ttft_s(self) -> float | None:
        """Arrival to first token, queueing included."""
        return None if self.first_token_s is None else self.first_token_s - self.arrival_s

    def tpot_s(self) -> float | None:
        """Mean time of an output token after the first; None for fewer than two."""
        if self.first_token_s is None or self.last_token_s is None or len(self.output_token_ids) < 2:
            return None
        return (self.last_token_s - self.first_token_s) / (len(self.output_token_ids) - 1)

    def slo_met(self) -> tuple[bool, bool]:
        """Whether TTFT and TPOT were within target; a one-token output is judged by TTFT alone."""
        ttft, tpot = self.ttft_s(), self.tpot_s()
        return ttft is not None and ttft <= self.slo.ttft_s, tpot is None or tpot <= self.slo.tpot_s

    def waited_s(self, now_s: float) -> float:
        """TTFT; until there is one, the time since arrival."""
        ttft_s = self.ttft_s()
        return now_s - self.arrival_s if ttft_s is None else ttft_s

    def is_judged(self, outcome: str, now_s: float) -> bool:
        """Whether the request counts in attainment: finished, or given up by its client beyond a target."""
        is_late = self.waited_s(now_s) > self.slo.ttft_s or not self.slo_met()[1]
        return outcome == "finished" or (outcome == "aborted" and is_late)


@dataclass(frozen=True, slots=True)
class Rejection:
    """The request was turned away before any token; the client may try again."""

    reason: str
    retry_after_s: int


@dataclass(slots=True)
class Ticket:
    """One HTTP request. The first five, `session`, `slo_class` and `traceparent` come with it.

    The fleet writes the rest.

    `sent_s`: when it came to the door, on this machine's monotonic clock; None once a part has taken that as
    its arrival. `worker`: where the request (or its first part) was first placed. `failure`: why a stream
    that had begun could not be finished. `client_left`: the client went away before its answer was complete
    (`answered`). `requests`: the parts that have not ended.
    """

    id: str
    key: str
    slo: Slo
    priority: int
    sent_s: float | None = None
    worker: WorkerId | None = None
    rejection: Rejection | None = None
    failure: str | None = None
    client_left: bool = False
    answered: bool = False
    session: str = ""
    slo_class: str = ""  # where it is of one
    traceparent: str = ""  # the client's, as the W3C's trace context has it
    requests: list[RequestId] = field(default_factory=list)

    def take_arrival_s(self, now_s: float) -> float:
        """When the HTTP request came to the door; of parts that are begun later, now."""
        sent_s, self.sent_s = self.sent_s, None
        return now_s if sent_s is None else min(sent_s, now_s)


def expected_tokens(request: EngineRequest, predict: Callable[[int, int], int]) -> int:
    """The output tokens to expect of a request, within what its client allows."""
    expected = predict(len(request.prompt_token_ids or ()), 0)
    params = request.sampling_params
    if params is None or params.max_tokens is None:
        return expected
    return int(params.max_tokens) if params.ignore_eos else min(expected, int(params.max_tokens))


CURRENT_TICKET: ContextVar[Ticket | None] = ContextVar("current_ticket", default=None)


def tracked_from(
    request: EngineRequest, default_slo: Slo, predict: Callable[[int, int], int], now_s: float
) -> Tracked:
    """The request with its HTTP request's ticket, its priority for the engine, and its expected output."""
    ticket = CURRENT_TICKET.get() or Ticket("", "anyone", default_slo, 0)
    request.priority = -ticket.priority  # vLLM: lower goes first
    _strip_reserved(request)
    return Tracked(request, ticket, ticket.take_arrival_s(now_s), expected_tokens(request, predict))


def _strip_reserved(request: EngineRequest) -> None:
    """Drop what only the fleet may say to an engine; clients reach `extra_args` through `vllm_xargs`."""
    params = request.sampling_params
    if params is not None and params.extra_args:
        allowed = {
            k: v for k, v in params.extra_args.items() if k not in (PRIOR_TOKENS, "kv_transfer_params")
        }
        params.extra_args = allowed or None


@dataclass(frozen=True, slots=True)
class Ended:
    """What a request has left behind: itself with all its tokens as its prompt, and the ids of its blocks."""

    request: EngineRequest
    tokens: array[int]
    ids: NDArray[np.int64]

    @classmethod
    def of(cls, tracked: Tracked, ids: NDArray[np.int64]) -> Ended:
        """What a request leaves whose blocks have these ids."""
        template = copy(tracked.request)
        template.prompt_token_ids = []
        prompt = tracked.request.prompt_token_ids or []
        return cls(template, array("q", [*prompt, *tracked.output_token_ids]), ids)

    def as_request(self) -> EngineRequest:
        """A request for that text, with all that enters the hashes of its blocks."""
        text = copy(self.request)
        text.prompt_token_ids = list(self.tokens)
        return text


class Texts:
    """The texts that ended last, `most` tokens of them; of a conversation the last turn alone."""

    def __init__(self) -> None:
        self._by_tail: OrderedDict[int, Ended] = OrderedDict()
        self._tokens = self.most = 0

    def __iter__(self) -> Iterator[Ended]:
        """The latest first."""
        return reversed(self._by_tail.values())

    def add(self, ended: Ended) -> None:
        for tail in ended.ids.tolist():
            self._drop(self._by_tail.pop(tail, None))
        self._by_tail[int(ended.ids[-1])] = ended
        self._tokens += len(ended.tokens)
        while self._tokens > self.most:
            self._drop(self._by_tail.popitem(last=False)[1])

    def _drop(self, ended: Ended | None) -> None:
        self._tokens -= 0 if ended is None else len(ended.tokens)
