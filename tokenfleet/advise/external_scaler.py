"""KEDA's external scaler over gRPC: the advice, asked for without Prometheus in between.

The metric is the number of replicas to have, at a target of 1 for each (`AverageValue`). Without an advice to
publish, every call fails with UNAVAILABLE, so that KEDA falls back to its own number. A trigger that names
another `model` or `workerType` gets NOT_FOUND. Of several types it must name one.

Messages and field numbers are those of KEDA's externalscaler.proto (`MESSAGES`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from controlplane.errors import BadInput
from tokenfleet.advise.gauges import AdviceGauges

SERVICE = "externalscaler.ExternalScaler"
METRIC = "tokenfleet-wanted-replicas"
TYPE = "workerType"  # of a trigger's metadata
POLL_S = 1.0
MESSAGES = {  # name:number:type; * is repeated, and a map is a repeated entry on the wire
    "Entry": "key:1:string value:2:string",
    "ScaledObjectRef": "name:1:string namespace:2:string scalerMetadata:3:*Entry",
    "IsActiveResponse": "result:1:bool",
    "MetricSpec": "metricName:1:string targetSize:2:int64 targetSizeFloat:3:double",
    "GetMetricSpecResponse": "metricSpecs:1:*MetricSpec",
    "GetMetricsRequest": "scaledObjectRef:1:ScaledObjectRef metricName:2:string",
    "MetricValue": "metricName:1:string metricValue:2:int64 metricValueFloat:3:double",
    "GetMetricsResponse": "metricValues:1:*MetricValue",
}


@asynccontextmanager
async def scaler_at(address: str, gauges: AdviceGauges) -> AsyncIterator[None]:
    """Answer KEDA at HOST:PORT meanwhile. Raises BadInput without grpcio, and for a port that is taken."""
    try:
        grpc, keda = import_module("grpc"), messages()
    except ImportError:
        needs = "grpcio and protobuf, which vLLM brings; `pip install grpcio protobuf`"
        raise BadInput(f"--scaler: needs {needs}") from None
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_handlers(grpc, keda, gauges),))
    try:
        server.add_insecure_port(address)
    except RuntimeError:
        raise BadInput(f"--scaler: {address}: cannot listen there") from None
    await server.start()
    try:
        yield
    finally:
        await server.stop(0)


def messages(package: str = "externalscaler", table: Mapping[str, str] = MESSAGES) -> Any:
    """The message classes of a table by their names; they need protobuf."""
    protobuf = "google.protobuf"
    descriptors = import_module(f"{protobuf}.descriptor_pb2")
    kinds = descriptors.FieldDescriptorProto
    plain = {
        one: getattr(kinds, f"TYPE_{one.upper()}") for one in ("string", "int64", "double", "bool", "bytes")
    }
    file = descriptors.FileDescriptorProto(name=f"{package}.proto", package=package, syntax="proto3")
    for name, fields in table.items():
        message = file.message_type.add(name=name)
        for called, number, kind in (field.split(":") for field in fields.split()):
            label = kinds.LABEL_REPEATED if kind[0] == "*" else kinds.LABEL_OPTIONAL
            made = message.field.add(name=called, number=int(number), label=label)
            made.type = plain.get(kind, kinds.TYPE_MESSAGE)
            if kind not in plain:
                made.type_name = f".{package}.{kind.lstrip('*')}"
    pool = import_module(f"{protobuf}.descriptor_pool").DescriptorPool()
    pool.Add(file)
    class_of = import_module(f"{protobuf}.message_factory").GetMessageClass
    return SimpleNamespace(**{n: class_of(pool.FindMessageTypeByName(f"{package}.{n}")) for n in table})


def _handlers(grpc: Any, keda: Any, gauges: AdviceGauges) -> Any:
    async def published(ref: Any, context: Any) -> int:
        asked = {entry.key: entry.value for entry in ref.scalerMetadata}
        model = asked.get("model", gauges.model)
        if model != gauges.model:
            await context.abort(grpc.StatusCode.NOT_FOUND, f"this advice is for {gauges.model}, not {model}")
        published = {}
        if gauges.advice is not None:
            published = {one.worker_type.name: one.published for one in gauges.advice.of_types}
        name = asked.get(TYPE, "" if len(published) != 1 else next(iter(published)))
        if published and name not in published:
            told = f"{TYPE} {name!r} is none of {', '.join(published)}"
            await context.abort(grpc.StatusCode.NOT_FOUND, f"this advice is for other types: {told}")
        wanted = published.get(name)
        if wanted is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "there is no advice to publish")
        return wanted or 0

    async def is_active(ref: Any, context: Any) -> Any:
        return keda.IsActiveResponse(result=await published(ref, context) > 0)

    async def stream_is_active(ref: Any, context: Any) -> AsyncIterator[Any]:
        before = None
        while True:
            now = await is_active(ref, context)
            if now != before:
                before = now
                yield now
            await asyncio.sleep(POLL_S)

    async def metric_spec(ref: Any, context: Any) -> Any:
        spec = keda.MetricSpec(metricName=METRIC, targetSize=1, targetSizeFloat=1.0)
        return keda.GetMetricSpecResponse(metricSpecs=[spec])

    async def metrics(asked: Any, context: Any) -> Any:
        wanted = await published(asked.scaledObjectRef, context)
        value = keda.MetricValue(metricName=METRIC, metricValue=wanted, metricValueFloat=float(wanted))
        return keda.GetMetricsResponse(metricValues=[value])

    def handled(answer: Any, asks: Any = keda.ScaledObjectRef, streams: bool = False) -> Any:
        kind = grpc.unary_stream_rpc_method_handler if streams else grpc.unary_unary_rpc_method_handler
        return kind(answer, asks.FromString, lambda reply: reply.SerializeToString())

    return grpc.method_handlers_generic_handler(
        SERVICE,
        {
            "IsActive": handled(is_active),
            "StreamIsActive": handled(stream_is_active, streams=True),
            "GetMetricSpec": handled(metric_spec),
            "GetMetrics": handled(metrics, keda.GetMetricsRequest),
        },
    )
