"""Nouns in text form: durations, targets, classes, parts of a trace, draft tokens, addresses."""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Generic, TypeVar

from controlplane.errors import BadInput
from controlplane.figures import duration_text
from controlplane.types import Slo, SloClass

if TYPE_CHECKING:
    from controlplane.perfmodel.speculation import Speculation
    from controlplane.placement.strictness import Strictness

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Parsed(Generic[T]):
    """A value, and the text in which it was given: command lines and records repeat that text."""

    text: str
    value: T

    def __str__(self) -> str:
        return self.text


def as_text(value: object) -> str:
    """A Python or YAML value as the text of a flag: `yes`, `ttft=1s,tpot=75ms`, `h100+a100`."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ",".join(f"{key}={as_text(one)}" for key, one in value.items())
    return "+".join(map(as_text, value)) if isinstance(value, list | tuple) else str(value)


_UNITS_S = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
_DURATION = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([a-z]*)\s*")
_CLASS = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,62}")
# `atgt` is the paper's word for TPOT.
_SLO_NAMES = {"ttft": "ttft", "tpot": "tpot", "atgt": "tpot"}


def parse_duration_s(text: str, where: str = "duration", *, unit_needed: bool = True) -> float:
    """Seconds in `text`. A bare number is seconds when `unit_needed` is false, and refused otherwise.

    A latency of `75` is 75 ms to one reader and 75 s to another, so latency targets need their unit.
    Raises BadInput, with `where` in the message.
    """
    match = _DURATION.fullmatch(text)
    unit = match[2] if match else None
    if match is None or (unit and unit not in _UNITS_S):
        raise BadInput(f"{where}: expected a duration such as 1.6s or 75ms, got {text!r}")
    if not unit and unit_needed:
        raise BadInput(f"{where}: {text.strip()} has no unit; write {text.strip()}ms or {text.strip()}s")
    seconds = float(match[1]) * _UNITS_S[unit or "s"]
    if not math.isfinite(seconds):
        raise BadInput(f"{where}: {text!r} is not a finite duration")
    return seconds


def parse_slo(text: str, where: str = "--slo") -> Slo:
    """The targets in `ttft=1.6s,tpot=75ms`; both are needed, in any order. Raises BadInput."""
    targets: dict[str, float] = {}
    for part in text.split(","):
        name, equals, value = part.partition("=")
        key = _SLO_NAMES.get(name.strip().lower())
        if not equals or key is None:
            raise BadInput(f"{where}: expected ttft=…,tpot=… such as ttft=1.6s,tpot=75ms, got {text!r}")
        if key in targets:
            raise BadInput(f"{where}: {key} is given twice in {text!r}")
        targets[key] = parse_duration_s(value, f"{where}: {key}")
    for key in ("ttft", "tpot"):
        if key not in targets:
            raise BadInput(f"{where}: {key} is missing in {text!r}; both ttft and tpot are needed")
    return Slo(ttft_s=targets["ttft"], tpot_s=targets["tpot"])


DEADLINE_TPOT_S = 0.2  # of a class with a deadline, unless it says another


def parse_slo_class(text: str, attainment: float) -> SloClass:
    """A class with its targets: `chat:ttft=400ms,tpot=30ms,attainment=0.99` or `batch:deadline=6h`.

    `attainment` where it names none; `share`: of the requests, for plans. A deadline is for whole answers;
    until their lengths are known the class has all of it as its TTFT target (see `due`). Raises BadInput.
    """
    name, _, targets = text.partition(":")
    where = f"--slo: {name}"
    if not targets.strip():
        raise BadInput(f"--slo: expected NAME:ttft=…,tpot=… or NAME:deadline=…, got {text!r}")
    if not _CLASS.fullmatch(name):
        raise BadInput(f"--slo: a class is named by letters, digits, '_', '.' and '-', got {name!r}")
    plain, deadline_s, tpot_s, traffic_share = [], None, DEADLINE_TPOT_S, None
    for part in targets.split(","):
        key, _, value = part.partition("=")
        if key.strip() == "attainment":
            attainment = _share(value, f"{where}: attainment")
        elif key.strip() == "share":
            traffic_share = _share(value, f"{where}: share")
        elif key.strip() == "deadline":
            deadline_s = parse_duration_s(value, f"{where}: deadline")
        else:
            plain.append(part)
    if deadline_s is None:
        return SloClass(name, parse_slo(",".join(plain), where), attainment, traffic_share=traffic_share)
    for part in plain:
        key, _, value = part.partition("=")
        if _SLO_NAMES.get(key.strip().lower()) != "tpot":
            raise BadInput(f"{where}: a deadline stands alone or with tpot and attainment, got {part!r}")
        tpot_s = parse_duration_s(value, f"{where}: tpot")
    return SloClass(name, Slo(deadline_s, tpot_s), attainment, deadline_s, traffic_share)


def due(one: SloClass, longest_tokens: int) -> SloClass:
    """A class with the targets by which answers of `longest_tokens` keep its deadline. Raises BadInput."""
    if one.deadline_s is None:
        return one
    takes_s = one.slo.tpot_s * (longest_tokens - 1)
    if takes_s >= one.deadline_s:
        raise BadInput(
            f"--slo: {one.name}: deadline: {duration_text(one.deadline_s)} is shorter than the longest answer"
            f" takes ({longest_tokens} tokens, {duration_text(one.slo.tpot_s)} each); give a tpot, or longer"
        )
    return replace(one, slo=Slo(one.deadline_s - takes_s, one.slo.tpot_s))


def _share(text: str, where: str) -> float:
    try:
        share = float(text)
    except ValueError:
        share = math.nan
    if not 0.0 < share < 1.0:
        raise BadInput(f"{where}: must be above 0 and below 1, got {text.strip() or 'nothing'}")
    return share


def parse_window_s(text: str) -> tuple[float, float]:
    """Start and end, in seconds of the trace's own clock, of `START..END` such as `10m..20m` or `600..1200`.

    An empty end means the trace's end (infinity). Raises BadInput.
    """
    start, dots, end = text.partition("..")
    if not dots:
        raise BadInput(f"--window: expected START..END such as 10m..20m, got {text!r}")
    start_s = parse_duration_s(start, "--window", unit_needed=False) if start.strip() else 0.0
    end_s = parse_duration_s(end, "--window", unit_needed=False) if end.strip() else math.inf
    if end_s <= start_s:
        raise BadInput(f"--window: the end must come after the start, got {text!r}")
    return start_s, end_s


def parse_strictness(text: str) -> Strictness:
    """A level of strictness or its values: `strict`, `theta=1,gamma=0.9`. Raises BadInput."""
    from controlplane.placement.strictness import read_strictness  # its package loads numpy

    try:
        return read_strictness(text)
    except BadInput as error:
        raise BadInput(f"--strictness: {error}") from None


def parse_speculation(text: str) -> Speculation | None:
    """Accepted shares of drafts by position, the time of a draft, a step's overhead: `0.8/0.6@1ms+0.5ms`.

    None for `off`. Raises BadInput.
    """
    from controlplane.perfmodel.speculation import Speculation  # loads numpy

    if text == "off":
        return None
    shares, at, draft = text.partition("@")
    try:
        acceptance = tuple(float(share) for share in shares.split("/"))
    except ValueError:
        raise BadInput(
            f"--speculate: expected shares by position, such as 0.8/0.6/0.4@1ms, got {text!r}"
        ) from None
    try:
        if not at:
            return Speculation(acceptance)
        draft, plus, beside = draft.partition("+")
        return Speculation(
            acceptance,
            parse_duration_s(draft, "--speculate: a draft"),
            parse_duration_s(beside, "--speculate: overhead of a step") if plus else 0.0,
        )
    except BadInput as error:
        raise BadInput(f"--speculate: {error}" if "--speculate" not in str(error) else str(error)) from None


def host_port(text: str, flag: str) -> tuple[str, int]:
    """HOST:PORT in two parts. Raises BadInput."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65_536:
        raise BadInput(f"{flag}: expected HOST:PORT, got {text!r}")
    return host.strip("[]"), int(port)


def listening_at(text: str, flag: str) -> socket.socket:
    """A bound socket at HOST:PORT. Raises BadInput."""
    from dataplane.http.server import bind  # loads uvicorn

    return bind(*host_port(text, flag), flag)
