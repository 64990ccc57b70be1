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
from typing import Any

from prometheus_client import values

from controlplane.errors import BadInput
from dataplane.http.keys import KeyRing
from dataplane.live.engine_api.vllm_surface import VllmCodec
from dataplane.live.gateway.middleware import DoorPolicy
from dataplane.live.gateway.server import Gateway, stop_accepting
from dataplane.live.gateways.remote_core import RemoteCore
from dataplane.live.gateways.shared import NOT_ACCEPTING, PROCESS_SETTINGS, Loads, ProcessSettings, Unwritten


def traffic(server: Any) -> tuple[int, int]:
    """A uvicorn server's open connections, and the requests in progress."""
    return (
        (0, 0) if server is None else (len(server.server_state.connections), len(server.server_state.tasks))
    )


async def run(settings: ProcessSettings, unwritten: Unwritten) -> None:
    """Serve until told to leave. Raises BadInput where the core refuses this gateway."""
    loop, loads = asyncio.get_running_loop(), Loads(settings.loads)
    gateway = Gateway(settings.gateway)
    core = await RemoteCore.connect(settings.core, settings.name, VllmCodec())
    gateway.prepare(core.welcome.kv_blocks)
    ring = KeyRing(settings.keys)
    door = DoorPolicy(
        ring, core.default_slo, core.allow, core.abandon, core, settings.page, core.welcome.closing
    )
    door.classes = {one.name: one.slo for one in core.welcome.classes}

    def leave() -> None:
        door.is_leaving = loads.has_left = True
        loads[settings.index] = NOT_ACCEPTING
        if door.server is not None:
            stop_accepting(door.server)

    def give_up() -> None:
        loop.call_later(1.0, end)  # clients read their streams' errors meanwhile

    def end() -> None:
        os.kill(os.getpid(), signal.SIGTERM)  # the way out is vLLM's

    core.on_closing.append(lambda why: setattr(door, "closing", why))
    core.on_leaving.append(leave)
    core.on_retire.append(lambda finish_s: end())
    core.on_gone.append(give_up)
    core.traffic = lambda: traffic(door.server)
    if (file := settings.gateway.keys_file) is not None:
        with suppress(BadInput):  # what was in force stays; the core has said so
            ring.reload(file)  # it may have changed since the fleet began
    following = asyncio.ensure_future(gateway.follow(ring, lambda kind, line: None))  # the core tells of it
    writing = asyncio.ensure_future(unwritten.keep_written())
    # A connection that is still open then is cut.
    with socket.socket(fileno=settings.listening) as listening, suppress(TimeoutError):
        await gateway.serve(core, door, listening, (loads, settings.index))
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
