"""Messages to the migration connector, carried in vLLM's public `kv_transfer_params`.

A move needs four messages to an engine:

- *begin* at the source: an abort of this segment keeps its KV blocks (a *hold*) until they are released.
- *load* at the target: take the KV of positions [0, tokens) of the source's segment instead of computing it.
- *hold* on a loader: keep its blocks when it finishes, until a later request *drops* it.
- *release* at the source: free the blocks that are held.

Begin and release travel on a request that is aborted on arrival (`EngineRequest.abort_immediately`), the
only message from vLLM's front end to its scheduler's connector. A begin is answered by an output for its own
segment id, finished by ABORT if the lease is taken and by ERROR if there is no such segment. The source's
segment must not be ended before that answer, since an engine takes aborts ahead of other messages. A held
loader is answered by STOP once its KV has arrived, with the tokens that were taken; it is not computed. What
its engine had cached is not taken: where that is all, a token of the loader is computed, and LENGTH answers.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import msgspec

if TYPE_CHECKING:
    from dataplane.live.engine_api.messages import EngineRequest, SegmentOutput

VLLM_KEY = "kv_transfer_params"  # in Sampling.extra_args, where vLLM looks for it
PARAMS_KEY = "tokenfleet"
LOADER_PREFIX = "move-"  # segment ids of loaders and control messages; never a client's
Verb = Literal["begin", "release"]


@dataclass(frozen=True, slots=True)
class CopyRate:
    """How fast a copy may go; the default is as fast as it can.

    At most `bytes_per_s` (0: no bound), and at work for at most `share` of the time in each process that
    copies, but never slower than `least_bytes_per_s`, for it must end.
    """

    bytes_per_s: float = 0.0
    share: float = 1.0
    least_bytes_per_s: float = 0.0

    @property
    def fixed_bytes_per_s(self) -> float:
        """The rate that follows where no time is counted; 0 for no bound."""
        return max(self.bytes_per_s, self.least_bytes_per_s) if self.bytes_per_s > 0 else 0.0


UNBOUND = CopyRate()


@dataclass(frozen=True, slots=True)
class KvLoad:
    """Take KV of positions [0, tokens) of `segment` from the rank servers at `addresses`.

    `inline`: load inside the step that admits the request (short tails), not between steps. `pace` is for
    loads between steps. `stream`: the source is still computing them; they come piece by piece.
    `secret`: what the servers ask of readers.
    """

    addresses: tuple[str, ...]
    segment: str
    tokens: int
    inline: bool = False
    pace: CopyRate = UNBOUND
    stream: bool = False
    secret: str = field(default="", repr=False)


class Transfer(msgspec.Struct, frozen=True, tag="transfer", omit_defaults=True):
    """What a segment asks of the connector when it is admitted, and when it ends."""

    load: KvLoad | None = None
    hold: bool = False
    drop: tuple[str, ...] = ()


class Control(msgspec.Struct, frozen=True, tag="control"):
    """A message to the connector about another segment."""

    verb: Verb
    segment: str


class KvParams(msgspec.Struct, frozen=True):
    """A request's `kv_transfer_params` as far as they are ours; an empty Transfer where nothing is."""

    tokenfleet: Transfer | Control = Transfer()


def params_from(message: Transfer | Control) -> dict[str, Any]:
    """The `kv_transfer_params` that carry a message."""
    return {PARAMS_KEY: msgspec.to_builtins(message)}


def message_from(params: dict[str, Any] | None) -> Transfer | Control:
    """The message in a request's `kv_transfer_params`; an empty Transfer where there is none."""
    return msgspec.convert(params or {}, KvParams).tokenfleet


def told_of_load(tokens: int) -> dict[str, Any]:
    """What the answer to a loader carries: the tokens that were taken from the source."""
    return {PARAMS_KEY: {"loaded": tokens}}


def loaded_tokens(answer: SegmentOutput) -> int | None:
    """The tokens that a loader took from the source; None where its engine does not say."""
    told: int | None = (answer.kv_transfer_params or {}).get(PARAMS_KEY, {}).get("loaded")
    return told


def message_of(request: EngineRequest) -> Transfer | Control:
    """The message that a request carries to its engine."""
    params = request.sampling_params
    extra = {} if params is None else params.extra_args or {}
    return message_from(extra.get(VLLM_KEY))
