"""The gateway's ASGI middleware: keys, rate limits, SLO headers, and refusals with a true status.

vLLM's server loads it by its own `--middleware` flag. It delays the start of a response until the first piece
of the body. By then the request has been placed or turned away. So a refusal can still be a 429 with
`Retry-After` although vLLM has begun to stream, and the header `x-tokenfleet-worker` is known. After a
failure in mid-stream vLLM writes an error event and then `[DONE]`. The event gets the fleet's reason, and
`[DONE]` is dropped, so that no broken stream looks complete.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import RedirectResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from controlplane.types import Slo
from dataplane.http.keys import PRIORITIES, ApiKey, KeyRing
from dataplane.http.rules import ReadAhead, error_reply, send_reply
from dataplane.live.gateway.idempotency import LONGEST_KEY, KeyClaims, OtherBody, answer_once
from dataplane.live.ledger.request import (
    CLASS_HEADER,
    CURRENT_TICKET,
    OBJECTIVE_HEADERS,
    TPOT_HEADERS,
    TTFT_HEADERS,
    Ticket,
)

CLASS_FIELD = "slo_class"  # of the body, where the header is not there
PRIORITY_HEADER = "x-tokenfleet-priority"
IDEMPOTENCY_HEADER = "idempotency-key"
SESSION_HEADER = "x-session-id"
LONGEST_SESSION = 256  # characters
OPEN_PATHS = frozenset({"/health", "/ping", "/version"})
MAX_BODY_BYTES = 64 << 20
DONE_EVENT = b"data: [DONE]\n\n"
VLLMS_REASON = b'"Internal server error"'  # for every request that ends in an error
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")


@dataclass(slots=True)
class DoorPolicy:
    """The gateway's keys and default targets, and what its front door calls.

    `allow` counts a request of a key and returns in how many seconds it may come. `abandon` ends the requests
    of a client that has left. `claims` are the fleet's idempotency keys. A browser on this machine that opens
    `/` is sent to `page`. `closing` is why no request is let in any more, or empty. While `is_leaving`,
    answers end their connections. `server` is uvicorn's. `classes`: the targets of each SLO class.
    """

    keys: KeyRing
    default_slo: Slo
    allow: Callable[[ApiKey], Awaitable[float]]
    abandon: Callable[[Ticket], Awaitable[None]]
    claims: KeyClaims
    page: str
    classes: Mapping[str, Slo] = field(default_factory=dict)
    closing: str = ""
    is_leaving: bool = False
    server: Any = None


class Refusal(Exception):
    """The door's own answer to a request: an HTTP status and an error in OpenAI's shape."""

    def __init__(self, status: int, kind: str, code: str, message: str, **headers: str) -> None:
        """`headers` have _ where HTTP has -."""
        super().__init__(message)
        self.reply = error_reply(status, message, kind, code, **headers)


def slo_from_headers(headers: dict[str, str], default: Slo) -> Slo:
    """The targets a request asks for, `default` where it is silent.

    Raises Refused (400) for a value that is not a positive number of milliseconds.
    """

    def target_s(names: tuple[str, ...], otherwise_s: float) -> float:
        for name in names:
            if name in headers:
                try:
                    value_ms = float(headers[name])
                except ValueError:
                    value_ms = float("nan")
                if not 0 < value_ms < float("inf"):
                    raise _bad_header(name, "must be a positive number of milliseconds", headers[name])
                return value_ms / 1e3
        return otherwise_s

    return Slo(target_s(TTFT_HEADERS, default.ttft_s), target_s(TPOT_HEADERS, default.tpot_s))


def _bad_header(name: str, expected: str, value: str) -> Refusal:
    code = "invalid_value" if name == CLASS_FIELD else "invalid_header"
    return Refusal(400, "invalid_request_error", code, f"{name}: {expected}, got {value[:40]!r}")


def _too_busy(message: str, wait_s: float) -> Refusal:
    retry_after = str(max(1, int(wait_s + 0.999)))
    return Refusal(429, "requests", "rate_limit_exceeded", message, retry_after=retry_after)


def _refused(ticket: Ticket, policy: DoorPolicy) -> Refusal | None:
    """The answer to a request that was turned away, or failed, before anything of it was sent."""
    if ticket.rejection is not None:
        return _too_busy(ticket.rejection.reason, ticket.rejection.retry_after_s)
    if ticket.failure is None:
        return None
    if policy.closing:
        return Refusal(503, "service_unavailable", "shutting_down", ticket.failure, retry_after="5")
    return Refusal(500, "server_error", "unfinished", ticket.failure)


class FrontDoor:
    """ASGI middleware; its policy is the `door` of the server's engine client."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        came_s, state = time.monotonic(), scope["app"].state
        policy: DoorPolicy = state.engine_client.door
        if scope["type"] == "lifespan":
            policy.server = state.server
            await self.app(scope, receive, send)
            return
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in scope["headers"]}
        if scope["type"] == "websocket":
            if policy.keys.find(headers.get("authorization", "")) is None:
                await send({"type": "websocket.close", "code": 1008, "reason": "invalid_api_key"})
            else:
                await self.app(scope, receive, send)
            return
        if _opens_page(scope):
            await RedirectResponse(policy.page)(scope, receive, send)
            return
        ahead = ReadAhead(receive)
        asked_id = headers.get("x-request-id", "")
        request_id = asked_id if _REQUEST_ID.fullmatch(asked_id) else uuid.uuid4().hex
        try:
            ticket = await _admit(policy, scope, headers, request_id, ahead)
            ticket.sent_s = came_s  # what a client waits for begins here, not where the prompt has been read
            name = _claimed_name(scope, headers, ticket)
        except Refusal as refusal:
            await _answer(refusal, request_id, send)
            return
        # vLLM names its own request after this header, so that both sides of a log agree.
        scope["headers"] = [h for h in scope["headers"] if h[0] != b"x-request-id"]
        scope["headers"].append((b"x-request-id", request_id.encode()))
        token = CURRENT_TICKET.set(ticket)
        body = _Body(ahead, ticket)
        watch = asyncio.ensure_future(body.until_client_leaves(policy)) if scope["method"] == "POST" else None

        async def run(receive: Receive, send: Send) -> None:
            await self.app(scope, receive, _Reply(send, ticket, policy))

        try:
            if name is None:
                await run(body, send)
            else:
                await answer_once(policy.claims, name, body, send, run, lambda: ticket.client_left)
        except OtherBody:
            said = "this key came with another body before"
            reused = Refusal(422, "invalid_request_error", "idempotency_key_reused", said)
            await _answer(reused, request_id, send)
        except Refusal as refusal:  # of who keeps the keys
            await _answer(refusal, request_id, send)
        finally:
            CURRENT_TICKET.reset(token)
            if watch is not None:
                watch.cancel()


