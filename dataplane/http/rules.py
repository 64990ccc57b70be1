"""Rules of every HTTP API of Tokenfleet: authentication, body limits, and the form of errors.

Errors have OpenAI's shape, as the gateway's do. Without a key, only requests that name a loopback host and do
not come from a foreign web page are answered. So no web site can steer the fleet of a person who visits it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import sqlite3
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from fastapi import FastAPI, Request, Response, Security
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.security import HTTPBearer
from pydantic import BaseModel, Field
from starlette.exceptions import HTTPException
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controlplane.errors import BadInput, ControlPlaneError
from dataplane.http.keys import KeyRing
from dataplane.http.tls import is_loopback

if TYPE_CHECKING:
    from dataplane.http.server import Extension

log = logging.getLogger(__name__)
OPEN_PATHS = frozenset({"/health", "/ready"})
BODY_BYTES = 1 << 20
BODY_IDLE_S = 30.0  # a body is given up if nothing more of it comes for this long


class ErrorBody(BaseModel):
    """One line that says what was wrong."""

    message: str = Field(description="for people")
    type: str = Field(description="for programs, as OpenAI's API has it")
    param: str | None = Field(None, description="always null")
    code: str | None = Field(None, description="as OpenAI's API has it")


class ErrorReply(BaseModel):
    """A refusal."""

    error: ErrorBody = Field(description="why")


class UnknownName(BadInput):
    """Nothing of that name is here: 404."""


class Conflict(BadInput):
    """The resource's present state forbids it: 409."""


class TooBusy(BadInput):
    """Come again in `retry_after_s`: 429."""

    def __init__(self, message: str, retry_after_s: int) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorReply, "description": phrase}
    for status, phrase in {
        400: "What was asked for cannot be done; the message says why",
        401: "The key is missing or wrong",
        403: "Without a key, only this machine's own pages and programs may call",
        404: "Nothing of that name is here",
        405: "The path has other methods",
        408: "The body did not come in time",
        413: "The body is too large",
        422: "A field has a value it cannot have; the message names it",
    }.items()
}


def application(title: str, keys: KeyRing, extensions: Sequence[Extension], **options: Any) -> FastAPI:
    """An API by the rules, for the routes of extensions too. Without keys loopback callers are let in."""
    # It tells OpenAPI, and so a generated client, of the key; HouseRules looks at it.
    bearer = Security(HTTPBearer(auto_error=False, description="a control key"))
    app = FastAPI(
        title=title,
        version="1",
        responses=ERRORS,
        docs_url="/docs",
        redoc_url=None,
        dependencies=[bearer] if keys.keys else [],
        **options,
    )
    open_paths = OPEN_PATHS.union(*(extension.open_paths for extension in extensions))
    body_bytes = {path: most for extension in extensions for path, most in extension.body_bytes.items()}
    app.add_middleware(HouseRules, keys=keys, open_paths=open_paths, body_bytes=body_bytes)
    app.add_exception_handler(ControlPlaneError, _bad_input)
    app.add_exception_handler(RequestValidationError, _bad_body)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(OSError, _no_disk)
    app.add_exception_handler(sqlite3.OperationalError, _no_disk)

    @app.get("/health")
    async def health() -> dict[str, str]:
        """Whether this process answers."""
        return {"status": "ok"}

    return app


class HouseRules:
    """ASGI middleware: refuses callers without a right to call, and bodies beyond their bounds."""

    def __init__(
        self, app: ASGIApp, keys: KeyRing, open_paths: frozenset[str], body_bytes: Mapping[str, int]
    ) -> None:
        self._app, self._keys = app, keys
        self._open_paths, self._body_bytes = open_paths, body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        refusal = None if request.url.path in self._open_paths else _refusal(request, self._keys)
        most = self._body_bytes.get(request.url.path, BODY_BYTES)
        stated = request.headers.get("content-length", "")
        if refusal is None and stated.isdigit() and int(stated) > most:
            refusal = error_reply(413, _too_large_message(most), connection="close")
        if refusal is not None:
            await refusal(scope, receive, send)
            return
        await self._app(scope, _bounded(receive, most), send)


