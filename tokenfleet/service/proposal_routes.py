"""The HTTP routes of a fleet's proposals: the last one, a new one now, and its application."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any

from fastapi import APIRouter, Body
from pydantic import BaseModel, ConfigDict, Field

from dataplane.http.rules import ERRORS, Conflict, ErrorReply
from tokenfleet.service.proposals import SINCE, Proposal, Proposals

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
