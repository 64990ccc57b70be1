"""The wire of a fleet of emulated engines: our messages as msgpack, which has no tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from dataplane.live.engine_api.messages import Adapter, EngineRequest, StepOutputs


class PlainCodec:
    """`messages.Codec` without vLLM."""

    version = "plain"

    def encode(self, message: Any) -> Sequence[Any]:
        return [msgspec.msgpack.encode(message)]

    def request(self, frames: Sequence[Any]) -> EngineRequest:
        return msgspec.msgpack.decode(frames[0], type=EngineRequest)

    def outputs(self, frames: Sequence[Any]) -> StepOutputs:
        return msgspec.msgpack.decode(frames[0], type=StepOutputs)

    def adapter(self, fields: Sequence[Any]) -> Adapter:
        return msgspec.convert(fields, Adapter)
