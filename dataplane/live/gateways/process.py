"""A gateway in a process of its own: vLLM's OpenAI server in front of a core in another process.

The fork server forks it, with its settings in JSON. Its listening socket is inherited and shared with the
other gateways. SIGTERM, or the core's word, makes it leave: it takes no more connections, serves what is
open, and ends.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import sys
from contextlib import suppress

from prometheus_client import values

from controlplane.errors import BadInput
from dataplane.http.keys import KeyRing
from dataplane.live.engine_api.vllm_surface import VllmCodec
from dataplane.live.gateway.middleware import DoorPolicy
from dataplane.live.gateway.server import Gateway, stop_accepting
from dataplane.live.gateways.remote_core import RemoteCore
from dataplane.live.gateways.wire import NOT_ACCEPTING, PROCESS_SETTINGS, Loads, ProcessSettings, Unwritten


class GatewayDoor:
    """The front door of this process, as its core calls it; `policy` is there once the core has answered."""

    policy: DoorPolicy

    def __init__(self, loads: Loads, index: int) -> None:
        self._loads, self._index = loads, index

    def close(self, why: str) -> None:
        self.policy.closing = why

    def retire(self, finish_s: float) -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # the way out is vLLM's

    def leave(self) -> None:
        self.policy.is_leaving = self._loads.has_left = True
        self._loads[self._index] = NOT_ACCEPTING
        if self.policy.server is not None:
            stop_accepting(self.policy.server)

    def core_gone(self) -> None:
        asyncio.get_running_loop().call_later(1.0, self.retire, 0.0)  # clients read their streams' errors

    def traffic(self) -> tuple[int, int]:
        if self.policy.server is None:
            return 0, 0
        state = self.policy.server.server_state
        return len(state.connections), len(state.tasks)


async def run(settings: ProcessSettings, unwritten: Unwritten) -> None:
    """Serve until told to leave. Raises BadInput where the core refuses this gateway."""
    loads = Loads(settings.loads)
    gateway, door = Gateway(settings.gateway), GatewayDoor(loads, settings.index)
    core = await RemoteCore.connect(settings.core, settings.name, VllmCodec(), door)
    gateway.prepare(core.welcome.kv_blocks)
    ring, welcome = KeyRing(settings.keys), core.welcome
    classes = {one.name: one.slo for one in welcome.classes}
    policy = DoorPolicy(
        ring, core.default_slo, core.allow, core.abandon, core, settings.page, classes, welcome.closing
    )
    door.policy = policy
    if (file := settings.gateway.keys_file) is not None:
        with suppress(BadInput):  # what was in force stays; the core has said so
            ring.reload(file)  # it may have changed since the fleet began
    following = asyncio.ensure_future(gateway.follow(ring, lambda kind, line: None))  # the core tells of it
    writing = asyncio.ensure_future(unwritten.keep_written())
    # A connection that is still open then is cut.
    with socket.socket(fileno=settings.listening) as listening, suppress(TimeoutError):
        await gateway.serve(core, policy, listening, (loads, settings.index))
    following.cancel()
    writing.cancel()
    unwritten.write()


def run_gateway(settings: bytes) -> int:
    """A gateway's whole life, as a job of a fork server: `settings` are PROCESS_SETTINGS; an exit code."""
    import uvloop

    told = PROCESS_SETTINGS.validate_json(settings)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # stdout is for the line of the core
    logging.getLogger("tokenfleet").setLevel("WARNING")
    logging.getLogger("torch").setLevel("ERROR")
    if (vllm := logging.getLogger("vllm")).getEffectiveLevel() == logging.WARNING:
        vllm.setLevel("ERROR")  # the core's process has printed the warnings of a start
    os.environ["PROMETHEUS_MULTIPROC_DIR"] = str(told.metrics)
    unwritten = Unwritten(values.MultiProcessValue())  # type: ignore[no-untyped-call]
    values.ValueClass = unwritten.value()
    try:
        uvloop.run(run(told, unwritten))
    except BadInput as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 1
    return 0
