"""Plots as inline SVG: axes, lines, steps, dots, bars and bands, with a legend and the numbers in a table.

A page that holds them needs no script and no network. Colours are classes of the page's own style sheet, so
that one drawing serves light and dark.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

HEIGHT, TOP, BOTTOM, RIGHT = 260.0, 14.0, 44.0, 16.0
LETTER = 7.0  # width of a letter of an axis's text
TONES = ("a", "b", "c", "d", "e")

Kind = Literal["line", "dashed", "steps", "filled steps", "dots", "open dots", "crosses", "bars", "band"]


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
    marks: Sequence[tuple[Literal["x", "y"], float, str]] = field(default=())


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
    shape = f'<path class="line {one.tone}{" dash" if one.kind == "dashed" else ""}" d="M1 6H21"/>'
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
        """At most so many round values within the range; on a logarithmic axis the powers of ten."""
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


def _range(axis: Axis, values: Sequence[float], marks: Sequence[float]) -> tuple[float, float]:
    seen = [*values, *marks]
    low = min(seen) if axis.low is None else axis.low
    high = max(seen) * (1.0 if axis.log else 1.06) if axis.high is None else axis.high
    return (low, high) if high > low else (low, low + 1.0)


def _svg(figure: Figure) -> str:
    width = 960.0 if figure.wide else 500.0
    x, y = figure.x, figure.y
    xs = [point[0] for one in figure.series for point in one.points]
    ys = [v for one in figure.series for point in one.points for v in point[1:]]
    marks_x, marks_y = ([at for axis, at, _ in figure.marks if axis == which] for which in "xy")
    if not xs:
        return ""
    up = _Scale(*_range(y, ys, marks_y), HEIGHT - BOTTOM, TOP, y.log)
    ticks_y = list(y.ticks) or up.ticks(5, y.whole)
    left = max((len(text) for _, text in ticks_y), default=2) * LETTER + 30.0
    across = _Scale(*_range(x, xs, marks_x), left, width - RIGHT, x.log)
    widest = max((len(text) for _, text in x.ticks), default=6) * LETTER + 14.0
    ticks_x = list(x.ticks) or across.ticks(max(int((width - left) / widest), 2), x.whole)
    floor = HEIGHT - BOTTOM
    parts = [
        *(f'<path class="grid" d="M{left:g} {up(v):.1f}H{width - RIGHT:g}"/>' for v, _ in ticks_y),
        *(_text(left - 8, up(v) + 4, text, "end") for v, text in ticks_y),
        *(f'<path class="grid" d="M{across(v):.1f} {floor:g}v5"/>' for v, _ in ticks_x),
        *(_text(across(v), floor + 18, text) for v, text in ticks_x),
        _text((left + width) / 2, HEIGHT - 6, x.name),
        f'<text class="axis" transform="translate(13 {(TOP + floor) / 2:g}) rotate(-90)">',
        f"{escape(y.name)}</text>",
        *(_drawn(one, across, up) for one in figure.series),
        *(_mark(axis, at, text, across, up, left, width) for axis, at, text in figure.marks),
    ]
    label = escape(f"{figure.title}: {figure.caption}")
    return f'<svg viewBox="0 0 {width:g} {HEIGHT:g}" role="img" aria-label="{label}">{"".join(parts)}</svg>'


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _mark(axis: str, at: float, text: str, across: _Scale, up: _Scale, left: float, width: float) -> str:
    if axis == "y":
        line = f'<path class="mark" d="M{left:g} {up(at):.1f}H{width - RIGHT:g}"/>'
        return line + _text(width - RIGHT, up(at) + (15 if up(at) < TOP + 16 else -5), text, "end")
    right = across(at) < width - RIGHT - len(text) * LETTER - 8
    line = f'<path class="mark" d="M{across(at):.1f} {TOP:g}V{HEIGHT - BOTTOM:g}"/>'
    return line + _text(across(at) + (6 if right else -6), TOP + 10, text, "start" if right else "end")


def _drawn(one: Series, across: _Scale, up: _Scale) -> str:
    if not one.points:
        return ""
    at = [(across(x), *(up(v) for v in values)) for x, *values in one.points]
    floor = up(max(up.low, 0.0))
    if one.kind == "bars":
        wide = min(0.6 * (across.end - across.start) / max(len(at), 1), 60.0)
        tones = one.tones or [one.tone] * len(at)
        labels = one.labels or [""] * len(at)
        return "".join(
            f'<rect class="bar {tone}" x="{x - wide / 2:.1f}" y="{y:.1f}" width="{wide:.1f}"'
            f' height="{max(floor - y, 0.0):.1f}"/>{_text(x, y - 5, label)}'
            for (x, y), tone, label in zip(at, tones, labels, strict=True)
        )
    if one.kind in ("dots", "open dots", "crosses"):
        return "".join(_dot(one, i, x, y) for i, (x, y) in enumerate(at))
    if one.kind == "band":
        if len(at) == 1:
            x, low, high = at[0]
            ends = f"M{x:.1f} {low:.1f}V{high:.1f}m-5 0h10M{x - 5:.1f} {low:.1f}h10"
            return f'<path class="line {one.tone}" d="{ends}"/>'
        edge = [f"{x:.1f} {high:.1f}" for x, _, high in at] + [f"{x:.1f} {low:.1f}" for x, low, _ in at[::-1]]
        return f'<path class="band {one.tone}" d="M{"L".join(edge)}Z"/>'
    steps = one.kind in ("steps", "filled steps")
    path = f"M{at[0][0]:.1f} {at[0][1]:.1f}" + "".join(
        f"H{x:.1f}V{y:.1f}" if steps else f"L{x:.1f} {y:.1f}" for x, y in at[1:]
    )
    fill = ""
    if one.kind == "filled steps":
        fill = f'<path class="band {one.tone}" d="{path}V{floor:.1f}H{at[0][0]:.1f}Z"/>'
    dash = " dash" if one.kind == "dashed" else ""
    return f'{fill}<path class="line {one.tone}{dash}" d="{path}"/>'


def _dot(one: Series, i: int, x: float, y: float) -> str:
    title = f"<title>{escape(one.labels[i])}</title>" if one.labels else ""
    if one.kind == "crosses":
        return f'<path class="line {one.tone}" d="M{x - 4:.1f} {y - 4:.1f}l8 8m0 -8l-8 8">{title}</path>'
    return f'<circle class="{_shape(one.kind)} {one.tone}" cx="{x:.1f}" cy="{y:.1f}" r="4.5">{title}</circle>'
