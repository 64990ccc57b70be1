"""Figures as people read them: durations, bytes, counts, and the facts on which a decision rests."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from itertools import starmap
from typing import Any

_BYTES = ("bytes", "KiB", "MiB", "GiB", "TiB")
# The facts whose name in JSON is no word.
_NAMES = {
    "request_id": "request",
    "worker_kind": "type",
    "kinds": "by type",
    "bytes": "copied",
    "downtime_s": "paused",
    "seen": "observed",
    "compared": "workers by",
    "alone": "workers of one type alone",
    "alone_usd_per_h": "$/h of one type alone",
}


def duration_text(seconds: float) -> str:
    """`seconds` as a person would write it, three figures: 75 ms, 1.6 s, 12 min."""
    if not math.isfinite(seconds):
        return "never"
    if seconds < 1.0:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120.0:
        return f"{seconds:.3g} s"
    if seconds < 7200.0:
        return f"{seconds / 60:.3g} min"
    return f"{seconds / 3600:.3g} h"


def bytes_text(count: float) -> str:
    """`29.6 KiB`."""
    power = min(len(_BYTES) - 1, int(math.log2(max(1.0, count)) / 10))
    return f"{count / 1024**power:.3g} {_BYTES[power]}"


def counted(count: int, thing: str) -> str:
    """`1 worker`, `2 workers`."""
    return f"{count:,} {thing}" if count == 1 else f"{count:,} {thing}s"


def fact_lines(facts: Mapping[str, Any]) -> list[str]:
    """The facts of a decision: single ones in the first line, then each group of figures in its own."""
    known = _told(facts)
    if isinstance(known.get("workers"), int):
        before, after = known.pop("before", None), counted(known.pop("workers"), "worker")
        known = {"": after if before is None else f"{before} → {after}"} | known
    if "source" in known:
        way = f"{known.pop('source')} → {known.pop('target', None) or known.pop('worker', '?')}"
        known = {"": way} | known
    single = {name: value for name, value in known.items() if not isinstance(value, Mapping)}
    groups = {name: told for name in known if name not in single and (told := _told(known[name]))}
    return [", ".join(starmap(_fact, single.items()))] * bool(single) + [
        f"{_word(name)}: {', '.join(starmap(_fact, group.items()))}" for name, group in groups.items()
    ]


def _told(facts: Mapping[str, Any]) -> dict[str, Any]:
    """Without those that are empty or not known."""
    return {name: value for name, value in facts.items() if value not in (None, "", [], {})}


_UNITS: dict[str, Callable[[Any], str]] = {
    "_per_rps": "{:.4g} per req/s".format,
    "_rps": "{:.4g} req/s".format,
    "_s_ago": lambda seconds: f"{duration_text(seconds)} ago",
    "_s": duration_text,
    "usd_per_h": lambda usd: f"{'-' * (usd < 0)}${abs(usd):,.2f}/h",
    "bytes": bytes_text,
}


def _fact(name: str, value: Any) -> str:
    """A fact by its name in JSON, which ends in its unit: `rate 7.7 req/s`."""
    words, text = _word(name), ", ".join(map(str, value)) if isinstance(value, list) else str(value)
    if isinstance(value, int | float) and not isinstance(value, bool):
        unit = next((unit for unit in _UNITS if name.endswith(unit)), "")
        words = _NAMES.get(name, _word(name.removesuffix(unit)))
        text = _UNITS[unit](value) if unit else f"{value:,.4g}" if abs(value) < 1e3 else f"{value:,.0f}"
    return f"{words} {text}".strip()


def _word(name: str) -> str:
    return _NAMES.get(name, name).replace("regime", "traffic phase").replace("_", " ").strip()