def _opens_page(scope: Scope) -> bool:
    """Whether a browser on this machine opens `/`, where vLLM has nothing."""
    client = scope["client"]
    is_local = client is not None and client[0] in ("127.0.0.1", "::1")
    return is_local and (scope["method"], scope["path"]) == ("GET", "/")


def _claimed_name(scope: Scope, headers: dict[str, str], ticket: Ticket) -> str | None:
    """The name that a request's idempotency key stands for, or None. Raises Refusal for one too long."""
    key = headers.get(IDEMPOTENCY_HEADER)
    if key is None or scope["method"] != "POST":
        return None
    if not 0 < len(key) <= LONGEST_KEY:
        raise _bad_header(IDEMPOTENCY_HEADER, f"must have 1 to {LONGEST_KEY} characters", key)
    return "\n".join((ticket.key, scope["path"], key))


async def _admit(
    policy: DoorPolicy, scope: Scope, headers: dict[str, str], request_id: str, ahead: ReadAhead
) -> Ticket:
    path, method = scope["path"], scope["method"]
    key: ApiKey | None = policy.keys.find(headers.get("authorization", ""))
    if key is None and path not in OPEN_PATHS and method != "OPTIONS":
        why = "the API key is missing or wrong"
        raise Refusal(401, "invalid_request_error", "invalid_api_key", why, www_authenticate="Bearer")
    caller = key.name if key else "anyone"
    if method != "POST" or key is None:
        return Ticket(request_id, caller, policy.default_slo, PRIORITIES["normal"])
    if policy.closing:
        raise Refusal(503, "service_unavailable", "shutting_down", policy.closing, retry_after="5")
    if (
        headers.get("content-length", "0").isdigit()
        and int(headers.get("content-length", 0)) > MAX_BODY_BYTES
    ):
        raise Refusal(
            413, "invalid_request_error", "too_large", f"the body must be at most {MAX_BODY_BYTES} bytes"
        )
    name, default = await _class_of(headers, key, policy, ahead)
    slo = slo_from_headers(headers, default)
    if slo != default or name == "":  # what the operator promises a class is bounded for no key
        slo = key.bounds.bounded(slo)
    asked = headers.get(PRIORITY_HEADER, "normal")
    if asked not in PRIORITIES:
        raise _bad_header(PRIORITY_HEADER, "must be high or normal", asked)
    wait_s = await policy.allow(key)
    if wait_s > 0:
        raise _too_busy(f"key {key.name} is over its limit of {key.limits_text}", wait_s)
    session = headers.get(SESSION_HEADER, "")[:LONGEST_SESSION]
    priority = min(PRIORITIES[asked], key.max_priority)
    parent = headers.get("traceparent", "")[:LONGEST_SESSION]
    return Ticket(request_id, key.name, slo, priority, session=session, slo_class=name, traceparent=parent)


