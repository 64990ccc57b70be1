"""The controller: the one place that runs `tick`. A process of its own, which may die without harm.

It looks at the fleet through the control API and acts through it. While it is down gateways go on placing
requests with what they know, and nothing is moved or scaled; started again, it begins with an empty state,
but for the counts that forecasts are made from, where the fleet keeps data (demand_file).

Run by the fleet as `python -m dataplane.live.control.controller`, its settings as JSON on stdin. It ends
when its parent does.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from controlplane.control import Action, Scale, State, tick
from controlplane.snapshot import Snapshot
from dataplane.kernel_cache import use_kernel_cache
from dataplane.live.control.demand_store import DemandFile
from dataplane.live.control.settings import ControllerSettings
from dataplane.live.control.snapshot_builder import Seeing

HEARTBEAT_S = 0.5
TIMEOUT_S = 5.0


class ControlPort:
    """The control API, as the controller uses it."""

    def __init__(self, settings: ControllerSettings) -> None:
        self._settings = settings
        self._advised: tuple[object, ...] | None = None

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The reply's JSON. Raises OSError (urllib's errors are) when there is none."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._settings.control + path, data, method=method)
        request.add_header("content-type", "application/json")
        if self._settings.key is not None:
            request.add_header("authorization", f"Bearer {self._settings.key}")
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as reply:
            return json.load(reply)

    def apply(self, action: Action, snapshot: Snapshot) -> None:
        """Do it, or only say it where the fleet is advisory; the same advice is given once."""
        kind = "scale" if isinstance(action, Scale) else "migrate"  # one that waits moves as one that runs
        order: dict[str, Any] = {"kind": kind, "reason": action.reason, "advisory": self._settings.advisory}
        if isinstance(action, Scale):
            advice = (snapshot.wanted, action.workers, action.kinds)
            if self._settings.advisory and advice == self._advised:
                return
            self._advised = advice
            order |= {"workers": action.workers, "kinds": action.kinds, "facts": action.facts}
        else:
            order |= {"request_id": action.request, "target": action.target}
        self.ask("POST", "/v1/decisions", order)


def run(settings: ControllerSettings) -> None:
    """Tick until the parent is gone. What cannot be done now is looked at again in the next round."""
    port, seeing = ControlPort(settings), Seeing(settings.speeds)
    file = DemandFile(None if settings.demand is None else Path(settings.demand))
    scaling = settings.tick(seeing.speeds).scaling
    state = State(scaling=file.read(scaling, time.monotonic()))
    while os.getppid() == settings.parent:
        began_s = time.monotonic()
        try:
            fleet = port.ask("GET", "/v1/fleet")
            requests = port.ask("GET", "/v1/requests")["requests"]
            snapshot = seeing.snapshot(fleet, requests, began_s)
            state, actions = tick(settings.tick(seeing.speeds, seeing.kv_bytes_per_token), state, snapshot)
            file.write(state.scaling, began_s)
            for action in actions:
                port.apply(action, snapshot)
        except urllib.error.HTTPError as error:
            print(f"controller: refused: {error.read(300).decode(errors='replace')}", file=sys.stderr)
        except OSError as error:
            print(f"controller: the control API does not answer: {error}", file=sys.stderr)
        time.sleep(max(0.0, HEARTBEAT_S - (time.monotonic() - began_s)))


def main() -> None:
    """Read the settings from stdin and run."""
    os.setpgrp()  # Ctrl-C is for the fleet, which then ends this one
    use_kernel_cache()
    run(ControllerSettings.from_json(json.load(sys.stdin)))


if __name__ == "__main__":
    main()
