"""The plan of several models within shared limits, as an object."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import polars as pl

from tokenfleet.files import cache_folder, write_files
from tokenfleet.portfolios.offers import tasks_of
from tokenfleet.portfolios.plan import PortfolioPlan, plan_portfolio
from tokenfleet.portfolios.request import Portfolio, read_portfolio
from tokenfleet.portfolios.view import headline, portfolio_json, portfolio_report
from tokenfleet.report.page import framed
from tokenfleet.report.progress import counted_bar, tell_compiling
from tokenfleet.report.tables import fleet_text
from tokenfleet.whatifs.solve import Cache


@dataclass(frozen=True, repr=False)
class PortfolioAnswer:
    """The cheapest fleets of several models within shared limits."""

    chosen: PortfolioPlan

    @property
    def usd_per_hour(self) -> float:
        """Dollars an hour of all models together, on their schedules."""
        return self.chosen.usd_per_h

    @property
    def models(self) -> pl.DataFrame:
        """One row per model: its fleet, how it is bought, its zone, and dollars an hour."""
        rows = [
            (row.name, fleet_text(row.plan.fleet), str(row.kind), row.zone, row.usd_per_h)
            for row in self.chosen.rows
        ]
        return pl.DataFrame(rows, schema=["model", "fleet", "bought", "zone", "usd_per_hour"], orient="row")

    @property
    def document(self) -> dict[str, Any]:
        """The JSON object, `tokenfleet.portfolio-plan/1`."""
        return portfolio_json(self.chosen)

    def save(self, folder: str | Path) -> Path:
        """Write portfolio.json, portfolio.html and each NAME.plan.json into a folder. Raises BadInput."""
        write_files({Path(folder, name): text for name, text in portfolio_texts(self.chosen).items()})
        return Path(folder)

    def __repr__(self) -> str:
        return f"{headline(self.chosen)}\n{self.models}"

    def _repr_html_(self) -> str:
        return framed(portfolio_report(self.chosen))


def portfolio_texts(plan: PortfolioPlan) -> dict[str, str]:
    """The files of a portfolio's plan by their names."""
    whole = {"portfolio": portfolio_json(plan)} | {f"{row.name}.plan": row.plan.document for row in plan.rows}
    texts = {f"{name}.json": json.dumps(document, indent=1) + "\n" for name, document in whole.items()}
    return texts | {"portfolio.html": portfolio_report(plan)}


def portfolio(file: str | Path, *, jobs: int = 1, keep: bool = True) -> PortfolioAnswer:
    """Choose the cheapest GPUs for the models in a YAML file (docs/guides/portfolio.md), within its limits.

    `jobs` and `keep` as in `whatif`. Raises BadInput, and Infeasible with the cheapest relaxation.
    """
    return PortfolioAnswer(chosen_fleets(read_portfolio(Path(file)), jobs, keep))


def chosen_fleets(models: Portfolio, jobs: int, keep: bool) -> PortfolioPlan:
    """The plan of a portfolio as read, with a bar. Raises BadInput, and Infeasible as `portfolio` does."""
    asked = tasks_of(models, date.today())
    cache = Cache(cache_folder("whatif") if keep else None)
    tell_compiling()
    with counted_bar("planning models", asked.count) as advance:
        return plan_portfolio(models, asked, jobs, cache, advance)
