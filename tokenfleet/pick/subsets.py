"""Placement among the servers that the gateway allows a request, and the steps of their engines."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from controlplane.types import RequestId, WorkerId
from dataplane.live.ledger.placement import Placement
from dataplane.live.ledger.request import Tracked
from tokenfleet.pick.call import Call

GATHER_S, QUIET_S = 0.010, 0.002  # a step's pieces: from the first to the last, and between two


@dataclass(slots=True)
class _PassedStep:
    """Pieces of one step that have passed, until `over_s`: when the first did, and each call's tokens."""

    first_s: float
    over_s: float = 0.0
    tokens: dict[Call, int] = field(default_factory=dict)


class SubsetPlacement(Placement):
    """The placement, which bars for each request those servers that its gateway does not allow."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._allowed: dict[RequestId, frozenset[str]] = {}
        self._passed: defaultdict[WorkerId, list[_PassedStep]] = defaultdict(list)  # not counted yet

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

    def passed(self, server: WorkerId, call: Call, tokens: int, now_s: float) -> bool:
        """Tokens of an answer have passed; whether they begin a step."""
        steps = self._passed[server]
        if begins := not steps or steps[-1].over_s <= now_s:
            steps.append(_PassedStep(now_s))
        step = steps[-1]
        step.over_s = min(step.first_s + GATHER_S, now_s + QUIET_S)
        step.tokens[call] = step.tokens.get(call, 0) + tokens
        return begins

    def count(self, server: WorkerId, until_s: float) -> bool:
        """Count a server's steps; whether there were any. Those in a row that only decode count at once."""
        steps, alike, at_s = self._passed[server], 0, math.nan
        tokens: Counter[Tracked] = Counter()
        while steps and steps[0].over_s <= until_s:
            step = steps.pop(0)
            got = {call.tracked: n for call, n in step.tokens.items() if call.tracked and not call.is_over}
            prefills = self.ledger.workers[self.worker_rows[server]]["queued"] > 0
            if prefills or not all(map(self.is_decoding, got)):
                self.add_tokens(server, tokens, at_s, alike)
                tokens, alike = Counter(), 0
            tokens.update(got)
            alike, at_s = alike + bool(got), step.first_s + GATHER_S
        self.add_tokens(server, tokens, at_s, alike)
        return not math.isnan(at_s)

    def add_tokens(self, server: WorkerId, got: Mapping[Tracked, int], now_s: float, steps: int = 1) -> None:
        """Count tokens for these requests. The picker does not know which tokens."""
        if got and self.advance(server, list(got.items()), now_s, steps=steps):
            for tracked, tokens in got.items():
                tracked.output_token_ids.extend([0] * tokens)
            self.begin_step(server, now_s)
