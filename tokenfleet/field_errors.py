"""One-line messages for faulty input: the first pydantic fault, and names near to an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pydantic import ValidationError

LONGEST = 80  # characters of a value that are worth repeating


def first_fault(error: ValidationError) -> tuple[str, str]:
    """The first field that is wrong, dotted (empty for the value as a whole), and what is wrong with it."""
    first = error.errors(include_url=False, include_context=False)[0]
    received = "" if first["type"] == "missing" else f", got {str(first['input'])[:LONGEST]!r}"
    return ".".join(str(part) for part in first["loc"]), f"{first['msg'].lower()}{received}"


def fault_line(where: str, error: ValidationError) -> str:
    """`where: field: what is wrong`, as a refusal of a file says it."""
    field, fault = first_fault(error)
    return f"{where}: {field or '(top)'}: {fault}"


def nearest(name: str, names: Iterable[str]) -> str:
    """` (did you mean x or y?)` for the closest known names, or nothing when none is close."""
    close = difflib.get_close_matches(name.lower(), sorted(names), n=2, cutoff=0.6)
    return f" (did you mean {' or '.join(close)}?)" if close else ""
