"""Scorecards and gaps, made in a process that ends with the one that asked.

Replays take processor time that a gateway must not lose. Folder and plan are arguments, without a plan the
last whole day's gap is made and kept; stdout has one line, the scorecard, gaps, or `{"error", "unknown"}`.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controlplane.errors import BadInput, ControlPlaneError
from dataplane.http.rules import UnknownName
from dataplane.processes.keeper import end_with_asker, helper
from dataplane.startup import use_kernel_cache

if TYPE_CHECKING:
    from tokenfleet.service.gap import Gap

log = logging.getLogger(__name__)

TIMEOUT_S = 300.0
GAP_EVERY_S = 600.0  # a look whether a day is over whose gap is not known
NICENESS = 5


def scorecard_beside(data: Path, plan: str) -> dict[str, Any]:
    """`whole_scorecard` in another process. Raises what it raises, BadInput when it takes too long."""
    try:
        said = asyncio.run(asyncio.wait_for(_said(data, plan), TIMEOUT_S))
    except TimeoutError:
        raise BadInput(f"scorecard: it took longer than {TIMEOUT_S:g} s") from None
    if "error" in said:
        raise UnknownName(said["error"]) if said.get("unknown") else BadInput(said["error"])
    return said


class LastGap:
    """The last finished day's gap of a fleet's folder, for its status, its console and its metrics alike.

    `keep` has it made, in another process, and reads it; in between all get what was found last.
    """

    def __init__(self, data: Path | None, has_history: bool = True) -> None:
        self.known: Gap | None = None
        self._data = data
        self._missing = (
            "the first full day (UTC) has not ended" if has_history else "this fleet keeps no history"
        )
        self._tried: str | None = None

    def view(self) -> dict[str, Any]:
        """`gap` of `GET /v1/fleet`: the `day`, None where none is known; `line` tells it, or why not."""
        from tokenfleet.service.gap import gap_line

        told = f"unknown; {self._missing}"
        if self.known is not None:
            told = "; ".join(filter(None, [gap_line(self.known), self._missing]))
        return {"line": told, "day": self.known}

    async def keep(self) -> None:
        """Look every GAP_EVERY_S, until cancelled."""
        while True:
            try:
                await self.look(time.time())
            except BadInput as why:
                self._missing = str(why)
                log.warning("cost over the hindsight optimum: %s", why)
            await asyncio.sleep(GAP_EVERY_S)

    async def look(self, now_s: float) -> None:
        """Read what is kept, and have the last day that is over made where it is not. Raises BadInput."""
        from tokenfleet.service.gap import last_kept_gap, last_whole_day

        if self._data is None:
            return
        day, self.known = last_whole_day(self._data, now_s), last_kept_gap(self._data / "history")
        if self.known is not None and self.known["day"] == day:
            self._missing = ""
        elif day is not None and day != self._tried:
            self._tried, self._missing = day, f"{day} is being computed"
            said = await _said(self._data)
            if "error" in said:
                raise BadInput(f"{day}: {said['error']}")
            found: Gap | None = said.get("gap")
            self.known = found or self.known
            self._missing = "" if found else f"{day}: its log has no whole minute"


async def _said(data: Path, *plan: str) -> dict[str, Any]:
    """What the process says that makes a plan's scorecard, or gaps; it ends with this task."""
    async with helper("tokenfleet.service.score_process", str(data), *plan) as process:
        assert process.stdout is not None
        text = await process.stdout.read()
        await process.wait()
    try:
        said: dict[str, Any] = json.loads(text)
    except ValueError:
        return {"error": f"its process ended with code {process.returncode}"}
    return said


def main() -> int:
    """Print the scorecard, or make the last whole day's gap."""
    os.nice(NICENESS)
    end_with_asker()
    use_kernel_cache()
    from tokenfleet.service.gap import last_whole_day, made_gap
    from tokenfleet.service.scorecard import whole_scorecard

    data, now_s = Path(sys.argv[1]), time.time()
    said: dict[str, Any] = {}
    try:
        if len(sys.argv) > 2:
            said = whole_scorecard(data, sys.argv[2])
        elif (day := last_whole_day(data, now_s)) is not None:
            said = {"gap": made_gap(data / "history", day, now_s)}
    except ControlPlaneError as error:
        said = {"error": " ".join(str(error).split()), "unknown": isinstance(error, UnknownName)}
    print(json.dumps(said, allow_nan=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
