"""A request as a client sends it: prompt, longest output and targets, from headers and JSON body.

Headers and bodies come from anybody. One that cannot be read raises `Unclear`, which becomes a 400.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from controlplane.types import Slo, SloClass
from dataplane.live.ledger.request import CLASS_HEADER, OBJECTIVE_HEADERS, TPOT_HEADERS, TTFT_HEADERS

TENANTS = ("x-llm-d-inference-fairness-id", "x-gateway-inference-fairness-id")
MOST_MS = 86_400_000.0
MOST_TOKENS = 1 << 31
# Parts of a message whose tokens are not their bytes.
MEDIA = {"image_url", "input_audio", "video_url", "audio_url", "file"}
NAME_CHARS = 80


class Unclear(ValueError):
    """A request that cannot be understood; its text is for the client."""


@dataclass(frozen=True, slots=True)
class PickTargets:
    """The targets of requests: of those that name no class, and of each class."""

    plain: Slo
    classes: Mapping[str, SloClass]

    def of(self, headers: Mapping[str, str]) -> tuple[str, Slo]:
        """The class that headers name, or nothing, and the targets. Raises Unclear."""
        name = headers.get(CLASS_HEADER, "")
        if name and name not in self.classes:
            known = "one of " + ", ".join(self.classes) if self.classes else "none: --slo names no class"
            raise Unclear(f"{CLASS_HEADER}: expected {known}, got {name[:NAME_CHARS]!r}")
        objectives = [headers.get(one, "") for one in OBJECTIVE_HEADERS]
        name = name or next((one for one in objectives if one in self.classes), "")
        slo = self.classes[name].slo if name else self.plain
        ttft_s, tpot_s = _seconds(headers, TTFT_HEADERS), _seconds(headers, TPOT_HEADERS)
        return name, Slo(ttft_s or slo.ttft_s, tpot_s or slo.tpot_s)


def tenant_of(headers: Mapping[str, str]) -> str:
    """The client that a request is counted under."""
    return next((headers[one][:NAME_CHARS] for one in TENANTS if headers.get(one)), "anyone")


@dataclass(frozen=True, slots=True)
class AskedBody:
    """A body, as far as placement reads it.

    `token_ids`: where the client sends tokens instead of text. `text_bytes`: of all text of the prompt.
    `has_media`: images or sound, whose tokens are not known. `document`: the body, for a tokenizer.
    """

    text_bytes: int = 0
    token_ids: Sequence[int] | None = None
    most_tokens: int | None = None
    streams: bool = False
    ignores_eos: bool = False
    has_media: bool = False
    salt: str | None = None
    model: str = ""
    document: Mapping[str, Any] | None = None

    @property
    def is_generation(self) -> bool:
        """Whether tokens are to be generated; else it is a list of models, a health check, …"""
        if self.document is None:
            return self.text_bytes > 0
        return "messages" in self.document or "prompt" in self.document


def read_body(body: bytes) -> AskedBody:
    """What a JSON body asks for; an empty one asks for nothing. Raises Unclear."""
    if not body:
        return AskedBody()
    try:
        document = msgspec.json.decode(body)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
        raise Unclear(f"body: not JSON: {str(error)[:NAME_CHARS]}") from None
    if not isinstance(document, dict):
        raise Unclear("body: expected a JSON object")
    prompt = document.get("prompt", document.get("input"))
    text_bytes, has_media = _text_of([document.get("messages"), document.get("tools"), prompt])
    most = [_tokens(document, name) for name in ("max_completion_tokens", "max_tokens")]
    salt = document.get("cache_salt")
    model = document.get("model")
    return AskedBody(
        text_bytes=text_bytes,
        token_ids=_ids(prompt),
        most_tokens=next((one for one in most if one is not None), None),
        streams=document.get("stream") is True,
        ignores_eos=document.get("ignore_eos") is True,
        has_media=has_media,
        salt=salt if isinstance(salt, str) and salt else None,
        model=model if isinstance(model, str) else "",
        document=document,
    )


def _ids(prompt: Any) -> Sequence[int] | None:
    """Token ids: a list of numbers, or a list of one such list."""
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], list):
        prompt = prompt[0]
    if not isinstance(prompt, list) or not prompt:
        return None
    return prompt if all(type(one) is int and 0 <= one < MOST_TOKENS for one in prompt) else None


def _text_of(value: Any) -> tuple[int, bool]:
    """The bytes of all texts in a document, and whether it has parts that are no text."""
    size, has_media, ahead = 0, False, [value]
    while ahead:
        one = ahead.pop()
        if isinstance(one, str):
            size += len(one) if one.isascii() else len(one.encode("utf-8", "surrogatepass"))
        elif isinstance(one, list):
            ahead.extend(one)
        elif isinstance(one, dict):
            has_media = has_media or not MEDIA.isdisjoint(one)
            ahead.extend(part for name, part in one.items() if name not in MEDIA)
    return size, has_media


def _tokens(document: Mapping[str, Any], name: str) -> int | None:
    value = document.get(name)
    if value is None:
        return None
    if type(value) is not int or not 0 < value < MOST_TOKENS:
        raise Unclear(f"body: {name}: expected a number of tokens, got {str(value)[:NAME_CHARS]}")
    return value


def _seconds(headers: Mapping[str, str], names: Sequence[str]) -> float | None:
    name = next((one for one in names if headers.get(one)), None)
    if name is None:
        return None
    text = headers[name]
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value <= MOST_MS:
        raise Unclear(f"{name}: expected milliseconds above 0, got {text[:NAME_CHARS]!r}")
    return value / 1000
