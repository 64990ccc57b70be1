"""The controller: the process of a live fleet that decides, by a round of the port every heartbeat.

It looks at the fleet through the control API and acts through it. It may die without harm: gateways go on
placing requests with what they know, and nothing is moved or scaled. Started again, it begins with an empty
state. Only the counts that forecasts are made from are kept, where the fleet keeps data. They are written
when a bin closes, whole under another name and then renamed. So a controller killed at any time leaves those
of some moments ago. They are counts by bin, no requests. The workers that there were, and what was wanted of
them, go to the fleet's log.

Run by the fleet as `python -m dataplane.live.control.controller`, its settings as JSON on stdin. It ends when
its parent does.
"""

from __future__ import annotations

import json
import os
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from controlplane.control import Settings, State, tick
from controlplane.errors import BadInput
from controlplane.port import ActionOutcome, run_round
from controlplane.scaler.state import Scaling, ScalingSettings, resumed, to_keep
from controlplane.snapshot import Migrate, Note, Reassign, Scale, Snapshot
from controlplane.worker_type import WorkerType
from dataplane.history.fleet_log import FleetLog, FleetSpec, look_of
from dataplane.http.tls import own_host_context
from dataplane.live.control.controller_process import CONTROLLER_SETTINGS, ControllerSettings
from dataplane.live.control.fleet_state import FleetState, Observer
from dataplane.live.engine_api.processes import replace_text
from dataplane.startup import use_kernel_cache

HEARTBEAT_S = 0.5
TIMEOUT_S = 5.0
SCHEMA = "tokenfleet.demand/1"
BOOT = Path("/proc/sys/kernel/random/boot_id")


class LivePlane:
    """The fleet behind its control API. Where it is advisory, decisions are recorded and not carried out."""

    def __init__(self, settings: ControllerSettings) -> None:
        self._settings = settings
        self._observer = Observer(settings.profiles)
        self._wanted = 0
        self._needed: int | None = None
        self._advised: tuple[object, ...] | None = None
        self._silence = ""  # why the API did not answer since the last look
        self._seen: Snapshot | None = None  # at the last look
        self._trust = own_host_context()

    @property
    def settings(self) -> Settings:
        """Of tick, with what is known of the workers by now."""
        cold_start_s = 0.0 if self._seen is None else self._seen.cold_start_s
        return self._settings.tick(self._observer.profiles, time.time(), cold_start_s)

    def observe(self) -> Snapshot:
        """The fleet now. Raises OSError (urllib's errors are) where the API does not answer."""
        now_s = time.monotonic()
        try:
            state = msgspec.msgpack.decode(self.ask("GET", "/v1/state"), type=FleetState)
        except msgspec.MsgspecError as error:
            raise OSError(f"it gave no state of the fleet: {error}") from error
        self._silence = ""
        self._seen = snapshot = self._observer.snapshot(state, now_s)
        self._wanted = snapshot.wanted
        return snapshot

    def migrate(self, move: Migrate | Reassign) -> str | None:
        return self._decided("migrate", {"request_id": move.request, "target": move.target}, move.reason)

    reassign = migrate  # a move as any other: one that has no KV yet copies none

    def scale(self, change: Scale) -> str | None:
        """The same advice is given once."""
        advice = (self._wanted, change.workers, change.kinds)
        if self._settings.advisory and advice == self._advised:
            return None
        self._advised = advice
        order = {"workers": change.workers, "kinds": change.kinds, "facts": change.facts}
        return self._decided("scale", order, change.reason)

    def note(self, note: Note) -> str | None:
        return self._post("note", {"kind": note.kind, "facts": note.facts, "reason": note.reason})

    def log(self, log: FleetLog, scaling: Scaling, at_s: float) -> None:
        """Tell the fleet's log of the last look, and of the rule that the scaler went by."""
        told, seen = self._settings, self._seen
        if seen is None:
            return
        fixed = told.autoscale is None or told.advisory or seen.fixed is not None
        types = tuple(self._known(t) for t in told.worker_types)
        log.write(
            look_of(seen, at_s, None if fixed else self.settings.scaling, scaling, fixed),
            FleetSpec(at_s, types, told.policy, told.attainment, told.classes),
        )

    def _known(self, worker_type: WorkerType) -> WorkerType:
        """The type with its step times as they are now."""
        profile = self._observer.profiles.get(worker_type.name)
        if profile is None:
            return worker_type
        step = self._observer.steps.get(worker_type.name, profile.step)
        return replace(worker_type, known_profile=replace(profile, step=step))

    def need(self, workers: int | None) -> None:
        """Tell what is needed of what is asked for, where that has changed and the fleet is one of many."""
        if self._settings.tells_need and workers is not None and workers != self._needed:
            if (refused := self._post("need", {"workers": workers})) is None:
                self._needed = workers
            else:
                print(f"controller: {refused}", file=sys.stderr)

    def report(self, outcomes: Sequence[ActionOutcome]) -> None:
        """Log the refused actions; the next round decides again."""
        for outcome in outcomes:
            if outcome.refused is not None:
                print(f"controller: {outcome.refused}", file=sys.stderr)

    def _decided(self, kind: str, order: dict[str, Any], reason: str) -> str | None:
        """Post a decision; why it was refused, None where it was not."""
        return self._post(kind, order | {"reason": reason, "advisory": self._settings.advisory})

    def _post(self, kind: str, order: dict[str, Any]) -> str | None:
        if self._silence:  # each try takes its time
            return self._silence
        try:
            self.ask("POST", f"/v1/decisions/{kind}", order)
        except urllib.error.HTTPError as error:
            return f"refused: {error.read(300).decode(errors='replace')}"
        except OSError as error:
            self._silence = f"the control API does not answer: {error}"
        return self._silence or None

    def ask(self, method: str, path: str, body: dict[str, Any] | None = None) -> bytes:
        """The reply's body. Raises OSError when there is none."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._settings.control + path, data, method=method)
        request.add_header("content-type", "application/json")
        if self._settings.key is not None:
            request.add_header("authorization", f"Bearer {self._settings.key}")
        with urllib.request.urlopen(request, timeout=TIMEOUT_S, context=self._trust) as reply:
            return bytes(reply.read())


class DemandFile:
    """The scaler's counts on disk, for one controller at a time; `path` None keeps nothing."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._bins: list[int] | None = None

    def read(self, settings: ScalingSettings | None, now_s: float) -> Scaling:
        """The scaler's state as far as the file knows it; an empty one where it does not, with the reason."""
        if self._path is None or settings is None or not self._path.exists():
            return Scaling()
        try:
            said = json.loads(self._path.read_text(encoding="utf-8"))
            if said["schema"] != SCHEMA:
                raise BadInput(f"schema: expected {SCHEMA}, got {said['schema']}")
            return resumed(settings, said["kept"], _age_s(said), now_s)
        except (OSError, ValueError, KeyError, TypeError, BadInput) as error:
            print(f"controller: {self._path}: the demand before is not known: {error}", file=sys.stderr)
            return Scaling()

    def write(self, state: Scaling, now_s: float) -> None:
        """Keep the state's bins, if one has closed since the last time. A full disk ends nothing else."""
        pasts = [outlook.past for outlook in (state.far, state.soon)]
        bins = [0 if past is None else past.first_bin + len(past.closed) for past in pasts]
        if self._path is None or bins == self._bins:
            return
        self._bins = bins
        clocks = {"unix_s": time.time(), "up_s": time.monotonic(), "boot": _boot()}
        said: dict[str, Any] = {"schema": SCHEMA, **clocks, "kept": to_keep(state, now_s)}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            replace_text(self._path, json.dumps(said))
        except OSError as error:
            print(f"controller: {self._path}: cannot be written: {error.strerror}", file=sys.stderr)


