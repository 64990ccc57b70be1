"""The advice as autoscalers read it: Prometheus gauges, and KEDA's external scaler over gRPC.

The scaler's metric is the number of replicas to have, at a target of 1 for each (`AverageValue`). Without an
advice to publish, every call fails with UNAVAILABLE, so that KEDA falls back to its own number. A trigger
that names another `model` or `workerType` gets NOT_FOUND. Of several types it must name one.

Pickers in front of the fleet tell whether anyone needs it (`PickedDemand`). Where they have no server, the
number is 1 or more while requests come, else 0. Without a request for QUIET_S the fleet is not active.

Messages and field numbers are those of KEDA's externalscaler.proto (`MESSAGES`).
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector

from controlplane.errors import BadInput
from tokenfleet.advise.advice import Advice
from tokenfleet.advise.servers import Servers

WANTED = "tokenfleet_wanted_replicas"
LABELS = ("model", "worker_type")  # of a model served by two types each has its own advice
SERVICE = "externalscaler.ExternalScaler"
METRIC = "tokenfleet-wanted-replicas"
TYPE = "workerType"  # of a trigger's metadata
POLL_S = 1.0
QUIET_S = 600.0  # without a request before KEDA may scale to zero
PICKER = "tokenfleet_pick_"
ASKED = ("no_server", "no_room")  # reasons to refuse what was a request
REQUESTS, HELD = ("picked_total", "refused_total"), ("running", "waiting")
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


@dataclass(frozen=True, slots=True)
class PickerCounts:
    """A picker's counters: requests so far, those that run or wait, and its servers."""

    requests: float
    held: float
    servers: int


def picker_counts(text: str) -> PickerCounts | None:
    """The counters on a picker's page; None where it is no picker's."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    try:
        samples = [one for family in text_string_to_metric_families(text) for one in family.samples]
    except ValueError:
        return None
    for one in samples:
        if one.name.startswith(PICKER) and one.labels.get("reason", ASKED[0]) in ASKED:
            found[one.name.removeprefix(PICKER)].append(one.value)
    requests, held = (sum(sum(found[name]) for name in names) for names in (REQUESTS, HELD))
    return PickerCounts(requests, held, len(found["running"])) if found["waiting"] else None


class PickedDemand:
    """Whether anyone needs a fleet, by the counters of all pickers in front of it.

    `is_heard`: all of them answered; one that is silent is not idle. At the first look a fleet with servers
    is needed for QUIET_S. One without servers is not.
    """

    def __init__(self) -> None:
        self._last: dict[str, PickerCounts] = {}
        self._asked_s = -math.inf
        self.is_heard = self.has_servers = self.is_needed = False

    @property
    def is_idle(self) -> bool:
        """Whether all pickers tell that the fleet is not needed."""
        return self.is_heard and not self.is_needed

    @property
    def replicas(self) -> int | None:
        """The fewest replicas of a fleet without servers; None where it has some, or a picker is silent."""
        return int(self.is_needed) if self.is_heard and not self.has_servers else None

    def heard(self, pages: Mapping[str, object], now_s: float) -> None:
        """The pickers' pages now; what is no text is a picker that gave none."""
        texts = {name: page for name, page in pages.items() if isinstance(page, str)}
        counts = {name: one for name, page in texts.items() if (one := picker_counts(page)) is not None}
        self.is_heard = bool(pages) and len(counts) == len(pages)
        self.has_servers = any(one.servers for one in counts.values())
        asked = any(
            one.held or (one.requests and name in self._last and one.requests != self._last[name].requests)
            for name, one in counts.items()
        )
        if asked or (self.has_servers and not self._last):
            self._asked_s = now_s
        self._last |= counts
        self.is_needed = now_s - self._asked_s < QUIET_S


@asynccontextmanager
async def demand_of(pickers: Sequence[str]) -> AsyncIterator[PickedDemand]:
    """The demand that these pickers see, followed meanwhile. Raises BadInput for what is no address."""
    demand = PickedDemand()
    async with Servers(pickers) as servers:

        async def follow() -> None:
            while True:
                await asyncio.sleep(POLL_S)
                demand.heard(await servers.texts(), time.monotonic())

        demand.heard(await servers.texts(), time.monotonic())
        following = asyncio.create_task(follow())
        try:
            yield demand
        finally:
            following.cancel()


