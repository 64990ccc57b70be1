"""`tokenfleet scorecard`: shows a kept plan's predictions beside what its fleet did."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from tokenfleet.cli.plan import OutputFormat
from tokenfleet.durations import duration_text


def scorecard_command(
    plan: Annotated[str, typer.Argument(help="a kept plan's id; by default the one served last")] = "last",
    data: Annotated[Path | None, typer.Option(help="the fleet's folder (default: $TOKENFLEET_DATA)")] = None,
    output_format: Annotated[OutputFormat, typer.Option("--format", help="on stdout")] = OutputFormat.TABLE,
) -> int:
    """Predicted against observed TTFT, TPOT, attainment and capacity, and the bias of the plan's profile.

    tokenfleet serve --plan plan.json …, let it run, then tokenfleet scorecard; the next plan takes the bias
    with tokenfleet plan --bias-from last. Exit code 1 while too little was served to compare.
    """
    from tokenfleet.cli.terminal import show
    from tokenfleet.service.data_folder import default_data_folder
    from tokenfleet.service.scorecard import scorecard_of

    card = scorecard_of(data or default_data_folder(), plan)
    if output_format == OutputFormat.JSON:
        print(json.dumps(card, indent=1))
    else:
        show(scorecard_tables(card))
    return 0 if card["attainment"] is not None else 1


def scorecard_tables(card: dict[str, Any]) -> list[Any]:
    """The scorecard for people."""
    fleet = " + ".join(f"{p['workers']} x {p['gpu']} TP{p['tp_degree']}" for p in card["fleet"]) or "no fleet"
    parts: list[Any] = [f"plan {card['plan']}: {fleet}; {card['requests']:,} requests finished under it"]
    if card["attainment"] is not None:
        table = Table()
        for name in ("", "planned", "predicted for what came", "observed", "observed / predicted"):
            table.add_column(name, justify="left" if not name else "right")
        for what in ("ttft_s", "tpot_s"):
            for name, row in card[what].items():
                table.add_row(
                    f"{what[:4].upper()} {name}",
                    *(_or_dash(row[k], duration_text) for k in ("planned", "predicted", "observed")),
                    _or_dash(row["ratio"], "{:.3f}".format),
                )
        shares = card["attainment"]
        cells = (_or_dash(shares[k], "{:.2%}".format) for k in ("planned", "predicted", "observed"))
        table.add_row("attainment", *cells, "–")
        rates, most = card["rate_rps"], card["capacity"]
        table.add_row("requests/s", f"{rates['planned']:.3g}", "–", f"{rates['observed']:.3g}", "–")
        parts.append(table)
        carried, failed = (_or_dash(most[k], "{:.3g}/s".format) for k in ("carried_rps", "failed_rps"))
        parts.append(f"busiest minute within the target {carried}; least busy one outside it {failed}")
    return [*parts, *card["says"]]


def _or_dash(value: float | None, shown: Any) -> str:
    return "–" if value is None else str(shown(value))
