"""The front of a portfolio: one OpenAI endpoint and one control API before the fleets of several models.

A request goes to the fleet of the model that its JSON names. The front passes the answer on piece by piece,
as the fleet sends it. A request that names no served model goes to the first fleet. Its server checks the key
and then refuses the request in vLLM's own words. The fleets check keys, limits and targets, so the front
holds no key of a client or of an operator. It asks the fleets about themselves with the caller's own key.

    endpoint       POST, by `model`; GET /v1/models of all fleets, /v1/models/NAME; /health, /ping, /version
    control API    /models/NAME/… is NAME's control API; GET /v1/fleet, /metrics, /health, /ready of all
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import quote

import aiohttp
from multidict import CIMultiDict
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from yarl import URL

from dataplane.http.rules import error_reply, send_reply, whole_body
from dataplane.live.engine_api.processes import race

MAX_BODY_BYTES = 64 << 20
CONNECT_S = 5.0
OWN = frozenset({"/v1/fleet", "/metrics", "/ready"})  # of the control API, answered from all fleets
OPEN = frozenset({"/health", "/ping", "/version", "/openapi.json", "/docs"})  # the first fleet's are any's
FIGURES = ("wanted_workers", "auto", "requests", "lately", "attainment_target", "gap")  # of a fleet
OF_A_CONNECTION = frozenset(
    {b"connection", b"keep-alive", b"te", b"trailer", b"transfer-encoding", b"upgrade"}
)
CALLERS = ("authorization", "host", "origin")  # by which a fleet knows who asks
PREFIX = re.compile(r"/models/([^/]+)(/.*)?")
Fleets = Mapping[str, str]  # addresses by model


def session() -> aiohttp.ClientSession:
    """Connections to fleets: as many as there are requests, and no end to how long one may last."""
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S),
        auto_decompress=False,
        skip_auto_headers=("accept", "accept-encoding", "content-type", "user-agent"),
    )


def endpoint(fleets: Fleets, http: aiohttp.ClientSession) -> ASGIApp:
    """The clients' endpoint, as an ASGI application. `fleets`: the gateway of each model and adapter."""
    first, known = next(iter(fleets.values())), dict[str, dict[str, Any]]()

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        if method == "GET" and path == "/v1/models":
            await listed(scope, receive, send)
        elif method == "POST":
            await route(scope, receive, send)
        elif (name := path.removeprefix("/v1/models/")) in fleets or path in OPEN or method == "OPTIONS":
            await relay(http, fleets.get(name, first), scope, receive, send, b"")
        else:
            refusal = error_reply(404, f"{path}: names none of the models that are served here")
            await refusal(scope, receive, send)

    async def listed(scope: Scope, receive: Receive, send: Send) -> None:
        """The models of all fleets. One whose core is being replaced is listed as it was `known`."""
        told = await ask_all(http, fleets, "/v1/models", scope)
        known.update({name: json.loads(text) for name, (status, text) in told.items() if status == 200})
        refused = [(status, text) for status, text in told.values() if status not in (200, 503)]
        if refused or len(known) < len(fleets):
            reply = _passed_on(*(refused or [one for one in told.values() if one[0] != 200])[0])
        else:
            models = {one["id"]: one for name in fleets for one in known[name]["data"]}
            reply = JSONResponse({"object": "list", "data": list(models.values())})
        await reply(scope, receive, send)

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        body = await whole_body(receive, MAX_BODY_BYTES)
        if body is None:
            refusal = error_reply(413, f"the body must be at most {MAX_BODY_BYTES} bytes", connection="close")
            await refusal(scope, receive, send)
            return
        try:
            told = json.loads(body)
        except (ValueError, RecursionError):
            told = {"model": ""}  # the server says what is wrong with it
        model = told.get("model") if isinstance(told, dict) else ""
        if model is None:
            refusal = error_reply(400, "model: missing: several are served here, and /v1/models lists them")
            await refusal(scope, receive, send)
            return
        if isinstance(model, str) and model not in fleets:
            names = ", ".join(fleets)
            send = _renaming(send, f"The model `{model}` does not exist. Valid aliases: {names}.")
        to = fleets.get(model, first) if isinstance(model, str) else first
        await relay(http, to, scope, receive, send, body)

    return _of_http(answer)


