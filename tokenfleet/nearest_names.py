"""What someone may have meant: the nearest known names to an unknown one."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def nearest(name: str, known: Iterable[str]) -> str:
    """` (did you mean x or y?)` for the closest known names, or nothing when none is close."""
    close = difflib.get_close_matches(name.lower(), sorted(known), n=2, cutoff=0.6)
    return f" (did you mean {' or '.join(close)}?)" if close else ""
