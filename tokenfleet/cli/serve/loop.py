"""The closed loop of `tokenfleet serve`: its bounds by flags and plan, and what the start prints of it.

A plan is run as a loop unless `--fixed`. The loop stays between the plan's fewest and most workers, or
`--autoscale`'s. It follows the plan's line, targets and limits, with its schedule as a floor by the clock.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING

from controlplane.errors import BadInput
from controlplane.figures import counted
from controlplane.scaler.bounds import Autoscale, ClockFloor
from controlplane.scaler.mix import MixSettings
from tokenfleet.cli.serve.flags import ServeFlags
from tokenfleet.cli.serve.workers import planned_types
from tokenfleet.planning.loop import expected_loop, needed_share, planned_loop
from tokenfleet.planning.plan_file import PlanFile
from tokenfleet.report.answer import loop_text
from tokenfleet.texts import parse_duration_s

if TYPE_CHECKING:
    from dataplane.live.control.replanned import PlanToServe
    from dataplane.live.pool.fleet_types import FleetTypes
    from tokenfleet.service.proposals import Replanning


def autoscale_asked(flags: ServeFlags, plan: PlanFile | None, workers: Mapping[str, int]) -> Autoscale | None:
    """The bounds of the loop; None where the number of workers is to stay. Raises BadInput.

    `workers`: at the start, by type. Without --autoscale a plan's are the most of each.
    """
    if flags.fixed and flags.autoscale is not None:
        raise BadInput("--fixed: keeps the number of workers and --autoscale changes it; give either")
    if flags.fixed and plan is None:
        raise BadInput("--fixed: without a plan nothing changes the number of workers; leave it out")
    if flags.fixed or (plan is None and flags.autoscale is None):
        return None
    text, most_kinds = flags.autoscale, {}
    loop = None if plan is None else planned_loop(plan)
    if text is None and loop is not None:
        text, most_kinds = f"{loop.fewest}..{loop.most}", dict(workers)
    assert text is not None
    asked = autoscale_of(text, flags.scale_in_after, plan, flags.as_is, flags.budget_usd_per_h)
    return replace(asked, most_kinds=most_kinds, floor=None if loop is None else loop.floor)


def autoscale_of(
    text: str,
    hold: str,
    plan: PlanFile | None,
    as_is: bool = False,
    budget_usd_per_h: float | None = None,
) -> Autoscale:
    """--autoscale and --scale-in-after, with a plan's limits and target, and its line where workers are as
    planned. `budget_usd_per_h`: in place of the plan's."""
    low, high = bounds_of(text)
    hold_s = parse_duration_s(hold, "--scale-in-after")
    if budget_usd_per_h is None and plan is not None:
        budget_usd_per_h = plan.inputs.budget_usd_per_h
    plain = Autoscale(low, high, hold_s=hold_s, budget_usd_per_h=budget_usd_per_h)
    if plan is None:
        return plain
    plain = replace(plain, max_gpus=plan.inputs.max_gpus, attainment=plan.attainment.target)
    # A mix's line counts workers of no single type. What each type can do decides how many of each.
    line = plan.demand_line if len(plan.fleet) == 1 and not as_is else None
    if line is None:
        return plain
    lengths = line.mean_prompt_tokens, line.mean_output_tokens
    learned_at = None if lengths[0] is None or lengths[1] is None else (lengths[0], lengths[1])
    return replace(plain, line=(line.workers_per_rps, line.intercept), learned_at=learned_at)


def bounds_of(text: str) -> tuple[int, int]:
    """MIN and MAX of --autoscale."""
    low, dots, high = text.partition("..")
    if not dots or not low.isdigit() or not high.isdigit() or not 0 <= int(low) <= int(high) or high == "0":
        raise BadInput(f"--autoscale: expected MIN..MAX such as 1..8, got {text!r}")
    return int(low), int(high)


def most_workers(flags: ServeFlags, workers: int, is_planned: bool = False) -> int:
    """The workers there may ever be; raises BadInput where it is below what other flags ask for.

    `is_planned`: a plan says how many `workers` there are at the start.
    """
    bounds = None if flags.autoscale is None else bounds_of(flags.autoscale)
    most = flags.max_workers or max(8, 2 * workers, bounds[1] if bounds else 0)
    if workers > most and is_planned:
        raise BadInput(f"--max-workers: expected at least the plan's {workers} workers, got {most}")
    if workers > most or (bounds is not None and bounds[1] > most):
        raise BadInput(f"--max-workers: {most} is below what --workers or --autoscale ask for")
    if bounds is not None and not bounds[0] <= workers <= bounds[1]:
        if is_planned:
            raise BadInput(
                f"--autoscale: expected MIN..MAX around the plan's {workers} workers, got {flags.autoscale}"
            )
        raise BadInput(f"--workers: {workers} is outside --autoscale {flags.autoscale}")
    return most


