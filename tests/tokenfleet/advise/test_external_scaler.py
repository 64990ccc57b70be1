"""KEDA's external scaler: a gRPC client with KEDA's own message types gets the advice, or an error."""

import asyncio
import struct
from types import SimpleNamespace

import pytest

from controlplane.errors import BadInput
from tokenfleet.advise.advice import ScaleTarget
from tokenfleet.advise.published import METRIC, SERVICE, TYPE, AdviceGauges, messages, scaler_at
from tokenfleet.export.keda import Followed
from tokenfleet.export.keda import keda as scaled_object

grpc = pytest.importorskip("grpc")
pytest.importorskip("google.protobuf")


@pytest.fixture(scope="module")
def keda():
    return messages()


def test_messages_are_those_of_externalscaler_proto(keda):
    """Bytes written out by hand: field number times 8 and the wire type, then the value."""
    entry = b"\x0a\x05model\x12\x01m"
    ref = keda.ScaledObjectRef.FromString(b"\x0a\x01n\x12\x01s\x1a" + bytes([len(entry)]) + entry)
    assert (ref.name, ref.namespace, ref.scalerMetadata[0].key, ref.scalerMetadata[0].value) == (
        *("n", "s"),
        *("model", "m"),
    )
    asks = keda.GetMetricsRequest.FromString(b"\x0a\x03\x0a\x01n\x12\x01k")
    assert (asks.scaledObjectRef.name, asks.metricName) == ("n", "k")
    assert keda.IsActiveResponse(result=True).SerializeToString() == b"\x08\x01"
    spec = keda.MetricSpec(metricName="k", targetSize=1, targetSizeFloat=1.0)
    one = b"\x0a\x01k\x10\x01\x19" + struct.pack("<d", 1.0)
    assert spec.SerializeToString() == one
    value = keda.MetricValue(metricName="k", metricValue=1, metricValueFloat=1.0)
    assert value.SerializeToString() == one
    for reply in (
        keda.GetMetricSpecResponse(metricSpecs=[spec]),
        keda.GetMetricsResponse(metricValues=[value]),
    ):
        assert reply.SerializeToString() == b"\x0a" + bytes([len(one)]) + one


def asked(tmp_path, keda, published, talk):
    """What comes of `talk` with a scaler that publishes this."""
    address = f"unix:{tmp_path}/scaler"
    gauges = AdviceGauges("llama")
    types = published if isinstance(published, dict) else {"h100-sxm TP1": published}
    of_types = [
        SimpleNamespace(worker_type=SimpleNamespace(name=name), published=wanted)
        for name, wanted in types.items()
    ]
    gauges.advice = SimpleNamespace(of_types=of_types)

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


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("h100-sxm TP1", 4),
        ("a100-sxm TP1", 0),
        ("l40s TP1", "this advice is for other types: workerType 'l40s TP1' is none of"),
        (None, "this advice is for other types: workerType '' is none of h100-sxm TP1, a100-sxm TP1"),
    ],
)
def test_of_several_worker_types_each_gets_its_own_number(tmp_path, keda, name, answer):
    asks = [] if name is None else [keda.Entry(key=TYPE, value=name)]
    ref = keda.ScaledObjectRef(name="vllm", scalerMetadata=asks)

    async def talk(call):
        try:
            asked = keda.GetMetricsRequest(scaledObjectRef=ref)
            return await call("GetMetrics", keda.GetMetricsResponse)(asked)
        except grpc.aio.AioRpcError as error:
            return error.code().name, error.details()

    said = asked(tmp_path, keda, {"h100-sxm TP1": 4, "a100-sxm TP1": 0}, talk)
    if isinstance(answer, str):
        assert said[0] == "NOT_FOUND"
        assert said[1].startswith(answer)
    else:
        assert said.metricValues[0].metricValue == answer


def test_the_scaledobjects_of_two_types_get_each_its_number_and_one_without_workers_is_not_active(
    tmp_path, keda
):
    """The triggers that `export keda --scaler` writes, passed on as KEDA does."""
    wanted = {"h100-sxm TP1": 4, "a100-sxm TP1": 0}
    triggers = [
        scaled_object(
            Followed(ScaleTarget("Deployment", f"vllm-{n}"), "llama", 0, 8, 8, name), "", "advise:6000"
        )["spec"]["triggers"][0]
        for n, name in enumerate(wanted)
    ]

    async def talk(call):
        said = []
        for trigger in triggers:
            entries = [keda.Entry(key=key, value=value) for key, value in trigger["metadata"].items()]
            ref = keda.ScaledObjectRef(name="vllm", namespace="llm", scalerMetadata=entries)
            (spec,) = (await call("GetMetricSpec", keda.GetMetricSpecResponse)(ref)).metricSpecs
            asks = keda.GetMetricsRequest(scaledObjectRef=ref, metricName=spec.metricName)
            (value,) = (await call("GetMetrics", keda.GetMetricsResponse)(asks)).metricValues
            active = await call("IsActive", keda.IsActiveResponse)(ref)
            stream = call("StreamIsActive", keda.IsActiveResponse, streams=True)(ref)
            pushed = await stream.read()
            stream.cancel()
            said.append((value.metricValueFloat, active.result, pushed.result))
        return said

    assert asked(tmp_path, keda, wanted, talk) == [(4.0, True, True), (0.0, False, False)]


def test_what_is_no_message_gets_an_error_and_the_next_one_an_answer(tmp_path, keda):
    async def talk(call):
        ask = call("IsActive", keda.IsActiveResponse)
        with pytest.raises(grpc.aio.AioRpcError):
            await ask(SimpleNamespace(SerializeToString=lambda: b"\x1a\xff\x07\x1a"))
        return await ask(keda.ScaledObjectRef())

    assert asked(tmp_path, keda, 2, talk).result


def test_an_address_that_is_none_is_refused_in_a_line():
    async def run():
        async with scaler_at("127.0.0.1:1/x", AdviceGauges("llama")):
            pass

    with pytest.raises(BadInput, match="cannot listen there"):
        asyncio.run(run())
