"""The folder of the user's own prices and profiles, which are used instead of those that ship.

    FOLDER/prices.yaml             a price list; the shipped one is then not read
    FOLDER/profiles/GPU/NAME.yaml  profiles; each comes before a shipped one of its model, GPU and TP degree

FOLDER is `$XDG_DATA_HOME/tokenfleet/library`, or `~/.local/share/tokenfleet/library`. `updates.py` fills it.
"""

from __future__ import annotations

import os
from pathlib import Path

PRICES = "prices.yaml"


def own_folder() -> Path | None:
    """The folder of the user's own prices and profiles; None for a user without a home."""
    try:
        home = Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share")
    except RuntimeError:
        return None
    return home / "tokenfleet" / "library"


def own_prices() -> Path | None:
    """The user's own price list; None where there is none."""
    folder = own_folder()
    return folder / PRICES if folder is not None and (folder / PRICES).is_file() else None


def own_profiles() -> list[Path]:
    """The user's own profiles."""
    folder = own_folder()
    return [] if folder is None else sorted(folder.glob("profiles/*/*.yaml"))
