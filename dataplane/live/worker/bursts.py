"""Bursts of designed batches, run on any engine: a worker's over its link, or one that is profiled alone."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from controlplane.errors import BadInput
from controlplane.perfmodel.samples import DECODE_STEPS, Burst, EngineRoom
from dataplane.live.engine_api.link import EngineLink, Lost, Outputs, SegmentRefused, Step, Telemetry
from dataplane.live.engine_api.messages import EngineRequest, Sampling, SegmentOutput
from dataplane.live.engine_api.segment import plain_request

FIRST_TOKEN_ID = 3  # below are special ones
PLAIN_TOKENS = 30_000  # and placeholders of images at the end


class Measured(Protocol):
    """An engine that runs bursts. `vocabulary`: how many tokens its model knows."""

    room: EngineRoom
    vocabulary: int

    async def begin(self, request: EngineRequest) -> None:
        """Give it a request."""

    async def news(self) -> tuple[Sequence[Step], Sequence[SegmentOutput]]:
        """Wait for the steps it has executed, and for what they made; either may be empty."""


class EngineDied(BadInput):
    """The engine under measurement ended, or went silent."""


class LinkedEngine(Measured):
    """An engine measured over its link, before anyone else listens there."""

    def __init__(self, link: EngineLink, vocabulary: int) -> None:
        self._link, self.room, self.vocabulary = link, room_of(link), vocabulary
        self.steps = self._begun_at = 0
        self._is_idle = True
        self._open: set[str] = set()

    async def begin(self, request: EngineRequest) -> None:
        if not self._open:
            self._begun_at = self.steps
        self._is_idle = False
        self._open.add(request.request_id)
        await self._link.add(request)

    async def news(self) -> tuple[Sequence[Step], Sequence[SegmentOutput]]:
        event = await self._link.receive()
        if isinstance(event, Telemetry):
            executed, self.steps = event.since(self.steps), event.steps
            self._is_idle = event.running + event.waiting == 0 and event.steps > self._begun_at
            return executed, ()
        if isinstance(event, Outputs):
            self._open -= {o.request_id for o in event.batch.outputs if o.finish_reason is not None}
            return (), event.batch.outputs
        if isinstance(event, SegmentRefused):
            raise EngineDied(f"{self._link.info.worker} refused a request: {event.reason}")
        if isinstance(event, Lost):
            raise EngineDied(f"{self._link.info.worker} was lost: {event.reason}")
        return (), ()  # nothing of steps

    async def settled(self, steps: list[Step]) -> None:
        """Wait for telemetry of the burst's last step."""
        while not self._is_idle:
            steps += (await self.news())[0]

    async def abandon(self) -> None:
        """End what runs; its outputs are not waited for."""
        await self._link.abort(sorted(self._open))
        self._open.clear()


def room_of(link: EngineLink) -> EngineRoom:
    """The largest batch and context of a worker."""
    info = link.info
    return EngineRoom(
        info.kv_blocks * info.block_tokens, info.max_seqs, info.max_batched_tokens, info.max_model_len
    )


async def run_burst(
    engine: Measured, burst: Burst, name: str, rng: np.random.Generator, steps: list[Any]
) -> None:
    """Run a burst to its end, and add its steps to `steps` as they come in; `name` begins requests' ids."""
    chunks = -(-burst.prefills * burst.prefill_tokens // engine.room.max_batched_tokens)
    joins = burst.prefills > 0
    lasts = DECODE_STEPS + (2 * chunks + 2 if joins else 0)
    decoding = [
        _request(f"{name}-d{i}", burst.context_tokens, 1 + lasts, engine.vocabulary, rng)
        for i in range(burst.decoding)
    ]
    joining = [
        _request(f"{name}-p{i}", burst.prefill_tokens, 1, engine.vocabulary, rng)
        for i in range(burst.prefills)
    ]
    for request in decoding:
        await engine.begin(request)
    silent = {request.request_id for request in decoding}
    unfinished = set(silent)
    while unfinished or joins:
        if joins and not silent:
            joins = False
            unfinished |= {request.request_id for request in joining}
            for request in joining:
                await engine.begin(request)
        executed, outputs = await engine.news()
        steps += executed
        for output in outputs:
            if output.new_token_ids:
                silent.discard(output.request_id)
            if output.finish_reason is not None:
                unfinished.discard(output.request_id)


def _request(
    name: str, tokens: int, output_tokens: int, vocabulary: int, rng: np.random.Generator
) -> EngineRequest:
    """A request of random tokens: no two share a prefix that the engine could have cached."""
    prompt = rng.integers(FIRST_TOKEN_ID, min(vocabulary, PLAIN_TOKENS), tokens).tolist()
    params = Sampling(temperature=0.0, max_tokens=output_tokens, ignore_eos=True, detokenize=False)
    return plain_request(name, prompt, params, time.time())
