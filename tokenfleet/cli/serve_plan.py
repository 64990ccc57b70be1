"""The workers and bounds of `tokenfleet serve`, read from a plan, `--kind`, `--workers` and `--autoscale`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import Profile
from tokenfleet.durations import parse_duration_s
from tokenfleet.planning.plan_file import PlanFile
from tokenfleet.profiles.library import canonical_gpus, find_profiles, read_profile
from tokenfleet.profiles.prices import read_prices

if TYPE_CHECKING:
    from dataplane.live.control.settings import Autoscale
    from dataplane.live.pool.worker_kinds import Kinds, WorkerKind


EMULATED = ("llama-3.1-8b", "h100-sxm")  # what an emulated engine is like unless something says
NAMES = ("gpu", "tp", "workers", "max", "usd", "reclaims")
KIND_HINT = "gpu=h100-sxm,tp=2,workers=1,max=4,usd=5.38,reclaims=0.05 (tp and workers default to 1)"


def kinds_of(
    workers: int,
    tp: int,
    flags: Sequence[str],
    plan: PlanFile | None,
    profiles: Sequence[Path],
    is_emulated: bool,
) -> Kinds:
    """The kinds to serve with, each with its profile where one is known. Raises BadInput.

    `given`: the texts of --kind; `profiles`: files, each for the kind of its GPU and TP degree, or for the
    only one. Emulated engines without one take the library's.
    """
    from dataplane.live.pool.worker_kinds import Kinds, WorkerKind

    model = EMULATED[0]
    if plan is not None:
        if flags:
            raise BadInput("--kind: the plan says which kinds there are; give either")
        kinds = _planned(plan)
        model = plan.inputs.profiles[0].model
    elif flags:
        kinds = [_kind(text) for text in flags]
    else:
        kinds = [WorkerKind(workers, tp)]
    made_kinds = Kinds(kinds)
    if sum(made_kinds.workers.values()) == 0:
        raise BadInput("--kind: workers: a fleet starts with at least one")
    read = [read_profile(path) for path in profiles]
    return Kinds(
        [_with_profile(kind, len(made_kinds), read, model if is_emulated else None) for kind in made_kinds]
    )


def _planned(plan: PlanFile) -> list[WorkerKind]:
    """A plan's groups; those of one kind (prefill and decode workers) are one."""
    from dataplane.live.pool.worker_kinds import WorkerKind

    counts: dict[tuple[str, int], tuple[int, float | None]] = {}
    for part in plan.fleet:
        kind = part.gpu, part.tp_degree
        each = None if part.usd_per_hour is None else part.usd_per_hour / part.workers
        counts[kind] = counts.get(kind, (0, None))[0] + part.workers, each
    return [WorkerKind(n, tp, gpu, usd_per_h=each) for (gpu, tp), (n, each) in counts.items()]


def _kind(text: str) -> WorkerKind:
    """One --kind."""
    from dataplane.live.pool.worker_kinds import WorkerKind

    values: dict[str, str] = {}
    for part in text.split(","):
        name, equals, value = part.strip().partition("=")
        if not equals or name not in NAMES or name in values:
            raise BadInput(f"--kind: expected {KIND_HINT}, got {text!r}")
        values[name] = value.strip()
    try:
        tp, workers = int(values.get("tp", "1")), int(values.get("workers", "1"))
        high = int(values["max"]) if "max" in values else None
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
    return WorkerKind(workers, tp, gpu, usd_per_h=usd, high=high, reclaims_per_h=reclaims)


def _with_profile(kind: WorkerKind, kinds: int, read: list[Profile], emulate: str | None) -> WorkerKind:
    """The kind with its profile: of those read, else of `emulate` in the library."""
    from dataclasses import replace

    own = [p for p in read if _is_of(p, kind)]
    if not own and kinds == 1 and read:
        own = read[:1]
    if own:
        return replace(kind, profile=own[0])
    if emulate is None:
        return kind
    if read:
        raise BadInput(f"--profile: none is of {kind.name}; give one for each kind")
    return replace(kind, profile=find_profiles(emulate, [kind.gpu or EMULATED[1]], [kind.tp_degree])[0])


def _is_of(profile: Profile, kind: WorkerKind) -> bool:
    names = [] if kind.gpu is None else [*canonical_gpus(kind.gpu), kind.gpu]
    return profile.tp_degree == kind.tp_degree and profile.gpu in names


def bounds_of(text: str) -> tuple[int, int]:
    """MIN and MAX of --autoscale."""
    low, dots, high = text.partition("..")
    if not dots or not low.isdigit() or not high.isdigit() or not 0 <= int(low) <= int(high) or high == "0":
        raise BadInput(f"--autoscale: expected MIN..MAX such as 1..8, got {text!r}")
    return int(low), int(high)


def autoscale_of(text: str, hold: str, plan: PlanFile | None) -> Autoscale:
    """--autoscale and --scale-in-after, with a plan's line and price where it has them."""
    from dataplane.live.control.settings import Autoscale

    low, high = bounds_of(text)
    hold_s = parse_duration_s(hold, "--scale-in-after")
    if plan is None:
        return Autoscale(low, high, hold_s=hold_s)
    each = None if plan.usd_per_hour is None else plan.usd_per_hour / plan.workers
    # A mix's line counts workers of no one kind: what each kind can do says how many of which.
    line = plan.demand_line if len(plan.fleet) == 1 else None
    if line is None:
        return Autoscale(low, high, None, hold_s, each, None)
    lengths = line.mean_prompt_tokens, line.mean_output_tokens
    learned_at = None if lengths[0] is None or lengths[1] is None else (lengths[0], lengths[1])
    return Autoscale(low, high, (line.workers_per_rps, line.intercept), hold_s, each, learned_at)
