"""The commands of docs/first-plan.md, each with the lines that the page prints under it."""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from checkout import ROOT

PAGE = ROOT / "docs" / "first-plan.md"
_BLOCK = re.compile(r"(?:^    .+\n)+|^```\n(?:.*\n)*?```$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class Command:
    """A command line in words, and the lines of its answer that the page has."""

    words: tuple[str, ...]
    prints: tuple[str, ...]


def commands() -> list[Command]:
    """Every command of the page in its order."""
    found: list[Command] = []
    for block in _BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        if block.startswith("```"):
            lines = tuple(plain(line) for line in block.split("\n")[1:-1] if line.strip())
            if not lines[0].startswith("{"):  # a line of the log
                found[-1] = Command(found[-1].words, lines)
        else:
            joined = block.replace("\\\n", " ")
            found += [Command(tuple(shlex.split(line)), ()) for line in joined.splitlines() if line.strip()]
    return found


def plain(line: str) -> str:
    """A line with single spaces: terminals pad columns and wrap long lines."""
    return " ".join(line.split())
