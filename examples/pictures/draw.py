"""The drawings of the documentation, each made from its data: python examples/pictures/draw.py

They lie in docs/pictures/. architecture.svg has no data. planned-needed.svg shows six_plans.csv: figures of
experiments/planning/six_cases.py. move-timeline.svg shows move.json, which take.py has recorded from two vLLM
engines. The guides' small drawings are of guides.py. The same data give the same bytes. Each drawing has a
ground of its own: it can be read on a white page and on a dark one.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterable, Mapping
from html import escape
from math import ceil, floor
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs/pictures"
INK, SOFT, RULE, GROUND = "#1b2430", "#55606e", "#c9d1db", "#ffffff"
BLUE, ORANGE, GREEN, RED = "#0b57b0", "#b8520f", "#17683a", "#b3261e"
FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"
ARROWS = (("arrow", INK), ("back", ORANGE), ("same", GREEN))


def text(
    x: float, y: float, says: str, size: int = 13, fill: str = INK, anchor: str = "start", weight: int = 400
) -> str:
    """A line of text."""
    at = f'x="{x:g}" y="{y:g}" font-size="{size}" fill="{fill}" text-anchor="{anchor}"'
    halo = "" if fill == GROUND else f'stroke="{GROUND}" stroke-width="4" paint-order="stroke"'
    return f'<text {at} font-weight="{weight}" {halo}>{escape(says)}</text>'


def note(x: float, y: float, *says: str, size: int = 13) -> str:
    """Lines of softer text, one below the other."""
    return "".join(text(x, y + (size + 4) * i, line, size, SOFT) for i, line in enumerate(says))


def rect(
    x: float, y: float, width: float, height: float, fill: str, edge: str = "none", round_px: int = 3
) -> str:
    """A rectangle."""
    at = f'x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{round_px}"'
    return f'<rect {at} fill="{fill}" stroke="{edge}"/>'


def box(x: float, y: float, width: float, height: float, name: str, *says: str, edge: str = INK) -> str:
    """A named part of the system, with lines on what it does."""
    middle = x + width / 2
    lines = [text(middle, y + 45 + 17 * i, line, 12, SOFT, "middle") for i, line in enumerate(says)]
    return "".join(
        [
            rect(x, y, width, height, GROUND, edge, 8),
            text(middle, y + 25, name, 15, INK, "middle", 600),
            *lines,
        ]
    )


def path(d: str, stroke: str = INK, width: float = 1.6, dash: str = "", head: str = "") -> str:
    """A line, with the head of an arrow at its end where `head` names one."""
    more = (f' stroke-dasharray="{dash}"' if dash else "") + (f' marker-end="url(#{head})"' if head else "")
    return f'<path d="{d}" fill="none" stroke="{stroke}" stroke-width="{width:g}"{more}/>'


def drawing(width: int, height: int, title: str, says: str, parts: Iterable[str]) -> str:
    """A whole SVG with a ground of its own, a title, and a description for people who cannot see it."""
    heads = "".join(
        f'<marker id="{name}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" '
        f'orient="auto-start-reverse"><path d="M0 0L10 5L0 10z" fill="{fill}"/></marker>'
        for name, fill in ARROWS
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" '
        f'role="img" aria-labelledby="title says" font-family="{FONT}">',
        f'<title id="title">{escape(title)}</title>',
        f'<desc id="says">{escape(says)}</desc>',
        f"<defs>{heads}</defs>",
        rect(0.5, 0.5, width - 1, height - 1, GROUND, RULE, 10),
        *parts,
        "</svg>",
    ]
    return "\n".join(lines) + "\n"


def architecture() -> str:
    """Plan above, run below: what goes into a plan, what runs by it, and what comes back."""
    plan = [
        text(24, 34, "Plan", 17, INK, weight=700),
        text(72, 34, "no GPU needed", 13, SOFT),
        box(24, 50, 190, 66, "Request trace", "CSV, JSON lines or a vLLM log"),
        box(24, 132, 190, 66, "Profiles and prices", "step times of each GPU type"),
        box(
            300,
            72,
            250,
            104,
            "Simulator",
            "vLLM's scheduler, replayed",
            "on the trace and on",
            "resampled traces of it",
        ),
        box(
            640,
            72,
            240,
            104,
            "plan.json",
            "GPU types, workers, cost",
            "SLO attainment and its",
            "lower bound, scaling rule",
        ),
        path("M214 83H258V112H294", head="arrow"),
        path("M214 165H258V138H294", head="arrow"),
        path("M550 124H634", head="arrow"),
    ]
    run = [
        path("M24 222H880", RULE, 1),
        text(24, 252, "Run", 17, INK, weight=700),
        text(66, 252, "vLLM on GPUs or CPUs", 13, SOFT),
        box(24, 290, 190, 80, "Clients", "OpenAI API,", "streams"),
        box(
            300,
            278,
            250,
            104,
            "Gateway",
            "places each request, queues",
            "it, moves it while it runs;",
            "scales the fleet",
        ),
        *(box(640, 262 + 48 * i, 240, 40, f"vLLM worker {i + 1}") for i in range(3)),
        path("M214 330H294", head="arrow"),
        *(path(f"M550 330H596V{282 + 48 * i}H634", head="arrow") for i in range(3)),
        path("M900 284V374", ORANGE, 1.6, head="back"),
        path("M900 374V284", ORANGE, 1.6, head="back"),
        text(912, 326, "live moves", 12, ORANGE),
        text(912, 342, "of requests", 12, ORANGE),
        text(912, 358, "with their KV", 12, ORANGE),
    ]
    between = [
        path("M760 176V206H486V272", head="arrow"),
        text(494, 246, "the planned fleet", 12),
        path("M330 227V182", GREEN, 1.6, "5 4", "same"),
        path("M330 227V272", GREEN, 1.6, "5 4", "same"),
        text(340, 246, "same placement code", 12, GREEN),
    ]
    back = [
        box(300, 424, 250, 60, "Scorecard", "predicted and observed, by day", edge=ORANGE),
        path("M425 382V418", ORANGE, 1.6, head="back"),
        path("M300 454H12V216V165H18", ORANGE, 1.6, "", "back"),
        text(24, 446, "corrects profiles, records traffic", 12, ORANGE),
    ]
    return drawing(
        1000, 504,
        "Tokenfleet's architecture",
        "A request trace and profiles go into the simulator, which writes plan.json. The gateway runs the "
        "planned fleet: it places requests on vLLM workers and moves running requests between them. "
        "The scorecard compares predicted with observed figures and corrects the profiles.",
        [*plan, *run, *between, *back],
    )  # fmt: skip


def six_plans() -> list[dict[str, str]]:
    """The rows of six_plans.csv."""
    with (FOLDER / "six_plans.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def planned_needed(rows: list[dict[str, str]]) -> str:
    """Three bars a case: planned from means, needed, and planned by Tokenfleet; each in percent of needed."""
    left, full, top, step = 250, 440, 128, 74
    parts = [
        text(24, 34, "Planned and needed GPUs in six cases", 17, INK, weight=700),
        note(
            24, 56,
            "Llama-3.1 at 20 requests/s, the hour of Azure's conversation trace. Bars: GPUs in percent of",
            "those needed. Percentages: requests within TTFT / TPOT when that fleet is replayed on the hour.",
        ),
    ]  # fmt: skip
    legend = [
        (RED, "planned from mean lengths (a widely used planner)"),
        (SOFT, "needed for 99 % (its maker's simulator)"),
        (BLUE, "planned by Tokenfleet"),
    ]
    x = 24.0
    for fill, says in legend:
        parts += [rect(x, 88, 14, 14, fill), text(x + 20, 100, says, 12)]
        x += 40 + 6.7 * len(says)
    end = top + step * len(rows)
    parts.append(path(f"M{left + full} {top}V{end}", INK, 1, "4 4"))
    for i, row in enumerate(rows):
        y = top + step * i
        needed, there = int(row["needed_gpus"]), row["sure_attained_there"]
        bars = [
            (RED, int(row["planned_gpus"]), float(row["planned_attained"])),
            (SOFT, needed, None),
            (BLUE, int(row["sure_gpus"]), float(there) if there else None),
        ]
        model, targets = row["case"].split(", ")
        parts += [
            text(left - 16, y + 25, model, 13, INK, "end", 600),
            text(left - 16, y + 42, targets, 12, SOFT, "end"),
        ]
        for j, (fill, gpus, share) in enumerate(bars):
            width = full * gpus / needed
            says = f"{gpus} GPU{'s' if gpus > 1 else ''}" + (
                "" if share is None else f", {share * 100:.1f} % in time"
            )
            at = y + 8 + 18 * j
            parts += [rect(left, at, width, 14, fill), text(left + width + 8, at + 11.5, says, 12)]
    parts += [
        note(
            24, end + 22,
            "Tokenfleet plans at 95 % confidence. Its fleets are replayed in that simulator's successor,",
            "which places requests round-robin. Two fleets without a percentage were not replayed there.",
            "Figures: python experiments/planning/six_cases.py --other PROGRAM",
            size=12,
        ),
    ]  # fmt: skip
    return drawing(
        900, end + 72,
        "Planned and needed GPUs in six cases",
        "; ".join(
            f"{r['case']}: planned from means {r['planned_gpus']}, needed {r['needed_gpus']}, "
            f"Tokenfleet {r['sure_gpus']}"
            for r in rows
        ),
        parts,
    )  # fmt: skip


def move_timeline(move: Mapping[str, Any]) -> str:
    """A moved request: where it runs, each copy of its KV, and when the client got each token."""
    tokens, stages, start_s, end_s = move["tokens_s"], move["stages"], move["from_s"], move["to_s"]
    left, width = 150, 700
    per_s = width / (end_s - start_s)

    def at(time_s: float) -> float:
        return round(left + (min(max(time_s, start_s), end_s) - start_s) * per_s, 1)

    between = f"{move['source']} to {move['target']}"
    before, after = move["pause_s"]
    cut_s, pause_ms = move["cut_over_s"], (after - before) * 1e3
    says = f"{move['prompt_tokens']:,} prompt tokens, {move['moved_bytes'] / 2**20:.1f} MiB of KV"
    parts = [
        text(24, 34, f"A running request moves from {between}", 17, INK, weight=700),
        note(
            24, 56,
            f"{says}; two vLLM engines on CPU. Longest wait for a token around the move: {pause_ms:.0f} ms",
            f"(median wait of this request: {move['usual_s'] * 1e3:.0f} ms).",
        ),
        rect(at(before), 92, at(after) - at(before), 206, "#fdecd9"),
        text(left - 14, 119, move["source"], 13, INK, "end", 600),
        rect(at(start_s), 104, at(cut_s) - at(start_s), 22, BLUE),
        text(at(start_s) + 8, 119.5, "decodes", 12, GROUND),
        text(left - 14, 167, move["target"], 13, INK, "end", 600),
        *(rect(at(b), 152, max(3, at(e) - at(b)), 22, ORANGE) for b, e, _ in stages),
        rect(at(cut_s), 152, at(end_s) - at(cut_s), 22, GREEN),
        text(at(end_s) - 8, 167.5, "decodes", 12, GROUND, "end"),
        text(left - 14, 215, "client", 13, INK, "end", 600),
        *(path(f"M{at(t)} 200V222", INK, 1) for t in tokens if start_s <= t <= end_s),
        text(left, 242, "one line: one token", 12, SOFT),
    ]  # fmt: skip
    copied = "; ".join(f"{tokens:,} tokens in {(e - b) * 1e3:.0f} ms" for b, e, tokens in stages)
    parts += [
        path(f"M{at(cut_s)} 92V298", INK, 1, "4 4"),
        text(at(stages[0][0]), 144, f"KV copied: {copied}", 12, ORANGE),
        text(at(cut_s) - 6, 276, "switch-over, with the KV", 12, INK, "end"),
        text(at(cut_s) - 6, 292, f"of the last {move['tail_tokens']} tokens", 12, INK, "end"),
        text(at(after) + 6, 276, f"the client waits {pause_ms:.0f} ms", 12, ORANGE),
    ]
    axis = 310
    parts.append(path(f"M{left} {axis}H{left + width}", SOFT, 1))
    step_s = next(s for s in (0.05, 0.1, 0.2, 0.5, 1, 2, 5) if (end_s - start_s) / s <= 10)
    ticks = [i * step_s for i in range(ceil(start_s / step_s), floor(end_s / step_s) + 1)]
    parts += [
        part
        for tick in ticks
        for part in (
            path(f"M{at(tick)} {axis}v5", SOFT, 1),
            text(at(tick), axis + 20, f"{tick:g}", 12, SOFT, "middle"),
        )
    ]
    parts.append(text(left + width / 2, axis + 40, "seconds from the order to move", 12, SOFT, "middle"))
    return drawing(
        900, 366,
        "A moved request on a time line",
        f"A request with {says} moves from {between}. Its KV is copied while it decodes; "
        f"the client waits {pause_ms:.0f} ms for one token.",
        parts,
    )  # fmt: skip


def drawings() -> dict[str, str]:
    """Every drawing by the name of its file."""
    return {
        "architecture.svg": architecture(),
        "planned-needed.svg": planned_needed(six_plans()),
        "move-timeline.svg": move_timeline(json.loads((FOLDER / "move.json").read_text())),
    }


if __name__ == "__main__":
    from guides import GUIDES

    for name, content in (drawings() | {name: drawn() for name, drawn in GUIDES.items()}).items():
        (FOLDER / name).write_text(content)
        print(FOLDER / name)
