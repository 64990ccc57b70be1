"""`tokenfleet scorecard`: shows predictions beside what was measured, and costs beside the cheapest's."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from tokenfleet.cli.flags import Format, OutputFormat
from tokenfleet.cli.terminal import answer, console
from tokenfleet.durations import duration_text


def scorecard_command(
    plan: Annotated[str, typer.Argument(help="a kept plan's id; by default the one served last")] = "last",
    data: Annotated[Path | None, typer.Option(help="the fleet's folder (default: $TOKENFLEET_DATA)")] = None,
    output_format: Format = OutputFormat.TABLE,
) -> int:
    """Predicted against observed TTFT, TPOT, attainment and capacity, the bias of the plan's profile, and by
    day what the fleet cost over the cheapest that would have served the same requests.

    tokenfleet serve --plan plan.json …, let it run, then tokenfleet scorecard; the next plan takes the bias
    with tokenfleet plan --bias-from last. Exit code 1 while too little was served to compare.
    """
    from tokenfleet.service.data_folder import default_data_folder
    from tokenfleet.service.scorecard import whole_scorecard

    card = whole_scorecard(data or default_data_folder(), plan)
    answer(output_format, json.dumps(card, indent=1), lambda: scorecard_tables(card))
    return 0 if card["attainment"] is not None else 1


def scorecard_tables(card: dict[str, Any]) -> list[Any]:
    """The scorecard for people."""
    from tokenfleet.report.tables import table

    fleet = " + ".join(f"{p['workers']} x {p['gpu']} TP{p['tp_degree']}" for p in card["fleet"]) or "no fleet"
    parts: list[Any] = [f"plan {card['plan']}: {fleet}; {card['requests']:,} requests finished under it"]
    if card["attainment"] is not None:
        ways = ("planned", "predicted", "observed")
        rows = [
            (
                f"{what[:4].upper()} {name}",
                *(_or_dash(row[k], duration_text) for k in ways),
                _or_dash(row["ratio"], "{:.3f}".format),
            )
            for what in ("ttft_s", "tpot_s")
            for name, row in card[what].items()
        ]
        shares, rates, most = card["attainment"], card["rate_rps"], card["capacity"]
        rows.append(("attainment", *(_or_dash(shares[k], "{:.2%}".format) for k in ways), "–"))
        rows.append(("requests/s", f"{rates['planned']:.3g}", "–", f"{rates['observed']:.3g}", "–"))
        columns = ("", "planned", "predicted for what came", "observed", "observed / predicted")
        parts.append(table(columns, rows, left=("",)))
        carried, failed = (_or_dash(most[k], "{:.3g}/s".format) for k in ("carried_rps", "failed_rps"))
        parts.append(f"busiest minute within the target {carried}; least busy one outside it {failed}")
    parts += [*card["says"]]
    return [*parts, *gap_tables(card["gap"])] if card["gap"] else parts


def gap_command(
    data: Annotated[Path | None, typer.Option(help="the fleet's folder (default: $TOKENFLEET_DATA)")] = None,
    days: Annotated[int, typer.Option(min=1, help="so many of the last days")] = 7,
    output_format: Format = OutputFormat.TABLE,
) -> int:
    """What a fleet cost over the cheapest that would have served the same requests, by day, and why.

    The cheapest knows the day beforehand, its cold starts ahead, and runs in the exact simulator by the step
    times measured. Exit code 1 where no log of a fleet tells of these days.

    tokenfleet scorecard gap --data /var/lib/tokenfleet --days 30
    """
    from tokenfleet.service.data_folder import default_data_folder
    from tokenfleet.service.gap import gaps

    folder = data or default_data_folder()
    found = gaps(folder, 0.0, time.time(), days)
    nothing = [f"{folder}: no log of a fleet; `tokenfleet serve` keeps one"]
    text = json.dumps({"schema": "tokenfleet.gaps/1", "days": found}, indent=1)
    answer(output_format, text, lambda: gap_tables(found) if found else nothing)
    return 0 if found else 1


def gap_tables(gaps: list[Any]) -> list[Any]:
    """The gaps of days for people: in dollars where prices are known, else in GPU-hours."""
    from tokenfleet.report.tables import table
    from tokenfleet.service.gap import shown

    columns = ("day (UTC)", "hours", "paid", "cheapest", "paid / cheapest", "of which")
    rows = (
        (
            day["day"],
            f"{day['hours']:.1f}",
            shown(day, day["paid"]),
            "–" if day["least"] is None else shown(day, day["least"]),
            _or_dash(day["ratio"], "{:.2f}".format),
            ", ".join(f"{name} {shown(day, amount)}" for name, amount in day["parts"].items()) or "–",
        )
        for day in gaps
    )
    found = table(columns, rows, left=("day (UTC)", "of which"))
    return [found, *(f"{day['day']}: {said}" for day in gaps for said in day["says"])]


def _or_dash(value: float | None, shown: Any) -> str:
    return "–" if value is None else str(shown(value))


def accuracy_command(
    runs: Annotated[list[Path], typer.Argument(help="files of runs (docs/accuracy.md); several at once")],
    profile: Annotated[Path | None, typer.Option(help="a profile instead of the library's")] = None,
    output_format: Format = OutputFormat.TABLE,
) -> int:
    """How far predictions are from measured runs: latencies, throughput, and the rate at which targets break.

    Each file's runs are simulated with the profile as it is, and once more with it calibrated on the three
    lowest rates, which are then judged no more.

    tokenfleet scorecard accuracy runs/llama-70b.yaml runs/llama-8b.yaml
    """
    from tokenfleet.profiles.accuracy import ACCURACY, CALIBRATED_ON, accuracy_of, overall, read_ladder
    from tokenfleet.profiles.library import read_profile
    from tokenfleet.report.tables import table

    own = None if profile is None else read_profile(profile)
    ladders = [(ladder, ladder.worker(own)) for ladder in map(read_ladder, runs)]
    found: dict[str, list[dict[str, Any]]] = {"as it is": [], "calibrated": []}
    with console(stderr=True).status("simulating"):
        for ladder, worker in ladders:
            found["as it is"].append(accuracy_of(ladder, worker, calibrates=False))
            if len(ladder.runs) > CALIBRATED_ON:
                found["calibrated"].append(accuracy_of(ladder, worker, calibrates=True))
    told = {
        "schema": ACCURACY,
        "runs": [row for rows in found.values() for row in rows],
        "medians": {name: overall(rows) for name, rows in found.items() if rows},
    }
    rows = [(row["runs"], name, *accuracy_cells(row)) for name, of in found.items() for row in of]
    shown = [table(ACCURACY_COLUMNS, rows, left=("runs", "profile"))]
    answer(output_format, json.dumps(told, indent=1), lambda: shown)
    return 0


ACCURACY_COLUMNS = (
    *("runs", "profile", "rates", "E2E %", "TPOT mean, p99 %", "TTFT mean, p50, p90, p99 %", "tokens/s %"),
    "knee, predicted",
)


def accuracy_cells(row: dict[str, Any]) -> list[str]:
    """The errors of one ladder in percent, for a table of ACCURACY_COLUMNS."""
    errors, knee = row["errors"], row["knee"]

    def percents(name: str, *whats: str) -> str:
        values = [errors[name][what] for what in whats]
        shown = ["–" if value != value else f"{100 * value:.1f}" for value in values]  # NaN is not itself
        return ", ".join(shown)

    knees = [_or_dash(knee[name], "{:.3g}".format) for name in ("measured_rps", "predicted_rps")]
    return [
        str(row["judged"]),
        percents("e2e", "mean"),
        percents("tpot", "mean", "p99"),
        percents("ttft", "mean", "p50", "p90", "p99"),
        percents("throughput", "tokens_per_s"),
        ", ".join(knees),
    ]
