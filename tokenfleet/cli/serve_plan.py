"""The workers and bounds of `tokenfleet serve`, read from a plan, `--kind`, `--workers` and `--autoscale`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import Profile
from controlplane.worker_type import WorkerGroup, WorkerType
from tokenfleet.durations import parse_duration_s
from tokenfleet.planning.plan_file import PlanFile
from tokenfleet.profiles.library import canonical_gpus, find_profiles, read_profile
from tokenfleet.profiles.prices import read_prices

if TYPE_CHECKING:
    from dataplane.live.control.settings import Autoscale
    from dataplane.live.pool.fleet_types import FleetTypes


EMULATED = ("llama-3.1-8b", "h100-sxm")  # what an emulated engine is like unless something says
NAMES = ("gpu", "tp", "workers", "max", "usd", "reclaims")
KIND_HINT = "gpu=h100-sxm,tp=2,workers=1,max=4,usd=5.38,reclaims=0.05 (tp and workers default to 1)"


def types_of(
    workers: int,
    tp: int,
    flags: Sequence[str],
    plan: PlanFile | None,
    profiles: Sequence[Path],
    is_emulated: bool,
) -> FleetTypes:
    """The types to serve with, each with its profile where one is known. Raises BadInput.

    `flags`: the texts of --kind; `profiles`: files, each for the type of its GPU and TP degree, or for the
    only one. Emulated engines without one take the library's.
    """
    from dataplane.live.pool.fleet_types import FleetTypes

    model = EMULATED[0]
    if plan is not None:
        if flags:
            raise BadInput("--kind: the plan says which kinds there are; give either")
        groups = _planned(plan)
        model = plan.inputs.profiles[0].model
    elif flags:
        groups = [_kind(text) for text in flags]
    else:
        groups = [WorkerGroup(WorkerType(None, tp), workers)]
    if sum(group.workers for group in groups) == 0:
        raise BadInput("--kind: workers: a fleet starts with at least one")
    read = [read_profile(path) for path in profiles]
    emulated = model if is_emulated else None
    return FleetTypes(
        [replace(g, worker_type=_with_profile(g.worker_type, len(groups), read, emulated)) for g in groups]
    )


def _planned(plan: PlanFile) -> list[WorkerGroup]:
    """A plan's groups; those of one type (prefill and decode workers) are one."""
    groups: dict[str, WorkerGroup] = {}
    for group in plan.groups:
        name = group.worker_type.name
        workers = group.workers + (groups[name].workers if name in groups else 0)
        groups[name] = WorkerGroup(group.worker_type, workers)
    return list(groups.values())


def _kind(text: str) -> WorkerGroup:
    """One --kind: a type, and how many of it to start with."""
    values: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or name not in NAMES or name in values:
            raise BadInput(f"--kind: expected {KIND_HINT}, got {text!r}")
        values[name] = value.strip()
    try:
        tp, workers = int(values.get("tp", "1")), int(values.get("workers", "1"))
        limit = int(values["max"]) if "max" in values else None
        usd = float(values["usd"]) if "usd" in values else None
        reclaims = float(values.get("reclaims", "0"))
    except ValueError:
        raise BadInput(f"--kind: expected numbers as in {KIND_HINT}, got {text!r}") from None
    if usd is not None and not 0 <= usd < 1e6:
        raise BadInput(f"--kind: usd: expected dollars an hour for a worker, got {values['usd']!r}")
    gpu = values.get("gpu") or None
    if not 0 <= reclaims < 60:
        raise BadInput(f"--kind: reclaims: expected how often an hour, below 60, got {values['reclaims']!r}")
    if usd is None and gpu is not None:
        price = read_prices().usd_per_gpu_h(gpu, spot=reclaims > 0)
        usd = None if price is None else price.usd * tp
    return WorkerGroup(WorkerType(gpu, tp, usd_per_h=usd, limit=limit, reclaims_per_h=reclaims), workers)


def _with_profile(
    worker_type: WorkerType, types: int, read: list[Profile], emulate: str | None
) -> WorkerType:
    """The type with its profile: of those read, else its plan's, else of `emulate` in the library."""
    own = [p for p in read if _is_of(p, worker_type)]
    if not own and types == 1 and read:
        own = read[:1]
    if own:
        return replace(worker_type, known_profile=own[0])
    if emulate is None or (worker_type.known_profile is not None and not read):
        return worker_type
    if read:
        raise BadInput(f"--profile: none is of {worker_type.name}; give one for each kind")
    profiles = find_profiles(emulate, [worker_type.gpu or EMULATED[1]], [worker_type.tp_degree])
    return replace(worker_type, known_profile=profiles[0])


def _is_of(profile: Profile, worker_type: WorkerType) -> bool:
    names = [] if worker_type.gpu is None else [*canonical_gpus(worker_type.gpu), worker_type.gpu]
    return profile.tp_degree == worker_type.tp_degree and profile.gpu in names


def bounds_of(text: str) -> tuple[int, int]:
    """MIN and MAX of --autoscale."""
    low, dots, high = text.partition("..")
    if not dots or not low.isdigit() or not high.isdigit() or not 0 <= int(low) <= int(high) or high == "0":
        raise BadInput(f"--autoscale: expected MIN..MAX such as 1..8, got {text!r}")
    return int(low), int(high)


def autoscale_of(text: str, hold: str, plan: PlanFile | None) -> Autoscale:
    """--autoscale and --scale-in-after, with a plan's line and limits where it has them."""
    from dataplane.live.control.settings import Autoscale

    low, high = bounds_of(text)
    hold_s = parse_duration_s(hold, "--scale-in-after")
    if plan is None:
        return Autoscale(low, high, hold_s=hold_s)
    # A mix's line counts workers of no one type: what each type can do says how many of which.
    line = plan.demand_line if len(plan.fleet) == 1 else None
    limits = plan.inputs.max_gpus, plan.inputs.budget_usd_per_h
    if line is None:
        return Autoscale(low, high, None, hold_s, None, *limits)
    lengths = line.mean_prompt_tokens, line.mean_output_tokens
    learned_at = None if lengths[0] is None or lengths[1] is None else (lengths[0], lengths[1])
    return Autoscale(low, high, (line.workers_per_rps, line.intercept), hold_s, learned_at, *limits)
