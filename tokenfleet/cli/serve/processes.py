"""The processes of `tokenfleet serve`: supervisors and cores, a portfolio's front, and what all of them log.

vLLM and Ray are imported only once they are needed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING

from controlplane.errors import BadInput
from dataplane.live.engine_api.processes import QUIET

if TYPE_CHECKING:
    from dataplane.live.control.fleet import FleetSettings
    from dataplane.live.engine_api.processes import Estate, Pulse
    from dataplane.live.portfolio.broker import FrontSettings

Say = Callable[[str], None]
Doors = tuple[socket, socket]
INSTALL = (
    "pip install --no-deps -r requirements/live-cpu.txt (on a GPU host: pip install 'tokenfleet[live-gpu]')"
)
# Warnings of every start on CPUs, of Ray in a thread, or of a server's end, by the logger they come from:
# they read like faults.
EXPECTED = {
    "vllm.platforms.cpu": ("Triton is not installed", "Reset SSM cache type"),
    "vllm.config.vllm": ("Model Runner V2 requires Triton",),
    "torch._library.triton": ("Triton not available",),
    "ray._private.worker": ("SIGTERM handler is not set",),
    "vllm.entrypoints.launchers.launcher": ("is used by process",),  # ours, which share a socket
}


def teller() -> Say:
    """Writes a line to stderr with the seconds since now."""
    began_s = time.monotonic()

    def tell(line: str) -> None:
        print(f"{time.monotonic() - began_s:4.0f} s  {line}", file=sys.stderr, flush=True)

    return tell


def bound(host: str, port: int, control_host: str, control_port: int, held: ExitStack) -> Doors:
    """The bound sockets of an endpoint and its control API, until `held` is over; port 0 is any."""
    from dataplane.http.server import bind

    return (
        held.enter_context(bind(host, port, "--port")),
        held.enter_context(bind(control_host, control_port, "--control-port")),
    )


def supervise(
    settings: FleetSettings, doors: Doors, tell: Say, name: str = "", ray: Path | None = None
) -> int:
    """Run one core after another until the fleet is told to end; the last one's exit code.

    `ray`: of a portfolio, the file in which the Ray of all says where it is.
    """
    from dataplane.live.control.processes import Supervisor
    from dataplane.live.pool.ray_host import keep_own_ray, sweep

    has_ray, is_own = settings.engine == "vllm", "RAY_ADDRESS" not in os.environ
    own_ray = keep_own_ray if ray is None else lambda own: own.symlink_to(ray)
    left = sweep if has_ray and not is_own else None
    core = partial(_run_core, settings, tell, name)
    return Supervisor(*doors, core, own_ray if has_ray and is_own else None, left).run()


def supervise_all(
    fleets: Mapping[str, tuple[FleetSettings, Doors]], front: FrontSettings, doors: Doors, tell: Say
) -> int:
    """Run the fleets of a portfolio, by model, and the front before them until told to end; an exit code."""
    from dataplane.live.control.processes import Household
    from dataplane.live.engine_api.processes import OWN_RAY, Pulse
    from dataplane.live.pool.ray_host import keep_own_ray

    def fleet(name: str, folder: Path) -> int:
        settings, own_doors = fleets[name]
        begun = folder / name
        if begun.exists():  # of what it had by then, others may have all but one worker's GPUs
            settings = replace(settings, share=1, site=replace(settings.site, beside=()))
        begun.touch()
        return supervise(settings, own_doors, tell, name, folder / OWN_RAY)

    has_ray = any(settings.engine == "vllm" for settings, _ in fleets.values())
    own_ray = keep_own_ray if has_ray and "RAY_ADDRESS" not in os.environ else None
    pulse = Pulse()
    run_front = partial(_run_front, front, doors, pulse, tell)
    return Household({name: partial(fleet, name) for name in fleets}, run_front, pulse, own_ray).run()


def _run_front(front: FrontSettings, doors: Doors, pulse: Pulse, tell: Say, _: Path) -> int:
    """The front's whole life, in a process of its own."""
    from dataplane.live.portfolio.broker import run_front
    from tokenfleet.cli.main import exit_code

    def announce(line: str) -> None:
        if pulse.has_served:
            tell(line)
        else:
            print(line, flush=True)

    def run() -> int:
        import uvloop

        uvloop.run(run_front(front, doors, pulse, announce))
        return 0

    return exit_code(run)


def _run_core(settings: FleetSettings, tell: Say, name: str, estate: Estate) -> int:
    """A core's whole life, in a process of its own. `name`: of its model in a portfolio."""
    from dataplane.live.control.fleet import run_fleet
    from tokenfleet.cli.main import INTERRUPTED, exit_code

    def told(line: str) -> None:
        tell(f"{name}: {line}" if name else line)

    def announce(line: str) -> None:
        if estate.number == 1 and not name:
            print(line, flush=True)
            tell(f"console: {line.split()[-1]}/live (Ctrl-C stops the fleet)")
        else:
            told(line)

    def run() -> int:
        import uvloop

        try:
            uvloop.run(run_fleet(settings, estate, announce, told))
        except asyncio.CancelledError:  # told to stop before it could answer; who told it says so
            return INTERRUPTED
        except RuntimeError as error:
            raise BadInput(f"serve: {name and name + ': '}{error}") from error
        except BadInput as error:
            raise BadInput(f"{name and name + ': '}{error}") from None
        return 0

    return exit_code(run)


def needs_live_extra() -> None:
    """Raise BadInput, with the command that installs them, unless vLLM and Ray can be imported."""
    missing = [name for name in ("vllm", "ray") if importlib.util.find_spec(name) is None]
    if missing:
        raise BadInput(f"serve: {' and '.join(missing)} not installed; {INSTALL}")


def prepare_process(verbose: bool) -> None:
    """Logs to stderr and no telemetry to anyone, for this process and all it will start.

    Before Ray is imported: it reads its settings then. Left alone it would keep its cluster's token in the
    user's home, and run workers at niceness 15, which is meant for batch jobs beside a desktop.
    """
    local_ray = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_worker_niceness": "0",
    }
    level = "INFO" if verbose else "WARNING"
    for name, value in {
        **QUIET,
        "VLLM_LOGGING_LEVEL": level,
        # Longer than clients and balancers keep idle connections (60 s): a server that closes first loses the
        # requests that are on their way, and vLLM's 5 s are soon over on a busy machine.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",
        "TOKENIZERS_PARALLELISM": "false",
        **({} if "RAY_ADDRESS" in os.environ else local_ray),
    }.items():
        os.environ.setdefault(name, value)
    logging.basicConfig(stream=sys.stderr, level=level, format="%(levelname)s %(name)s: %(message)s")
    logging.getLogger("tokenfleet").setLevel(logging.INFO)
    if not verbose:
        for name in EXPECTED:
            logging.getLogger(name).addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a warning says more than every start on such a host says."""
    return not any(part in record.getMessage() for part in EXPECTED.get(record.name, ()))
