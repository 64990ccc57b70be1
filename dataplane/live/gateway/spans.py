"""OpenTelemetry spans of served requests, sent by OTLP over HTTP: `tokenfleet serve --otlp URL`.

    request                        arrival to last token; its parent is the client's `traceparent`
      admission                    arrival to the first placement
      placement                    one each time a worker is chosen, with predicted and real TTFT
      engine                       one each stay on a worker
      move, replay                 what took the request elsewhere, and why

The engines get the request's span as `traceparent` in vLLM's `trace_headers`. A client that does not sample
(`…-00`) gets no spans. They are sent by a thread of OpenTelemetry's own, so that no request waits for a
collector. Where that is full or does not answer, spans are dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from controlplane.errors import BadInput
from controlplane.types import RequestId, WorkerId
from dataplane.live.gateway.metrics import PRIORITY_NAMES
from dataplane.live.ledger.request import Tracked

if TYPE_CHECKING:
    from dataplane.live.gateway.fleet_core import FleetCore

PATH = "/v1/traces"
TIMEOUT_S = 5.0
Facts = Mapping[str, str | int | float | bool]


def endpoint_of(url: str) -> str:
    """The address that spans are sent to. Raises BadInput for one that is no http address."""
    scheme, _, rest = url.partition("://")
    if scheme not in ("http", "https") or not rest:
        raise BadInput(f"--otlp: expected an http:// or https:// address, got {url!r}")
    return url if "/" in rest.rstrip("/") else url.rstrip("/") + PATH


def predicted_ttft_s(core: FleetCore, tracked: Tracked, worker: WorkerId) -> float | None:
    """Seconds from its placement, by the step times: for the prompts ahead and its own; None: not known."""
    profile = core.placement.kinds.profiles.get(core.kind_of(worker) or "")
    if profile is None:
        return None
    others = (t for t in core.requests.on_worker(worker) if t is not tracked and not t.output_token_ids)
    ahead = sum(other.prompt_tokens for other in others)
    return float(
        profile.alone_ttfts_s(tracked.context_tokens + ahead, core.placement.cached_at(tracked, worker))
    )


@dataclass(slots=True)
class _Stay:
    worker: WorkerId
    at_s: float
    predicted_s: float | None
    begun: int  # tokens that it had then


@dataclass(slots=True)
class _Open:
    span: Any
    stays: list[_Stay] = field(default_factory=list)


class Spans:
    """The spans of the requests of a core.

    Raises BadInput for an address that is none, or where OpenTelemetry's packages are missing.
    """

    def __init__(self, url: str, model: str, core: FleetCore) -> None:
        endpoint = endpoint_of(url)
        try:
            from opentelemetry import trace
            from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
        except ImportError as error:
            needed = "opentelemetry-sdk and opentelemetry-exporter-otlp-proto-http"
            raise BadInput(f"--otlp: needs {needed}: {error}") from None
        self._trace, self._propagator = trace, TraceContextTextMapPropagator()
        self._provider = TracerProvider(resource=Resource.create({"service.name": "tokenfleet"}))
        exporter = OTLPSpanExporter(endpoint=endpoint, timeout=TIMEOUT_S)
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("tokenfleet.gateway")
        self._model, self._core = model, core
        self._shift_ns = time.time_ns() - time.monotonic_ns()
        self._open: dict[RequestId, _Open] = {}
        core.on_arrival.append(self.arrive)
        core.segments.on_begin.append(self.place)
        core.on_end.append(self.end)

    def arrive(self, tracked: Tracked) -> None:
        """Begin the span of a request; its engines get it as the parent of theirs."""
        parent = self._propagator.extract({"traceparent": tracked.ticket.traceparent})
        kind = self._trace.SpanKind.SERVER
        span = self._tracer.start_span("request", parent, kind, start_time=self._unix_ns(tracked.arrival_s))
        headers = dict(tracked.request.trace_headers or {})
        self._propagator.inject(headers, self._trace.set_span_in_context(span))
        tracked.request.trace_headers = headers
        self._open[tracked.id] = _Open(span)

    def place(self, tracked: Tracked, worker: WorkerId) -> None:
        """Note that a request begins a stay on a worker."""
        if (at := self._open.get(tracked.id)) is not None:
            predicted_s = predicted_ttft_s(self._core, tracked, worker)
            at.stays.append(_Stay(worker, time.monotonic(), predicted_s, len(tracked.output_token_ids)))

    def end(self, tracked: Tracked, outcome: str) -> None:
        """End the span of a request, and make those within it."""
        if (at := self._open.pop(tracked.id, None)) is None:
            return
        end_s = time.monotonic()
        within = self._trace.set_span_in_context(at.span)

        def made(name: str, start_s: float, until_s: float, facts: Facts) -> None:
            span = self._tracer.start_span(
                name, within, attributes=dict(facts), start_time=self._unix_ns(start_s)
            )
            span.end(self._unix_ns(until_s))

        first_s = at.stays[0].at_s if at.stays else end_s
        waits = {
            "tokenfleet.priority": PRIORITY_NAMES[tracked.ticket.priority],
            "tokenfleet.key": tracked.ticket.key,
        }
        made("admission", tracked.arrival_s, first_s, waits)
        for n, stay in enumerate(at.stays):
            until_s = at.stays[n + 1].at_s if n + 1 < len(at.stays) else end_s
            facts: dict[str, str | int | float | bool] = {
                "tokenfleet.worker": stay.worker,
                "tokenfleet.stay": n,
            }
            made("placement", stay.at_s, stay.at_s, facts | _first_token(tracked, stay))
            made("engine", stay.at_s, until_s, facts | {"tokenfleet.tokens_before": stay.begun})
        if tracked.moves or tracked.replays:
            self._elsewhere(tracked, made)
        self._close(at.span, tracked, outcome, end_s)

    def _elsewhere(self, tracked: Tracked, made: Callable[[str, float, float, Facts], None]) -> None:
        """The spans of what took a request to another worker; of a move its pause."""
        shift_s = time.time() - time.monotonic()
        for event in self._core.events.about(tracked.id):
            if event.kind not in ("migrate", "replay"):
                continue
            pause_s = event.facts.get("cost", {}).get("downtime_s") or 0.0
            ends = {f"tokenfleet.{end}": str(event.facts.get(end)) for end in ("source", "target", "worker")}
            at_s = event.at_s - shift_s
            name = "move" if event.kind == "migrate" else "replay"
            made(name, at_s - pause_s, at_s, {**ends, "tokenfleet.reason": event.reason})

    def _close(self, span: Any, tracked: Tracked, outcome: str, end_s: float) -> None:
        ttft_s, tpot_s = tracked.ttft_s(), tracked.tpot_s()
        facts: dict[str, Any] = {
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": self._model,
            "gen_ai.response.id": str(tracked.id),
            "gen_ai.usage.input_tokens": tracked.prompt_tokens,
            "gen_ai.usage.output_tokens": len(tracked.output_token_ids),
            "gen_ai.server.time_to_first_token": ttft_s,
            "gen_ai.server.time_per_output_token": tpot_s,
            "tokenfleet.outcome": outcome,
            "tokenfleet.slo_class": tracked.ticket.slo_class or None,
            "tokenfleet.ttft_target_s": tracked.slo.ttft_s,
            "tokenfleet.tpot_target_s": tracked.slo.tpot_s,
            "tokenfleet.moves": tracked.moves,
            "tokenfleet.replays": tracked.replays,
        }
        span.set_attributes({name: value for name, value in facts.items() if value is not None})
        if outcome == "failed":
            span.set_status(self._trace.StatusCode.ERROR, tracked.ticket.failure or outcome)
        span.end(self._unix_ns(end_s))

    def _unix_ns(self, at_s: float) -> int:
        """A time of the monotonic clock as Unix time in nanoseconds; equal times stay equal."""
        return int(1e9 * at_s) + self._shift_ns

    def close(self) -> None:
        """Send what is left, for a few seconds at most."""
        self._provider.force_flush(int(1e3 * TIMEOUT_S))
        self._provider.shutdown()


def _first_token(tracked: Tracked, stay: _Stay) -> dict[str, float]:
    """Predicted and real seconds from the arrival to the first token, of the placement that led to it."""
    facts = {}
    if stay.begun == 0 and stay.predicted_s is not None:
        facts["tokenfleet.predicted_ttft_s"] = stay.at_s - tracked.arrival_s + stay.predicted_s
    if stay.begun == 0 and (ttft_s := tracked.ttft_s()) is not None:
        facts["tokenfleet.ttft_s"] = ttft_s
    return facts