class AdviceGauges(Collector):
    """The gauges of the newest advice. Those that are not known are left out: a missing gauge is no zero."""

    def __init__(self, model: str) -> None:
        self.model = model
        self.advice: Advice | None = None

    def collect(self) -> Iterator[Metric]:
        advice = self.advice
        if advice is None:
            return
        held = int(bool(advice.held))
        wanted = GaugeMetricFamily(WANTED, "replicas that meet the targets", labels=LABELS)
        has = GaugeMetricFamily("tokenfleet_replicas", "replicas that answer now", labels=LABELS)
        kept = "1 while metrics are missing and the last advice is kept"
        holds = GaugeMetricFamily("tokenfleet_advice_held", kept, labels=LABELS)
        arrivals = CounterMetricFamily("tokenfleet_advice_arrivals", "requests that arrived", labels=LABELS)
        range_ = "bounds of the advice's 90 % interval"
        likely = GaugeMetricFamily("tokenfleet_likely_replicas", range_, labels=[*LABELS, "bound"])
        cost = GaugeMetricFamily(
            "tokenfleet_advice_usd_per_hour", "cost of the fleet and of the advice", labels=[*LABELS, "of"]
        )
        for one in advice.of_types:
            labels, each = [self.model, one.worker_type.name], one.worker_type.usd_per_h
            if one.published is not None:
                wanted.add_metric(labels, one.published)
            has.add_metric(labels, one.has)
            holds.add_metric(labels, held)
            arrivals.add_metric(labels, one.arrivals)
            for bound, value in zip(("low", "high"), one.likely or (), strict=False):
                likely.add_metric([*labels, bound], value)
            if each is not None and one.wanted is not None:
                cost.add_metric([*labels, "fleet"], one.has * each)
                cost.add_metric([*labels, "wanted"], one.wanted * each)
        yield from (family for family in (wanted, has, holds, arrivals, likely, cost) if family.samples)


@asynccontextmanager
async def scaler_at(
    address: str, gauges: AdviceGauges, demand: PickedDemand | None = None
) -> AsyncIterator[None]:
    """Answer KEDA at HOST:PORT meanwhile. Raises BadInput without grpcio, and for a port that is taken."""
    try:
        grpc, keda = import_module("grpc"), messages()
    except ImportError:
        needs = "grpcio and protobuf, which vLLM brings; `pip install grpcio protobuf`"
        raise BadInput(f"--scaler: needs {needs}") from None
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((_handlers(grpc, keda, gauges, demand),))
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


def _handlers(grpc: Any, keda: Any, gauges: AdviceGauges, demand: PickedDemand | None) -> Any:
    async def published(ref: Any, context: Any) -> int:
        asked = {entry.key: entry.value for entry in ref.scalerMetadata}
        model = asked.get("model", gauges.model)
        if gauges.model and model != gauges.model:  # it is not known before a server has answered
            await context.abort(grpc.StatusCode.NOT_FOUND, f"this advice is for {gauges.model}, not {model}")
        published = {}
        if gauges.advice is not None:
            published = {one.worker_type.name: one.published for one in gauges.advice.of_types}
        name = asked.get(TYPE, "" if len(published) != 1 else next(iter(published)))
        if published and name not in published:
            told = f"{TYPE} {name!r} is none of {', '.join(published)}"
            await context.abort(grpc.StatusCode.NOT_FOUND, f"this advice is for other types: {told}")
        wanted = published.get(name)
        if demand is not None and (least := demand.replicas) is not None:
            return max(wanted or 0, 1) if least else 0
        if wanted is None:
            await context.abort(grpc.StatusCode.UNAVAILABLE, "there is no advice to publish")
        return wanted or 0

    async def is_active(ref: Any, context: Any) -> Any:
        is_idle = demand is not None and demand.is_idle
        return keda.IsActiveResponse(result=await published(ref, context) > 0 and not is_idle)

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
