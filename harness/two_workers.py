"""The migration experiments' helpers: a model made here, and two real workers on this machine."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from controlplane.types import WorkerId
from harness import ROOT

A, B = WorkerId("a"), WorkerId("b")


RAY_ATTEMPTS = 4


@dataclass(frozen=True, slots=True)
class Pair:
    """Two started workers and a fleet of links to them; `actors` by name."""

    fleet: Any
    actors: dict[WorkerId, Any]

    async def forget(self, worker: WorkerId) -> None:
        """Empty a worker's prefix cache, once nothing uses it any more."""
        while not await self.actors[worker].reset_prefix_cache.remote():
            await asyncio.sleep(0.02)


def start_ray(**options: Any) -> None:
    """`ray.init`, tried again when Ray gives up on its own start: it waits 30 s, too few on a busy machine.

    Raises what Ray raised last.
    """
    import ray

    for attempt in range(RAY_ATTEMPTS):
        try:
            ray.init(**options)
            return
        except Exception as error:  # Ray raises a bare Exception here
            ray.shutdown()
            if attempt + 1 == RAY_ATTEMPTS or "timed out" not in str(error):
                raise


def on_two_workers(
    story: Callable[[Pair], Awaitable[Any]],
    *,
    fat: bool = False,
    model: str = "",
    **engine: Any,
) -> Any:
    """Make a tiny model, or take the folder `model`, start two workers, run the story.

    Each worker has a GPU of its own, or half of the only one. On a host without GPUs it has a core of its
    own, if there are two. A model without weights gets random ones.
    """
    # Ray would run its workers at the lowest priority, behind everything else on the machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    import ray
    import zmq.asyncio

    from dataplane.live.engine_api.vllm_surface import SamplingParams, VllmCodec
    from dataplane.live.engine_api.wire import new_key, public_key
    from dataplane.live.worker.launch import WorkerResources, launch_worker
    from dataplane.live.worker.link import WorkerLink
    from harness.bare_fleet import BareFleet

    async def run(folder: str) -> Any:
        key = new_key()
        known = public_key(key)
        asked = {"model": folder, "max_num_seqs": 32, "max_num_batched_tokens": 8192} | engine
        if not any(Path(folder).glob("*.safetensors")):
            asked["load_format"] = "dummy"
        cores, gpus = sorted(os.sched_getaffinity(0)), len(list(Path("/dev").glob("nvidia[0-9]*")))
        places = {
            name: WorkerResources(gpus=min(1, gpus / 2), cores="" if gpus else str(cores[i % len(cores)]))
            for i, name in enumerate((A, B))
        }
        started = await asyncio.gather(*(launch_worker(n, asked, known, p) for n, p in places.items()))
        context = zmq.asyncio.Context()
        links = [await WorkerLink.connect(w.info, key, context, VllmCodec()) for w in started]
        pair = Pair(BareFleet(links, sampling=SamplingParams), {w.info.worker: w.actor for w in started})
        try:
            return await story(pair)
        finally:
            await pair.fleet.close()
            for link in links:
                await link.close()
            context.destroy(linger=0)
            await asyncio.gather(*(worker.stop() for worker in started))

    with tempfile.TemporaryDirectory(prefix="tokenfleet-") as folder:
        if not model:
            make = [sys.executable, str(ROOT / "examples" / "tiny_llama.py"), folder]
            subprocess.run(make + ["--fat"] * fat, check=True, capture_output=True)
        start_ray(
            address="local",
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=80 << 20,
            log_to_driver=False,
            logging_level="WARNING",
        )
        try:
            return asyncio.run(run(model or folder))
        finally:
            ray.shutdown()