def _age_s(said: Mapping[str, Any]) -> float:
    """Seconds since a file was written. Within one boot of a machine no set clock changes them."""
    if said.get("boot") and said["boot"] == _boot():
        return time.monotonic() - float(said["up_s"])
    return max(time.time() - float(said["unix_s"]), 0.0)


def _boot() -> str:
    """The running boot of this machine; empty where it is not Linux."""
    return BOOT.read_text(encoding="utf-8").strip() if BOOT.exists() else ""


def run(settings: ControllerSettings) -> None:
    """A round each heartbeat until the parent is gone."""
    plane = LivePlane(settings)
    folder = None if settings.data is None else Path(settings.data)
    file = DemandFile(None if folder is None else folder / "demand.json")
    log = FleetLog(None if folder is None else folder / "history")
    state = State(scaling=file.read(plane.settings.scaling, time.monotonic()))
    while os.getppid() == settings.parent:
        began_s = time.monotonic()
        try:
            state = run_round(plane, lambda *seen: tick(plane.settings, *seen), state)
            plane.need(state.scaling.needed)
            file.write(state.demand, began_s)
            plane.log(log, state.scaling, time.time())
        except OSError as error:
            print(f"controller: the control API does not answer: {error}", file=sys.stderr)
        time.sleep(max(0.0, HEARTBEAT_S - (time.monotonic() - began_s)))
    log.close()


def main() -> None:
    """Read the settings from stdin and run; do nothing where the parent ended before it wrote them."""
    os.setpgrp()  # Ctrl-C is for the fleet, which then ends this one
    use_kernel_cache()
    if settings := sys.stdin.read():
        run(CONTROLLER_SETTINGS.validate_json(settings))


if __name__ == "__main__":
    main()
