"""GPU prices an hour, from the dated list that ships or from the user's own file; none is guessed.

    schema: tokenfleet.prices/1
    prices:
    - {gpu: h100-sxm, on_demand: 2.69, spot: 1.52, date: 2026-05-22, source: where from}
    - {gpu: h100-sxm, provider: coreweave, on_demand: 6.16, spot: 2.46, date: 2026-09-28, source: where from}
    - {gpu: a100-sxm, on_demand: 1.39, host_memory_gib: 0.004, date: 2026-03-10, source: where from}

Without `--provider`, the first row of a GPU that has the price (on demand, spot) counts. A row may also price
a GiB of host memory that keeps KV. Where it does not, the GPU's price is taken to include it.
"""

from __future__ import annotations

import datetime
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_args

from pydantic import BeforeValidator, Field

from controlplane.errors import BadInput
from tokenfleet.field_errors import FilePart, no_bool, parse_yaml, read_text
from tokenfleet.profiles.library import canonical_gpus, library_folder
from tokenfleet.profiles.own import own_prices

SCHEMA = "tokenfleet.prices/1"
Kind = Literal["on_demand", "reserved", "spot"]
KINDS: tuple[Kind, ...] = get_args(Kind)
STALE_AFTER_DAYS = 180
OWN = "your "  # begins the origin of a price that the user gave
MAX_FILE_BYTES = 1_000_000


def kind_of(spot: bool = False, reserved: bool = False) -> Kind:
    """The kind of price that workers have."""
    return "spot" if spot else "reserved" if reserved else "on_demand"


@dataclass(frozen=True, slots=True)
class GpuPrice:
    """US dollars for one GPU for one hour, when and where that was the price.

    `host_memory_gib`: the price of a GiB of host memory for an hour; 0 where the GPU's price includes it.
    """

    usd: float
    date: datetime.date
    source: str
    host_memory_gib: float = 0.0

    def age_warning(self, today: datetime.date) -> str | None:
        """A plain sentence when the price is old; None while it is recent."""
        days = (today - self.date).days
        if days <= STALE_AFTER_DAYS:
            return None
        return f"the price of ${self.usd:.2f} is {days} days old ({self.date}); give today's with --prices"


@dataclass(frozen=True)
class PriceList:
    """Prices by canonical GPU name, kind and provider, in the order of the file."""

    prices: Mapping[tuple[str, Kind, str], GpuPrice]
    where: str

    def usd_per_gpu_h(
        self, gpu: str, kind: Kind = "on_demand", provider: str | None = None
    ) -> GpuPrice | None:
        """The price of a GPU by any name people write; None when the list has none of that kind.

        Raises BadInput for a provider that the list does not have.
        """
        known = sorted({of for _, _, of in self.prices if of})
        if provider is not None and provider not in known:
            raise BadInput(f"--provider: {self.where} has {', '.join(known) or 'none'}, got {provider!r}")
        for name in canonical_gpus(gpu):
            for (row, of_kind, of), price in self.prices.items():
                if (row, of_kind) == (name, kind) and provider in (None, of):
                    return price
        return None

    @property
    def whose(self) -> str:
        """`your prices.yaml: ` of a list of the user's own; nothing of the shipped one."""
        path = Path(self.where)
        return "" if path == library_folder() / "prices.yaml" else f"{OWN}{path.name}: "

    @property
    def gpus(self) -> list[str]:
        return sorted({gpu for gpu, _, _ in self.prices})


_Usd = Annotated[float, BeforeValidator(no_bool), Field(gt=0, lt=10_000, allow_inf_nan=False)]


class _Row(FilePart):
    gpu: Annotated[str, Field(min_length=1, max_length=100)]
    provider: Annotated[str, Field(max_length=100)] = ""
    on_demand: _Usd | None = None
    reserved: _Usd | None = None
    spot: _Usd | None = None
    host_memory_gib: _Usd | None = None
    date: datetime.date
    source: Annotated[str, Field(min_length=1, max_length=1000)]


class _PriceFile(FilePart):
    form: Literal["tokenfleet.prices/1"] = Field(alias="schema")
    prices: Annotated[list[_Row], Field(max_length=10_000)]


def read_prices(path: Path | str | None = None) -> PriceList:
    """The prices in a file, else the user's own, else those that ship. Raises BadInput naming the entry.

    A file of the user's stands alone: it is not filled up from the shipped list, since prices of two
    makers do not compare.
    """
    path = Path(path or own_prices() or library_folder() / "prices.yaml")
    return parse_prices(read_text(path, MAX_FILE_BYTES), str(path))


def parse_prices(text: str, path: str) -> PriceList:
    """The prices in a text. Raises BadInput naming `path`, the entry and the value."""
    no_prices = f"not a price list: expected `schema: {SCHEMA}` and `prices`"
    file = parse_yaml(text, path, _PriceFile, no_prices)
    prices: dict[tuple[str, Kind, str], GpuPrice] = {}
    for row in file.prices:
        gpu, host_usd = canonical_gpus(row.gpu)[0], row.host_memory_gib or 0.0
        if host_usd and not any(getattr(row, kind) for kind in KINDS):
            raise BadInput(f"{path}: {row.gpu}: host_memory_gib: needs a price of the GPU in the same row")
        for kind in KINDS:
            usd = getattr(row, kind)
            if usd is None:
                continue
            if (gpu, kind, row.provider) in prices:
                raise BadInput(f"{path}: {row.gpu}: {kind}: given twice")
            prices[gpu, kind, row.provider] = GpuPrice(usd, row.date, row.source, host_usd)
    return PriceList(prices, path)
