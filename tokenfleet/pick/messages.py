"""The messages of Envoy's external processor, as far as a picker reads and writes them.

Names and field numbers are those of envoy/service/ext_proc/v3 and envoy/config/core/v3, and those of
grpc.health.v1. Fields that are not named here are skipped. A map is a repeated entry on the wire.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache, lru_cache
from importlib import import_module
from typing import Any

from tokenfleet.advise.published import messages

PROCESS = "/envoy.service.ext_proc.v3.ExternalProcessor/Process"
CHECK = "/grpc.health.v1.Health/Check"
DESTINATION = "x-gateway-destination-endpoint"
SERVED = "x-gateway-destination-endpoint-served"
SUBSET, SUBSET_SPACE = "x-gateway-destination-endpoint-subset", "envoy.lb.subset_hint"
LB_SPACE = "envoy.lb"
CALL = "tokenfleet-call"  # names a request to the filter that copies its answer
UPSTREAM = "upstream.address"
NONE, STREAMED, BUFFERED, BUFFERED_PARTIAL, FULL_DUPLEX = range(5)  # body modes
OVERWRITE = 2  # append_action: overwrite, or add where there is none
PIECE_BYTES = 62 * 1024  # of a body in one message
MESSAGES = {  # name:number:type; * is repeated
    "Header": "key:1:string value:2:string raw_value:3:bytes",
    "HeaderMap": "headers:1:*Header",
    "Value": "string_value:3:string struct_value:5:Struct list_value:6:List",
    "List": "values:1:*Value",
    "Field": "key:1:string value:2:Value",
    "Struct": "fields:1:*Field",
    "Named": "key:1:string value:2:Struct",
    "Metadata": "filter_metadata:1:*Named",
    "HttpHeaders": "headers:1:HeaderMap end_of_stream:3:bool",
    "HttpBody": "body:1:bytes end_of_stream:2:bool",
    "HttpTrailers": "trailers:1:HeaderMap",
    "ProtocolConfig": "request_body_mode:1:int64 response_body_mode:2:int64",
    "ProcessingRequest": "request_headers:2:HttpHeaders response_headers:3:HttpHeaders"
    " request_body:4:HttpBody response_body:5:HttpBody request_trailers:6:HttpTrailers"
    " response_trailers:7:HttpTrailers metadata_context:8:Metadata attributes:9:*Named"
    " observability_mode:10:bool protocol_config:11:ProtocolConfig",
    "HeaderOption": "header:1:Header append_action:3:int64",
    "HeaderMutation": "set_headers:1:*HeaderOption",
    "StreamedBody": "body:1:bytes end_of_stream:2:bool",
    "BodyMutation": "streamed_response:3:StreamedBody",
    "Common": "header_mutation:2:HeaderMutation body_mutation:3:BodyMutation clear_route_cache:5:bool",
    "CommonResponse": "response:1:Common",
    "TrailersResponse": "header_mutation:1:HeaderMutation",
    "HttpStatus": "code:1:int64",
    "Immediate": "status:1:HttpStatus headers:2:HeaderMutation body:3:bytes details:5:string",
    "ProcessingResponse": "request_headers:1:CommonResponse response_headers:2:CommonResponse"
    " request_body:3:CommonResponse response_body:4:CommonResponse request_trailers:5:TrailersResponse"
    " response_trailers:6:TrailersResponse immediate_response:7:Immediate dynamic_metadata:8:Struct",
    "HealthCheckRequest": "service:1:string",
    "HealthCheckResponse": "status:1:int64",
}


@cache
def wire() -> Any:
    """The message classes by their names; they need protobuf."""
    return messages("tokenfleet.ext_proc", MESSAGES)


def parsed(kind: str, data: bytes) -> Any:
    """A message of these bytes. Raises ValueError for bytes that are none."""
    try:
        return getattr(wire(), kind).FromString(data)
    except import_module("google.protobuf.message").DecodeError as error:
        raise ValueError(str(error)) from None


@cache
def go_on(stage: str) -> bytes:
    """Let a stage pass unchanged."""
    kind = wire().TrailersResponse if stage.endswith("trailers") else wire().CommonResponse
    return bytes(wire().ProcessingResponse(**{stage: kind()}).SerializeToString())


def picked(stage: str, addresses: Sequence[str], call: str) -> bytes:
    """Send the request `call` to the first of these addresses, and to the next where that one refuses it."""
    of, text = wire(), ",".join(addresses)
    header = of.Header(key=DESTINATION, raw_value=text.encode())
    mutation = of.HeaderMutation(set_headers=[of.HeaderOption(header=header, append_action=OVERWRITE)])
    told = {DESTINATION: text, CALL: call}
    inner = of.Struct(fields=[of.Field(key=k, value=of.Value(string_value=v)) for k, v in told.items()])
    metadata = of.Struct(fields=[of.Field(key=LB_SPACE, value=of.Value(struct_value=inner))])
    common = of.Common(header_mutation=mutation, clear_route_cache=True)
    reply = of.ProcessingResponse(**{stage: of.CommonResponse(response=common)}, dynamic_metadata=metadata)
    return bytes(reply.SerializeToString())


def body_pieces(stage: str, body: bytes, ends: bool) -> Iterator[bytes]:
    """A body given back to Envoy, in full duplex. Written by hand: each piece of each answer passes here."""
    tag = b"\x1a" if stage == "request_body" else b"\x22"
    for start in range(0, max(len(body), 1), PIECE_BYTES):
        piece = body[start : start + PIECE_BYTES]
        last = b"\x10\x01" if ends and start + PIECE_BYTES >= len(body) else b""
        yield _before(tag, len(piece), len(last)) + piece + last


@lru_cache(4096)
def _before(tag: bytes, size: int, more: int) -> bytes:
    """What stands before a streamed body: messages within messages, each with a tag and its length."""
    head = b"\x0a" + _varint(size)
    for outer in (b"\x1a", b"\x1a", b"\x0a", tag):
        head = outer + _varint(len(head) + size + more) + head
    return head


def _varint(number: int) -> bytes:
    digits = bytearray()
    while number > 0x7F:
        digits.append(number & 0x7F | 0x80)
        number >>= 7
    digits.append(number)
    return bytes(digits)


def refused(status: int, body: bytes, reason: str, retry_after_s: int | None) -> bytes:
    """Answer the client with this status instead of any server."""
    of, headers = wire(), {"content-type": "application/json"}
    if retry_after_s is not None:
        headers["retry-after"] = str(retry_after_s)
    options = [
        of.HeaderOption(header=of.Header(key=key, raw_value=value.encode()), append_action=OVERWRITE)
        for key, value in headers.items()
    ]
    mutation = of.HeaderMutation(set_headers=options)
    immediate = of.Immediate(status=of.HttpStatus(code=status), headers=mutation, body=body, details=reason)
    return bytes(of.ProcessingResponse(immediate_response=immediate).SerializeToString())


def headers_of(message: Any) -> dict[str, str]:
    """The headers of a message, by their names in lower case; the last of several."""
    return {
        one.key.lower(): (one.raw_value or one.value.encode()).decode("latin-1")
        for one in message.headers.headers
    }


def subset_of(message: Any) -> frozenset[str] | None:
    """The addresses that the gateway allows; None where it says nothing."""
    for named in message.metadata_context.filter_metadata:
        if named.key == SUBSET_SPACE:
            for field in named.value.fields:
                if field.key == SUBSET:
                    listed = (v.string_value for v in field.value.list_value.values)
                    values = field.value.string_value, *listed
                    return frozenset(a.strip() for text in values for a in text.split(",") if a.strip())
    return None


def told(message: Any, *keys: str) -> str:
    """What the gateway tells under one of these keys, in attributes or metadata, or nothing."""
    for named in (*message.attributes, *message.metadata_context.filter_metadata):
        for field in named.value.fields:
            if field.key in keys:
                return str(field.value.string_value)
    return ""
