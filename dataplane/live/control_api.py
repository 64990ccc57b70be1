"""The control API: the fleet over HTTP, on a port of its own.

Errors have OpenAI's shape, as the gateway's do. Without a key it answers only requests that name a
loopback host and come from no foreign web page, so that no site a person visits can steer their fleet.
"""

from __future__ import annotations

import hmac
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import uvicorn
from fastapi import Body, FastAPI, Header, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel, ConfigDict, Field
from sse_starlette.sse import EventSourceResponse
from starlette.exceptions import HTTPException

from controlplane.control import Migrate, Scale
from controlplane.errors import BadInput
from controlplane.types import RequestId, WorkerId
from dataplane.live.gateway import is_loopback
from dataplane.live.operations import Operations, UnknownName

OPEN_PATHS = frozenset({"/health", "/ready"})


class ErrorBody(BaseModel):
    """One line that says what was wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorReply(BaseModel):
    error: ErrorBody


class ScaleOrder(BaseModel):
    """A number of workers, or `auto` to let the controller decide."""

    model_config = ConfigDict(extra="forbid", strict=True)
    workers: int | None = Field(None, ge=0, le=10_000)
    auto: bool = False


class MoveOrder(BaseModel):
    """A running request, and the worker it shall go to; without one the fleet chooses."""

    model_config = ConfigDict(extra="forbid", strict=True)
    request_id: str = Field(min_length=1, max_length=256)
    target: str | None = Field(None, min_length=1, max_length=64)


class Decision(BaseModel):
    """The controller's: a `scale` with `workers`, or a `migrate` with `request_id` and `target`."""

    model_config = ConfigDict(extra="forbid", strict=True)
    kind: Literal["scale", "migrate"]
    reason: str = Field(min_length=1, max_length=500)
    advisory: bool = False
    workers: int | None = Field(None, ge=0, le=10_000)
    request_id: str | None = Field(None, min_length=1, max_length=256)
    target: str | None = Field(None, min_length=1, max_length=64)

    def action(self) -> Scale | Migrate:
        """The decision as the core's noun. Raises BadInput when a field its kind needs is missing."""
        if self.kind == "scale" and self.workers is not None:
            return Scale(self.workers, self.reason)
        if self.kind == "migrate" and self.request_id is not None and self.target is not None:
            return Migrate(RequestId(self.request_id), WorkerId(self.target), self.reason)
        raise BadInput(f"decision: a {self.kind} needs other fields, see /openapi.json")


_ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply} for status in (400, 401, 403, 404, 405, 422)
}