def control(fleets: Fleets, http: aiohttp.ClientSession, shared: Mapping[str, Any]) -> ASGIApp:
    """The operators' API, as an ASGI application. `fleets`: the control API of each model; `shared`: what is
    to be told of what they share."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        path, method = scope["path"], scope["method"]
        named = PREFIX.fullmatch(path)
        if named is not None and named[1] in fleets:
            body = await whole_body(receive, MAX_BODY_BYTES)
            to, inner = fleets[named[1]], named[2] or "/"
            await relay(http, to, {**scope, "path": inner}, receive, send, body or b"")
        elif (method, path) == ("GET", "/health"):
            await JSONResponse({"status": "ok"})(scope, receive, send)
        elif method == "GET" and path in OWN:
            await own(path, scope, receive, send)
        else:
            said = (
                "several models are served here: /models/NAME/… (`tokenfleet fleet --model NAME`) asks one,"
                " and /v1/fleet (`fleet status`) lists them"
            )
            await error_reply(404, said)(scope, receive, send)

    async def own(path: str, scope: Scope, receive: Receive, send: Send) -> None:
        told = await ask_all(http, fleets, path, scope)
        texts = {name: text for name, (status, text) in told.items() if status == 200}
        # While a fleet does not answer (503), the reply covers the others, but not all are ready.
        may_lack = 503 if texts and path != "/ready" else 200
        refused = [one for one in told.values() if one[0] not in (200, may_lack)]
        if refused:
            reply = _passed_on(*refused[0])
        elif path == "/v1/fleet":
            views = {name: json.loads(text) for name, text in texts.items()}
            reply = JSONResponse(portfolio_view(fleets, views, shared))
        elif path == "/metrics":
            text = merged({name: text.decode() for name, text in texts.items()})
            reply = Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
        else:
            reply = JSONResponse({"status": "ready"})
        await reply(scope, receive, send)

    return _of_http(answer)


def portfolio_view(
    fleets: Fleets, views: Mapping[str, Mapping[str, Any]], shared: Mapping[str, Any]
) -> dict[str, Any]:
    """Each model's fleet in a few figures, from `GET /v1/fleet` of each, and what is shared."""
    models = []
    for name, view in views.items():
        states = [worker["state"] for worker in view["workers"]]
        models.append(
            {
                "name": name,
                "control": fleets[name],
                "workers": {s: states.count(s) for s in ("starting", "serving", "draining")},
            }
            | {figure: view[figure] for figure in FIGURES}
        )
    return {"schema": "tokenfleet.portfolio-fleet/1", "models": models, **shared}


def merged(texts: Mapping[str, str]) -> str:
    """Prometheus' text of several fleets as one, each sample with its model as the label `fleet`."""
    about: dict[str, list[str]] = {}
    samples: dict[str, list[str]] = {}
    for fleet, text in texts.items():
        family = ""
        for line in text.splitlines():
            if line.startswith("# "):
                _, what, family, *_ = line.split(" ", 3)
                lines = about.setdefault(family, [])
                if not any(known.startswith(f"# {what} ") for known in lines):
                    lines.append(line)
            elif line:
                end = re.search(r"[{ ]", line)
                assert end is not None
                at, rest = end.start(), line[end.end() :]
                label = f'fleet="{fleet}"'
                labels = f"{{{label},{rest}" if line[at] == "{" else f"{{{label}}} {rest}"
                samples.setdefault(family, []).append(line[:at] + labels)
    families = [[*lines, *samples.get(family, ())] for family, lines in about.items()]
    return "".join(f"{line}\n" for lines in families for line in lines)


