"""Placement among the servers that the gateway allows a request."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from controlplane.types import RequestId, WorkerId
from dataplane.live.ledger.placement import Placement
from dataplane.live.ledger.request import Tracked


class SubsetPlacement(Placement):
    """The placement, which bars for each request those servers that its gateway does not allow."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._allowed: dict[RequestId, frozenset[str]] = {}

    def allow(self, request: RequestId, servers: frozenset[str] | None) -> None:
        """Let a request go to these servers alone; None: to all."""
        if servers is None:
            self._allowed.pop(request, None)
        else:
            self._allowed[request] = servers

    def load(self, server: WorkerId) -> int:
        """The requests that the ledger has on a server."""
        row = self.ledger.workers[self.worker_rows[server]]
        return int(row["decoding"] + row["queued"])

    def _barred(self, request: Tracked, exclude: Collection[WorkerId]) -> set[int]:
        barred, allowed = super()._barred(request, exclude), self._allowed.get(request.id)
        if allowed is None:
            return barred
        return barred | {row for name, row in self.worker_rows.items() if name not in allowed}
