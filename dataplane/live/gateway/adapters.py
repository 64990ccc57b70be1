"""The LoRA adapters of the fleet's workers: which worker holds which, and the loads that are asked for.

A request carries the path of its adapter, and a worker that does not hold it loads it before the request. So
an adapter is loaded once when it is named to the fleet, which tells whether it can be, and on other workers
as requests come to them; placement prefers those that hold it. An engine forgets the least used beyond
its `--max-cpu-loras`.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from typing import TYPE_CHECKING

from controlplane.types import WorkerId
from dataplane.live.engine_api.link import Adapters, EngineLink

if TYPE_CHECKING:
    from dataplane.live.engine_api.vllm_surface import LoRARequest


class AdapterBook:
    """By worker: the ids of the adapters it holds, and who waits for which."""

    def __init__(self) -> None:
        self._held: dict[WorkerId, frozenset[int]] = {}
        self._loads: defaultdict[tuple[WorkerId, int], list[asyncio.Future[str]]] = defaultdict(list)

    def of(self, worker: WorkerId) -> frozenset[int]:
        """The ids of the adapters that a worker holds."""
        return self._held.get(worker, frozenset())

    def holders(self, adapter: int) -> list[WorkerId]:
        """The workers that hold an adapter."""
        return [worker for worker, held in self._held.items() if adapter in held]

    def take(self, worker: WorkerId, told: Adapters) -> None:
        """Note what a worker says."""
        self._held[worker] = frozenset(told.held)
        self._settle(worker, told.asked, told.error)

    def forget(self, worker: WorkerId) -> None:
        """The worker is gone."""
        self._held.pop(worker, None)
        for name, adapter in list(self._loads):
            if name == worker:
                self._settle(worker, adapter, f"{worker} is gone")

    async def load(self, links: list[EngineLink], adapter: LoRARequest) -> None:
        """Load an adapter on one worker, and again where it is held and to be replaced.

        Raises RuntimeError with the engine's reason; vLLM's server makes an error of it.
        """
        if not links:
            raise RuntimeError(f"adapter {adapter.lora_name}: no worker is there to load it")
        named = adapter.lora_int_id
        chosen = [link for link in links if named in self.of(link.info.worker)]
        if not chosen or not adapter.load_inplace:
            chosen = [min(links, key=lambda link: len(self.of(link.info.worker)))]
        loads = []
        for link in chosen:
            load: asyncio.Future[str] = asyncio.get_running_loop().create_future()
            self._loads[link.info.worker, named].append(load)
            loads.append(load)
            await link.load_adapter(adapter)
        errors = [error for error in await asyncio.gather(*loads) if error]
        if errors:
            raise RuntimeError(errors[0])

    def _settle(self, worker: WorkerId, adapter: int, error: str) -> None:
        for load in self._loads.pop((worker, adapter), ()):
            if not load.done():
                load.set_result(error)