async def ask_all(
    http: aiohttp.ClientSession, fleets: Fleets, path: str, scope: Scope
) -> dict[str, tuple[int, bytes]]:
    """What each fleet answers to a GET by this caller: status and body; 503 of one that does not answer."""
    headers = {k.decode(): v.decode("latin-1") for k, v in scope["headers"] if k.decode() in CALLERS}

    async def ask(name: str, to: str) -> tuple[int, bytes]:
        try:
            async with http.get(to + path, headers=headers) as reply:
                return reply.status, await reply.read()
        except (aiohttp.ClientError, TimeoutError):
            said = error_reply(503, f"{name}: its fleet does not answer", "service_unavailable")
            return 503, bytes(said.body)

    return dict(zip(fleets, await asyncio.gather(*(ask(*one) for one in fleets.items())), strict=True))


async def relay(
    http: aiohttp.ClientSession, to: str, scope: Scope, receive: Receive, send: Send, body: bytes
) -> None:
    """Let the server at `to` answer. A client that leaves takes its request with it."""
    await race(_answered(http, to, scope, send, body), _until_gone(receive))


async def _answered(http: aiohttp.ClientSession, to: str, scope: Scope, send: Send, body: bytes) -> None:
    query = f"?{scope['query_string'].decode()}" if scope["query_string"] else ""
    where = URL(to + quote(scope["path"]) + query, encoded=True)
    headers: CIMultiDict[str] = CIMultiDict(
        (name.decode(), value.decode("latin-1"))
        for name, value in _passed(scope["headers"])
        if name != b"content-length"
    )
    is_stream = None  # until the answer has begun
    try:
        async with http.request(
            scope["method"], where, headers=headers, data=body or None, allow_redirects=False
        ) as reply:
            is_stream = reply.content_type == "text/event-stream"
            passed = [(name.lower(), value) for name, value in _passed(reply.raw_headers)]
            await send({"type": "http.response.start", "status": reply.status, "headers": passed})
            async for piece in reply.content.iter_any():
                await send({"type": "http.response.body", "body": piece, "more_body": True})
    except (aiohttp.ClientError, TimeoutError) as error:
        if is_stream is None:
            why = "this model's fleet does not answer at the moment"
            refusal = error_reply(503, why, "service_unavailable", retry_after="2")
            await send_reply(refusal, send)
            return
        if not is_stream:
            raise  # the connection breaks, as it did there
        said = error_reply(502, f"the answer broke off: {error}", "server_error").body
        await send({"type": "http.response.body", "body": b"data: " + said + b"\n\n", "more_body": True})
    await send({"type": "http.response.body", "body": b""})


def _renaming(send: Send, message: str) -> Send:
    """Send, which gives a 404 this message: the fleet that refuses a model knows of none but its own."""
    start: Message | None = None
    pieces = []

    async def renamed(sent: Message) -> None:
        nonlocal start
        if sent["type"] == "http.response.start" and sent["status"] == 404:
            start = sent
        elif start is None:
            await send(sent)
        elif sent.get("more_body", False):
            pieces.append(sent["body"])
        else:
            told = json.loads(b"".join(pieces))
            told["error"]["message"] = message
            body = json.dumps(told).encode()
            headers = [(name, value) for name, value in start["headers"] if name != b"content-length"]
            await send({**start, "headers": [*headers, (b"content-length", str(len(body)).encode())]})
            await send({"type": "http.response.body", "body": body})

    return renamed


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _passed(headers: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Headers without those that concern one connection."""
    return [(name, value) for name, value in headers if name.lower() not in OF_A_CONNECTION]


def _passed_on(status: int, body: bytes) -> Response:
    return Response(body, status, media_type="application/json")


def _of_http(answer: ASGIApp) -> ASGIApp:
    """The application where others than HTTP's requests are refused, and lifespans are passed over."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await answer(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008, "reason": "names no model"})

    return app
