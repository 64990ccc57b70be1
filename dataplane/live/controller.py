"""The controller: the one place that runs `tick`. A process of its own, which may die without harm.

It looks at the fleet through the control API and acts through it. While it is down gateways go on placing
requests with what they know, and nothing is moved or scaled; started again, it begins with an empty state.

Run by the fleet as `python -m dataplane.live.controller`, its settings as JSON on stdin. It ends when its
parent does.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

from controlplane.control import (
    Action,
    RunningRequest,
    Scale,
    Settings,
    Snapshot,
    State,
    WorkerLoad,
    tick,
)
from controlplane.migration.pairing import MoveSettings
from controlplane.types import RequestId, WorkerId

HEARTBEAT_S = 0.5
TIMEOUT_S = 5.0
PRIORITIES = {"normal": 0, "high": 1}
MOVES = MoveSettings(pressure=0.6, drains=False)  # the fleet empties its draining workers itself


@dataclass(frozen=True, slots=True)
class ControllerSettings:
    """Where the control API is, and what tick is told."""

    control: str
    key: str | None
    advisory: bool
    bounds: tuple[int, int] | None
    parent: int


def snapshot_from(fleet: dict[str, Any], requests: list[dict[str, Any]], now_s: float) -> Snapshot:
    """The core's view of the control API's replies."""
    by_worker: dict[str, list[RunningRequest]] = {}
    waiting_tokens = 0
    for r in requests:
        tokens = int(r["prompt_tokens"]) + int(r["output_tokens"])
        if r["worker"] is None:
            waiting_tokens += tokens
        else:
            running = RunningRequest(
                RequestId(r["request"]),
                tokens,
                PRIORITIES[r["priority"]],
                generated=int(r["output_tokens"]),
                remaining_tokens=max(int(r["expected_tokens"]) - int(r["output_tokens"]), 1),
                tpot_s=float(r["slo"]["tpot_s"]),
            )
            by_worker.setdefault(r["worker"], []).append(running)
    workers = tuple(
        WorkerLoad(
            WorkerId(w["worker"]),
            w["state"],
            int(w.get("kv_blocks", 0)) * int(w.get("block_tokens", 0)),
            tuple(by_worker.get(w["worker"], ())),
        )
        for w in fleet["workers"]
    )
    moving = frozenset(RequestId(move["request"]) for move in fleet["moving"])
    busy = frozenset(WorkerId(move[end]) for move in fleet["moving"] for end in ("source", "target"))
    return Snapshot(now_s, workers, int(fleet["wanted_workers"]), waiting_tokens, moving, busy)


class ControlPort:
    """The control API, as the controller uses it."""

    def __init__(self, settings: ControllerSettings) -> None:
        self._settings = settings

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The reply's JSON. Raises OSError (urllib's errors are) when there is none."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._settings.control + path, data, method=method)
        request.add_header("content-type", "application/json")
        if self._settings.key is not None:
            request.add_header("authorization", f"Bearer {self._settings.key}")
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            return json.load(reply)

    def observe(self, now_s: float) -> tuple[Snapshot, bool]:
        """The fleet now, and whether its size is the controller's to decide."""
        fleet = self.ask("GET", "/v1/fleet")
        requests = self.ask("GET", "/v1/requests")["requests"]
        return snapshot_from(fleet, requests, now_s), bool(fleet["auto"])

    def apply(self, action: Action) -> None:
        """Do it, or only say it where the fleet is advisory."""
        kind = "scale" if isinstance(action, Scale) else "migrate"  # one that waits moves as one that runs
        order: dict[str, Any] = {"kind": kind, "reason": action.reason, "advisory": self._settings.advisory}
        if isinstance(action, Scale):
            order |= {"workers": action.workers}
        else:
            order |= {"request_id": action.request, "target": action.target}
        self.ask("POST", "/v1/decisions", order)


def run(settings: ControllerSettings) -> None:
    """Tick until the parent is gone. What cannot be done now is looked at again in the next round."""
    port, state = ControlPort(settings), State()
    while os.getppid() == settings.parent:
        began_s = time.monotonic()
        try:
            snapshot, auto = port.observe(began_s)
            bounds = settings.bounds if auto else None
            state, actions = tick(Settings(MOVES, bounds=bounds), state, snapshot)
            for action in actions:
                port.apply(action)
        except urllib.error.HTTPError as error:
            print(f"controller: refused: {error.read(300).decode(errors='replace')}", file=sys.stderr)
        except OSError as error:
            print(f"controller: the control API does not answer: {error}", file=sys.stderr)
        time.sleep(max(0.0, HEARTBEAT_S - (time.monotonic() - began_s)))


def main() -> None:
    """Read the settings from stdin and run."""
    given = json.load(sys.stdin)
    bounds = given["bounds"]
    given["bounds"] = None if bounds is None else (int(bounds[0]), int(bounds[1]))
    run(ControllerSettings(**given))


if __name__ == "__main__":
    main()
