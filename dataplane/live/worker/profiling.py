"""Measurement of one vLLM engine: bursts of designed batches in, the steps it executed out.

The engine is a worker's, connector included, so its steps carry the exact regressors (kv/connector.py). Two
clocks:

  wall   From the end of the previous step to its own end, as telemetry has it: what a client waits for.
  cpu    The processor time that the engine's processes used meanwhile. It is about what the step takes with
         a core to itself, for CPU hosts that are busy with other work too.

A fleet measures its workers over their links (pool/learning.py).
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import platform
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from controlplane.errors import BadInput
from controlplane.perfmodel.samples import Burst, EngineRoom
from controlplane.types import WorkerId
from dataplane.live.engine_api.link import Step
from dataplane.live.engine_api.messages import EngineRequest, SegmentOutput
from dataplane.live.engine_api.processes import descendants, shared_memory, unlink
from dataplane.live.engine_api.step_trace import StepTrace
from dataplane.live.engine_api.vllm_surface import EngineDeadError, current_platform, vllm_version
from dataplane.live.kv.transport import reserve_addresses
from dataplane.live.worker.bursts import EngineDied, run_burst
from dataplane.live.worker.engine import KvDoor, device_name, engine_args, start_engine, warm_up

Clock = Literal["wall", "cpu"]
BURST_S = 600.0  # a burst that takes longer is stuck
SHUTDOWN_S = 10.0


class ProfiledEngine:
    """A started engine. Make one with `start`, and `close` it."""

    def __init__(self, core: Any, clock: Clock, shared: set[Path]) -> None:
        self._core, self._clock, self._shared = core, clock, shared
        self._bursts = self._executed = 0
        config = core.vllm_config
        cache, limits, model = config.cache_config, config.scheduler_config, config.model_config
        # The largest batch and context that the engine has room for.
        self.room = EngineRoom(
            kv_tokens=cache.num_gpu_blocks * cache.block_size,
            max_seqs=limits.max_num_seqs,
            max_batched_tokens=limits.max_num_batched_tokens,
            max_context_tokens=model.max_model_len,
        )
        self.vocabulary = int(model.get_vocab_size())
        self._trace = StepTrace(WorkerId("engine"), cache.num_gpu_blocks)
        self._cpu_s = 0.0

    @classmethod
    async def start(cls, engine_settings: Mapping[str, Any], clock: Clock) -> ProfiledEngine:
        """Start an engine with these vLLM arguments and warm it up. Raises BadInput if it does not start."""
        if clock == "cpu" and not current_platform.is_cpu():
            raise BadInput("--clock: cpu is for engines that compute on the CPU")
        addresses, release = reserve_addresses(
            "127.0.0.1", int(engine_settings.get("tensor_parallel_size") or 1)
        )
        door = KvDoor(addresses, secrets.token_hex(32), cpu_clock=clock == "cpu")
        args = engine_args(engine_settings, door)
        try:
            core = await asyncio.to_thread(start_engine, args)
        except (RuntimeError, ValueError, OSError) as error:
            raise BadInput(f"engine: did not start: {error}") from error
        release()
        engine = cls(core, clock, shared_memory(descendants()))
        try:
            await warm_up(core)
        except BaseException:
            await engine.close()
            raise
        return engine

    def environment(self) -> dict[str, Any]:
        """Everything its step times depend on; measurements are only continued under the same."""
        import torch

        config = self._core.vllm_config
        model = config.model_config
        return {
            "engine": "vllm",
            "vllm": vllm_version,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": device_name(),
            "model": Path(model.model).name,
            "model_config": fingerprint(model.hf_config),
            "dtype": str(model.dtype).removeprefix("torch."),
            "tp_degree": config.parallel_config.tensor_parallel_size,
            "block_tokens": config.cache_config.block_size,
            "kv_tokens": self.room.kv_tokens,
            "max_seqs": self.room.max_seqs,
            "max_batched_tokens": self.room.max_batched_tokens,
            "max_context_tokens": self.room.max_context_tokens,
            "enforce_eager": bool(model.enforce_eager),
            "threads_bind": os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "") * current_platform.is_cpu(),
            "clock": self._clock,
        }

    async def run(self, burst: Burst, rng: np.random.Generator) -> list[Step]:
        """Run a burst to its end and return its steps. Raises EngineDied."""
        self._bursts += 1
        steps: list[Step] = []
        try:
            await asyncio.wait_for(run_burst(self, burst, f"profile-{self._bursts}", rng, steps), BURST_S)
        except EngineDeadError as error:
            raise EngineDied(f"engine: it died: {error}") from error
        except TimeoutError:
            raise EngineDied(f"engine: {burst.name} did not end within {BURST_S:g} s") from None
        return steps

    async def close(self) -> None:
        """End the engine's processes."""
        await asyncio.to_thread(self._core.shutdown, SHUTDOWN_S)
        unlink(self._shared)

    async def begin(self, request: EngineRequest) -> None:
        await self._core.add_request_async(request)

    async def news(self) -> tuple[Sequence[Step], Sequence[SegmentOutput]]:
        batch = await self._core.get_output_async()
        stats, spent_s = batch.scheduler_stats, 0.0
        if stats is not None:
            self._trace.take(stats, batch.timestamp)
            cpu_s = (stats.kv_connector_stats or {}).get("cpu_s", self._cpu_s)
            spent_s, self._cpu_s = cpu_s - self._cpu_s, cpu_s
        self._executed, steps = self._trace.steps(self._executed)
        if self._clock == "cpu":
            steps = [step._replace(step_s=spent_s) for step in steps]
        # The first step of all has no beginning on the CPU's clock.
        return [step for step in steps if step.step_s > 0], batch.outputs


def fingerprint(config: Any) -> str:
    """A digest of a model's configuration, which tells apart models in folders of the same name."""
    plain = {k: v for k, v in config.to_dict().items() if not k.startswith("_")}
    return hashlib.sha256(repr(sorted(plain.items(), key=lambda kv: kv[0])).encode()).hexdigest()[:16]
