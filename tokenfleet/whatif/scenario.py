"""One scenario: the flags of a plan with some of them changed, and what comes of it."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from controlplane.errors import BadInput
from controlplane.types import EngineMode, Slo
from controlplane.worker_type import WorkerType
from controlplane.workload import Workload
from tokenfleet.planning.inputs import gather, known_policy
from tokenfleet.planning.plan_file import PlanFile
from tokenfleet.planning.question import Question
from tokenfleet.planning.result import Inputs
from tokenfleet.traces import Trace
from tokenfleet.whatif.axes import Changes, checked


@dataclass(frozen=True)
class Asked:
    """Everything that `tokenfleet plan` takes and that has a say in its answer."""

    traces: tuple[Path, ...]
    slo: Slo
    model: str | None = None
    attainment: float = 0.99
    confidence: float = 0.95
    gpus: tuple[str, ...] = ()
    tps: tuple[int, ...] = ()
    profiles: tuple[Path, ...] = ()
    prices: Path | None = None
    spot: bool = False
    engine: EngineMode | None = None
    policy: str = "spread"
    rate_scale: float = 1.0
    prompt_scale: float = 1.0
    output_scale: float = 1.0
    price_scale: float = 1.0
    cold_start_s: float | None = None
    reclaims_per_h: float | None = None
    window: str | None = None
    budget_usd_per_h: float | None = None
    max_gpus: int | None = None
    drop_too_long: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Task:
    """A scenario ready to be planned, by whichever process: nothing in it is read from a file any more."""

    number: int
    workload: Workload
    worker_types: tuple[WorkerType, ...]
    question: Question
    inputs: Inputs
    scheduled: bool


@dataclass(frozen=True)
class Scenario:
    """A cell of the grid: what was changed, how to ask for it alone, and its plan or why there is none.

    `plan` is the same whether it was made now, elsewhere, or last week.
    """

    changes: Changes
    command: str
    plan: PlanFile | None
    error: str = ""

    @property
    def feasible(self) -> bool:
        return self.plan is not None and self.plan.feasible


def changed(asked: Asked, changes: Changes) -> Asked:
    """`asked` with the changes of a cell. Raises BadInput where one has no meaning beside the others."""
    values: dict[str, Any] = {key: checked(key, text) for key, text in changes.items()}
    new: dict[str, Any] = {}
    for key, field in _FIELDS.items():
        if key in values:
            new[field] = values[key]
    if "lengths" in values:
        new["prompt_scale"] = new["output_scale"] = values["lengths"]
    if "slo.ttft" in values or "slo.tpot" in values:
        new["slo"] = Slo(values.get("slo.ttft", asked.slo.ttft_s), values.get("slo.tpot", asked.slo.tpot_s))
    if "gpu" in values:
        new["gpus"] = tuple(values["gpu"].split("+"))
    if "tp" in values:
        new["tps"] = (values["tp"],)
    if "prices" in values:
        new["prices"] = Path(values["prices"])
    if "engine" in values:
        new["engine"] = EngineMode(values["engine"])
    after = replace(asked, **new)
    if after.reclaims_per_h is not None and not after.spot:
        if "reclaims" in values:
            raise BadInput("reclaims: only spot workers are reclaimed")
        after = replace(after, reclaims_per_h=None)  # of the grid's spot scenarios, not of this one
    if after.spot and "spot" in values and after.reclaims_per_h is None:
        raise BadInput(
            "spot: how often are workers reclaimed? Give --reclaims-per-h, or vary reclaims: a spot fleet"
            " without spares does not hold the target"
        )
    return after


_FIELDS = {
    "rate": "rate_scale",
    "lengths.prompt": "prompt_scale",
    "lengths.output": "output_scale",
    "price": "price_scale",
    "cold-start": "cold_start_s",
    "reclaims": "reclaims_per_h",
    "attainment": "attainment",
    "confidence": "confidence",
    "policy": "policy",
    "spot": "spot",
}


def prepared(number: int, trace: Trace, asked: Asked, scheduled: bool, today: date | None) -> Task:
    """What the planner takes, for a trace as read. Raises BadInput or ProfileMissing."""
    question = Question(
        asked.slo,
        asked.attainment,
        asked.confidence,
        known_policy(asked.policy),
        asked.seed,
        asked.max_gpus,
        asked.budget_usd_per_h,
        asked.cold_start_s,
        asked.reclaims_per_h,
    )
    gathered = gather(
        trace,
        model=asked.model,
        gpus=asked.gpus,
        tps=asked.tps,
        profiles=asked.profiles,
        prices=asked.prices,
        spot=asked.spot,
        engine=asked.engine,
        rate_scale=asked.rate_scale,
        window=asked.window,
        drop_too_long=asked.drop_too_long,
        budgeted=asked.budget_usd_per_h is not None,
        price_scale=asked.price_scale,
        prompt_scale=asked.prompt_scale,
        output_scale=asked.output_scale,
        today=today,
    )
    return Task(number, gathered.workload, gathered.worker_types, question, gathered.inputs, scheduled)


def plan_command_line(asked: Asked) -> str:
    """The `tokenfleet plan` that makes this scenario's plan, ready for a shell; defaults are left out."""
    plain = Asked(asked.traces, asked.slo)
    words = ["tokenfleet", "plan"]
    for path in asked.traces:
        words += ["--trace", str(path)]
    words += ["--slo", f"ttft={_seconds(asked.slo.ttft_s)},tpot={_seconds(asked.slo.tpot_s)}"]
    for flag, field in _FLAGS.items():
        value = getattr(asked, field)
        if value == getattr(plain, field):
            continue
        for one in value if isinstance(value, tuple) else (value,):
            words += [flag] if one is True else [flag, _text(field, one)]
    return shlex.join(words)


_FLAGS = {
    "--model": "model",
    "--attainment": "attainment",
    "--confidence": "confidence",
    "--gpu": "gpus",
    "--tp": "tps",
    "--profile": "profiles",
    "--prices": "prices",
    "--spot": "spot",
    "--reclaims-per-h": "reclaims_per_h",
    "--cold-start": "cold_start_s",
    "--engine": "engine",
    "--policy": "policy",
    "--rate-scale": "rate_scale",
    "--prompt-scale": "prompt_scale",
    "--output-scale": "output_scale",
    "--price-scale": "price_scale",
    "--window": "window",
    "--budget-usd-per-h": "budget_usd_per_h",
    "--max-gpus": "max_gpus",
    "--drop-too-long": "drop_too_long",
    "--seed": "seed",
}


def _text(field: str, value: object) -> str:
    if field == "cold_start_s":
        assert isinstance(value, float)
        return _seconds(value)
    # repr, so that the very same number is read back
    return repr(value) if isinstance(value, float) else str(value)


def _seconds(seconds: float) -> str:
    """A duration that reads back as the very same number."""
    millis = round(seconds * 1e3, 6)
    if seconds < 1.0 and math.isclose(millis, round(millis)) and float(f"{millis:g}") * 1e-3 == seconds:
        return f"{millis:g}ms"
    return f"{seconds!r}s".replace(".0s", "s")
