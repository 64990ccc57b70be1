"""An emulated engine as a gateway sees one: an `EngineLink` whose steps take a profile's time.

Many run in one process and one event loop. `Fabric` joins them as the network joins workers, so that moves
between them copy, hold, fail and time out as real ones do.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np

from controlplane.perfmodel.profile import Profile
from controlplane.types import WorkerId
from dataplane.live.emulated.batch import EmulatedBatch, PlannedStep, StepOutput
from dataplane.live.emulated.segment import Noise
from dataplane.live.engine_api import VLLM_VERSION, messages
from dataplane.live.engine_api.link import Adapters, Event, Lost, Outputs, SegmentRefused, Step, WorkerInfo
from dataplane.live.engine_api.processes import Tasks
from dataplane.live.engine_api.step_trace import StepTrace, step_stats
from dataplane.live.kv.holds import LoadJob

UNREAD_EVENTS = 1024
IDLE_LOOK_S = 0.05  # how often an engine that cannot go on looks again, for holds that have run out
TELEMETRY_EVERY_S = 0.05
STREAM_LOOK_S = 0.002  # how often a reader looks for the chunks of a prefill in progress


@dataclass(slots=True)
class Fabric:
    """The network between emulated engines; `speed` runs all of them that many times faster than life."""

    bytes_per_s: float = 2e9
    speed: float = 1.0
    engines: dict[str, EmulatedEngine] = field(default_factory=dict)

    def can_read(self, job: LoadJob) -> bool:
        """Whether the source of a load still has what is asked for."""
        source = self.engines.get(job.load.addresses[0])
        return source is not None and source.batch.readable_tokens(job.load.segment) >= job.load.tokens

    def will_read(self, job: LoadJob) -> bool:
        """Whether the source is still computing what is asked for."""
        source = self.engines.get(job.load.addresses[0])
        return source is not None and source.batch.is_prefilling(job.load.segment, job.load.tokens)

    def transfer_s(self, job: LoadJob, block_bytes: int) -> float:
        """Seconds that a load takes, in emulated time."""
        rate = min(self.bytes_per_s, job.load.pace.fixed_bytes_per_s or self.bytes_per_s)
        return len(job.blocks) * block_bytes / rate


class EmulatedEngine:
    """One engine. It works from its construction, inside a running event loop, until `close` or `kill`."""

    def __init__(
        self,
        worker: WorkerId,
        profile: Profile,
        fabric: Fabric,
        *,
        model: str = "emulated",
        max_model_len: int = 8192,
        noise: Noise | None = None,
    ) -> None:
        self._profile = profile
        self._fabric = fabric
        # A request longer than the KV memory could never end; vLLM refuses such a configuration.
        max_model_len = min(max_model_len, profile.kv.capacity_tokens)
        self.batch = EmulatedBatch(profile, max_model_len, noise or Noise())
        self.info = WorkerInfo(
            worker=worker,
            engine="emulated",
            model=model,
            endpoint="",
            kv_addresses=(f"emulated://{worker}",),
            block_tokens=profile.kv.block_tokens,
            kv_blocks=self.batch.total_blocks,
            kv_bytes_per_token=profile.kv.bytes_per_token,
            max_model_len=max_model_len,
            max_seqs=profile.engine.max_seqs,
            max_batched_tokens=profile.engine.max_batched_tokens,
            tp_degree=profile.tp_degree,
            vllm_version=VLLM_VERSION,
            dtype="none",
            pid=os.getpid(),
            weights=model,
        )
        self._trace = StepTrace(worker, self.batch.total_blocks)
        self._events: asyncio.Queue[Event] = asyncio.Queue(UNREAD_EVENTS)
        self._work = asyncio.Event()
        self._adapters: set[int] = set()
        self._lost: Lost | None = None
        self._told_s = 0.0
        self._telling = Tasks()
        fabric.engines[self.info.kv_addresses[0]] = self
        self._loop = asyncio.get_running_loop()
        self._runner = self._loop.create_task(self._run())

    @property
    def is_lost(self) -> bool:
        return self._lost is not None

    async def add(self, request: messages.EngineRequest) -> None:
        if self._lost is not None:
            return
        if len(self.batch) >= 4 * self.info.max_seqs and not request.abort_immediately:
            await self._events.put(SegmentRefused(request.request_id, "its queue is full"))
            return
        adapter = request.lora_request
        if adapter is not None and adapter.lora_int_id not in self._adapters:
            await self.load_adapter(adapter)
        is_leased = self.batch.add(request, time.monotonic())
        if is_leased is not None:
            reason = messages.Finish.ABORT if is_leased else messages.Finish.ERROR
            await self._tell([messages.SegmentOutput(request.request_id, [], finish_reason=reason)])
        self._work.set()

    async def abort(self, segments: Sequence[str]) -> None:
        for name in segments:
            self.batch.abort(name, time.monotonic())
        self._work.set()

    async def load_adapter(self, adapter: messages.Adapter) -> None:
        self._adapters.add(adapter.lora_int_id)
        await self._events.put(Adapters(tuple(sorted(self._adapters)), adapter.lora_int_id))

    async def ask_cached(self) -> None:
        """It caches nothing."""

    async def receive(self) -> Event:
        if self._lost is not None and self._events.empty():
            return self._lost
        return await self._events.get()

    async def close(self) -> None:
        self.kill("closed")
        await asyncio.gather(self._runner, return_exceptions=True)

    def kill(self, reason: str = "killed") -> None:
        """End as a killed process does: at once, with no further event and all KV lost."""
        if self._lost is None:
            self._lost = Lost(reason)
            self._fabric.engines.pop(self.info.kv_addresses[0], None)
            self._runner.cancel()
            if not self._events.full():
                self._events.put_nowait(self._lost)

    def steps(self, since: int = 0) -> tuple[int, Sequence[Step]]:
        """Executed steps from number `since` on (see `StepTrace.steps`)."""
        return self._trace.steps(since)

    async def _run(self) -> None:
        ends_s = time.monotonic()
        while True:
            step = self.batch.plan(time.monotonic())
            lasts_s, outputs = self._start_loads(step)
            if not step.chunks:
                await self._tell(outputs)
                self._work.clear()
                await self._tell_load(ends_s, step, 0.0)
                with suppress(TimeoutError):  # not wait_for: before Python 3.12 it may swallow a cancellation
                    async with asyncio.timeout(IDLE_LOOK_S):
                        await self._work.wait()
                ends_s = time.monotonic()
                continue
            of = ("prefill_tokens", "sequences", "context_tokens", "prefill_sum_sq")
            lasts_s += float(self._profile.step.step_s(*(step.load[name] for name in of)))
            ends_s += lasts_s / self._fabric.speed
            await asyncio.sleep(max(0.0, ends_s - time.monotonic()))
            # A loop that is late must not run the next steps faster than life to catch up for ever.
            ends_s = max(ends_s, time.monotonic() - 0.1)
            now_s = time.monotonic()
            outputs += [self._output(output) for output in self.batch.finish(step, now_s)]
            await self._tell(outputs, step)
            await self._tell_load(now_s, step, lasts_s)

    def _start_loads(self, step: PlannedStep) -> tuple[float, list[messages.SegmentOutput]]:
        """Start the step's loads; return the time of those inside it, and outputs of those that failed."""
        inline_s, outputs = 0.0, []
        block_bytes = self.info.block_tokens * self.info.kv_bytes_per_token
        for job in step.jobs:
            duration_s = self._fabric.transfer_s(job, block_bytes)
            if not job.load.inline:
                self._loop.call_later(duration_s / self._fabric.speed, self._arrive, job)
                continue
            inline_s += duration_s
            if not self._fabric.can_read(job):
                outputs += self._fail(job)
        step.chunks = [(s, chunk) for s, chunk in step.chunks if s in self.batch]
        return inline_s, outputs

    def _arrive(self, job: LoadJob) -> None:
        if self._lost is not None:
            return
        if job.load.stream and self._fabric.will_read(job):
            self._loop.call_later(STREAM_LOOK_S / self._fabric.speed, self._arrive, job)
        elif not self._fabric.can_read(job):
            self._say(self._fail(job))
        elif self.batch.loaded(job.segment, time.monotonic()):
            self._say([messages.SegmentOutput(job.segment, [], finish_reason=messages.Finish.STOP)])
        self._work.set()

    def _say(self, outputs: list[messages.SegmentOutput]) -> None:
        """Emit the outputs that arise between steps."""
        self._telling.spawn(self._tell(outputs))

    def _fail(self, job: LoadJob) -> list[messages.SegmentOutput]:
        output = self.batch.failed(job.segment, time.monotonic())
        return [] if output is None else [self._output(output)]

    def _output(self, produced: StepOutput) -> messages.SegmentOutput:
        segment = produced.segment
        output = messages.SegmentOutput(segment.id, [] if produced.token is None else [produced.token])
        output.finish_reason = produced.finish
        if produced.is_first:
            prompt = segment.tokens - segment.produced
            cached = segment.cached
            output.prefill_stats = messages.Prefilled(prompt, prompt - cached, cached, cached)
            output.events, segment.events = segment.events, []
        wanted = segment.params.logprobs
        if wanted is not None and produced.token is not None:
            output.new_logprobs = _logprobs(produced.token, wanted)
        return output

    async def _tell(self, outputs: list[messages.SegmentOutput], step: PlannedStep | None = None) -> None:
        """Emit the outputs of a step, or, without one, those that arise between steps."""
        if not outputs and step is None:
            return
        stats = messages.EngineLoad(
            num_running_reqs=self.batch.running,
            num_waiting_reqs=self.batch.waiting,
            kv_cache_usage=1 - self.batch.free_blocks / self.batch.total_blocks,
            kv_connector_stats=None if step is None else step_stats(step.load),
        )
        batch = messages.StepOutputs(outputs=outputs, scheduler_stats=stats, timestamp=time.monotonic())
        await self._events.put(Outputs(batch))

    async def _tell_load(self, now_s: float, step: PlannedStep, lasts_s: float) -> None:
        usage = 1 - self.batch.free_blocks / self.batch.total_blocks
        changed = self._trace.add(step.load, lasts_s, now_s, self.batch.running, self.batch.waiting, usage)
        if changed and (self.batch.is_idle or now_s - self._told_s > TELEMETRY_EVERY_S):
            self._told_s = now_s
            await self._events.put(self._trace.telemetry(now_s))


def _logprobs(token: int, wanted: int) -> messages.Logprobs:
    """Log-probabilities of the right shape, [1, wanted + 1]: the token's own, then the likeliest."""
    others = [token + i for i in range(wanted)]
    values = [-0.5 - i for i in range(wanted)]
    return messages.Logprobs(
        np.array([[token, *others]]), np.array([[-0.5, *values]], np.float32), np.array([1])
    )
