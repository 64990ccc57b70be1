"""The emulated host: workers that are emulated engines in this process, timed by a profile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping

from controlplane.perfmodel.profile import Profile
from controlplane.types import WorkerId
from dataplane.live.emulated.engine import EmulatedEngine, Fabric
from dataplane.live.emulated.segment import Noise
from dataplane.live.engine_api.link import EngineLink
from dataplane.live.engine_api.notices import Notice, read_notice
from dataplane.live.pool.member import Adopted, Revision


class EmulatedHost:
    """Launches emulated engines, each kind by its profile, joined by one fabric; each takes `start_s`."""

    def __init__(
        self, profiles: Mapping[str, Profile], max_model_len: int, noise: Noise, start_s: float = 0.0
    ) -> None:
        self._start_s = start_s
        self._profiles, self._max_model_len, self._noise = profiles, max_model_len, noise
        self.fabric = Fabric()
        self._engines: dict[WorkerId, EmulatedEngine] = {}

    async def launch(
        self, worker: WorkerId, kind: str, revision: Revision, say: Callable[[str], None]
    ) -> EngineLink:
        await asyncio.sleep(self._start_s)
        engine = EmulatedEngine(
            worker,
            self._profiles[kind],
            self.fabric,
            model=revision.model,
            max_model_len=self._max_model_len,
            noise=self._noise,
        )
        self._engines[worker] = engine
        return engine

    def room(self, kind: str) -> str | None:
        return None

    async def stop(self, worker: WorkerId) -> None:
        engine = self._engines.pop(worker, None)
        if engine is not None:
            await engine.close()

    async def is_healthy(self, worker: WorkerId) -> bool:
        engine = self._engines.get(worker)
        return engine is None or not engine.is_lost

    async def notices(self, source: str | None) -> Mapping[WorkerId, Notice]:
        if source is None:
            return {}
        found = {w: await asyncio.to_thread(read_notice, source, w) for w in tuple(self._engines)}
        return {worker: notice for worker, notice in found.items() if notice is not None}

    async def leave_node(self, address: str, seconds: float) -> None:
        """Emulated engines are on no node."""

    async def adopt(self, workers: Collection[WorkerId]) -> Mapping[WorkerId, Adopted]:
        """None: emulated engines are in their core's process, and end with it."""
        return {}

    def kill(self, worker: WorkerId) -> None:
        """End a worker as `kill -9` would, for fault injection."""
        self._engines[worker].kill()

    async def close(self) -> None:
        for worker in tuple(self._engines):
            await self.stop(worker)
