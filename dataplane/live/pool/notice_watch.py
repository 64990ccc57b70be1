"""Notices that machines go away order the evacuation of the workers on them.

They are those of the fleet's cloud (engine_api/notices.py) and of Ray, which says which nodes it drains.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable

from controlplane.errors import BadInput
from controlplane.types import WorkerId
from dataplane.live.engine_api.notices import GIVEN_S
from dataplane.live.pool.pool import WorkerPool

log = logging.getLogger(__name__)
LOOK_S, LEAST_S = 2.0, 1.0


class NoticeWatch:
    """Looks for notices, and evacuates the workers that they are about, each once."""

    def __init__(self, pool: WorkerPool, source: str | None, clock: Callable[[], float] = time.time) -> None:
        self._pool, self._source, self._clock = pool, source, clock
        self._seen: set[WorkerId] = set()
        self._fault = ""

    async def run(self) -> None:
        """Look until cancelled."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_S)

    async def look(self) -> None:
        """Evacuate every worker that has a notice now; record an event where it cannot be evacuated."""
        try:
            notices = await self._pool.host.notices(self._source)
        except (OSError, BadInput, RuntimeError) as error:
            if str(error) != self._fault:  # once, not every two seconds
                log.warning("interruption notices cannot be read: %s", error)
            self._fault = str(error)
            return
        self._fault = ""
        serving = {m.worker for m in self._pool.members() if m.state == "serving"}
        news = {w: n for w, n in notices.items() if w in serving and w not in self._seen}
        self._seen = (self._seen | news.keys()) & notices.keys()
        for worker, notice in news.items():
            at_s = notice.at_s
            left_s = max(GIVEN_S if at_s is None else at_s - self._clock(), LEAST_S)
            try:
                if not serving - notices.keys() - self._seen:
                    raise BadInput("the machines of all workers go away, so its requests have nowhere to go")
                self._pool.evacuate([worker], left_s, notice.why)
            except BadInput as error:
                said = f"{notice.why} ({left_s:.0f} s left). It is not evacuated: {error}"
                self._pool.events.record(time.time(), "notice", said, worker=worker)
