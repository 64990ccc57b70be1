"""KEDA's external scaler over gRPC: the advice, asked for without Prometheus in between.

The metric is the number of replicas to have, at a target of 1 for each (`AverageValue`). Without an advice to
publish, every call fails with UNAVAILABLE, so that KEDA falls back to its own number. A trigger that names
another `model` gets NOT_FOUND.

Messages and field numbers are those of KEDA's externalscaler.proto:

    ScaledObjectRef        name 1, namespace 2, scalerMetadata 3 (entries: key 1, value 2)
    GetMetricsRequest      scaledObjectRef 1, metricName 2
    IsActiveResponse       result 1
    MetricSpec             metricName 1, targetSize 2, targetSizeFloat 3; GetMetricSpecResponse: metricSpecs 1
    MetricValue            metricName 1, metricValue 2, metricValueFloat 3; GetMetricsResponse: metricValues 1
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from importlib import import_module
from typing import Any

from controlplane.errors import BadInput
from tokenfleet.advise.gauges import AdviceGauges

SERVICE = "externalscaler.ExternalScaler"
METRIC = "tokenfleet-wanted-replicas"
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5
POLL_S = 1.0


@asynccontextmanager
async def scaler_at(address: str, gauges: AdviceGauges) -> AsyncIterator[None]:
    """Answer KEDA at HOST:PORT meanwhile. Raises BadInput without grpcio, and for a port that is taken."""
    try:
        grpc = import_module("grpc")
    except ImportError:
        raise BadInput("--scaler: needs grpcio, which vLLM brings; `pip install grpcio`") from None
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_handlers(grpc, gauges),))
    try:
        server.add_insecure_port(address)
    except RuntimeError:
        raise BadInput(f"--scaler: {address}: cannot listen there") from None
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)


def _handlers(grpc: Any, gauges: AdviceGauges) -> Any:
    async def published(ref: bytes, context: Any) -> int:
        model = _metadata(ref).get("model", gauges.model)
        if model != gauges.model:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"this advice is for {gauges.model}, not {model}")
        wanted = None if gauges.advice is None else gauges.advice.published
        if wanted is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "there is no advice to publish")
        return wanted or 0

    async def is_active(ref: bytes, context: Any) -> bytes:
        return _number(1, int(await published(ref, context) > 0))

    async def stream_is_active(ref: bytes, context: Any) -> AsyncIterator[bytes]:
        before: bytes | None = None
        while True:
            now = await is_active(ref, context)
            if now != before:
                before = now
                yield now
            await asyncio.sleep(POLL_S)

    async def metric_spec(ref: bytes, context: Any) -> bytes:
        return _text(1, _text(1, METRIC.encode()) + _number(2, 1) + _double(3, 1.0))

    async def metrics(asked: bytes, context: Any) -> bytes:
        ref = dict(_fields(asked)).get(1, b"")
        wanted = await published(ref if isinstance(ref, bytes) else b"", context)
        return _text(1, _text(1, METRIC.encode()) + _number(2, wanted) + _double(3, float(wanted)))

    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "IsActive": grpc.unary_unary_rpc_method_handler(is_active),
            "StreamIsActive": grpc.unary_stream_rpc_method_handler(stream_is_active),
            "GetMetricSpec": grpc.unary_unary_rpc_method_handler(metric_spec),
            "GetMetrics": grpc.unary_unary_rpc_method_handler(metrics),
        },
    )


def _metadata(ref: bytes) -> dict[str, str]:
    """The metadata of a ScaledObjectRef, as the trigger has it."""
    found = {}
    for number, entry in _fields(ref):
        if number == 3 and isinstance(entry, bytes):
            of = dict(_fields(entry))
            found[_word(of.get(1))] = _word(of.get(2))
    return found


def _word(value: int | bytes | None) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else ""


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message, as they come; none of what is cut or no message."""
    at = 0
    try:
        while at < len(message):
            key, at = _read_varint(message, at)
            if key & 7 == _VARINT:
                value, at = _read_varint(message, at)
                yield key >> 3, value
            elif key & 7 in (_DOUBLE, _FLOAT):
                at += 8 if key & 7 == _DOUBLE else 4
            elif key & 7 == _BYTES:
                size, at = _read_varint(message, at)
                yield key >> 3, message[at : at + size]
                at += size
            else:
                return
    except IndexError:
        return


def _read_varint(message: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = message[at]
        value, shift, at = value | (byte & 0x7F) << shift, shift + 7, at + 1
        if byte < 0x80:
            return value, at


def _varint(value: int) -> bytes:
    made = bytearray()
    while value > 0x7F:
        made.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*made, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3 | _VARINT) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | _DOUBLE) + struct.pack("<d", value)


def _text(field: int, value: bytes) -> bytes:
    return _varint(field << 3 | _BYTES) + _varint(len(value)) + value
