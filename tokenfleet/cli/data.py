"""`tokenfleet data update | show | forget`: prices and profiles of the user's own, with their dates."""

from __future__ import annotations

import json
from dataclasses import asdict
from datetime import date
from typing import Annotated

import typer
from rich.table import Table

from tokenfleet.cli.flags import Format, OutputFormat
from tokenfleet.cli.terminal import answer
from tokenfleet.profiles.library import library
from tokenfleet.profiles.own import own_folder, own_prices
from tokenfleet.profiles.prices import read_prices
from tokenfleet.profiles.updates import OwnFile, forget, kept, update

data_app = typer.Typer(
    help="Keep prices and profiles of your own; nothing is fetched that you do not name.",
    add_completion=False,
    rich_markup_mode=None,
)


@data_app.command("update", epilog="Example: tokenfleet data update https://prices.example.com/gpus.yaml")
def update_command(
    source: Annotated[
        str, typer.Argument(help="a YAML file or address with prices or profiles", show_default=False)
    ],
    output_format: Format = OutputFormat.TABLE,
) -> None:
    """Use the prices and profiles of a file or an address.

    They are checked first. Prices replace the shipped list. A profile comes before the shipped one of its
    model, GPU and TP degree.
    """
    _print(update(source, date.today()), output_format)


@data_app.command("show")
def show_command(output_format: Format = OutputFormat.TABLE) -> None:
    """Print your own prices and profiles, their dates and sources."""
    _print(kept(), output_format)


@data_app.command("forget")
def forget_command() -> None:
    """Remove your own, so that plans use the shipped ones again."""
    files = forget()
    typer.echo(f"removed {files} file{'s' * (files != 1)}; plans use the shipped prices and profiles")


def _print(files: list[OwnFile], output_format: OutputFormat) -> None:
    def shown() -> list[Table | str]:
        if not files:
            return [f"Nothing of your own in {own_folder()}; plans use the shipped prices and profiles."]
        table = Table("in use", "dated", "updated", "source", box=None, header_style="bold")
        for one in files:
            table.add_row(one.name, one.dated, one.updated, one.source)
        return [table, *(f"No profile is of {gpu!r}: no plan uses its price." for gpu in unused)]

    unused = sorted(set(read_prices().gpus) - {p.gpu for p in library()}) if own_prices() else []
    rows = [asdict(one) for one in files]
    answer(
        output_format,
        json.dumps({"folder": str(own_folder()), "files": rows, "gpus_without_profile": unused}, indent=1),
        lambda: iter(shown()),
    )