def check_budget(flags: ServeFlags, types: FleetTypes) -> None:
    """Raise BadInput for a --budget-usd-per-h that cannot be kept to: without --autoscale, without prices, or
    below what the first workers cost."""
    budget, there = flags.budget_usd_per_h, 0.0
    if budget is None:
        return
    if flags.autoscale is None and (flags.plan is None or flags.fixed):
        raise BadInput("--budget-usd-per-h: limits autoscaling, so give --autoscale MIN..MAX, or no --fixed")
    for one in types:
        if one.usd_per_h is None:
            raise BadInput(f"--budget-usd-per-h: {one.name} has no price; give it by --kind gpu=…,usd=…")
        there += one.usd_per_h * types.workers[one.name]
    if there > budget + 1e-9:
        raise BadInput(
            f"--budget-usd-per-h: {budget:g}: the workers to start with cost ${there:g} an hour; begin with"
            " fewer"
        )


def replanning_of(flags: ServeFlags, model: str) -> Replanning:
    """--replan-every, and why this fleet does not plan again. Raises BadInput. `model`: of a portfolio."""
    from tokenfleet.service.proposals import Replanning
    from tokenfleet.service.replan import AutoApply

    text = flags.replan_every
    every_s = None if text == "off" else parse_duration_s(text, "--replan-every")
    if every_s is not None and every_s <= 0:
        raise BadInput(f"--replan-every: expected a time such as 1d, or off, got {text!r}")
    why_not = None
    if flags.as_is:
        why_not = "--as-is serves a plan of other hardware"
    elif model:
        why_not = "the models of a portfolio share their limits; plan the portfolio again"
    auto = None if flags.auto_apply is None else AutoApply.read(flags.auto_apply)
    if auto is not None and (every_s is None or flags.plan is None):
        raise BadInput(
            "--auto-apply: applies what the fleet plans again by itself; give --plan and --replan-every"
        )
    return Replanning(every_s, why_not, partial(plan_to_serve, flags), auto)


def plan_to_serve(flags: ServeFlags, name: str, plan: PlanFile) -> PlanToServe:
    """A plan as a running fleet takes it that was started with these flags. Raises BadInput."""
    from dataplane.live.control.replanned import PlanToServe

    types = planned_types(plan, flags.profile or (), as_is=False)
    autoscale, workers = autoscale_asked(flags, plan, types.workers), sum(types.workers.values())
    if autoscale is not None and not autoscale.low <= workers <= autoscale.high:
        raise BadInput(f"apply: the plan's {workers} workers are outside --autoscale {flags.autoscale}")
    budget = flags.budget_usd_per_h or plan.inputs.budget_usd_per_h
    most = MixSettings(max_gpus=plan.inputs.max_gpus, budget_usd_per_h=budget)
    return PlanToServe(name, types.groups, types.planned, autoscale, most)


def loop_lines(plan: PlanFile, autoscale: Autoscale, are_own: bool) -> Iterator[str]:
    """What the start of a planned fleet prints of its bounds, its floor and its expected cost.

    `are_own`: the bounds are the plan's, not --autoscale's.
    """
    if autoscale.low == autoscale.high:
        yield f"autoscaling keeps {counted(autoscale.high, 'worker')}: its bounds leave no other number"
        return
    fixed = f"; --fixed keeps {plan.workers}" if are_own else ""
    yield f"autoscaling from {autoscale.low} to {autoscale.high} workers, {plan.workers} at the start{fixed}"
    yield _floor_line(plan, autoscale.floor, time.time())
    if are_own and (loop := expected_loop(plan)) is not None:
        yield f"on the plan's trace autoscaling {loop_text(loop, plan.workers, plan.usd_per_hour)}"


def _floor_line(plan: PlanFile, floor: ClockFloor | None, unix_s: float) -> str:
    """How the plan's schedule follows the clock, and the workers that it keeps now."""
    if floor is None:
        why = "its trace has no dates" if plan.schedule else "the plan has none"
        return f"no floor from the plan's schedule, since {why}: demand alone decides"
    kept = floor.at(unix_s)
    now = datetime.fromtimestamp(unix_s, UTC)
    at_least = f"at least {counted(kept, 'worker')}" if kept else "no floor"
    most = max(one.workers for one in floor.intervals)
    margin = f", without its margin for step times (at most {most})" if needed_share(plan) < 1.0 else ""
    return f"floor: the plan's schedule by {floor.clock} (UTC){margin}; now, {now:%A %H:%M}, {at_least}"
