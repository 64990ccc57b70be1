"""The version of Tokenfleet, and where an installation comes from: its commit and its newest profile."""

from __future__ import annotations

import re
from pathlib import Path

VERSION = "0.1.0"
_PACKAGE = Path(__file__).resolve().parent
COMMIT_FILE = _PACKAGE / "_commit.txt"  # a wheel has it


def version_text() -> str:
    """`tokenfleet 0.1.0, commit 2ef5b44, newest profile of 2026-07-01`; an unknown commit is left out."""
    parts = [f"tokenfleet {VERSION}"]
    if commit := _commit():
        parts.append(f"commit {commit}")
    if dates := _profile_dates():
        parts.append(f"newest profile of {max(dates)}")
    return ", ".join(parts)


def _commit() -> str:
    """The commit that a wheel was built from, or that is checked out; empty where neither is known."""
    if COMMIT_FILE.exists():
        return COMMIT_FILE.read_text(encoding="ascii").strip()
    if not (_PACKAGE.parent / ".git").exists():
        return ""
    import subprocess

    asked = ["git", "-C", str(_PACKAGE.parent), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return ""


def _profile_dates() -> list[str]:
    from tokenfleet.profiles.library import library_folder

    dated = re.compile(r"^\s+date: ['\"]?(\d{4}-\d{2}-\d{2})", re.MULTILINE)
    texts = (path.read_text(encoding="utf-8") for path in library_folder().glob("*/*.yaml"))
    return [date for text in texts for date in dated.findall(text)]
