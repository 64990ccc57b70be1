"""The plan service as an application (`tokenfleet api`) and as an extension of a fleet's control API.

The extension has the routes of a fleet's proposals: the last one, a new one now, and its application.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any

from fastapi import APIRouter, Body, FastAPI, Response
from prometheus_client import CollectorRegistry, generate_latest
from pydantic import BaseModel, ConfigDict, Field

from dataplane.http.keys import KeyRing
from dataplane.http.rules import ERRORS, Conflict, ErrorReply, application
from dataplane.http.server import Extension
from tokenfleet.planning.plan_file import PlanFile
from tokenfleet.service.data_folder import VARIABLE, default_data_folder, made_folder
from tokenfleet.service.plan_service import PlanService, ServiceLimits
from tokenfleet.service.proposals import BY_ITSELF, SINCE, Proposal, Proposals, Replanning
from tokenfleet.service.routes import plan_extension
from tokenfleet.service.score_process import LastGap

EXPOSITION = "text/plain; version=0.0.4; charset=utf-8"


def plan_app(keys: KeyRing, extensions: Sequence[Extension]) -> FastAPI:
    """The application; without keys loopback callers are let in."""
    registry = CollectorRegistry()
    for extension in extensions:
        for collector in extension.collectors:
            registry.register(collector)

    @asynccontextmanager
    async def running(_: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as cleanup:
            for extension in extensions:
                await cleanup.enter_async_context(extension.running())
            yield

    app = application("Tokenfleet plans", keys, extensions, lifespan=running)

    @app.get("/metrics", response_class=Response)
    def metrics() -> Response:
        """Prometheus' text format."""
        return Response(generate_latest(registry), media_type=EXPOSITION)

    @app.get("/ready")
    def ready() -> dict[str, str]:
        """Whether plans can be ordered; the service answers nothing before, so this is it."""
        return {"status": "ready"}

    for extension in extensions:
        for router in extension.routers:
            app.include_router(router)
    return app


log = logging.getLogger(__name__)


@contextmanager
def folder_of_fleet(option: Path | None, keeps: bool | None, model: str = "") -> Iterator[Path | None]:
    """A fleet's data folder: the one named by flag or environment (below it its `model`'s, where there are
    several), else a temporary one.

    `keeps` true asks for the user's data folder where none is named; else a fleet leaves nothing behind. It
    also serves on a host that it cannot write on: None there. Raises BadInput for a folder that was asked for
    and cannot be written.
    """
    if option is not None or keeps or os.environ.get(VARIABLE):
        yield made_folder((option or default_data_folder()) / model)
        return
    try:
        passing = TemporaryDirectory(prefix="tokenfleet-", ignore_cleanup_errors=True)
    except OSError as error:
        log.warning("no history and no plans: no folder for them: %s", error)
        yield None
        return
    with passing as folder:
        yield Path(folder)


def fleet_extension(
    folder: Path | None, plan: PlanFile | None, has_history: bool, replanning: Replanning = BY_ITSELF
) -> Extension:
    """The plan service over a fleet's folder, where it has one, the last day's gap, and proposals; under
    `plan`, where one is given, the fleet is served."""
    gap = LastGap(folder, has_history and folder is not None)
    told: dict[str, Callable[[], Any]] = {"gap": gap.view}
    if folder is None:
        return Extension(routers=(), fleet=told | {"proposal": no_proposal("this fleet keeps no history")})
    service = PlanService(folder, ServiceLimits())
    name = None if plan is None else service.plans.keep(plan.document, "served")
    proposals, why_not = None, replanning.why_not or (None if has_history else "this fleet keeps no history")
    if plan is None or name is None:
        why_not = "this fleet is served without --plan"
    elif why_not is None:
        proposals = Proposals(service, name, plan, replanning)
    told["proposal"] = no_proposal(why_not or "") if proposals is None else proposals.view

    @asynccontextmanager
    async def running() -> AsyncIterator[None]:
        served = name if proposals is None else proposals.name
        number = None if served is None else service.plans.begin_serving(served)
        if proposals is not None:
            proposals.serving = number
        kept = (gap,) if proposals is None else (gap, proposals)
        tasks = [asyncio.create_task(one.keep()) for one in kept]
        try:
            async with service.running():
                yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            if proposals is not None:
                await proposals.close()
                number = proposals.serving
            if number is not None:
                service.plans.end_serving(number)
            service.close()

    plans = plan_extension(service, lambda: gap.known)
    routers = [*plans.routers, proposal_router(proposals or why_not or "")]
    attach = plans.attach if proposals is None else proposals.attach
    return replace(plans, routers=routers, running=running, fleet=told, attach=attach)


REFUSED: dict[int | str, dict[str, Any]] = {
    409: {"model": ErrorReply, "description": "The state of the proposal does not allow it"},
    429: {"model": ErrorReply, "description": "Too many plans wait already"},
}


class ProposalOrder(BaseModel):
    """Plan again now, from the requests of the last `since`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    since: Annotated[str, Field(min_length=1, max_length=20, examples=["1d", "6h"])] = SINCE


def no_proposal(why: str) -> Callable[[], dict[str, Any]]:
    """The view of a fleet that never has one."""
    return lambda: Proposal("none", f"none: {why}", "", 0.0).as_json()


def proposal_router(proposals: Proposals | str) -> APIRouter:
    """The routes of a fleet's proposals; of a fleet that has none, the reason."""
    router = APIRouter(prefix="/v1/fleet", tags=["proposals"], responses=ERRORS | REFUSED)

    @router.get("/proposal")
    async def proposal() -> dict[str, Any]:
        """The last plan that the fleet made from its own history, and what it would change."""
        return no_proposal(proposals)() if isinstance(proposals, str) else proposals.view()

    @router.post("/proposal", status_code=202)
    async def propose(order: Annotated[ProposalOrder, Body()]) -> dict[str, Any]:
        """Plan again now, from the requests that the fleet recorded."""
        if isinstance(proposals, str):
            raise Conflict(f"proposal: none is made: {proposals}")
        await proposals.begin("an operator asked", order.since)
        return proposals.view()

    @router.post("/apply", status_code=202)
    async def apply() -> dict[str, Any]:
        """Begin to serve by the proposed plan, one worker after another; events tell how it goes."""
        if isinstance(proposals, str):
            raise Conflict(f"apply: there is no proposal: {proposals}")
        return proposals.apply()

    return router
