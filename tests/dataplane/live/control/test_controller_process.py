"""The controller's process, as the core keeps it."""

import asyncio
import math
import signal
import time

import pytest

from dataplane.live.control import controller_process
from dataplane.live.control.controller_process import ControllerProcess
from dataplane.live.gateway.events import EventLog


class Kept:
    """A process that notes the signals that it is sent."""

    pid, returncode = 1, None

    def __init__(self) -> None:
        self.signals: list[int] = []

    def send_signal(self, sign: int) -> None:
        self.signals.append(sign)


@pytest.mark.parametrize(
    ("looked_s", "killed"),
    [
        pytest.param(-1.0, False, id="one that has not looked yet, which may compile"),
        pytest.param(1.0, True, id="one that looked, and hangs"),
        pytest.param(math.inf, False, id="one that looks"),
    ],
)
def test_a_controller_that_hangs_is_killed(
    monkeypatch: pytest.MonkeyPatch, looked_s: float, killed: bool
) -> None:
    monkeypatch.setattr(controller_process, "LOOK_S", 0.0)
    monkeypatch.setattr(controller_process, "SILENT_S", 0.0)

    async def watched() -> list[int]:
        of, process = ControllerProcess(EventLog()), Kept()
        of._keeper.process, of._began_s = process, time.monotonic() - 100.0  # type: ignore[assignment]
        watching = asyncio.ensure_future(of.watch(lambda: of._began_s + looked_s))
        for _ in range(10):
            await asyncio.sleep(0)
        watching.cancel()
        return process.signals

    signals = asyncio.run(watched())
    assert set(signals) == ({signal.SIGKILL} if killed else set())
