"""A fleet that is watched: a look at its servers every few seconds, the advice, and its gauges over HTTP.

Looks lie on a grid of times, so that each bin of the counts has equally many; one that would be late is left
out. Step times are calibrated every minute by what the servers count.
"""

from __future__ import annotations

import asyncio
import json
import math
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Protocol

from controlplane.errors import BadInput
from controlplane.figures import duration_text
from controlplane.perfmodel.calibration import Interval, calibrated_by
from tokenfleet.advise.advice import Advice, AdviceSettings, AdviceState
from tokenfleet.advise.day import AdviceHistory
from tokenfleet.advise.decide import ORIGIN_S, advise, looked_at
from tokenfleet.advise.look import FleetTraffic, NoCounts, Page, Watched, checked, look
from tokenfleet.profiles.engine_metrics import LENGTHS, EngineCounts, intervals_of
from tokenfleet.traces.from_metrics import CountedTraffic, LengthHistogram

if TYPE_CHECKING:
    import socket
    from collections.abc import AsyncIterator

    from prometheus_client.registry import Collector

    from dataplane.http.server import Extension

CALIBRATE_S = 60.0
MOST_INTERVALS = 2000
ENOUGH = 500.0  # requests that ended while watched; with fewer, the servers' whole lives give the lengths
Act = Callable[[Advice], Awaitable[str]]
Show = Callable[[Advice, Callable[[float], datetime]], bool]


class MetricsSource(Protocol):
    """The place that a look reads the servers' metrics from. `discovered`: servers that may be starting."""

    discovered: frozenset[str]

    async def pages(self, at_s: float) -> dict[str, Page]:
        """What each server says now."""


async def first_pages(servers: MetricsSource, is_planned: bool = False) -> dict[str, EngineCounts]:
    """The servers' first pages. Raises BadInput for one that gives no counts, and where models differ.

    A pod that does not answer yet is starting, where another answers. `is_planned`: lengths are needed, too.
    """
    pages = await servers.pages(ORIGIN_S)
    if not pages:
        raise BadInput("advise: no server is listed")
    some_answer = any(isinstance(page, EngineCounts) for page in pages.values())
    for server, page in pages.items():
        may_start = some_answer and server in servers.discovered
        is_silent = isinstance(page, NoCounts) and not page.answers
        if (why := _lacks(page, is_planned)) and not (may_start and is_silent):
            raise BadInput(f"{server}: {why}")
    counts = {server: page for server, page in pages.items() if isinstance(page, EngineCounts)}
    models = {page.model: server for server, page in counts.items()}
    if len(models) > 1:
        (one, at), (other, there) = sorted(models.items())[:2]
        raise BadInput(f"advise: one model at a time; {at} serves {one}, {there} serves {other}")
    return counts


def _lacks(page: Page, is_planned: bool) -> str:
    """What a first page lacks, or nothing."""
    if isinstance(page := checked(page), NoCounts):
        return page.why
    no_lengths = is_planned and page.values["ended"] and not page.buckets["prompt"]
    return f"vllm:{LENGTHS['prompt']} is missing; --plan needs lengths" if no_lengths else ""


async def some_answer(
    servers: MetricsSource, every_s: float, stop: asyncio.Event, tell: Callable[[str], None]
) -> bool:
    """Wait until a server answers, and tell why once; False where `stop` is set before."""
    told = ""
    while not stop.is_set():
        why = "no server answers"
        try:
            pages = (await servers.pages(ORIGIN_S)).values()
            if any(isinstance(page, EngineCounts) or page.answers for page in pages):
                return True
        except BadInput as error:  # a name without addresses may get some
            why = str(error)
        if not told:
            tell(told := f"{why}; waiting for one")
        with suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), every_s)
    return False


class FleetWatch:
    """The watched fleet: its state between looks."""

    def __init__(
        self,
        servers: MetricsSource,
        settings: AdviceSettings,
        model: str,
        every_s: float,
        act: Act | None = None,
    ) -> None:
        self._servers, self._model, self._every_s, self._act = servers, model, every_s, act
        self._settings = looked_at(settings, every_s)
        self._watched, self._state = Watched(), AdviceState()
        self._intervals: list[deque[Interval]] = [deque(maxlen=MOST_INTERVALS) for _ in settings.types]
        self._calibrated_s = ORIGIN_S
        self.record, self.history = TrafficRecord(), AdviceHistory()

    async def run(self, first: dict[str, EngineCounts], show: Show, stop: asyncio.Event) -> None:
        """Look, advise and show until `stop` is set or `show` asks for no more."""
        began_s, unix_s, number = time.monotonic(), time.time(), 0
        pages: dict[str, Page] = dict(first)

        def clock(at_s: float) -> datetime:
            return datetime.fromtimestamp(unix_s + at_s - ORIGIN_S).astimezone()

        while True:
            advice = await self._look(pages, ORIGIN_S + number * self._every_s)
            advice = replace(advice, spent=self.history.add(advice))
            if self._act is not None:
                advice = replace(advice, applied=await self._act(advice))
            if not show(advice, clock) or stop.is_set():
                return
            number = max(number, int((time.monotonic() - began_s) / self._every_s)) + 1
            try:
                async with asyncio.timeout(max(began_s + number * self._every_s - time.monotonic(), 0.0)):
                    await stop.wait()
                return
            except TimeoutError:
                pages = await self._servers.pages(ORIGIN_S + number * self._every_s)

    async def _look(self, pages: dict[str, Page], at_s: float) -> Advice:
        before = self._watched.last
        self._watched, traffic = look(self._watched, pages, at_s, self._model)
        self.record.add(traffic)
        if not traffic.held:
            for kind, intervals in enumerate(self._intervals):
                both = (before, self._watched.last)
                intervals.extend(intervals_of([_of_kind(pages, kind) for pages in both]))
        self._state, advice = advise(self._settings, self._state, traffic)
        if at_s - self._calibrated_s >= CALIBRATE_S:
            self._calibrated_s = at_s
            await self._calibrate()
        return advice

    async def _calibrate(self) -> None:
        """Correct the step times of each type that had traffic enough."""
        for kind, intervals in enumerate(self._intervals):
            around = self._settings.types[kind].profile
            try:
                made, _ = await asyncio.to_thread(calibrated_by, tuple(intervals), around)
            except BadInput:
                continue
            self._state = replace(self._state, profiles={**self._state.profiles, kind: made})


