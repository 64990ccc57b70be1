"""Plots as inline SVG: axes, lines, steps, dots, bars and bands, with a legend and the numbers in a table.

A page that holds them needs no script and no network. Colours are classes of the page's own style sheet, so
that one drawing serves light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

HEIGHT, TOP, BOTTOM, RIGHT = 260.0, 14.0, 44.0, 16.0
LETTER = 7.0  # width of a letter of an axis's text
TONES = ("a", "b", "c", "d", "e")

Mark = tuple[Literal["x", "y"], float, str]  # axis, where, its words
Kind = Literal["line", "steps", "filled steps", "dots", "open dots", "crosses", "bars", "band"]


@dataclass(frozen=True)
class Axis:
    """An axis: its name, its range (None: that of the points), and its ticks where they are not found."""

    name: str
    low: float | None = None
    high: float | None = None
    ticks: Sequence[tuple[float, str]] = ()
    log: bool = False
    whole: bool = False


@dataclass(frozen=True)
class Series:
    """Points (x, y), of a band (x, low, high); `labels` stand above bars and are the tips of dots."""

    name: str
    kind: Kind
    points: Sequence[tuple[float, ...]]
    tone: str = "a"
    labels: Sequence[str] = ()
    tones: Sequence[str] = ()  # of each bar, where they differ


@dataclass(frozen=True)
class Figure:
    """One plot: what it shows in words, its axes and series, and its numbers as a table."""

    id: str
    title: str
    caption: str
    x: Axis
    y: Axis
    series: Sequence[Series]
    columns: tuple[str, ...] = ()
    rows: Sequence[tuple[str, ...]] = ()
    wide: bool = False
    marks: Sequence[Mark] = field(default=())


def figure_html(figure: Figure, table: str) -> str:
    """The figure as HTML; `table` holds its numbers."""
    wide = ' class="wide"' if figure.wide else ""
    numbers = f"<details><summary>Numbers</summary>{table}</details>" if figure.rows else ""
    return (
        f'<figure{wide} id="{figure.id}"><h2>{escape(figure.title)}</h2>{_legend(figure)}'
        f'<div class="scroll">{_svg(figure)}</div>'
        f"<figcaption>{escape(figure.caption)}{numbers}</figcaption></figure>"
    )


def _legend(figure: Figure) -> str:
    named = [one for one in figure.series if one.name]
    if len(named) < 2:
        return ""
    items = "".join(f"<li>{_swatch(one)} {escape(one.name)}</li>" for one in named)
    return f'<ul class="legend">{items}</ul>'


def _swatch(one: Series) -> str:
    shape = f'<path class="line {one.tone}" d="M1 6H21"/>'
    if one.kind in ("band", "bars"):
        shape = f'<rect class="{_shape(one.kind)} {one.tone}" width="22" height="12"/>'
    elif one.kind in ("dots", "open dots"):
        shape = f'<circle class="{_shape(one.kind)} {one.tone}" cx="11" cy="6" r="4"/>'
    return f'<svg width="22" height="12" aria-hidden="true">{shape}</svg>'


def _shape(kind: Kind) -> str:
    return {"open dots": "open", "dots": "dot", "bars": "bar"}.get(kind, kind)


@dataclass(frozen=True)
class _Scale:
    """From values to pixels."""

    low: float
    high: float
    start: float
    end: float
    log: bool

    def __call__(self, value: float) -> float:
        low, high = (math.log10(self.low), math.log10(self.high)) if self.log else (self.low, self.high)
        at = math.log10(max(value, self.low)) if self.log else value
        return self.start + (at - low) / ((high - low) or 1.0) * (self.end - self.start)

    def ticks(self, most: int, whole: bool) -> list[tuple[float, str]]:
        """At most `most` round values within the range; on a logarithmic axis the powers of ten."""
        if self.log:
            powers = range(
                math.ceil(math.log10(self.low) - 1e-9), math.floor(math.log10(self.high) + 1e-9) + 1
            )
            return [(10.0**power, f"{10.0**power:g}") for power in powers]
        rough = (self.high - self.low) / most or 1.0
        unit = 10.0 ** math.floor(math.log10(rough))
        step = next(unit * times for times in (1, 2, 5, 10) if unit * times >= rough - 1e-12)
        step = max(step, 1.0) if whole else step
        first, last = math.ceil(self.low / step - 1e-9), math.floor(self.high / step + 1e-9)
        return [(i * step, f"{i * step:.6g}") for i in range(first, last + 1)]


def _seen(figure: Figure, axis: str) -> list[float]:
    """The values of points and marks on an axis."""
    part = slice(0, 1) if axis == "x" else slice(1, None)
    values = [value for one in figure.series for point in one.points for value in point[part]]
    return values + [at for which, at, _ in figure.marks if which == axis]


def _range(axis: Axis, seen: Sequence[float]) -> tuple[float, float]:
    low = min(seen, default=0.0) if axis.low is None else axis.low
    high = max(seen, default=1.0) * (1.0 if axis.log else 1.06) if axis.high is None else axis.high
    return (low, high) if high > low else (low, low + 1.0)


def _svg(figure: Figure) -> str:
    width = 960.0 if figure.wide else 500.0
    x, y, floor = figure.x, figure.y, HEIGHT - BOTTOM
    up = _Scale(*_range(y, _seen(figure, "y")), floor, TOP, y.log)
    ticks_y = list(y.ticks) or up.ticks(5, y.whole)
    left = max((len(text) for _, text in ticks_y), default=2) * LETTER + 30.0
    across = _Scale(*_range(x, _seen(figure, "x")), left, width - RIGHT, x.log)
    widest = max((len(text) for _, text in x.ticks), default=6) * LETTER + 14.0
    ticks_x = list(x.ticks) or across.ticks(max(int((width - left) / widest), 2), x.whole)
    parts = [
        *_frame(ticks_x, ticks_y, across, up),
        _text((left + width) / 2, HEIGHT - 6, x.name),
        f'<text class="axis" transform="translate(13 {(TOP + floor) / 2:g}) rotate(-90)">',
        f"{escape(y.name)}</text>",
        *(_drawn(one, across, up) for one in figure.series if one.points),
        *(_mark(axis, at, text, across, up) for axis, at, text in figure.marks),
    ]
    label = escape(f"{figure.title}: {figure.caption}")
    return f'<svg viewBox="0 0 {width:g} {HEIGHT:g}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _frame(
    ticks_x: Sequence[tuple[float, str]], ticks_y: Sequence[tuple[float, str]], across: _Scale, up: _Scale
) -> Iterator[str]:
    """The ticks of both axes, and a line across for each of the upright one's."""
    for value, text in ticks_y:
        yield f'<path class="grid" d="M{across.start:g} {up(value):.1f}H{across.end:g}"/>'
        yield _text(across.start - 8, up(value) + 4, text, "end")
    for value, text in ticks_x:
        yield f'<path class="grid" d="M{across(value):.1f} {up.start:g}v5"/>'
        yield _text(across(value), up.start + 18, text)


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _mark(axis: str, at: float, text: str, across: _Scale, up: _Scale) -> str:
    if axis == "y":
        line = f'<path class="mark" d="M{across.start:g} {up(at):.1f}H{across.end:g}"/>'
        return line + _text(across.end, up(at) + (15 if up(at) < TOP + 16 else -5), text, "end")
    right = across(at) < across.end - len(text) * LETTER - 8
    line = f'<path class="mark" d="M{across(at):.1f} {TOP:g}V{up.start:g}"/>'
    return line + _text(across(at) + (6 if right else -6), TOP + 10, text, "start" if right else "end")


