"""OpenTelemetry spans of requests on emulated engines, as a collector in this process receives them."""

import asyncio
from itertools import pairwise

import numpy as np
import pytest
from front import SLO, A, B, Front, alone, profile, until
from span_collector import Collector, facts

from controlplane.errors import BadInput
from controlplane.placement.lengths import LengthTable
from controlplane.placement.policies import Policy
from controlplane.placement.queue import QueueSettings

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def collector():
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http.trace_exporter")
    made = Collector()
    yield made
    made.stop()


def traced(story, url):
    """Run a story on a fleet of two workers whose spans go to `url`."""
    from dataplane.live.gateway.spans import Spans
    from dataplane.live.ledger.placement import Placement

    async def run():
        rng = np.random.default_rng(0)
        placement = Placement({"": profile()}, 8, LengthTable.constant(200), rng, Policy.SPREAD)
        front = Front((A, B), profile(), QueueSettings(), placement)
        spans = Spans(url, "a-model", front.core)
        try:
            await asyncio.wait_for(story(front), 60)
        finally:
            await front.close()
            await asyncio.get_running_loop().run_in_executor(None, spans.close)

    asyncio.run(run())


def ticket(traceparent):
    from dataplane.live.ledger.request import Ticket

    return Ticket("r", "a-key", SLO, 0, traceparent=traceparent)


def test_a_moved_and_replayed_request_is_one_trace_with_every_stay(collector):
    seen = {}

    async def story(front):
        await front.send("r", [5, 6], ticket(f"00-{TRACE}-{PARENT}-01"))
        await front.until("r", 20)
        tracked = front.core.requests.get("r")
        seen["headers"], source = tracked.request.trace_headers, tracked.worker
        target = B if source == A else A
        await front.core.segments.move("r", target, "a test")
        await until(lambda: tracked.worker == target and len(front.tokens["r"]) > 40, every_s=0.001)
        front.engines[target].kill("kill -9")
        await front.ended("r")
        assert front.tokens["r"] == alone([5, 6], 100)
        seen["stays"] = [source, target, source]

    traced(story, collector.url)
    spans, names = collector.of(TRACE)
    assert sorted(names) == sorted(["request", "admission", *["placement", "engine"] * 3, "move", "replay"])
    (root,) = (span for span in spans if span.name == "request")
    assert root.parent_span_id.hex() == PARENT
    assert {span.parent_span_id for span in spans if span is not root} == {root.span_id}
    assert seen["headers"] == {"traceparent": f"00-{TRACE}-{root.span_id.hex()}-01"}
    told = facts(root)
    assert (told["tokenfleet.outcome"], told["tokenfleet.moves"], told["tokenfleet.replays"]) == (
        "finished",
        1,
        1,
    )
    assert (told["gen_ai.usage.input_tokens"], told["gen_ai.usage.output_tokens"]) == (2, 100)
    engines = [span for span in spans if span.name == "engine"]
    assert [facts(span)["tokenfleet.worker"] for span in engines] == seen["stays"]
    for before, after in pairwise(engines):
        assert before.end_time_unix_nano == after.start_time_unix_nano
    placed = facts(next(span for span in spans if span.name == "placement"))
    assert 0.0 < placed["tokenfleet.predicted_ttft_s"] < 1.0
    assert placed["tokenfleet.ttft_s"] == pytest.approx(told["gen_ai.server.time_to_first_token"])
    for span in spans:
        assert root.start_time_unix_nano - 1e6 <= span.start_time_unix_nano <= span.end_time_unix_nano
        assert span.end_time_unix_nano <= root.end_time_unix_nano + 1e6


@pytest.mark.parametrize("parent", ["", "nonsense", f"00-{'0' * 32}-{PARENT}-01"])
def test_a_request_without_a_usable_parent_begins_a_trace(collector, parent):
    async def story(front):
        await front.send("r", [5, 6], ticket(parent))
        await front.ended("r")

    traced(story, collector.url)
    (root,) = (span for span in collector.spans if span.name == "request")
    assert root.parent_span_id == b""
    assert len({span.trace_id for span in collector.spans}) == 1


def test_a_client_that_does_not_sample_gets_no_spans(collector):
    async def story(front):
        await front.send("r", [5, 6], ticket(f"00-{TRACE}-{PARENT}-00"))
        await front.ended("r")

    traced(story, collector.url)
    assert collector.spans == []


def test_a_collector_that_is_gone_costs_no_request(collector):
    collector.stop()

    async def story(front):
        for i in range(5):
            await front.send(f"r{i}", [i + 1] * 10)
        await front.ended(*(f"r{i}" for i in range(5)))
        assert all(front.tokens[f"r{i}"] == alone([i + 1] * 10, 100) for i in range(5))

    traced(story, collector.url)


@pytest.mark.parametrize("url", ["collector:4318", "ftp://collector", "http://", ""])
def test_an_address_that_is_none_is_refused(url):
    from dataplane.live.gateway.spans import endpoint_of

    with pytest.raises(BadInput, match="--otlp: expected an http:// or https:// address"):
        endpoint_of(url)
    assert (
        endpoint_of("http://collector:4318")
        == endpoint_of("http://collector:4318/")
        == ("http://collector:4318/v1/traces")
    )
    assert endpoint_of("https://collector/otlp/v1/traces") == "https://collector/otlp/v1/traces"
