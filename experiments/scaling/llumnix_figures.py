"""Llumnix' Figures 11, 13, 14 and 15 in simulation, beside the published curves; then ours beside theirs.

Figure 11: serving performance of 16 instances on the generated traces, INFaaS++ against Llumnix. Figure 13:
a tenth of the requests at high priority, Llumnix-base (no priorities) against Llumnix. Figures 14 and 15:
auto-scaling (llumnix_scaling.py), INFaaS++ against Llumnix. Judged as pairs:

    ordering   wherever two published points differ by more than 20 %, the simulated ones differ the same way
    ratio      the largest published ratio of a trace and metric (over 1.2) is met within ±30 %

Saving, of fleets that scale themselves (the published 36 % is of these): 1 - ours / INFaaS++, in mean
instances, at each point of INFaaS++ in Figures 14 and 15, ours read off its own curve where it has the same
P99 prefill latency: between two of its points (linear in instances and in the logarithm of P99), or its
cheapest point where all are better. Each point of Figure 15 and each rate and CV of Figure 14, on the same
trace, with the same start-up time. (The published 36 % is INFaaS++ / Llumnix - 1, of two points that do not
have the same P99.)

Saving, of fixed fleets: 1 - N/16, N the fewest workers with which a system's P99 prefill latency is no worse
than that of INFaaS++ on 16, on the same trace. There, at the highest rates, 16 instances are nearly full:
`bound` (perfmodel.fluid) is what no policy can do with less of for long, and leaves 6 to 19 % to save at
most, on S-S nothing. The other end of the same line: 1 - 16/N, N the fewest workers with which INFaaS++ is no
worse than ours on 16.

The published dispatchers know loads as of the beginning of each instance's last step (llumnix_setup.py):
without that nothing herds, and INFaaS++ is so much better than published that migration has little left to
win. What is left of the difference lies near saturation (S-S, S-L), where latencies are steep in the load and
a P99 is the tail of one or two bursts: `--only streams` judges each stream of arrivals alone. The real traces
of Figure 11 are not part of the public data. The whole takes an hour of one core; with `--resume FOLDER` it
goes on where it stopped.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np

from experiments.lib.llumnix import Curves, published
from experiments.lib.llumnix_scaling import CVS as SCALED_CVS
from experiments.lib.llumnix_scaling import (
    FILLS,
    INSTANCES,
    LOWS,
    P99,
    Curve,
    figure_14,
    figure_15,
    instances_at,
    published_15,
)
from experiments.lib.llumnix_scaling import RATES as SCALED_RATES
from experiments.lib.llumnix_serving import (
    CVS,
    GAP,
    PAIR,
    RATES,
    WITHIN,
    Points,
    by_stream,
    figure_11,
    figure_13,
    savings,
)
from experiments.lib.public_data import LLUMNIX_FIGURES
from experiments.lib.results import bar, flags, show
from experiments.lib.resume import Parts

ONLY = ("serving", "streams", "priorities", "scaling")


def judge(figure: str, paper: Curves, seen: Points, slower: str, faster: str) -> tuple[list[Any], Any]:
    """Rows of one pair of systems by trace and metric, and the two bars."""
    rows, right, wrong, near, far = [], 0, 0, 0, 0
    for row, metric in dict.fromkeys((key[0], key[1]) for key in seen):
        xs = sorted({key[2] for key in seen if key[:2] == (row, metric)})
        theirs = {x: paper[row, metric, x, slower] / paper[row, metric, x, faster] for x in xs}
        ours = {x: seen[row, metric, x, slower] / seen[row, metric, x, faster] for x in xs}
        clear = [x for x in xs if max(theirs[x], 1 / theirs[x]) > GAP]
        held = sum((theirs[x] > 1) == (ours[x] > 1) for x in clear)
        right, wrong = right + held, wrong + len(clear) - held
        most, most_seen = max(theirs.values()), max(ours.values())
        judged = most > GAP
        if judged:
            inside = abs(most_seen / most - 1) <= WITHIN
            near, far = near + inside, far + (not inside)
        last = xs[-1]
        rows.append(
            {
                "figure": figure,
                "trace": row,
                "metric": metric,
                "at": last,
                f"paper {slower}": paper[row, metric, last, slower],
                slower: seen[row, metric, last, slower],
                f"paper {faster}": paper[row, metric, last, faster],
                faster: seen[row, metric, last, faster],
                "ours": seen[row, metric, last, "ours"],
                "orderings": f"{held}/{len(clear)}",
                "paper ratio": most,
                "ratio": most_seen,
                "within": ("yes" if inside else "no") if judged else "-",
            }
        )
    bars = {
        f"{figure}: share of orderings that hold": bar(right / max(right + wrong, 1), 1.0, at_least=True),
        f"{figure}: share of ratios within 30 %": bar(near / max(near + far, 1), 1.0, at_least=True),
    }
    return rows, bars


def scaling(
    asked: argparse.Namespace, seeds: range, parts: Parts
) -> tuple[list[Any], list[Any], dict[str, Any]]:
    """Rows of Figures 14 and 15 with what ours saves, and their bars."""
    quick = asked.quick
    fills = FILLS[1::2] if quick else FILLS
    rates, cvs = ((2.0,), (2.0,)) if quick else (SCALED_RATES, SCALED_CVS)
    seen_14, ours_14 = figure_14(rates, cvs, fills, seeds, parts)
    rows_14, bars = judge("Fig 14", published(asked.data, "Fig14"), seen_14, "INFaaS++", "Llumnix")
    theirs_15 = published_15(published(asked.data, "Fig15"))
    lows = (5.0, 25.0) if quick else LOWS
    seen_15, curves = figure_15(lows, fills, seeds, parts)
    rows_15, bars_15 = judge("Fig 15", theirs_15, seen_15, "INFaaS++", "Llumnix")
    bars |= bars_15
    saved: dict[str, list[float]] = {}
    for (row, x), own in ours_14.items():
        there = {name: (seen_14[row, INSTANCES, x, name], seen_14[row, P99, x, name]) for name in PAIR}
        title = f"Fig 14 {row}"
        rows_14.append(saving_row(title, x, there["INFaaS++"], [there["Llumnix"]], own))
        saved.setdefault(title, []).append(rows_14[-1]["saving ours"])
    for low, point in zip(lows, curves["INFaaS++"], strict=True):
        rows_15.append(saving_row("Fig 15", low, point, curves["Llumnix"], curves["ours"]))
        saved.setdefault("Fig 15", []).append(rows_15[-1]["saving ours"])
    for title, each in saved.items():
        mean = float(np.mean([0.0 if one is None else one for one in each]))
        says = f"{title}: 1 - instances of ours / of INFaaS++ at its P99, mean of {len(each)}"
        bars[says] = bar(mean, 0.2, at_least=True)
    return rows_14, rows_15, bars


def saving_row(title: str, x: float, there: tuple[float, float], theirs: Curve, own: Curve) -> dict[str, Any]:
    """Instances where INFaaS++ stands (instances, P99), and those with which others are no worse."""
    row: dict[str, Any] = {"figure": title, "at": x, "P99 INFaaS++": there[1], "INFaaS++": there[0]}
    for name, line in (("Llumnix", theirs), ("ours", own)):
        count = instances_at(line, there[1])
        row |= {name: count, f"saving {name}": None if count is None else 1.0 - count / there[0]}
    return row | {"curve of ours": ", ".join(f"{n:.2f}: {p:.1f} s" for n, p in sorted(own))}


def run(asked: argparse.Namespace) -> int:
    quick = asked.quick
    seeds = range(asked.seed, asked.seed + (1 if quick else asked.repeats))
    parts = asked.resume
    if asked.only == "scaling":
        rows_14, rows_15, bars = scaling(asked, seeds, parts)
        if asked.format == "json":
            return show("llumnix_figures", [*rows_14, *rows_15], bars, asked)
        show("Figure 14", rows_14, {}, asked)
        show("Figure 15", rows_15, {}, asked)
        return show("bars", [], bars, asked)
    names = ("M-M", "L-L", "S-S") if quick else tuple(RATES)
    if asked.trace:
        names = (asked.trace,)
    if asked.only == "streams":
        rows = by_stream(names, seeds, parts, published(asked.data, "Fig11"))
        return show("Figure 11 by stream of arrivals", rows, {}, asked)
    rows_11: list[Any] = []
    rows_13: list[Any] = []
    rows_saved: list[Any] = []
    bars: dict[str, Any] = {}
    if asked.only in (None, "serving"):
        seen_11 = figure_11(names, lambda n: RATES[n][-1:] if quick else RATES[n], seeds, parts)
        rows_11, bars = judge("Fig 11", published(asked.data, "Fig11"), seen_11, "INFaaS++", "Llumnix")
        rows_saved = [] if quick else savings(names, parts)
    if asked.only in (None, "priorities"):
        seen_13 = figure_13((2.0,) if quick else CVS, seeds, parts)
        rows_13, bars_13 = judge("Fig 13", published(asked.data, "Fig13"), seen_13, "Llumnix-base", "Llumnix")
        bars |= bars_13
    if rows_saved:
        mean = float(np.mean([row["saving ours"] for row in rows_saved]))
        bars["fixed: workers saved at the P99 of INFaaS++ on 16 (1 - N/16), mean"] = bar(
            mean, 0.2, at_least=True
        )
        mean = float(np.mean([row["saving at it"] for row in rows_saved]))
        bars["fixed: workers saved at the P99 of ours on 16 (1 - 16/N), mean"] = bar(mean, 0.2, at_least=True)
    rows_14: list[Any] = []
    rows_15: list[Any] = []
    if asked.only is None:
        rows_14, rows_15, bars_scaled = scaling(asked, seeds, parts)
        bars |= bars_scaled
    if asked.format == "json":
        return show("llumnix_figures", [*rows_11, *rows_13, *rows_14, *rows_15, *rows_saved], bars, asked)
    for title, rows in (
        ("Figure 11", rows_11),
        ("Figure 13", rows_13),
        ("Figure 14", rows_14),
        ("Figure 15", rows_15),
        ("Equal P99", rows_saved),
    ):
        if rows:
            show(title, rows, {}, asked)
    return show("bars", [], bars, asked)


if __name__ == "__main__":
    parser = flags(__doc__, LLUMNIX_FIGURES, resumes=True)
    parser.add_argument("--repeats", type=int, default=1, help="arrival streams to average over")
    parser.add_argument("--only", choices=ONLY, help="11; 11 by stream; 13; 14 and 15")
    parser.add_argument("--trace", choices=tuple(RATES), help="only one trace of Figure 11")
    sys.exit(run(parser.parse_args()))