def _drawn(one: Series, across: _Scale, up: _Scale) -> str:
    at = [(across(x), *(up(v) for v in values)) for x, *values in one.points]
    if one.kind in ("dots", "open dots", "crosses"):
        return "".join(_dot(one, i, x, y) for i, (x, y) in enumerate(at))
    if one.kind == "band":
        return _band(one.tone, at)
    floor = up(max(up.low, 0.0))
    if one.kind == "bars":
        wide = min(0.6 * (across.end - across.start) / len(at), 60.0)
        return "".join(_bar(one, i, x, y, wide, floor) for i, (x, y) in enumerate(at))
    step = "H{:.1f}V{:.1f}" if one.kind in ("steps", "filled steps") else "L{:.1f} {:.1f}"
    path = "M{:.1f} {:.1f}".format(*at[0]) + "".join(step.format(x, y) for x, y in at[1:])
    line = f'<path class="line {one.tone}" d="{path}"/>'
    if one.kind != "filled steps":
        return line
    return f'<path class="band {one.tone}" d="{path}V{floor:.1f}H{at[0][0]:.1f}Z"/>{line}'


def _band(tone: str, at: Sequence[Sequence[float]]) -> str:
    if len(at) == 1:  # a band of no width would not be seen
        x, low, high = at[0]
        ends = f"M{x:.1f} {low:.1f}V{high:.1f}m-5 0h10M{x - 5:.1f} {low:.1f}h10"
        return f'<path class="line {tone}" d="{ends}"/>'
    edge = [f"{x:.1f} {high:.1f}" for x, _, high in at] + [f"{x:.1f} {low:.1f}" for x, low, _ in at[::-1]]
    return f'<path class="band {tone}" d="M{"L".join(edge)}Z"/>'


def _bar(one: Series, i: int, x: float, y: float, wide: float, floor: float) -> str:
    tone = one.tones[i] if one.tones else one.tone
    size = f'x="{x - wide / 2:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{max(floor - y, 0.0):.1f}"'
    return f'<rect class="bar {tone}" {size}/>{_text(x, y - 5, one.labels[i]) if one.labels else ""}'


def _dot(one: Series, i: int, x: float, y: float) -> str:
    title = f"<title>{escape(one.labels[i])}</title>" if one.labels else ""
    if one.kind == "crosses":
        return f'<path class="line {one.tone}" d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8">{title}</path>'
    return f'<circle class="{_shape(one.kind)} {one.tone}" cx="{x:.1f}" cy="{y:.1f}" r="4.5">{title}</circle>'
