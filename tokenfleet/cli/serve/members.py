"""The fleets that `tokenfleet serve` is to run: one, or in a portfolio one for each model, with its share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from controlplane.errors import BadInput
from controlplane.scaler.shares import Limits, Tenant, most_workers, rights
from controlplane.worker_type import WorkerType
from tokenfleet.cli.flags import adapter_at
from tokenfleet.cli.serve.flags import OF_ONE_FLEET, ServeFlags
from tokenfleet.cli.serve.loop import bounds_of
from tokenfleet.planning.plan_file import PlanFile, read_plan
from tokenfleet.portfolios.request import PlannedPortfolio, read_planned_portfolio

OF_ONE_MODEL = ("--served-model-name", "--lora-modules", "--enable-lora")
FEW_WORKERS, UNBOUNDED = 8, 10_000
ADAPTERS_AT_ONCE = 8  # in one batch; an engine sets memory aside for each


@dataclass(frozen=True)
class ServedFleet:
    """A fleet to serve: its flags, and its plan if it has one.

    In a portfolio it also has its share of each type of worker, its model's adapters, and how many of its
    workers are on demand (None: that is not given).
    """

    flags: ServeFlags
    plan: PlanFile | None
    tenants: Sequence[Tenant] = ()
    adapters: Sequence[str] = ()
    on_demand: float | None = None

    @property
    def share(self) -> dict[str, int] | None:
        """The workers of each type at first, and at most until another share is sent; None: any."""
        return {tenant.kind: tenant.share for tenant in self.tenants} or None

    @property
    def zone(self) -> str | None:
        return self.tenants[0].zone if self.tenants else None


@dataclass(frozen=True)
class Asked:
    """The fleets to serve by the names of their models, "" for the only one, and what a portfolio's share."""

    flags: ServeFlags
    members: Mapping[str, ServedFleet]
    limits: Limits


def members_of(flags: ServeFlags) -> Asked:
    """What `serve` is to run. Raises BadInput for plans and flags that no portfolio is served with."""
    if flags.portfolio is None:
        if len(flags.model) > 1:
            raise BadInput("--model: given twice; several models are served by --portfolio")
        plan = None if flags.plan is None else read_plan(flags.plan)
        return Asked(flags, {"": ServedFleet(flags, plan)}, Limits({}))
    _check_of_all(flags)
    low, high = (1, None) if flags.autoscale is None else bounds_of(flags.autoscale)
    planned = read_planned_portfolio(flags.portfolio)
    limits = planned.limits
    tenants = [p for name in planned.plans for p in _tenants(name, planned, (low, high), flags.as_is)]
    _check_parts(tenants)
    right = _rights(tenants, limits)
    where = _where(flags, (*planned.plans, *chain(*planned.adapters.values())))
    members = {}
    for name, plan in planned.plans.items():
        adapters = planned.adapters.get(name, ())
        own_right = {p: right[p.key] for p in tenants if p.model == name}
        most = _most(own_right, tenants, limits)
        most = min(most, high or most)
        own = replace(
            flags,
            portfolio=None,
            model=[where[name]],
            host="127.0.0.1",
            control_host="127.0.0.1",
            autoscale=f"{low}..{most}",
            engine_flags=[
                *_adapter_flags({one: where[one] for one in adapters}, flags.engine),
                *(flags.engine_flags or ()),
                *("--served-model-name", name),
            ],
        )
        plan = plan.with_workers(list(own_right.values()))
        shares = [replace(p, right=n, share=n) for p, n in own_right.items() if n]
        members[name] = ServedFleet(own, plan, shares, adapters, planned.on_demand.get(name))
    return Asked(flags, members, limits)


def _most(own_right: Mapping[Tenant, int], tenants: Sequence[Tenant], limits: Limits) -> int:
    """The most workers that a model may have; of several types no more than its right to each."""
    right, first = sum(own_right.values()), next(iter(own_right))
    most = right if len(own_right) > 1 else most_workers(first, tenants, limits, UNBOUNDED)
    return max(FEW_WORKERS, 2 * right) if most == UNBOUNDED else most


def _adapter_flags(where: Mapping[str, str], engine: str) -> list[str]:
    """vLLM's flags for adapters in these folders; `--` may give others of --max-loras and --max-lora-rank.

    Raises BadInput for folders of none; emulated engines read none.
    """
    if not where:
        return []
    # One more than are there: without an empty slot CPU engines may compute the model itself with an adapter.
    at_once = str(min(len(where), ADAPTERS_AT_ONCE) + 1)
    found = {name: at if engine == "emulated" else adapter_at(at) for name, at in where.items()}
    modules = (f"{name}={folder}" for name, folder in found.items())
    return ["--enable-lora", "--max-loras", at_once, "--lora-modules", *modules]


