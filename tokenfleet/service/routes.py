"""The HTTP routes of the plan service, and its metrics.

`POST /v1/traces` takes a trace. `POST /v1/plans` makes a job of a trace and targets, `POST /v1/portfolios`
one of a portfolio. The other routes follow, show, list and cancel jobs. Handlers are plain functions, so that
FastAPI runs them in threads and the event loop stays free. The database counts jobs when Prometheus asks.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterable
from functools import partial
from typing import Annotated, Any, get_args

from fastapi import APIRouter, Body, Header, Query, Request, Response
from fastapi import Path as InPath
from fastapi.openapi.models import Example
from fastapi.responses import JSONResponse
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector
from pydantic import BaseModel
from sse_starlette.sse import EventSourceResponse

from controlplane.errors import BadInput
from dataplane.history.fleet_log import day_begin_s
from dataplane.http.rules import ERRORS, ErrorReply, TooBusy
from dataplane.http.server import Extension
from tokenfleet.service import forms
from tokenfleet.service.gap import Gap, last_kept_gap
from tokenfleet.service.jobs import PORTFOLIO, Jobs
from tokenfleet.service.plan_service import RETRY_AFTER_S, PlanService

INLINE_BODY_BYTES = 8 << 20
LOOK_EVERY_S = 0.2
MOST_FOLLOWERS = 200

Key = Annotated[
    str | None, Header(min_length=1, max_length=128, description="the same key again gives the same job")
]
JobId = Annotated[str, InPath(min_length=1, max_length=64, description="the `id` of a job")]
_BUSY: dict[int | str, dict[str, Any]] = {
    429: {
        "model": ErrorReply,
        "description": "Too many wait already",
        "headers": {"Retry-After": {"description": "seconds", "schema": {"type": "integer"}}},
    }
}
# A job without its answer, a list of them, and a job with it.
_OF_PLAN = forms.JobBrief, forms.JobList, forms.Job
_OF_PORTFOLIO = forms.PortfolioJobBrief, forms.PortfolioJobList, forms.PortfolioJob
_ID = {"job": "$response.body#/id"}


def _ordered(kind: str) -> dict[int | str, dict[str, Any]]:
    links = {
        "job": {"operationId": f"get_{kind}", "parameters": _ID},
        "cancel": {"operationId": f"cancel_{kind}", "parameters": _ID},
    }
    location = {"description": "where the job is", "schema": {"type": "string"}}
    queued = {"description": "Queued", "headers": {"Location": location}, "links": links}
    return {202: queued, **_BUSY, **_CONFLICT}


_EXAMPLES: dict[str, Example] = {
    "sample": {
        "summary": "The sample trace on one kind of worker",
        "value": {
            "trace": {"sample": True},
            "slo": {"ttft_s": 0.4, "tpot_s": 0.03},
            "model": "llama-3.1-8b",
            "gpu": ["h100"],
            "tp": [1],
        },
    }
}
_CONFLICT: dict[int | str, dict[str, Any]] = {
    409: {"model": ErrorReply, "description": "The job's state does not allow it"}
}


def plan_extension(service: PlanService, last_gap: Callable[[], Gap | None] | None = None) -> Extension:
    """The service as a part of an API. `last_gap`: for /metrics, by default the last one that was kept."""
    known = last_gap or partial(last_kept_gap, service.folder / "history")
    return Extension(
        routers=[plan_router(service)],
        running=service.running,
        collectors=[JobCollector(service.jobs), GapCollector(known)],
        body_bytes={
            "/v1/traces": service.limits.upload_bytes,
            "/v1/plans": INLINE_BODY_BYTES,
            "/v1/portfolios": INLINE_BODY_BYTES,
        },
    )


def plan_router(service: PlanService) -> APIRouter:
    """The routes over a service; who mounts them also enters `service.running()`."""
    router = APIRouter(prefix="/v1", tags=["plans"], responses=ERRORS)
    _add_catalogue_and_traces(router, service)
    _add_orders(router, service)
    followers = asyncio.Semaphore(MOST_FOLLOWERS)
    _add_jobs(router, service, "plan", _OF_PLAN, followers)
    _add_jobs(router, service, PORTFOLIO, _OF_PORTFOLIO, followers)

    @router.get(
        "/plans/{job}/scorecard",
        operation_id="get_scorecard",
        response_model=forms.Scorecard,
        responses=_BUSY | _CONFLICT,
    )
    def scorecard(job: JobId) -> Response:
        """What a kept plan (`last`: the one served last) predicted, and what the fleet under it did."""
        return JSONResponse(service.scorecard(job))

    return router


def _add_catalogue_and_traces(router: APIRouter, service: PlanService) -> None:
    @router.get("/catalogue", operation_id="get_catalogue")
    def catalogue() -> forms.Catalogue:
        """Models, kinds of worker, prices and policies to plan with, and what history is here."""
        return forms.Catalogue.model_validate(service.catalogue())

    @router.post(
        "/traces",
        operation_id="send_trace",
        status_code=201,
        openapi_extra={
            "requestBody": {
                "required": True,
                "description": "CSV, JSON lines or Parquet, in any format `tokenfleet trace check` reads",
                "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
            }
        },
    )
    async def upload(
        request: Request,
        name: Annotated[
            str, Query(min_length=1, max_length=200, pattern=r"^[^/\x00-\x1f]+$", description="for people")
        ] = "trace",
    ) -> forms.TraceSummary:
        """Send a trace as the body; `id` of the reply is what `POST /v1/plans` calls it."""
        draft = await asyncio.to_thread(service.uploads.draft)
        try:
            with draft.open("wb") as file:
                async for block in request.stream():
                    await asyncio.to_thread(file.write, block)
            summary = await asyncio.to_thread(service.uploads.keep, draft, name)
        finally:
            draft.unlink(missing_ok=True)
        return forms.TraceSummary.model_validate(summary)


def _add_orders(router: APIRouter, service: PlanService) -> None:
    @router.post("/plans", operation_id="order_plan", status_code=202, responses=_ordered("plan"))
    def order(
        response: Response,
        order: Annotated[forms.PlanOrder, Body(openapi_examples=_EXAMPLES)],
        idempotency_key: Key = None,
    ) -> forms.JobBrief:
        """Queue a plan job. It outlives the service: after a crash it is begun again."""
        job = service.order(order, idempotency_key)
        response.headers["location"] = f"/v1/plans/{job['id']}"
        return forms.JobBrief.model_validate(job)

    @router.post(
        "/portfolios", operation_id="order_portfolio", status_code=202, responses=_ordered(PORTFOLIO)
    )
    def order_portfolio(
        response: Response, order: forms.PortfolioOrder, idempotency_key: Key = None
    ) -> forms.PortfolioJobBrief:
        """Queue the plan of several models within limits that they share."""
        job = service.order_portfolio(order, idempotency_key)
        response.headers["location"] = f"/v1/portfolios/{job['id']}"
        return forms.PortfolioJobBrief.model_validate(job)


def _add_jobs(
    router: APIRouter,
    service: PlanService,
    kind: str,
    of_kind: tuple[type[BaseModel], type[BaseModel], type[BaseModel]],
    followers: asyncio.Semaphore,
) -> None:
    """What both kinds of job have; `of_kind`: the forms of a job without its answer, of a list, and whole."""
    brief, listing, whole = of_kind

    @router.get(f"/{kind}s", operation_id=f"list_{kind}s", response_model=listing)
    def jobs(
        limit: Annotated[int, Query(ge=1, le=500)] = 50, state: Annotated[forms.State | None, Query()] = None
    ) -> Any:
        """The last jobs, newest first, without their answers."""
        return {f"{kind}s": service.jobs.newest(limit, state, kind)}

    @router.get(f"/{kind}s/{{job}}", operation_id=f"get_{kind}", response_model=whole)
    def get(job: JobId) -> Response:
        """A job, and its answer once it is done."""
        state = service.job(job, kind)
        text = service.plans.text(job, of_portfolio=kind == PORTFOLIO)
        # The answer goes out as it was made; a model in between could change a digit.
        return JSONResponse(state | {kind: None if text is None else json.loads(text)})

    @router.delete(
        f"/{kind}s/{{job}}",
        operation_id=f"cancel_{kind}",
        status_code=202,
        response_model=brief,
        responses=_CONFLICT,
    )
    def cancel(job: JobId) -> Any:
        """Cancel a job: at once while it waits, within a moment while it runs."""
        return service.cancel(job, kind)

    @router.get(
        f"/{kind}s/{{job}}/events",
        operation_id=f"follow_{kind}",
        response_class=EventSourceResponse,
        responses=_BUSY,
    )
    async def follow(job: JobId) -> EventSourceResponse:
        """Server-sent events: the job (as in `GET`, without its answer) whenever it has changed. The event's
        name is the job's state; after `done`, `failed` or `cancelled` the stream ends."""
        await asyncio.to_thread(service.job, job, kind)
        if followers.locked():
            raise TooBusy(f"{MOST_FOLLOWERS} jobs are being followed already", RETRY_AFTER_S)
        return EventSourceResponse(_changes(service, job, followers, kind))