def _of_kind(pages: Mapping[str, EngineCounts], kind: int) -> dict[str, EngineCounts]:
    """The pages of a type's servers."""
    return {server: page for server, page in pages.items() if page.kind == kind}


@asynccontextmanager
async def answering(
    listening: socket.socket,
    gauges: Collector,
    page: Callable[[], dict[str, Any] | None] = lambda: None,
    extensions: Sequence[Extension] = (),
) -> AsyncIterator[None]:
    """Serve the gauges at /metrics and `page` at /v1/advice meanwhile, to everybody who may ask."""
    from fastapi import APIRouter, Response
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

    from dataplane.http.keys import KeyRing
    from dataplane.http.rules import application
    from dataplane.http.server import Extension, QuietServer

    registry, router = CollectorRegistry(auto_describe=False), APIRouter()
    registry.register(gauges)

    @router.get("/metrics")
    async def metrics() -> Response:
        """The advice as Prometheus gauges."""
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)

    @router.get("/v1/advice")
    async def advice() -> Response:
        """The newest advice and the last day; 503 before the first look."""
        shown = page()
        return Response(json.dumps(shown), 503 if shown is None else 200, media_type="application/json")

    own = Extension([router], open_paths=frozenset({"/metrics", "/v1/advice"}))
    app = application("Tokenfleet advice", KeyRing(()), [own, *extensions])
    for extension in (own, *extensions):
        for one in extension.routers:
            app.include_router(one)
    server = QuietServer(app)
    listening.listen()  # a call before the server has started waits, and is not refused
    serving = asyncio.create_task(server.serve(sockets=[listening]))
    try:
        yield
    finally:
        server.should_exit = True
        await serving
        listening.close()


class TrafficRecord:
    """Arrivals between looks, and the lengths of the requests that ended: while watched, and before.

    A trace for `plan` is drawn from it.
    """

    def __init__(self) -> None:
        self._at_s: list[float] = []
        self._rates_rps: list[float] = []
        self._watched, self._lives = _Lengths(), _Lengths()

    def add(self, traffic: FleetTraffic) -> None:
        """Count a look. The first begins the record; one that was held leaves a step without counts."""
        if self._at_s:
            passed_s = traffic.at_s - self._at_s[-1]
            self._rates_rps.append(math.nan if traffic.arrivals is None else traffic.arrivals / passed_s)
        self._at_s.append(traffic.at_s)
        if not traffic.held:
            (self._lives if traffic.arrivals is None else self._watched).add(traffic)

    def counted(self, clock: Callable[[float], datetime]) -> CountedTraffic:
        """What the record says about the traffic. Raises BadInput where it has too little."""
        span_s = self._at_s[-1] - self._at_s[0] if self._at_s else 0.0
        lengths, whose = self._watched, "while watched"
        if lengths.ended < ENOUGH:
            lengths, whose = lengths.with_those_of(self._lives), "since the servers started"
        if not any(rate > 0 for rate in self._rates_rps):
            raise BadInput(f"advise: no request arrived in {duration_text(span_s)}; watch for longer")
        if not all(lengths.buckets.get(name, {}).get(math.inf, 0.0) > 0 for name in LENGTHS):
            raise BadInput(f"advise: the servers have no vllm:{LENGTHS['prompt']}; no lengths to plan for")
        prompts, outputs = (
            LengthHistogram.of_buckets(lengths.buckets[name], tokens / lengths.ended, f"{name}s")
            for name, tokens in (("prompt", lengths.prompt_tokens), ("output", lengths.output_tokens))
        )
        times_s = tuple(clock(at_s).timestamp() for at_s in self._at_s)
        return CountedTraffic(times_s, self._rates_rps, prompts, outputs, f"vLLM's metrics, lengths {whose}")


class _Lengths:
    """Requests that ended, their tokens, and their histograms."""

    def __init__(self) -> None:
        self.ended = self.prompt_tokens = self.output_tokens = 0.0
        self.buckets: dict[str, dict[float, float]] = {name: {} for name in LENGTHS}

    def add(self, more: FleetTraffic | _Lengths) -> None:
        self.ended += more.ended
        self.prompt_tokens += more.prompt_tokens
        self.output_tokens += more.output_tokens
        for name in LENGTHS:
            for edge, count in more.buckets.get(name, {}).items():
                self.buckets[name][edge] = self.buckets[name].get(edge, 0.0) + count

    def with_those_of(self, other: _Lengths) -> _Lengths:
        both = _Lengths()
        for one in (self, other):
            both.add(one)
        return both
