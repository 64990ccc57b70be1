"""The screen of a recorded terminal, and a picture of it: terminal.py uses both."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from html import escape
from itertools import groupby

COLUMNS = 110
LINE_PX, CHAR_PX, EDGE_PX = 17, 7.8, 16
GROUND, INK, SOFT = "#15202b", "#e6edf3", "#9fb0c0"
COLOURS = {31: "#ff8f86", 32: "#7ee0a1", 33: "#f0c674", 34: "#8ab8ff", 35: "#d9a6ff", 36: "#79d9e6"}
FONT = "ui-monospace, 'DejaVu Sans Mono', Menlo, Consolas, monospace"
CODE = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b[=>]|\x1b\][^\x07]*\x07")

Style = tuple[str, bool]


@dataclass
class Screen:
    """The lines that a terminal shows, scrolled ones too, each character with its colour and weight."""

    rows: list[list[tuple[str, Style]]] = field(default_factory=lambda: [[]])
    row: int = 0
    column: int = 0
    style: Style = (INK, False)

    def write(self, output: str) -> None:
        """Follow output with the codes that our programs print."""
        at = 0
        while at < len(output):
            if code := CODE.match(output, at):
                self.follow(code[1] or "", code[2] or "")
                at = code.end()
                continue
            self.put(output[at])
            at += 1

    def put(self, char: str) -> None:
        """One character at the cursor."""
        if char == "\r":
            self.column = 0
        elif char == "\n":
            self.row += 1
            self.rows += [[] for _ in range(self.row + 1 - len(self.rows))]
        elif char == "\b":
            self.column = max(0, self.column - 1)
        elif char >= " ":
            if self.column == COLUMNS:
                self.put("\r")
                self.put("\n")
            line = self.rows[self.row]
            line += [(" ", (INK, False))] * (self.column + 1 - len(line))
            line[self.column] = char, self.style
            self.column += 1

    def follow(self, values: str, name: str) -> None:
        """One code: colours, cursor up, or erase."""
        first = int(values) if values.isdigit() else 0
        if name == "m":
            for value in (int(v or 0) for v in values.split(";")):
                self.restyle(value)
        elif name == "A":
            self.row = max(0, self.row - max(1, first))
        elif name == "K":
            self.rows[self.row] = [] if first == 2 else self.rows[self.row][: self.column]
        elif name == "J":
            del self.rows[self.row + 1 :]
            self.rows[self.row] = self.rows[self.row][: self.column]

    def restyle(self, value: int) -> None:
        """One value of a colour code."""
        colour, bold = self.style
        if value in (0, 39):
            colour = INK
        if value in (0, 22):
            colour, bold = INK if value == 0 or colour == SOFT else colour, False
        if value == 1:
            bold = True
        if value in (2, 90):
            colour = SOFT
        self.style = COLOURS.get(value - 60 if value > 90 else value, colour), bold

    def lines(self) -> list[list[tuple[str, Style]]]:
        """The lines down to the last that shows something."""
        trimmed = []
        for row in self.rows:
            end = max((i + 1 for i, (char, _) in enumerate(row) if char != " "), default=0)
            trimmed.append(row[:end])
        while trimmed and "".join(char for char, _ in trimmed[-1]) in ("", "$"):
            trimmed.pop()
        return trimmed


def svg(screen: Screen, title: str) -> str:
    """The screen as a picture with a ground of its own and no font from elsewhere."""
    lines = screen.lines()
    width = round(2 * EDGE_PX + CHAR_PX * COLUMNS)
    height = 2 * EDGE_PX + LINE_PX * len(lines)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" role="img" aria-labelledby="title" font-family="{FONT}" font-size="13">',
        f'<title id="title">{escape(title)}</title>',
        f'<rect width="{width}" height="{height}" rx="8" fill="{GROUND}"/>',
    ]
    for number, line in enumerate(lines):
        y = EDGE_PX + LINE_PX * number + 13
        column = 0
        for (colour, bold), run in groupby(line, key=lambda cell: cell[1]):
            words = "".join(char for char, _ in run)
            parts += [
                run_of(column + m.start(), y, m[0], colour, bold) for m in re.finditer(r"\S+(?: \S+)*", words)
            ]
            column += len(words)
    return "\n".join([*parts, "</svg>"]) + "\n"


def run_of(column: int, y: int, words: str, colour: str, bold: bool) -> str:
    """Words of one style, as wide in every font."""
    weight = ' font-weight="700"' if bold else ""
    x, length = EDGE_PX + CHAR_PX * column, CHAR_PX * len(words)
    return (
        f'<text x="{x:.1f}" y="{y}" fill="{colour}" textLength="{length:.1f}"{weight}>{escape(words)}</text>'
    )