async def _class_of(
    headers: dict[str, str], key: ApiKey, policy: DoorPolicy, ahead: ReadAhead
) -> tuple[str, Slo]:
    """A request's SLO class (its header's, its body's, its objective, its key's, or none) and its targets.

    Raises Refusal (400) for a header or body that names a class which the fleet does not have. A key may name
    one: it is filed for all fleets.
    """
    where, name = CLASS_HEADER, headers.get(CLASS_HEADER, "")
    if not name and policy.classes:
        where, name = CLASS_FIELD, await _class_in_body(ahead)
    if name and name not in policy.classes:
        known = ", ".join(policy.classes)
        raise _bad_header(where, f"must be one of {known}" if known else "this fleet has no classes", name)
    others = [*(headers.get(one, "") for one in OBJECTIVE_HEADERS), key.slo_class]
    name = name or next((one for one in others if one in policy.classes), "")
    return name, policy.classes.get(name, policy.default_slo)


async def _class_in_body(ahead: ReadAhead) -> str:
    """The field of the body; empty where that has none, is no JSON, or is too large to be taken."""
    text = await ahead.body(MAX_BODY_BYTES) or b""
    if f'"{CLASS_FIELD}"'.encode() not in text:
        return ""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # vLLM says what is wrong with it
        return ""
    name = found.get(CLASS_FIELD, "") if isinstance(found, dict) else ""
    if not isinstance(name, str):
        raise _bad_header(CLASS_FIELD, "the name of a class", repr(name))
    return name


class _Body:
    """Receive, and an eye on the connection once the request's body has been read.

    vLLM notices a client that leaves a stream only when it next has something to send; a request that
    still waits, or prefills, would go on without a reader.
    """

    def __init__(self, receive: Receive, ticket: Ticket) -> None:
        self._receive, self._ticket = receive, ticket
        self._is_read = asyncio.Event()
        self._bytes = 0

    async def __call__(self) -> Message:
        message = await self._receive()
        if message["type"] == "http.disconnect":
            # The server sends the same message once its answer is complete; then the client has not left.
            self._ticket.client_left = not self._ticket.answered
        else:
            self._bytes += len(message.get("body", b""))
            if self._bytes > MAX_BODY_BYTES:  # it came without, or with a false, content-length
                self._ticket.client_left = True
                return {"type": "http.disconnect"}
            if not message.get("more_body", False):
                self._is_read.set()
        return message

    async def until_client_leaves(self, policy: DoorPolicy) -> None:
        """Return once the client has left and its requests are ended; else never."""
        await self._is_read.wait()
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self._ticket.answered:
            await policy.abandon(self._ticket)


class _Reply:
    """Send, holding back the response's start until there is something to say."""

    def __init__(self, send: Send, ticket: Ticket, policy: DoorPolicy) -> None:
        self._send, self._ticket, self._policy = send, ticket, policy
        self._start: Message | None = None
        self._begun = False
        self._replaced = False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._start = message
            return
        if not self._begun and self._start is not None:
            self._begun = True
            if (refusal := _refused(self._ticket, self._policy)) is not None:
                self._replaced = True
                await _answer(refusal, self._ticket.id, self._send)
            else:
                self._start["headers"] = [*self._start.get("headers", ()), *self._own_headers()]
                await self._send(self._start)
        if not message.get("more_body", False):
            self._ticket.answered = True
        if self._replaced:
            return
        broken = self._ticket.failure is not None or self._ticket.rejection is not None
        if broken and message.get("body") == DONE_EVENT:
            message = {**message, "body": b""}
        if self._ticket.failure is not None and VLLMS_REASON in message.get("body", b""):
            said = message["body"].replace(VLLMS_REASON, json.dumps(self._ticket.failure).encode())
            message = {**message, "body": said}
        await self._send(message)

    def _own_headers(self) -> list[tuple[bytes, bytes]]:
        own = [(b"x-request-id", self._ticket.id.encode())]
        if self._ticket.worker is not None:
            own.append((b"x-tokenfleet-worker", str(self._ticket.worker).encode()))
        if self._policy.is_leaving:  # so that its client's next request comes to another gateway
            own.append((b"connection", b"close"))
        return own


async def _answer(refusal: Refusal, request_id: str, send: Send) -> None:
    refusal.reply.headers["x-request-id"] = request_id
    await send_reply(refusal.reply, send)
