"""The plan service beside a live fleet, in its control API: one folder, and which plan the fleet is under."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from controlplane.errors import BadInput
from dataplane.live.extension import Extension
from tokenfleet.service.data_folder import default_data_folder, made_folder
from tokenfleet.service.plan_service import PlanService, ServiceLimits
from tokenfleet.service.routes import plan_extension

log = logging.getLogger(__name__)


def folder_of_fleet(asked: Path | None) -> Path | None:
    """Where a fleet keeps its things: as asked, else the default folder; None where that cannot be written.

    A fleet must serve on a host without a home, too. Raises BadInput only for a folder that was asked for.
    """
    if asked is not None:
        return made_folder(asked)
    try:
        return made_folder(default_data_folder())
    except BadInput as error:
        log.warning("no history and no plans are kept: %s", error)
        return None


def fleet_extension(folder: Path, plan: Mapping[str, Any] | None) -> Extension:
    """The plan service over a fleet's folder; under `plan`, where one is given, the fleet is served."""
    service = PlanService(folder, ServiceLimits())
    kept = None if plan is None else service.plans.keep(dict(plan), "served")

    @asynccontextmanager
    async def running() -> AsyncIterator[None]:
        number = None if kept is None else service.plans.begin_serving(kept)
        try:
            async with service.running():
                yield
        finally:
            if number is not None:
                service.plans.end_serving(number)
            service.close()

    return replace(plan_extension(service), running=running)
