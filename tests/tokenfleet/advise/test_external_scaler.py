"""KEDA's external scaler: a gRPC client with KEDA's own message types gets the advice, or an error."""

import asyncio
from types import SimpleNamespace

import pytest

from controlplane.errors import BadInput
from tokenfleet.advise.external_scaler import METRIC, SERVICE, scaler_at
from tokenfleet.advise.gauges import AdviceGauges

grpc = pytest.importorskip("grpc")
descriptors = pytest.importorskip("google.protobuf.descriptor_pb2")
from google.protobuf import descriptor_pool, message_factory  # noqa: E402

KINDS = {"string": 9, "int64": 3, "double": 1, "bool": 8}
# externalscaler.proto; a map is a repeated entry on the wire.
MESSAGES = {
    "Entry": "key:1:string value:2:string",
    "ScaledObjectRef": "name:1:string namespace:2:string scalerMetadata:3:*Entry",
    "IsActiveResponse": "result:1:bool",
    "MetricSpec": "metricName:1:string targetSize:2:int64 targetSizeFloat:3:double",
    "GetMetricSpecResponse": "metricSpecs:1:*MetricSpec",
    "GetMetricsRequest": "scaledObjectRef:1:ScaledObjectRef metricName:2:string",
    "MetricValue": "metricName:1:string metricValue:2:int64 metricValueFloat:3:double",
    "GetMetricsResponse": "metricValues:1:*MetricValue",
}


@pytest.fixture(scope="module")
def keda():
    """KEDA's messages, by their names."""
    file = descriptors.FileDescriptorProto(name="keda.proto", package="externalscaler", syntax="proto3")
    for name, fields in MESSAGES.items():
        message = file.message_type.add(name=name)
        for field in fields.split():
            called, number, kind = field.split(":")
            made = message.field.add(name=called, number=int(number), label=3 if kind[0] == "*" else 1)
            made.type = KINDS.get(kind, 11)
            if made.type == 11:
                made.type_name = f".externalscaler.{kind.lstrip('*')}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    of = {
        n: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"externalscaler.{n}"))
        for n in MESSAGES
    }
    return SimpleNamespace(**of)


def asked(tmp_path, keda, published, talk):
    """What comes of `talk` with a scaler that publishes this."""
    address = f"unix:{tmp_path}/scaler"
    gauges = AdviceGauges("llama", None)
    gauges.advice = SimpleNamespace(published=published)

    async def run():
        async with scaler_at(address, gauges), grpc.aio.insecure_channel(address) as channel:

            def call(verb, reply, streams=False):
                kind = channel.unary_stream if streams else channel.unary_unary
                return kind(f"/{SERVICE}/{verb}", lambda m: m.SerializeToString(), reply.FromString)

            return await talk(call)

    return asyncio.run(run())


def test_keda_gets_the_advice_at_a_target_of_one(tmp_path, keda):
    ref = keda.ScaledObjectRef(
        name="vllm", namespace="llm", scalerMetadata=[keda.Entry(key="model", value="llama")]
    )

    async def talk(call):
        stream = call("StreamIsActive", keda.IsActiveResponse, streams=True)(ref)
        pushed = await stream.read()
        stream.cancel()
        return (
            await call("IsActive", keda.IsActiveResponse)(ref),
            await call("GetMetricSpec", keda.GetMetricSpecResponse)(ref),
            await call("GetMetrics", keda.GetMetricsResponse)(
                keda.GetMetricsRequest(scaledObjectRef=ref, metricName=METRIC)
            ),
            pushed,
        )

    active, spec, values, pushed = asked(tmp_path, keda, 300, talk)
    assert active.result
    assert pushed.result
    assert spec.metricSpecs[0] == keda.MetricSpec(metricName=METRIC, targetSize=1, targetSizeFloat=1.0)
    assert values.metricValues[0] == keda.MetricValue(
        metricName=METRIC, metricValue=300, metricValueFloat=300.0
    )


@pytest.mark.parametrize(
    ("published", "model", "code", "why"),
    [
        (None, "llama", "UNAVAILABLE", "there is no advice to publish"),
        (3, "other", "NOT_FOUND", "this advice is for llama, not other"),
    ],
)
def test_without_an_advice_or_of_another_model_the_call_fails(tmp_path, keda, published, model, code, why):
    ref = keda.ScaledObjectRef(name="vllm", scalerMetadata=[keda.Entry(key="model", value=model)])

    async def talk(call):
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await call("GetMetrics", keda.GetMetricsResponse)(keda.GetMetricsRequest(scaledObjectRef=ref))
        return error.value

    error = asked(tmp_path, keda, published, talk)
    assert (error.code().name, error.details()) == (code, why)


def test_what_is_no_message_is_taken_as_an_empty_one(tmp_path, keda):
    async def talk(call):
        ask = call("IsActive", keda.IsActiveResponse)
        bad = SimpleNamespace(SerializeToString=lambda: b"\x1a\xff\x07\x1a")
        return await ask(bad)

    assert asked(tmp_path, keda, 2, talk).result


def test_an_address_that_is_none_is_refused_in_a_line():
    async def run():
        async with scaler_at("127.0.0.1:1/x", AdviceGauges("llama", None)):
            pass

    with pytest.raises(BadInput, match="cannot listen there"):
        asyncio.run(run())