def control_app(operations: Operations, key: str | None) -> FastAPI:
    """The application; `key` None lets loopback callers in without one."""
    app = FastAPI(
        title="Tokenfleet control", version="1", responses=_ERRORS, docs_url="/docs", redoc_url=None
    )
    app.state.operations = operations

    @app.middleware("http")
    async def guard(request: Request, proceed: Callable[[Request], Awaitable[Response]]) -> Response:
        refusal = _refusal(request, key)
        return refusal if refusal is not None else await proceed(request)

    app.add_exception_handler(BadInput, _bad_input)
    app.add_exception_handler(RequestValidationError, _bad_body)
    app.add_exception_handler(HTTPException, _http_error)

    @app.get("/v1/fleet")
    async def fleet() -> dict[str, Any]:
        """Workers, their load, what is moving, and the last decisions with their reasons."""
        return operations.fleet()

    @app.post("/v1/fleet/scale", status_code=202)
    async def scale(order: Annotated[ScaleOrder, Body()]) -> dict[str, Any]:
        """Fix the number of workers, or hand the decision back to the controller."""
        if (order.workers is None) == (not order.auto):
            raise BadInput('scale: give either {"workers": N} or {"auto": true}')
        if order.workers is None:
            operations.scale_automatically()
        else:
            operations.scale(order.workers, "an operator asked")
        return {"wanted_workers": operations.cluster.wanted, "auto": operations.auto}

    @app.post("/v1/workers/{worker}/drain", status_code=202)
    async def drain(worker: str) -> dict[str, Any]:
        """Move everything off a worker, then stop it."""
        operations.drain(worker)
        return {"worker": worker, "state": "draining"}

    @app.delete("/v1/workers/{worker}/drain")
    async def cancel_drain(worker: str) -> dict[str, Any]:
        """Let a draining worker serve again."""
        operations.cancel_drain(worker)
        return {"worker": worker, "state": "serving"}

    @app.get("/v1/requests")
    async def requests() -> dict[str, Any]:
        """Running and waiting requests, with worker and progress."""
        return {"requests": operations.requests()}

    @app.get("/v1/requests/{request_id}")
    async def explain(request_id: str) -> dict[str, Any]:
        """One request and every decision about it."""
        return operations.explain(request_id)

    @app.post("/v1/migrations", status_code=202)
    async def migrate(order: Annotated[MoveOrder, Body()]) -> dict[str, Any]:
        """Begin to move a running request."""
        return await operations.migrate(order.request_id, order.target, "an operator asked")

    @app.get("/v1/migrations/{migration_id}")
    async def migration(migration_id: str) -> dict[str, Any]:
        """One move: stage, bytes, downtime, outcome."""
        return operations.migration(migration_id)

    @app.post("/v1/decisions", status_code=202)
    async def decide(decision: Annotated[Decision, Body()]) -> dict[str, str]:
        """The controller's door: carry out, or where it is only advice record, what it decided."""
        await operations.decide(decision.action(), decision.advisory)
        return {"kind": decision.kind}

    @app.get("/v1/events", response_class=EventSourceResponse)
    async def events(
        last_event_id: Annotated[int, Header(ge=0)] = 0,
    ) -> EventSourceResponse:
        """Server-sent events: every decision, with its reason. Resumes after `Last-Event-ID`."""
        return EventSourceResponse(_event_lines(operations, last_event_id))

    @app.get("/metrics", response_class=Response)
    async def metrics() -> Response:
        """Prometheus' text format: `tokenfleet_` families, and vLLM's own by worker."""
        return Response(operations.exposition(), media_type="text/plain; version=0.0.4; charset=utf-8")

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether this process answers."""
        return {"status": "ok"}

    @app.get("/ready", responses={503: {"model": ErrorReply}})
    async def ready() -> Any:
        """Whether a worker serves."""
        if operations.is_ready:
            return {"status": "ready"}
        return _error(503, "service_unavailable", "no worker is serving")

    return app


async def _event_lines(operations: Operations, after_id: int) -> AsyncIterator[dict[str, str]]:
    async for event in operations.events.follow(after_id):
        yield {"id": str(event.id), "event": event.kind, "data": json.dumps(event.as_json())}


def _refusal(request: Request, key: str | None) -> JSONResponse | None:
    if request.url.path in OPEN_PATHS:
        return None
    if key is not None:
        scheme, _, secret = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() == "bearer" and hmac.compare_digest(secret.encode(), key.encode()):
            return None
        return _error(401, "invalid_request_error", "the control key is missing or wrong")
    if not is_loopback(request.url.hostname or ""):
        return _error(403, "invalid_request_error", "without a key, only loopback hosts may be named")
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.url.netloc:
        return _error(403, "invalid_request_error", "without a key, no other site's page may call")
    return None


def _error(status: int, kind: str, message: str) -> JSONResponse:
    error = {"message": message, "type": kind, "param": None, "code": None}
    headers = {"www-authenticate": "Bearer"} if status == 401 else None
    return JSONResponse({"error": error}, status_code=status, headers=headers)


async def _bad_input(request: Request, error: Exception) -> Response:
    status = 404 if isinstance(error, UnknownName) else 400
    return _error(status, "invalid_request_error", str(error))


async def _bad_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    where = ".".join(str(part) for part in first["loc"])
    return _error(422, "invalid_request_error", f"{where}: {first['msg']}")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reply = _error(error.status_code, "invalid_request_error", str(error.detail))
    reply.headers.update(error.headers or {})
    return reply


class QuietServer(uvicorn.Server):
    """Uvicorn without signal handlers of its own: the gateway's end is the fleet's end."""

    def install_signal_handlers(self) -> None:
        return

    def capture_signals(self) -> Any:
        from contextlib import nullcontext

        return nullcontext()


def control_server(app: FastAPI) -> QuietServer:
    """A server for the app; give its `serve` a bound socket, and set `should_exit` to end it."""
    return QuietServer(
        uvicorn.Config(app, log_level="warning", access_log=False, timeout_graceful_shutdown=1)
    )
