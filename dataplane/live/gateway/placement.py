"""Placement as the gateway calls it: choose a worker by the gateway's own live counts.

Every change is counted here (a request put on a worker, its tokens, its end), so ten requests that arrive
between two telemetry messages are spread over the workers. `LeastLoaded` needs no profile; `LedgerPlacement`
(ledger_placement.py) asks the control plane.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from controlplane.types import WorkerId
from dataplane.live.engine_api.link import WorkerInfo
from dataplane.live.gateway.request import Tracked


class Placement(Protocol):
    """The gateway's account of the fleet, and the choice made from it.

    `refusals`: how many waiting requests may find no place before the others are left for the next look.
    """

    @property
    def refusals(self) -> int: ...

    def attach(self, info: WorkerInfo, kind: str) -> None:
        """A worker of a kind takes requests from now on."""

    def detach(self, worker: WorkerId) -> None:
        """A worker is gone; its requests must be put elsewhere or ended."""

    def set_open(self, worker: WorkerId, is_open: bool) -> None:
        """Whether new requests may go to a worker (a draining one is closed)."""

    def choose(self, request: Tracked, now_s: float, exclude: Collection[WorkerId] = ()) -> WorkerId | None:
        """The worker for a request, or None when it had better wait."""

    def put(self, request: Tracked, worker: WorkerId, has_kv: bool) -> None:
        """A request is on a worker (again); `has_kv` when it brings its KV and needs no prefill there."""

    def advance(self, worker: WorkerId, got: Sequence[tuple[Tracked, int]], now_s: float) -> None:
        """A worker's step made tokens: (request, how many), before they join the requests' own lists."""

    def take(self, request: Tracked) -> None:
        """A request is on no worker any more."""

    def forget(self, request: Tracked) -> None:
        """A request is over."""


@dataclass(slots=True)
class Charge:
    """One worker's load by the gateway's count: requests, and tokens they hold or are expected to hold."""

    info: WorkerInfo
    requests: int = 0
    expected_tokens: int = 0
    open: bool = True

    @property
    def capacity_tokens(self) -> int:
        return self.info.kv_blocks * self.info.block_tokens

    def fits(self, tokens: int) -> bool:
        return (
            self.open
            and self.requests < self.info.max_seqs
            and (self.requests == 0 or self.expected_tokens + tokens <= self.capacity_tokens)
        )


class LeastLoaded:
    """The open worker with room and the smallest share of its KV promised; SLOs play no part."""

    refusals = 1  # nobody overtakes: a large request would wait for ever

    def __init__(self) -> None:
        self._charges: dict[WorkerId, Charge] = {}
        self._shares: dict[str, tuple[WorkerId, int]] = {}

    def attach(self, info: WorkerInfo, kind: str) -> None:
        self._charges[info.worker] = Charge(info)

    def detach(self, worker: WorkerId) -> None:
        self._charges.pop(worker, None)

    def set_open(self, worker: WorkerId, is_open: bool) -> None:
        self._charges[worker].open = is_open

    def choose(self, request: Tracked, now_s: float, exclude: Collection[WorkerId] = ()) -> WorkerId | None:
        tokens = _expected_tokens(request)
        fitting = [
            (charge.expected_tokens / charge.capacity_tokens, charge.requests, worker)
            for worker, charge in self._charges.items()
            if worker not in exclude and charge.fits(tokens)
        ]
        return min(fitting)[2] if fitting else None

    def put(self, request: Tracked, worker: WorkerId, has_kv: bool) -> None:
        self.take(request)
        charge = self._charges[worker]
        tokens = _expected_tokens(request)
        charge.requests += 1
        charge.expected_tokens += tokens
        self._shares[request.id] = (worker, tokens)

    def advance(self, worker: WorkerId, got: Sequence[tuple[Tracked, int]], now_s: float) -> None:
        """Nothing to do: promises were counted when they were made."""

    def take(self, request: Tracked) -> None:
        share = self._shares.pop(request.id, None)
        charge = None if share is None else self._charges.get(share[0])
        if share is not None and charge is not None:
            charge.requests -= 1
            charge.expected_tokens -= share[1]

    def forget(self, request: Tracked) -> None:
        self.take(request)


def _expected_tokens(request: Tracked) -> int:
    return request.prompt_tokens + max(request.predicted_tokens, len(request.output_token_ids) + 1)
