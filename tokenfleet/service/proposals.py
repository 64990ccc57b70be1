"""Proposals: a served fleet plans again from its own history and keeps what it would change.

`Proposals.keep` looks every LOOK_S whether a plan is due (replan.py). The plan is a job as any other, in a
process of its own at low priority. The fleet goes on unchanged until the proposal is applied. The last
proposal is kept in `proposal.json` of the data folder.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any, Literal

from controlplane.errors import BadInput
from controlplane.figures import duration_text
from dataplane.history.files import history_span, read_history
from dataplane.http.rules import Conflict, TooBusy
from tokenfleet.files import write_files
from tokenfleet.planning.plan_file import PlanFile
from tokenfleet.service import replan
from tokenfleet.service.forms import OVER
from tokenfleet.service.plan_service import PlanService
from tokenfleet.texts import parse_duration_s

log = logging.getLogger(__name__)

SCHEMA = "tokenfleet.proposal/1"
FILE = "proposal.json"
LOOK_S = 600.0
JOB_LOOK_S = 0.5
SINCE = "1d"
TAKEN_UP = ("ready", "same", "applying", "applied", "rolled-back")
State = Literal["none", "planning", "ready", "same", "failed", "applying", "applied", "rolled-back"]


@dataclass(frozen=True, slots=True)
class Replanning:
    """Whether a fleet plans again: `every_s` by itself (None: only when asked), or `why_not` at all.

    `to_serve`: a plan as the running fleet takes it. `auto`: the limits within which a plan is applied
    without an operator; None waits for one.
    """

    every_s: float | None = replan.DAY_S
    why_not: str | None = None
    to_serve: Callable[[str, PlanFile], Any] | None = None
    auto: replan.AutoApply | None = None


BY_ITSELF = Replanning()


@dataclass(frozen=True, slots=True)
class Proposal:
    """The last plan that a fleet made again. `served`: the plan that it is compared with, by its name.

    `why`: the reason for planning; `plan`: the new plan's name, `change`: its difference, `recorded_s`: how
    much history it was made of. `line`: the state in words.
    """

    state: State
    line: str
    served: str
    at_s: float
    why: str | None = None
    plan: str | None = None
    change: dict[str, Any] | None = None
    recorded_s: float | None = None

    def as_json(self) -> dict[str, Any]:
        """`tokenfleet.proposal/1`."""
        names = ("state", "line", "why", "served", "plan", "at_s", "recorded_s", "change")
        return {"schema": SCHEMA, **{name: getattr(self, name) for name in names}}


class Proposals:
    """The proposals of one fleet, which is served under a kept `plan` of that `name`.

    `serving`: the number of that serving in the database, while the fleet runs.
    """

    def __init__(
        self, service: PlanService, name: str, plan: PlanFile, replanning: Replanning = BY_ITSELF
    ) -> None:
        self.plan, self.name = plan, name
        self.serving: int | None = None
        self._service, self._every_s, self._by = service, replanning.every_s, replanning
        self._fleet: Any = None  # takes plans to serve by
        self._planned_s = time.time()
        self._planning: asyncio.Task[None] | None = None
        self.last = Proposal("none", self._waits(), name, self._planned_s)
        self._read()

    def view(self) -> dict[str, Any]:
        """`proposal` of `GET /v1/fleet`."""
        return self.last.as_json()

    async def keep(self) -> None:
        """Look whether a plan is due, until cancelled."""
        while self._every_s is not None and replan.why_never(self.plan) is None:
            try:
                await self.look(time.time())
            except (BadInput, TooBusy, OSError) as refusal:
                self._note("failed", str(refusal))
                log.warning("%s", self.last.line)
            await asyncio.sleep(min(LOOK_S, self._every_s))

    async def look(self, now_s: float) -> None:
        """Plan again if it is due and there is history enough. Raises BadInput."""
        assert self._every_s is not None
        if self._is_planning or self.last.state == "applying":
            return
        recent = await asyncio.to_thread(self._recorded, now_s, replan.RECENT_S)
        why = replan.due(self.plan, self._planned_s, now_s, self._every_s, recent)
        if why is None:
            return
        kept = await asyncio.to_thread(self._span, now_s)
        if (short := replan.too_short(kept)) is not None:
            if self.last.plan is None:
                self._note("none", short)
            return
        await self.begin(why, SINCE)
        assert self._planning is not None
        await asyncio.shield(self._planning)

    async def begin(self, why: str, since: str) -> None:
        """Begin to plan again from the last `since`. Raises BadInput, Conflict while one is in work."""
        if self._is_planning or self.last.state == "applying":
            raise Conflict(
                f"proposal: is {'being applied' if not self._is_planning else 'being made'} already"
            )
        since_s, now_s = parse_duration_s(since, "since"), time.time()
        order = replan.next_order(self.plan, since, datetime.fromtimestamp(now_s, UTC).date())
        kept = await asyncio.to_thread(self._recorded, now_s, since_s)
        job = await asyncio.to_thread(self._service.order, order)
        self._planned_s = now_s
        self._note("planning", f"a plan of the last {since} is being made ({why})", why=why)
        self._planning = asyncio.create_task(self._await(job["id"], why, kept))

    def attach(self, fleet: Any) -> None:
        """The running fleet that proposals are applied to; a core's successor serves by the last applied."""
        self._fleet = fleet
        fleet.on_end.append(self._applied)
        if fleet.served is not None and (plan := self._service.plans.find(fleet.served)) is not None:
            self.plan, self.name = plan, fleet.served
        self._read(fleet.is_left)

    def apply(self, by: str = "an operator") -> dict[str, Any]:
        """Begin to serve by the proposed plan; how that stands. Raises BadInput, and then changes nothing."""
        last = self.last
        if last.plan is None or last.state not in ("ready", "rolled-back"):
            raise Conflict(f"apply: no proposal is ready to apply; the last one: {last.line}")
        plan = self._service.plans.find(last.plan)
        if plan is None or self._by.to_serve is None or self._fleet is None:
            raise Conflict(f"apply: plan {last.plan} cannot be applied to this fleet")
        order = self._by.to_serve(last.plan, plan)
        told: dict[str, Any] = self._fleet.apply(order)
        self._note("applying", f"{last.line}; {by} applies it", last)
        return told

    def _applied(self, name: str, state: str, cause: str) -> None:
        """Serve under the new plan from now on, or go on under the one of before."""
        last, line, plan = self.last, self.last.line.rpartition("; ")[0], self._service.plans.find(name)
        if state != "done" or plan is None:
            self._note("rolled-back", f"{line}; rolled back: {cause}", last)
            return
        self.plan, self.name = plan, name
        self.serving = self._service.plans.begin_serving(name)
        self._planned_s = time.time()
        self._note("applied", f"{line}; applied", last)

    async def close(self) -> None:
        """End what is under way here; the job itself goes on or is queued again."""
        if self._planning is not None:
            self._planning.cancel()
            await asyncio.wait([self._planning])

    @property
    def _is_planning(self) -> bool:
        return self._planning is not None and not self._planning.done()

    async def _await(self, job: str, why: str, kept: replan.Recorded) -> None:
        """Wait for a job, and keep what its plan would change."""
        while (found := await asyncio.to_thread(self._service.job, job))["state"] not in OVER:
            await asyncio.sleep(JOB_LOOK_S)
        plan = await asyncio.to_thread(self._service.plans.find, job) if found["state"] == "done" else None
        if plan is None:
            self._note("failed", found["error"] or f"its job is {found['state']}", why=why)
        elif not plan.feasible:
            self._note(
                "failed", f"no fleet within the plan's limits holds the targets: {plan.reason}", why=why
            )
        else:
            change = replan.FleetChange.between(self.plan, plan, kept.attainment)
            self._note(
                "same" if change.is_none else "ready",
                f"{change.text()}; planned {datetime.now(UTC):%Y-%m-%d %H:%M} UTC from"
                f" {duration_text(kept.seconds)} of history ({why})",
                why=why,
                plan=job,
                change=change.as_json(),
                recorded_s=round(kept.seconds, 1),
            )
            if not change.is_none and self._by.auto is not None:
                self._apply_within(self._by.auto, change, kept.seconds)
        log.info("proposal: %s", self.last.line)

    def _apply_within(self, limits: replan.AutoApply, change: replan.FleetChange, recorded_s: float) -> None:
        """Apply the proposal, or say why an operator has to."""
        why = limits.refusal(change, recorded_s)
        if why is None:
            try:
                self.apply("--auto-apply")
                return
            except BadInput as refusal:
                why = str(refusal)
        self._note("ready", f"{self.last.line}; not applied by itself: {why}", self.last)

    def _waits(self) -> str:
        why = replan.why_never(self.plan)
        if why is None and self._every_s is None:
            return "none; `tokenfleet fleet proposal --now` makes one"
        return (
            f"none: {why}"
            if why
            else f"none yet; the fleet plans again every {duration_text(self._every_s or replan.DAY_S)}"
        )

    def _recorded(self, now_s: float, since_s: float) -> replan.Recorded:
        return replan.Recorded.of(read_history(self._folder, now_s - since_s, now_s, replan.COLUMNS), now_s)

    def _span(self, now_s: float) -> replan.Recorded:
        """All that is recorded, without its latencies."""
        requests, first_s, _ = history_span(self._folder)
        return replan.Recorded(0.0 if first_s is None else now_s - first_s, requests, 0, 0, None, None)

    @property
    def _folder(self) -> Any:
        return self._service.folder / "history"

    def _note(self, state: State, line: str, of: Proposal | None = None, **facts: Any) -> None:
        """Keep a proposal, here and on disk: a new one, or a new state `of` one. A full disk ends nothing."""
        self.last = Proposal(state, line, self.name, time.time(), **facts)
        if of is not None:
            self.last = replace(of, state=state, line=line, served=self.name, at_s=time.time())
        with suppress(OSError, BadInput):
            write_files(
                {self._service.folder / FILE: json.dumps(self.view() | {"planned_s": self._planned_s})}
            )

    def _read(self, is_applying: bool = False) -> None:
        """Take up what was kept before, where it is of the plan that is served."""
        with suppress(OSError, ValueError, KeyError, TypeError):
            kept = json.loads((self._service.folder / FILE).read_text(encoding="utf-8"))
            if kept.pop("schema") != SCHEMA or kept["served"] != self.name:
                return
            self._planned_s = float(kept.pop("planned_s"))
            if kept["state"] == "applying" and not is_applying:
                kept["state"] = "ready"  # that fleet has ended
            if kept["state"] in TAKEN_UP:
                self.last = Proposal(**kept)