def _check_of_all(flags: ServeFlags) -> None:
    """Raise BadInput for flags that are of one model or one fleet."""
    for name in OF_ONE_FLEET:
        if getattr(flags, name):
            flag = f"--{name.replace('_', '-')}"
            raise BadInput(f"{flag}: is for one fleet; --portfolio runs each model by its own plan")
    if of_one := next((flag for flag in OF_ONE_MODEL if flag in flags.engine_flag_names), None):
        raise BadInput(f"{of_one}: is for one model; in a portfolio the plan names each model")
    if flags.autoscale is not None and bounds_of(flags.autoscale)[0] == 0:
        raise BadInput(f"--autoscale: each model of a portfolio keeps a worker, got {flags.autoscale}")


def _check_parts(tenants: Sequence[Tenant]) -> None:
    """Raise BadInput where Ray would put workers on one GPU that were planned with fewer neighbours."""
    parts: dict[tuple[str, str | None], set[float]] = {}
    for tenant in tenants:
        parts.setdefault((tenant.gpu, tenant.zone), set()).update([tenant.gpus] if tenant.gpus < 1 else [])
    for (gpu, _), sizes in parts.items():
        if len(sizes) > 1:
            named = ", ".join(f"{gpus:g}" for gpus in sorted(sizes))
            raise BadInput(
                f"--portfolio: workers have {named} of a {gpu}; expected the same of all that share one"
            )


def _tenants(
    name: str, planned: PlannedPortfolio, bounds: tuple[int, int | None], as_is: bool
) -> list[Tenant]:
    """A model's workers as they were planned, by type. Raises BadInput for what no portfolio is served with.

    Of several types the cheapest of each role is always kept.
    """
    plan, (low, high) = planned.plans[name], bounds
    ranked = sorted(plan.groups, key=lambda group: (group.worker_type.usd_per_h or 0, group.worker_type.gpus))
    least = {group.role: group for group in reversed(ranked)}
    on_demand_usd_per_h = {ranked[0].worker_type.name: planned.on_demand_usd_per_h.get(name, 0.0)}
    tenants: dict[str, Tenant] = {}
    for group in plan.groups:
        worker_type, workers = group.worker_type, group.workers
        _check_type(name, worker_type, planned, as_is)
        kind = WorkerType(None, worker_type.tp_degree, role=group.role).name if as_is else worker_type.name
        if kind in tenants:
            raise BadInput(f"--as-is: {name} was planned on several types of GPU; plan it on one")
        if len(plan.fleet) == 1:
            workers = max(low, min(workers, high or workers))
        tenants[kind] = Tenant(
            name,
            str(worker_type.gpu),
            worker_type.reserved_gpus,
            worker_type.usd_per_h or 0.0,
            workers,
            floor=min(low, workers) if group == least[group.role] else 0,
            zone=planned.zone_of.get(name),
            fixed_usd_per_h=on_demand_usd_per_h.get(worker_type.name, 0.0),
            kind=kind,
        )
    return list(tenants.values())


def _check_type(name: str, worker_type: WorkerType, planned: PlannedPortfolio, as_is: bool) -> None:
    if planned.limits.usd_per_h is not None and worker_type.usd_per_h is None:
        raise BadInput(f"--portfolio: {name}: {worker_type.name} has no price to hold against the budget")
    if as_is and worker_type.reserved_gpus < 1:
        n = worker_type.workers_per_gpu
        raise BadInput(
            f"--as-is: {name} was planned on 1/{n} of a GPU, and other engines are not held to that"
        )


def _rights(tenants: Sequence[Tenant], limits: Limits) -> dict[str, int]:
    """The right of each tenant. A model of several types has its whole plan, where the limits allow that.

    It asks for no more than its right, since the share of one type takes no account of the others.
    """
    types = Counter(p.model for p in tenants)
    whole = [replace(p, floor=p.right) if types[p.model] > 1 else p for p in tenants]
    return rights(whole if limits.hold(whole, [p.floor for p in whole]) else tenants, limits)


def _where(flags: ServeFlags, names: Sequence[str]) -> dict[str, str]:
    """Where each model is, by --model NAME=WHERE; emulated engines may all have one. Raises BadInput."""
    if len(flags.model) == 1 and flags.engine == "emulated" and flags.model[0].partition("=")[0] not in names:
        return dict.fromkeys(names, flags.model[0])
    where: dict[str, str] = {}
    for text in flags.model:
        name, _, place = text.partition("=")
        if name not in names or not place or name in where:
            raise BadInput(f"--model: expected NAME=FOLDER once for each of {', '.join(names)}, got {text!r}")
        where[name] = place
    if missing := [name for name in names if name not in where]:
        raise BadInput(f"--model: where is {missing[0]}? give --model {missing[0]}=FOLDER")
    return where