async def _changes(
    service: PlanService, job: str, followers: asyncio.Semaphore, kind: str
) -> AsyncIterator[dict[str, str]]:
    async with followers:
        last, number = "", 0
        while True:
            try:
                view = await asyncio.to_thread(service.job, job, kind)
            except BadInput:
                return
            text = json.dumps(view)
            if text != last:
                last, number = text, number + 1
                yield {"id": str(number), "event": view["state"], "data": text}
            if view["state"] in forms.OVER:
                return
            await asyncio.sleep(LOOK_EVERY_S)


class JobCollector(Collector):
    """`tokenfleet_plan_jobs{state}`."""

    def __init__(self, jobs: Jobs) -> None:
        self._jobs = jobs

    def collect(self) -> Iterable[Metric]:
        counts = self._jobs.counts()
        family = GaugeMetricFamily(
            "tokenfleet_plan_jobs", "Plan jobs that are kept, by state", labels=["state"]
        )
        for state in get_args(forms.State):
            family.add_metric([state], counts.get(state, 0))
        yield family


class GapCollector(Collector):
    """The last whole day's excess cost, where one is known: `tokenfleet_gap_ratio` and its parts."""

    def __init__(self, last_gap: Callable[[], Gap | None]) -> None:
        self._last_gap = last_gap

    def collect(self) -> Iterable[Metric]:
        found = self._last_gap()
        whole = "Cost of the last full day (UTC) over the hindsight optimum"
        part = "of the last full day (UTC): paid, cheapest (hindsight optimum), and the difference by cause"
        ratio = GaugeMetricFamily("tokenfleet_gap_ratio", whole)
        day = GaugeMetricFamily(
            "tokenfleet_gap_day_seconds", "Start of the day of tokenfleet_gap_*, Unix time"
        )
        gpu_hours = GaugeMetricFamily("tokenfleet_gap_gpu_hours", f"GPU-hours {part}", labels=["part"])
        usd = GaugeMetricFamily("tokenfleet_gap_usd", f"US dollars {part}", labels=["part"])
        if found is not None and found["ratio"] is not None and found["least"] is not None:
            ratio.add_metric([], found["ratio"])
            day.add_metric([], day_begin_s(found["day"]))
            amounts = {"paid": found["paid"], "cheapest": found["least"], **found["parts"]}
            for name, amount in amounts.items():
                gpu_hours.add_metric([name], amount["gpu_h"])
                if amount["usd"] is not None:
                    usd.add_metric([name], amount["usd"])
        yield from (ratio, day, gpu_hours, usd)
