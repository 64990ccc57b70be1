"""The processes of `tokenfleet serve`: supervisors and cores, a portfolio's front, and what all of them log.

vLLM and Ray are imported only once they are needed.
"""

from __future__ import annotations

import asyncio
import importlib.util
import json
import logging
import os
import secrets
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from socket import socket
from typing import TYPE_CHECKING

from controlplane.errors import BadInput
from dataplane.live.engine_api.processes import QUIET, Estate, Pulse, Record
from dataplane.startup import log_to_stderr

if TYPE_CHECKING:
    from dataplane.live.control.settings import FleetSettings
    from dataplane.live.portfolio.broker import FrontSettings
    from dataplane.processes.fork_server import Job

Say = Callable[[str], None]
Doors = tuple[socket, socket]
INSTALL = (
    "pip install --no-deps -r requirements/live-cpu.txt (on a GPU host: pip install 'tokenfleet[live-gpu]')"
)
# Warnings of every start on CPUs, of Ray in a thread, of a server's end, or of each request turned away, by
# their loggers: they read like faults. The fleet itself states why a request failed.
EXPECTED = {
    "vllm.platforms.cpu": ("Triton is not installed", "Reset SSM cache type"),
    "vllm.config.vllm": ("Model Runner V2 requires Triton",),
    "torch._library.triton": ("Triton not available",),
    "ray._private.worker": ("SIGTERM handler is not set",),
    "vllm.entrypoints.generate.base.serving": ("failed with an internal error",),
    "vllm.entrypoints.launchers.launcher": ("is used by process",),  # ours, which share a socket
}


def teller() -> Say:
    """Writes a line to stderr with the seconds since now. A terminal that is gone stops nothing."""
    began_s = time.monotonic()

    def tell(line: str) -> None:
        with suppress(OSError):
            print(f"{time.monotonic() - began_s:4.0f} s  {line}", file=sys.stderr, flush=True)

    return tell


def bound(host: str, port: int, control_host: str, control_port: int, held: ExitStack) -> Doors:
    """The bound sockets of an endpoint and its control API, until `held` is over; port 0 is any."""
    from dataplane.http.server import bind

    return (
        held.enter_context(bind(host, port, "--port")),
        held.enter_context(bind(control_host, control_port, "--control-port")),
    )


def supervise(settings: FleetSettings, doors: Doors, tell: Say) -> None:
    """Become the fork server of a fleet's processes, below a supervisor that takes this process's place."""
    from dataplane.live.control.supervisor import Supervised, run_supervised

    core, pulse = core_job(settings, doors, tell)
    jobs, own_ray = _shared_jobs([settings])
    sweeps = settings.engine == "vllm" and not own_ray
    run_supervised({"core": core, **jobs}, Supervised({"": pulse}, None, own_ray, sweeps))


def supervise_all(
    fleets: Mapping[str, tuple[FleetSettings, Doors]], front: FrontSettings, doors: Doors, tell: Say
) -> None:
    """The same for the fleets of a portfolio, by model, and the front before them."""
    from dataplane.live.control.supervisor import Supervised, run_supervised

    jobs, own_ray = _shared_jobs([settings for settings, _ in fleets.values()])
    pulse, pulses = Pulse(), {}
    for name, (settings, own_doors) in fleets.items():
        jobs[f"core {name}"], pulses[name] = core_job(settings, own_doors, tell, name)
    jobs["front"] = partial(_run_front, front, doors, pulse, tell)
    sweeps = "sweep" in jobs and not own_ray
    run_supervised(jobs, Supervised(pulses, pulse.descriptor, own_ray, sweeps))


def _shared_jobs(fleets: Sequence[FleetSettings]) -> tuple[dict[str, Job], bool]:
    """The jobs that cores order, and whether a Ray of this machine is to run."""
    import dataplane.live.control.fleet  # noqa: F401  # now: later an update may have changed the files
    from dataplane.live.gateways.process import run_gateway

    jobs: dict[str, Job] = {"gateway": run_gateway}
    if not any(settings.engine == "vllm" for settings in fleets):
        return jobs, False
    from dataplane.live.pool.ray_host import sweep

    def swept(own_ray: bytes) -> int:
        sweep(Path(own_ray.decode()))
        return 0

    return jobs | {"sweep": swept}, "RAY_ADDRESS" not in os.environ


def core_job(settings: FleetSettings, doors: Doors, tell: Say, name: str = "") -> tuple[Job, int]:
    """The job that is a whole core, and the descriptor of the pulse that it shows."""
    pulse, loads = Pulse(), os.memfd_create("tokenfleet-gateways")

    def core(told: bytes) -> int:
        order = json.loads(told)
        folder = Path(order["folder"])
        estate = Estate(order["number"], folder, *doors, loads, Record(folder / "record.json"), pulse)
        asked = settings
        if order["again"]:  # of what it had by then, others may have all but one worker's GPUs
            least = min(settings.types, key=lambda t: (t.usd_per_h or 0.0, t.gpus)).name
            share = {kind: int(kind == least) for kind in settings.types.names}
            asked = replace(settings, share=share, site=replace(settings.site, beside=()))
        return _run_core(asked, tell, name, estate)

    return core, pulse.descriptor


def _run_front(front: FrontSettings, doors: Doors, pulse: Pulse, tell: Say, _: bytes) -> int:
    """The front's whole life, in a process of its own."""
    from dataplane.live.portfolio.broker import run_front
    from tokenfleet.cli.main import exit_code

    def announce(line: str) -> None:
        if pulse.served:
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
            print(line, file=sys.__stdout__, flush=True)
            tell(f"console: {line.split()[-1]}/live (Ctrl-C stops the fleet)")
        else:
            told(line)

    def run() -> int:
        import uvloop

        sys.stdout = sys.stderr  # Ray prints there that an actor has died; stdout is for our one line
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
    user's home. It would run workers at niceness 15, which is meant for batch jobs on a desktop.
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
        "SAGEMAKER_CONTAINER_LOG_LEVEL": level,  # which vLLM's server gives the root logger, else ERROR
        # Longer than clients and balancers keep idle connections (60 s). A server that closes first loses the
        # requests that are on their way. vLLM's 5 s are soon over on a busy machine.
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": "75",
        "TOKENIZERS_PARALLELISM": "false",
        "RAY_COLOR_PREFIX": "0",  # its messages go to a log
        "RAY_ENABLE_AUTO_CONNECT": "0",  # a call that finds no Ray must not start another
        **({} if "RAY_ADDRESS" in os.environ else local_ray),
    }.items():
        os.environ.setdefault(name, value)
    log_to_stderr(named=verbose)
    logging.getLogger("tokenfleet").setLevel(logging.INFO)
    # What sets that level logs to stdout where it has no handler, and has news for SageMaker alone.
    logging.getLogger("model_hosting_container_standards").addHandler(logging.NullHandler())
    if not verbose:
        for name in EXPECTED:
            logging.getLogger(name).addFilter(_is_news)


def _is_news(record: logging.LogRecord) -> bool:
    """Whether a warning says more than every start on such a host says."""
    return not any(part in record.getMessage() for part in EXPECTED.get(record.name, ()))
