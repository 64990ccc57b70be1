"""The fleets that `tokenfleet serve` is to run: one, or in a portfolio one for each model, with its share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from controlplane.errors import BadInput
from controlplane.scaler.shares import Limits, Tenant, most_workers, rights
from tokenfleet.cli.flags import adapter_at
from tokenfleet.cli.serve.flags import ServeFlags
from tokenfleet.cli.serve.workers import bounds_of, engine_flag_names
from tokenfleet.planning.plan_file import PlanFile, read_plan
from tokenfleet.portfolios.request import PlannedPortfolio, read_planned_portfolio

# Of one fleet: a portfolio's plans, or its limits, say them for each model, or nothing does yet.
OF_ONE_FLEET = (
    "plan", "workers", "tp", "prefill", "decode", "kind", "slo", "max_workers", "budget_usd_per_h",
    "advisory", "host_kv", "fixed",
)  # fmt: skip
OF_ONE_MODEL = ("--served-model-name", "--lora-modules", "--enable-lora")
FEW_WORKERS, UNBOUNDED = 8, 10_000
ADAPTERS_AT_ONCE = 8  # in one batch; an engine sets memory aside for each


@dataclass(frozen=True)
class ServedFleet:
    """A fleet to serve: its flags, and its plan if it has one.

    In a portfolio it also has its share, its model's adapters, and how many of its workers are on demand
    (None: that is not given).
    """

    flags: ServeFlags
    plan: PlanFile | None
    tenant: Tenant | None = None
    adapters: Sequence[str] = ()
    on_demand: float | None = None


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
    limits = Limits(planned.gpus, planned.max_gpus, planned.budget_usd_per_h, planned.zones)
    tenants = [_tenant(name, planned, (low, high), flags.as_is) for name in planned.plans]
    _check_parts(tenants)
    right = rights(tenants, limits)
    where = _where(flags, (*planned.plans, *chain(*planned.adapters.values())))
    members = {}
    for tenant, plan in zip(tenants, planned.plans.values(), strict=True):
        name, adapters = tenant.model, planned.adapters.get(tenant.model, ())
        most = most_workers(tenant, tenants, limits, UNBOUNDED)
        most = max(FEW_WORKERS, 2 * tenant.right) if most == UNBOUNDED else most
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
        share = replace(tenant, right=right[name], share=right[name])
        plan = plan.with_workers(right[name])
        members[name] = ServedFleet(own, plan, share, adapters, planned.on_demand.get(name))
    return Asked(flags, members, limits)


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
    if of_one := next((flag for flag in OF_ONE_MODEL if flag in engine_flag_names(flags)), None):
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


def _tenant(name: str, planned: PlannedPortfolio, bounds: tuple[int, int | None], as_is: bool) -> Tenant:
    """A model's workers as they were planned. Raises BadInput for what no portfolio is served with."""
    plan = planned.plans[name]
    if len(plan.fleet) > 1:
        raise BadInput(f"--portfolio: {name}: is planned on several kinds of worker; plan it with one")
    worker_type = plan.groups[0].worker_type
    if planned.budget_usd_per_h is not None and worker_type.usd_per_h is None:
        raise BadInput(f"--portfolio: {name}: {worker_type.name} has no price to hold against the budget")
    if as_is and worker_type.reserved_gpus < 1:
        n = worker_type.workers_per_gpu
        raise BadInput(
            f"--as-is: {name} was planned on 1/{n} of a GPU, and other engines are not held to that"
        )
    usd_per_h = worker_type.usd_per_h or 0.0
    low, high = bounds
    return Tenant(
        name,
        str(worker_type.gpu),
        worker_type.reserved_gpus,
        usd_per_h,
        max(low, min(plan.workers, high or plan.workers)),
        floor=low,
        zone=planned.zone_of.get(name),
        fixed_usd_per_h=planned.on_demand_usd_per_h.get(name, 0.0),
    )


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
