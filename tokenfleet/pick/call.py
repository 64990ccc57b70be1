"""`Call`: a request that a picker has been asked for, until its end, and its form in the ledger."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from controlplane.types import Slo, WorkerId
from dataplane.live.engine_api.messages import Adapter, EngineRequest, Sampling
from dataplane.live.ledger.request import Tracked
from tokenfleet.pick.asked import AskedBody


class Asker:
    """Gets the choice. This one does nothing with it."""

    def picked(self, addresses: Sequence[str]) -> None:
        """The server is chosen, and those to try after it."""

    def refused(self, status: int, why: str, reason: str, retry_after_s: int | None = None) -> None:
        """No server gets it."""


@dataclass(slots=True, eq=False)
class Call:
    """A request, from its headers to its end.

    `allowed`: the addresses that the gateway lets it go to; None for all. `may_wait`: whether it can be held
    back. `is_streamed`: whether its tokens pass here one by one. `estimated`: bytes of a prompt whose length
    is a guess. `is_generation`: others are placed, and leave no row. `placed_s`: when it got its server, by
    the picker's clock. `is_answered`: whether an answer has begun. `prompt_tokens` and `output_tokens`: as
    the server counted them, in the end.
    """

    asker: Asker
    slo: Slo
    slo_class: str
    tenant: str
    allowed: frozenset[str] | None = None
    may_wait: bool = True
    is_streamed: bool = True
    estimated: int = 0
    is_generation: bool = True
    tracked: Tracked | None = None
    placed_s: float = 0.0
    is_answered: bool = False
    is_over: bool = False
    prompt_tokens: int | None = None
    output_tokens: int | None = None

    @property
    def worker(self) -> WorkerId | None:
        """The server that has it."""
        return None if self.tracked is None else self.tracked.worker


def request_of(
    call: Call, asked: AskedBody, ids: Sequence[int], adapter: str | None, number: int
) -> EngineRequest:
    """The request in the engines' form. Where its tokens are not known its blocks are like no other's."""
    call.is_generation = asked.is_generation
    is_text = call.estimated == 0 and not asked.has_media
    return EngineRequest(
        request_id=f"pick-{number}",
        prompt_token_ids=list(ids),
        mm_features=None if is_text else [None],
        sampling_params=Sampling(max_tokens=asked.most_tokens, ignore_eos=asked.ignores_eos),
        pooling_params=None,
        arrival_time=0.0,
        lora_request=None if adapter is None else Adapter(adapter, 0),
        cache_salt=asked.salt,
        data_parallel_rank=None,
    )
