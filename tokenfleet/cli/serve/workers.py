"""The workers and targets of `tokenfleet serve`, read from a plan, `--kind`, `--workers` and `--slo`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import Profile
from controlplane.types import PLAIN_CLASS, Role, Slo, SloClass
from controlplane.worker_type import WorkerGroup, WorkerType
from tokenfleet.cli.serve.flags import WORKERS, ServeFlags
from tokenfleet.planning.plan_file import PlanFile
from tokenfleet.profiles.library import canonical_gpus, canonical_model, find_profiles, read_profile
from tokenfleet.profiles.prices import kind_of, read_prices
from tokenfleet.texts import parse_slo, parse_slo_class, parse_strictness

if TYPE_CHECKING:
    from controlplane.placement.strictness import Strictness
    from dataplane.live.pool.fleet_types import FleetTypes

COUNTED = ("workers", "prefill", "decode", "tp")  # flags that say how many workers of what width
EMULATED = ("llama-3.1-8b", "h100-sxm")  # what an emulated engine is like unless something says
ATTAINMENT = 0.99  # asked of a fleet without a plan
AS_IS_MEANS = (
    "--as-is: the plan's step times are of other hardware or another model and are left out."
    " Without --profile, the workers are measured as they start, and requests are placed by those figures"
)
NAMES = ("gpu", "tp", "workers", "role", "max", "usd", "reclaims")
KIND_HINT = "gpu=h100-sxm,tp=2,workers=1,max=4,usd=5.38,reclaims=0.05 (tp and workers default to 1)"
OF_WHOLE_GPUS = ("--gpu-memory-utilization", "--kv-cache-memory-bytes", "--num-gpu-blocks-override")


def types_asked(flags: ServeFlags, plan: PlanFile | None, model: str) -> FleetTypes:
    """The types of worker to serve with; raises BadInput for flags that contradict each other or the plan."""
    is_emulated = flags.engine == "emulated"
    counted = [name for name in COUNTED if getattr(flags, name) is not None]
    if plan is None:
        return _named_types(flags, counted, is_emulated)
    if flags.kind or counted:
        raise BadInput(f"--{'kind' if flags.kind else counted[0]}: the plan says which workers; give either")
    if is_emulated and flags.as_is:
        raise BadInput("--as-is: emulated engines are what the plan says; leave it out")
    if not is_emulated and not flags.as_is:
        check_model(plan, model, flags.engine_flags or ())
    types = planned_types(plan, flags.profile or (), flags.as_is)
    _check_memory(flags, types)
    return types


def _check_memory(flags: ServeFlags, types: FleetTypes) -> None:
    """Raise BadInput for flags by which engines would not have the memory that they were planned with."""
    if flags.engine == "emulated" and any(types.host_bytes(name) for name in types.names):
        raise BadInput("--engine emulated: keeps no KV in host memory, which the plan has")
    own = sorted(flags.engine_flag_names & set(OF_WHOLE_GPUS))
    if own and any(t.workers_per_gpu > 1 for t in types):
        raise BadInput(f"{own[0]}: the plan says what its workers take of a GPU that they share")


def _named_types(flags: ServeFlags, counted: Sequence[str], is_emulated: bool) -> FleetTypes:
    """The types that flags name, without a plan; `counted` are those flags that say how many workers."""
    if flags.as_is:
        raise BadInput("--as-is: says how to run a plan; give --plan, too")
    if flags.kind and counted:
        raise BadInput(f"--{counted[0]}: --kind says how many workers and which TP degree; give either")
    tp = flags.tp or 1
    kinds = flags.kind or _pools(flags, tp)
    return types_of(flags.workers or WORKERS, tp, kinds, flags.profile or (), is_emulated)


def _pools(flags: ServeFlags, tp: int) -> Sequence[str]:
    """--prefill and --decode as --kind has them; raises BadInput for half of them."""
    counts = {"prefill": flags.prefill, "decode": flags.decode}
    if not any(counts.values()):
        return ()
    if None in counts.values() or flags.workers is not None:
        raise BadInput("--prefill: give --decode with it, and leave out --workers")
    return [f"tp={tp},workers={workers},role={role}" for role, workers in counts.items()]


def types_of(
    workers: int, tp: int, flags: Sequence[str], profiles: Sequence[Path], is_emulated: bool
) -> FleetTypes:
    """The types to serve with, each with its profile where one is known. Raises BadInput.

    `flags`: the texts of --kind; `profiles`: files, each for the type of its GPU and TP degree, or for the
    only one. Emulated engines without one take the library's.
    """
    from dataplane.live.pool.fleet_types import FleetTypes

    groups = [_kind(text) for text in flags] or [WorkerGroup(WorkerType(None, tp), workers)]
    if sum(group.workers for group in groups) == 0:
        raise BadInput("--kind: workers: a fleet starts with at least one")
    return FleetTypes(_with_profiles(groups, profiles, is_emulated))


def planned_types(plan: PlanFile, profiles: Sequence[Path], as_is: bool) -> FleetTypes:
    """A plan's types with profiles, prices, limits and engine limits. Raises BadInput for what is not served.

    `profiles` stand in for the plan's. `as_is`: of a type only its TP degree and engine limits are kept,
    since GPUs, model and so step times and prices are others.
    """
    from dataplane.live.pool.fleet_types import FleetTypes

    if (why := plan.unserved) is not None:
        raise BadInput(f"--plan: {why}")
    groups = list(plan.groups)
    limits = {g.worker_type.name: g.worker_type.profile.engine for g in groups}
    if as_is:
        alike: dict[WorkerType, list[WorkerGroup]] = {}
        for group in groups:
            alike.setdefault(WorkerType(None, group.worker_type.tp_degree, role=group.role), []).append(group)
        groups = [WorkerGroup(t, sum(g.workers for g in of)) for t, of in alike.items()]
        # Of types that are one here the engines get the least limits.
        limits = {
            t.name: min(
                (limits[g.worker_type.name] for g in of), key=lambda e: (e.max_seqs, e.max_batched_tokens)
            )
            for t, of in alike.items()
        }
    known = _with_profiles(groups, profiles, is_emulated=False)
    if not as_is:
        known = [_with_host_memory(one, group) for one, group in zip(known, groups, strict=True)]
    return FleetTypes(known, limits, as_is, plan.prefix_cache)


def targets_asked(texts: Sequence[str], plan: PlanFile | None) -> tuple[Slo | None, tuple[SloClass, ...]]:
    """The plain targets, None where none are given, and the classes: `--slo`'s, else the plan's.

    A plan's class with a deadline has the targets that the plan found to keep it. For one of `--slo` all of
    the deadline is the TTFT target. Raises BadInput.
    """
    plain = [text for text in texts if ":" not in text]
    classes = tuple(_served_class(text) for text in texts if ":" in text)
    if len(plain) > 1:
        raise BadInput(f"--slo: several targets need names: NAME:{plain[0]}, NAME:{plain[1]}")
    if len({one.name for one in classes}) < len(classes):
        raise BadInput("--slo: a class is given twice")
    if plan is not None:
        classes = classes or tuple(one for one in plan.slo_classes if one.name != PLAIN_CLASS)
        plain = plain or [plan.slo_text]
    return (parse_slo(plain[0]) if plain else None), classes


def _served_class(text: str) -> SloClass:
    """A class of `--slo`. Raises BadInput."""
    one = parse_slo_class(text, ATTAINMENT)
    if one.traffic_share:
        raise BadInput(f"--slo: {one.name}: share: is for plans; clients decide what they send")
    return one


def check_model(plan: PlanFile, model: str, engine_flags: Sequence[str]) -> None:
    """Raise BadInput unless one of the model's names is that of the plan's model.

    Its names are its folder's or the hub's, the one in its configuration, and those it is served by.
    """
    planned = plan.inputs.profiles[0].model
    names = [model, *_served_names(engine_flags)]
    if (Path(model) / "config.json").is_file():
        with suppress(OSError, ValueError, AttributeError):
            config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
            names.append(str(config.get("_name_or_path", "")))
    if not any(canonical_model(name) == planned for name in names):
        raise BadInput(
            f"--model: {model} does not match the plan's model {planned}; if it is that model, add"
            f" -- --served-model-name {planned}; elsewhere, --as-is serves it without the plan's step times"
        )


def _served_names(engine_flags: Sequence[str]) -> list[str]:
    """What follows vLLM's --served-model-name."""
    names: list[str] = []
    taking = False
    for word in engine_flags:
        if word.startswith("--"):
            flag, _, value = word.replace("_", "-").partition("=")
            taking = flag == "--served-model-name"
            names += [word.partition("=")[2]] if taking and value else []
        elif taking:
            names.append(word)
    return names


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
    role = _role(values.get("role", "any"))
    if not 0 <= reclaims < 60:
        raise BadInput(f"--kind: reclaims: expected how often an hour, below 60, got {values['reclaims']!r}")
    if usd is None and gpu is not None:
        price = read_prices().usd_per_gpu_h(gpu, kind_of(spot=reclaims > 0))
        usd = None if price is None else price.usd * tp
    worker_type = WorkerType(gpu, tp, usd_per_h=usd, limit=limit, reclaims_per_h=reclaims, role=role)
    return WorkerGroup(worker_type, workers)


