"""The workers and bounds of `tokenfleet serve`, read from a plan, `--kind`, `--workers` and `--autoscale`."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import Profile
from tokenfleet.durations import parse_duration_s
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
    plan: tuple[Path, dict[str, Any]] | None,
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
        kinds = _planned(*plan)
        model = _model_of(plan[1]) or model
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


def _planned(path: Path, plan: dict[str, Any]) -> list[WorkerKind]:
    """A plan's groups; those of one kind (prefill and decode workers) are one."""
    from dataplane.live.pool.worker_kinds import WorkerKind

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


def read_plan(path: Path) -> dict[str, Any]:
    """A feasible plan's JSON. Raises BadInput for anything else."""
    try:
        plan = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise BadInput(f"{path}: is not JSON: {error}") from None
    if not isinstance(plan, dict) or plan.get("schema") != "tokenfleet.plan/1":
        raise BadInput(f"{path}: schema: expected tokenfleet.plan/1 (plan --format json)")
    if not plan.get("feasible") or not plan.get("fleet"):
        raise BadInput(f"{path}: feasible: this plan found no fleet, so there is none to serve")
    return plan


def slo_of(plan: dict[str, Any]) -> str | None:
    """A plan's targets, as --slo has them."""
    slo = plan.get("slo") or plan.get("inputs", {}).get("slo")
    return f"ttft={slo['ttft_s']}s,tpot={slo['tpot_s']}s" if isinstance(slo, dict) else None


def bounds_of(text: str) -> tuple[int, int]:
    """MIN and MAX of --autoscale."""
    low, dots, high = text.partition("..")
    if not dots or not low.isdigit() or not high.isdigit() or not 0 <= int(low) <= int(high) or high == "0":
        raise BadInput(f"--autoscale: expected MIN..MAX such as 1..8, got {text!r}")
    return int(low), int(high)


def autoscale_of(text: str, hold: str, plan: tuple[Path, dict[str, Any]] | None) -> Autoscale:
    """--autoscale and --scale-in-after, with a plan's line and price where it has them."""
    from dataplane.live.control.settings import Autoscale

    low, high = bounds_of(text)
    hold_s = parse_duration_s(hold, "--scale-in-after")
    if plan is None:
        return Autoscale(low, high, hold_s=hold_s)
    path, content = plan
    # A mix's line counts workers of no one kind: what each kind can do says how many of which.
    line = content.get("demand_line") if len(content["fleet"]) == 1 else None
    usd = content.get("usd_per_hour")
    slope_and_intercept = learned_at = None
    if line is not None:
        try:
            slope_and_intercept = float(line["workers_per_rps"]), float(line["intercept"])
        except (KeyError, TypeError, ValueError):
            raise BadInput(
                f"{path}: demand_line: expected workers_per_rps and intercept, got {line!r}"
            ) from None
        if not all(map(math.isfinite, slope_and_intercept)) or slope_and_intercept[0] < 0:
            raise BadInput(f"{path}: demand_line: expected a slope of at least 0, got {line!r}")
        learned_at = _lengths_of(path, line)
    each = float(usd) / int(content["workers"]) if usd is not None and int(content["workers"]) else None
    return Autoscale(low, high, slope_and_intercept, hold_s, each, learned_at)


def _lengths_of(path: Path, line: dict[str, Any]) -> tuple[float, float] | None:
    """Mean prompt and output tokens that a plan's line was drawn at; None in a plan that does not say."""
    names = ("mean_prompt_tokens", "mean_output_tokens")
    if not any(name in line for name in names):
        return None
    try:
        prompt, output = (float(line[name]) for name in names)
    except (KeyError, TypeError, ValueError):
        prompt = output = math.nan
    if not (0 < prompt < math.inf and 0 < output < math.inf):
        raise BadInput(f"{path}: demand_line: expected {' and '.join(names)} above 0, got {line!r}")
    return prompt, output
