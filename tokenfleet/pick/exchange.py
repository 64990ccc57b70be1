"""One HTTP request between Envoy and the picker, by Envoy's external processor: messages in, replies out.

In full duplex the picker answers the headers once it has the body, gives the body back in pieces, and then
passes each piece of the answer on. Where the gateway keeps bodies to itself, the picker chooses by what it
gets. It does no I/O: `receive` takes a message, `send` gets each reply.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from tokenfleet.pick import messages as wire
from tokenfleet.pick.asked import AskedBody, PickTargets, Unclear, read_body, tenant_of
from tokenfleet.pick.call import Asker, Call

if TYPE_CHECKING:
    from tokenfleet.pick.fleet import PickedFleet

MOST_BODY_BYTES = 32 << 20
TAIL_BYTES = 2048  # of an answer, in which its usage stands
EVENT = b"data: {"
DONE = b"[DONE]"
_USAGE = re.compile(rb'(?<!\\)"(prompt_tokens|completion_tokens)"\s*:\s*(\d{1,9})\b')
OK = 200


class Exchange(Asker):
    """The state of one request. `send` gets replies, as bytes."""

    def __init__(self, fleet: PickedFleet, targets: PickTargets, send: Callable[[bytes], None]) -> None:
        self._fleet, self._targets, self._send = fleet, targets, send
        self._request_mode = self._response_mode = wire.FULL_DUPLEX
        self._headers: dict[str, str] = {}
        self._allowed: frozenset[str] | None = None
        self._body, self._tail = bytearray(), b""
        self._call: Call | None = None
        self._status = 0
        self._is_events = self._is_refused = self._has_trailers = False
        self._is_copy = False  # of an answer, for which the gateway reads no reply
        self._stage = ""  # of the reply that carries the choice

    def receive(self, data: bytes) -> None:
        """Take a message. Raises ValueError for bytes that are none."""
        message = wire.parsed("ProcessingRequest", data)
        if message.observability_mode and not self._is_copy:
            self._is_copy, self._response_mode, self._send = True, wire.STREAMED, lambda reply: None
        if self._is_refused:
            return
        if message.HasField("response_body"):
            self._response_body(message.response_body)
        elif message.HasField("request_body"):
            self._request_body(message.request_body)
        elif message.HasField("request_headers"):
            self._request_headers(message)
        elif message.HasField("response_headers"):
            self._response_headers(message)
        elif message.HasField("response_trailers"):
            self._send(wire.go_on("response_trailers"))
            self._end()
        elif message.HasField("request_trailers"):
            self._request_trailers()

    def closed(self) -> None:
        """The gateway has closed the exchange: the answer has passed, or will not pass here."""
        self._body.clear()
        call = self._call
        if call is None:
            return
        if self._response_mode == wire.NONE and not self._status and call.worker is not None:
            self._fleet.unseen(call)
        elif self._response_mode == wire.NONE and self._status:
            self._end()
        else:
            self._fleet.over(call, "aborted")

    # The request.

    def _request_headers(self, message: Any) -> None:
        if self._is_copy:
            self._call = self._fleet.watched(wire.told(message, wire.CALL))
            return
        self._headers = wire.headers_of(message.request_headers)
        self._allowed = wire.subset_of(message)
        if message.HasField("protocol_config"):
            self._request_mode = message.protocol_config.request_body_mode
            self._response_mode = message.protocol_config.response_body_mode
        if message.request_headers.end_of_stream or self._request_mode in (wire.NONE, wire.STREAMED):
            self._ask("request_headers")
        elif self._request_mode != wire.FULL_DUPLEX:
            self._send(wire.go_on("request_headers"))

    def _request_body(self, body: Any) -> None:
        if self._call is not None:  # the server is chosen before the body has come
            self._send(wire.go_on("request_body"))
            return
        self._body += body.body
        if len(self._body) > MOST_BODY_BYTES:
            self.refused(413, f"the body has more than {MOST_BODY_BYTES >> 20} MiB", "body_too_large")
        elif body.end_of_stream or self._request_mode in (wire.BUFFERED, wire.BUFFERED_PARTIAL):
            self._ask("request_headers" if self._request_mode == wire.FULL_DUPLEX else "request_body")

    def _request_trailers(self) -> None:
        if self._call is None:
            self._has_trailers = True
            self._ask("request_headers")
        else:
            self._send(wire.go_on("request_trailers"))

    def _ask(self, stage: str) -> None:
        self._stage = stage
        try:
            asked = read_body(bytes(self._body))
            name, slo = self._targets.of(self._headers)
        except Unclear as error:
            self.refused(400, str(error), "unclear_request")
            return
        if not self._body:
            length = self._headers.get("content-length", "")
            asked = AskedBody(text_bytes=int(length) if length.isdecimal() and len(length) < 10 else 0)
        may_wait = self._request_mode == wire.FULL_DUPLEX  # elsewhere Envoy's own timeout runs
        sees_tokens = self._response_mode != wire.NONE
        self._call = Call(
            self, slo, name, tenant_of(self._headers), self._allowed, may_wait, sees_tokens and asked.streams
        )
        self._fleet.ask(self._call, asked)

    def picked(self, name: str, addresses: Sequence[str]) -> None:
        """Its servers are chosen: the first, and those to try after it."""
        body, self._body = bytes(self._body), bytearray()
        self._send(wire.picked(self._stage, addresses, name))
        if self._request_mode == wire.FULL_DUPLEX and (body or self._has_trailers):
            for piece in wire.body_pieces("request_body", body, not self._has_trailers):
                self._send(piece)
        if self._has_trailers:
            self._send(wire.go_on("request_trailers"))

    def refused(self, status: int, why: str, reason: str, retry_after_s: int | None = None) -> None:
        """The client gets this status instead of an answer."""
        self._is_refused = True
        self._body.clear()
        kind = "invalid_request_error" if status < 429 else "overloaded_error"
        error = {"message": why, "type": kind, "code": reason, "param": None}
        self._send(wire.refused(status, json.dumps({"error": error}).encode(), reason, retry_after_s))

    # The answer.

    def _response_headers(self, message: Any) -> None:
        headers = wire.headers_of(message.response_headers)
        status = headers.get(":status", "")
        self._status = int(status) if status.isdecimal() and len(status) == 3 else 0
        self._is_events = headers.get("content-type", "").startswith("text/event-stream")
        self._send(wire.go_on("response_headers"))
        if self._call is not None and self._is_copy:
            self._call.is_streamed = self._is_events
        if self._call is not None and (address := wire.told(message, wire.UPSTREAM, wire.SERVED)):
            self._fleet.served(self._call, address)
        if message.response_headers.end_of_stream:
            self._end()

    def _response_body(self, body: Any) -> None:
        data, is_last = body.body, body.end_of_stream
        if self._response_mode == wire.FULL_DUPLEX:
            for piece in wire.body_pieces("response_body", data, is_last):
                self._send(piece)
        else:
            self._send(wire.go_on("response_body"))
        if self._call is None:
            return
        if self._is_events and (tokens := (self._tail[-len(EVENT) + 1 :] + data).count(EVENT)):
            self._fleet.got(self._call, tokens)
        self._tail = (self._tail + data)[-TAIL_BYTES:]
        if is_last:
            self._end()

    def _end(self) -> None:
        """The answer is complete, or the server ended it early."""
        if self._call is None:
            return
        for name, digits in _USAGE.findall(self._tail):
            if name == b"prompt_tokens":
                self._call.prompt_tokens = int(digits)
            else:
                self._call.output_tokens = int(digits)
        is_whole = not self._is_events or DONE in self._tail or self._response_mode == wire.NONE
        self._fleet.over(self._call, "finished" if self._status == OK and is_whole else "failed")
