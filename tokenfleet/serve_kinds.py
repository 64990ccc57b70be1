"""Which kinds of worker `tokenfleet serve` starts: a plan's, those of --kind, or --workers of one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import Profile
from tokenfleet.prices import read_prices
from tokenfleet.profile_files import canonical_gpus, find_profiles, read_profile

if TYPE_CHECKING:
    from dataplane.live.kinds import Kinds, WorkerKind

EMULATED = ("llama-3.1-8b", "h100-sxm")  # what an emulated engine is like unless something says
NAMES = ("gpu", "tp", "workers", "max", "usd", "reclaims")
KIND_HINT = "gpu=h100-sxm,tp=2,workers=1,max=4,usd=5.38,reclaims=0.05 (tp and workers default to 1)"


def kinds_of(
    workers: int,
    tp: int,
    given: Sequence[str],
    plan: tuple[Path, dict[str, Any]] | None,
    profiles: Sequence[Path],
    is_emulated: bool,
) -> Kinds:
    """The kinds to serve with, each with its profile where one is known. Raises BadInput.

    `given`: the texts of --kind; `profiles`: files, each for the kind of its GPU and TP degree, or for the
    only one. Emulated engines without one take the library's.
    """
    from dataplane.live.kinds import Kinds, WorkerKind

    model = EMULATED[0]
    if plan is not None:
        if given:
            raise BadInput("--kind: the plan says which kinds there are; give either")
        kinds = _planned(*plan)
        model = _model_of(plan[1]) or model
    elif given:
        kinds = [_kind(text) for text in given]
    else:
        kinds = [WorkerKind(workers, tp)]
    found = Kinds(kinds)
    if sum(found.workers.values()) == 0:
        raise BadInput("--kind: workers: a fleet starts with at least one")
    read = [read_profile(path) for path in profiles]
    return Kinds([_with_profile(kind, len(found), read, model if is_emulated else None) for kind in found])


def _planned(path: Path, plan: dict[str, Any]) -> list[WorkerKind]:
    """A plan's groups; those of one kind (prefill and decode workers) are one."""
    from dataplane.live.kinds import WorkerKind

    counts: dict[tuple[str, int], tuple[int, float | None]] = {}
    for part in plan["fleet"]:
        try:
            kind, workers = (str(part["gpu"]), int(part["tp_degree"])), int(part["workers"])
            usd = part.get("usd_per_hour")
            each = None if usd is None else float(usd) / workers
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            raise BadInput(f"{path}: fleet: expected gpu, tp_degree and workers, got {part!r}") from None
        counts[kind] = counts.get(kind, (0, None))[0] + workers, each
    return [WorkerKind(n, tp, gpu, usd_per_h=each) for (gpu, tp), (n, each) in counts.items()]


def _model_of(plan: dict[str, Any]) -> str | None:
    """The model that was planned for, as profiles name it."""
    profiles = plan.get("inputs", {}).get("profiles") or [{}]
    model = profiles[0].get("model")
    return model if isinstance(model, str) else None


def _kind(text: str) -> WorkerKind:
    """One --kind."""
    from dataplane.live.kinds import WorkerKind

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
