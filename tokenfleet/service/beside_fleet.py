"""The plan service beside a live fleet, in its control API: one folder, and which plan the fleet is under."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from dataplane.live.extension import Extension
from tokenfleet.service.data_folder import VARIABLE, default_data_folder, made_folder
from tokenfleet.service.plan_service import PlanService, ServiceLimits
from tokenfleet.service.routes import plan_extension

log = logging.getLogger(__name__)


@contextmanager
def folder_of_fleet(asked: Path | None, keeps: bool | None) -> Iterator[Path | None]:
    """Where a fleet keeps its things: the folder named by flag or environment, else one that goes with it.

    `keeps` true asks for the user's data folder where none is named. A fleet leaves nothing behind that
    nobody asked for, and must serve on a host that it cannot write on, too: None there. Raises BadInput for a
    folder that was asked for and cannot be written.
    """
    if asked is not None or keeps or os.environ.get(VARIABLE):
        yield made_folder(asked or default_data_folder())
        return
    try:
        passing = TemporaryDirectory(prefix="tokenfleet-", ignore_cleanup_errors=True)
    except OSError as error:
        log.warning("no history and no plans: no folder for them: %s", error)
        yield None
        return
    with passing as folder:
        yield Path(folder)


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