def _bounded(receive: Receive, most: int) -> Receive:
    """`receive` that raises once the body is too large (its length may be unstated) or stays away."""
    read, whole = 0, False

    async def bounded() -> Message:
        nonlocal read, whole
        if whole:
            return await receive()
        try:
            message = await asyncio.wait_for(receive(), BODY_IDLE_S)
        except TimeoutError:
            raise HTTPException(408, f"nothing more of the body came within {BODY_IDLE_S:g} s") from None
        read += len(message.get("body", b""))
        whole = not message.get("more_body", False)
        if read > most:
            raise HTTPException(413, _too_large_message(most))
        return message

    return bounded


async def whole_body(receive: Receive, most: float = math.inf) -> bytes | None:
    """A request's body; None where it has more than `most` bytes, or the client has left."""
    pieces, size, is_last = [], 0, False
    while not is_last:
        message = await receive()
        pieces.append(message.get("body", b""))
        size += len(pieces[-1])
        if size > most or message["type"] == "http.disconnect":
            return None
        is_last = not message.get("more_body", False)
    return b"".join(pieces)


class ReadAhead:
    """Receive, whose body may be read whole before it is asked for."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._read: Message | None = None

    async def __call__(self) -> Message:
        message, self._read = self._read, None
        return await self._receive() if message is None else message

    async def body(self, most: float = math.inf) -> bytes | None:
        """As `whole_body`. Who receives next gets it; where it is None, the client has left."""
        body = await whole_body(self._receive, most)
        self._read = {"type": "http.disconnect"}
        if body is not None:
            self._read = {"type": "http.request", "body": body, "more_body": False}
        return body


async def send_reply(reply: Response, send: Send) -> None:
    """Send a whole reply where no scope is at hand."""
    await send({"type": "http.response.start", "status": reply.status_code, "headers": reply.raw_headers})
    await send({"type": "http.response.body", "body": reply.body})


def error_reply(
    status: int,
    message: str,
    kind: str = "invalid_request_error",
    code: str | None = None,
    **headers: str,
) -> JSONResponse:
    """An error in OpenAI's shape; `headers` have _ where HTTP has -."""
    error = {"message": message, "type": kind, "param": None, "code": code}
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return JSONResponse({"error": error}, status_code=status, headers=named)


def _refusal(request: Request, keys: KeyRing) -> JSONResponse | None:
    if keys.keys:
        if keys.find(request.headers.get("authorization", "")) is not None:
            return None
        return error_reply(401, "the control key is missing or wrong", www_authenticate="Bearer")
    if not is_loopback(request.url.hostname or ""):
        return error_reply(403, "without a key, only loopback hosts may be named")
    origin = request.headers.get("origin")
    if origin is not None and urlsplit(origin).netloc != request.url.netloc:
        return error_reply(403, "without a key, no other site's page may call")
    return None


def _too_large_message(most: int) -> str:
    return f"the body must be at most {most} bytes"


async def _bad_input(request: Request, error: Exception) -> Response:
    if isinstance(error, UnknownName):
        return error_reply(404, str(error))
    if isinstance(error, Conflict):
        return error_reply(409, str(error))
    if isinstance(error, TooBusy):
        return error_reply(429, str(error), "rate_limit_error", retry_after=str(error.retry_after_s))
    return error_reply(400, str(error))


async def _no_disk(request: Request, error: Exception) -> Response:
    """What could not be kept, of a full disk or a folder that cannot be written any more."""
    why = getattr(error, "strerror", None) or str(error)
    log.error("%s %s: %s", request.method, request.url.path, error)
    return error_reply(507, f"nothing can be kept here now: {why}", "server_error", "no_storage")


async def _bad_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    errors = error.errors()
    # A body may take one of several forms. The others then miss fields: report the fault of the one sent.
    first = next((e for e in errors if e["type"] not in ("missing", "extra_forbidden")), errors[0])
    where = ".".join(str(part) for part in first["loc"])
    return error_reply(422, f"{where}: {first['msg']}")


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    reply = error_reply(error.status_code, str(error.detail))
    reply.headers.update(error.headers or {})
    if error.status_code == 405:
        # Starlette names the methods of the first route on the path; a path may have several.
        reply.headers["allow"] = ", ".join(sorted(_methods(request)))
    return reply


def _methods(request: Request) -> set[str]:
    """The methods that a path allows."""
    methods: set[str] = set()
    for route in request.app.routes:
        if route.matches(request.scope)[0] is not Match.NONE:
            methods |= getattr(route, "methods", None) or set()
    return methods
