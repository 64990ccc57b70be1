"""A trace: a workload with its source and the corrections that reading it took."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from controlplane.workload import Workload


@dataclass(frozen=True)
class Trace:
    """Requests read from a file.

    `clock_start_s` is the Unix time (seconds) of the workload's zero, None where the file's times are
    relative. `tenant` [requests] indexes `tenants`; a file without tenants has the one called "default".
    `warnings` are whole lines for a person; the counts behind them are `out_of_order` (rows that came
    before an earlier arrival and were sorted in), `empty_outputs` (requests that returned nothing and
    were dropped) and `blank_rows`.
    """

    name: str
    format: str
    workload: Workload
    warnings: list[str] = field(default_factory=list)
    clock_start_s: float | None = None
    tenant: NDArray[np.int64] = field(default_factory=lambda: np.zeros(0, np.int64))
    tenants: tuple[str, ...] = ("default",)
    out_of_order: int = 0
    empty_outputs: int = 0
    blank_rows: int = 0

    def __post_init__(self) -> None:
        if len(self.tenant) != len(self.workload):
            object.__setattr__(self, "tenant", np.zeros(len(self.workload), np.int64))

    def __len__(self) -> int:
        return len(self.workload)
