"""`tokenfleet scorecard`: compares predictions with measurements, and costs with the hindsight optimum."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from controlplane.errors import BadInput
from tokenfleet.cli.flags import FleetFolder, Format, OutputFormat
from tokenfleet.cli.terminal import answer, console
from tokenfleet.profiles.library import read_profile
from tokenfleet.report.tables import plan_table, table


def scorecard_command(
    plan: Annotated[str, typer.Argument(help="id of a kept plan (default: the one served last)")] = "last",
    data: FleetFolder = None,
    output_format: Format = OutputFormat.TABLE,
) -> int:
    """Compare predicted with observed TTFT, TPOT, SLO attainment and capacity.

    It also shows how far the plan's step times are off, and by day the cost over the hindsight optimum. Exit
    code 1: too few requests were served to compare.

    tokenfleet serve --plan plan.json --model ./llama --history      # let it run
    tokenfleet scorecard
    tokenfleet plan --trace day.csv --bias-from last --model llama-3.1-8b --slo ttft=400ms,tpot=30ms
    """
    from tokenfleet.service.data_folder import default_data_folder
    from tokenfleet.service.scorecard import whole_scorecard

    card = whole_scorecard(data or default_data_folder(), plan)
    answer(output_format, json.dumps(card, indent=1), lambda: scorecard_tables(card))
    return 0 if card["attainment"] is not None else 1


def scorecard_tables(card: dict[str, Any]) -> list[Any]:
    """The scorecard for people."""
    from tokenfleet.planning.plan_file import Shown

    verdict, of, *rest = card["says"]
    shown = [plan_table(Shown.model_validate(one)) for one in card["tables"]]
    return [verdict, of, *shown, *rest, *(gap_tables(card["gap"]) if card["gap"] else ())]


def gap_command(
    data: FleetFolder = None,
    days: Annotated[int, typer.Option(min=1, help="number of days, up to the last one")] = 7,
    output_format: Format = OutputFormat.TABLE,
) -> int:
    """Show by day what a fleet cost over the hindsight optimum, and why.

    The hindsight optimum is the cheapest fleet for the same requests. It knows the day in advance and orders
    workers ahead. The simulator runs it on measured step times. Exit code 1: no log covers these days.

    tokenfleet scorecard gap --data /var/lib/tokenfleet --days 30
    """
    from tokenfleet.service.data_folder import default_data_folder
    from tokenfleet.service.gap import gaps

    folder = data or default_data_folder()
    if not folder.is_dir():
        raise BadInput(f"--data: {folder}: no such folder, expected that of a fleet")
    found = gaps(folder, 0.0, time.time(), days)
    nothing = [f"{folder}: no log of a fleet; `tokenfleet serve` writes one"]
    text = json.dumps({"schema": "tokenfleet.gaps/1", "days": found}, indent=1)
    answer(output_format, text, lambda: gap_tables(found) if found else nothing)
    return 0 if found else 1


def gap_tables(gaps: list[Any]) -> list[Any]:
    """Each day's excess cost: the last day in a line, then a table. Dollars, or GPU-hours without prices."""
    from tokenfleet.service.gap import PARTS, gap_line, shown

    columns = ("day (UTC)", "hours", "paid", "optimum", "paid / optimum", "excess by cause")
    rows = (
        (
            day["day"],
            f"{day['hours']:.1f}",
            shown(day, day["paid"]),
            "–" if day["least"] is None else shown(day, day["least"]),
            _or_dash(day["ratio"], "{:.2f}".format),
            ", ".join(f"{PARTS[name]} {shown(day, amount)}" for name, amount in day["parts"].items()) or "–",
        )
        for day in gaps
    )
    found = table(columns, rows, left=("day (UTC)", "excess by cause"))
    told = [f"{day['day']}: {said}" for day in gaps for said in day["says"]]
    return [gap_line(gaps[-1]), *([found] if len(gaps) > 1 else ()), *told]  # the line says all of one day


def _or_dash(value: float | None, shown: Any) -> str:
    return "–" if value is None else str(shown(value))


def accuracy_command(
    runs: Annotated[list[Path], typer.Argument(help="files of runs (docs/accuracy.md); several at once")],
    profile: Annotated[Path | None, typer.Option(help="profile in place of the library's")] = None,
    output_format: Format = OutputFormat.TABLE,
) -> int:
    """Show the errors of predictions on measured runs: latencies, throughput and the saturation point.

    Each file's runs are simulated twice: with the profile, and with the profile calibrated on the three
    lowest rates. The second time these three rates are not judged.

    tokenfleet scorecard accuracy runs/llama-70b.yaml runs/llama-8b.yaml
    """
    from tokenfleet.profiles.accuracy import ACCURACY, CALIBRATED_ON, accuracy_of, overall, read_ladder

    own = None if profile is None else read_profile(profile)
    ladders = [(ladder, ladder.worker(own)) for ladder in map(read_ladder, runs)]
    found: dict[str, list[dict[str, Any]]] = {"as it is": [], "calibrated": []}
    with console(stderr=True).status("simulating"):
        for ladder, worker in ladders:
            found["as it is"].append(accuracy_of(ladder, worker, calibrates=False))
            if len(ladder.runs) > CALIBRATED_ON:
                found["calibrated"].append(accuracy_of(ladder, worker, calibrates=True))
    errors = {name: overall(rows) for name, rows in found.items() if rows}
    told = {
        "schema": ACCURACY,
        "runs": [row for rows in found.values() for row in rows],
        "medians": errors,
    }
    shown: list[Any] = []
    ways = ("uncalibrated", f"calibrated on the {CALIBRATED_ON} lowest rates")
    for (name, of), words in zip(found.items(), ways, strict=True):
        if rows := [(row["runs"], *accuracy_cells(row)) for row in of]:
            tpot, ttft = (100.0 * errors[name]["errors"][what]["mean"] for what in ("tpot", "ttft"))
            shown.append(f"Median error, {words}: mean TPOT {tpot:.1f} %, mean TTFT {ttft:.1f} %")
            shown.append(table(SHORT_COLUMNS, rows, left=("runs",)))
    answer(output_format, json.dumps(told, indent=1), lambda: [*shown, ACCURACY_WORDS])
    return 0


SHORT_COLUMNS = ("runs", "rates", "E2E", "TPOT, p99", "TTFT, p50, p90, p99", "tokens/s", "saturation")
ACCURACY_WORDS = (
    "Errors in percent, of the mean unless a quantile is named.\n"
    "Saturation point in requests/s: measured, predicted; –: none within these rates."
)


ACCURACY_COLUMNS = (
    *("runs", "profile", "rates", "E2E %", "TPOT mean, p99 %", "TTFT mean, p50, p90, p99 %", "tokens/s %"),
    "saturation req/s, predicted",
)


def accuracy_cells(row: dict[str, Any]) -> list[str]:
    """The errors of one load sweep in percent, for a table of ACCURACY_COLUMNS."""
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