def _role(text: str) -> Role:
    for role in get_args(Role):
        if text == role:
            return role  # type: ignore[no-any-return]
    raise BadInput(f"--kind: role: one of {', '.join(get_args(Role))}, got {text!r}")


def _with_profiles(
    groups: Sequence[WorkerGroup], profiles: Sequence[Path], is_emulated: bool
) -> list[WorkerGroup]:
    """The groups with profiles: of those read, else their own, else (emulated) of the library."""
    read = [read_profile(path) for path in profiles]
    found = []
    for group in groups:
        t = group.worker_type
        own = [p for p in read if _is_of(p, t)] or (read[:1] if len(groups) == 1 else [])
        if read and not own and t.known_profile is None:
            raise BadInput(f"--profile: none is of {t.name}; give one for each kind")
        if not own and is_emulated:
            own = find_profiles(EMULATED[0], [t.gpu or EMULATED[1]], [t.tp_degree])
        found.append(replace(group, worker_type=t.with_profile(own[0])) if own else group)
    return found


def _with_host_memory(group: WorkerGroup, planned: WorkerGroup) -> WorkerGroup:
    """The group with the host memory that it was planned with, whatever step times it has now."""
    profile = group.worker_type.profile.with_host_memory_of(planned.worker_type.profile)
    return replace(group, worker_type=group.worker_type.with_profile(profile))


def _is_of(profile: Profile, worker_type: WorkerType) -> bool:
    """Whether a profile is of a type; one that names no GPU is by any."""
    gpu = worker_type.gpu
    names = [profile.gpu] if gpu is None else [*canonical_gpus(gpu), gpu]
    return profile.tp_degree == worker_type.tp_degree and profile.gpu in names


def strictness_of(asked: str | None, plan: PlanFile | None) -> Strictness:
    """How strictly requests are placed: as asked, else as planned. Raises BadInput."""
    planned = "normal" if plan is None or plan.strictness is None else plan.strictness
    return parse_strictness(planned if asked is None else asked)


def headroom_of(asked: float | None, plan: PlanFile | None) -> float:
    """The share of KV kept free for high-priority requests: as asked, else the plan's."""
    if asked is not None:
        return asked
    return 0.0 if plan is None else plan.priority_headroom
