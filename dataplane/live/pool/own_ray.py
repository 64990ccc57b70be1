"""A fleet's own Ray on this machine, as a program: it starts Ray, writes its address, ends with its parent.

It imports Ray and nothing else of weight: it only waits. The supervisor runs it as
`python -m dataplane.live.pool.own_ray FILE`. The file gets Ray's address, or an empty line and then the
reason why there is none. It ends once one of Ray's daemons has ended, and the supervisor starts it again.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import sys
from contextlib import suppress
from pathlib import Path

import psutil
import ray

from dataplane.live.engine_api.processes import replace_text
from dataplane.processes.fork_server import PR_SET_PDEATHSIG, ask_kernel
from dataplane.startup import log_to_stderr

log = logging.getLogger("tokenfleet.ray")
STARTS = 3
DAEMONS = {"gcs_server", "raylet"}
AGAIN_S = 30.0  # the cores have read by then why there is none
OBJECT_STORE_BYTES = 80 << 20  # nothing of ours travels through it; Ray's least is 75 MiB


def keep_own_ray(own: Path) -> int:
    """Run a local Ray until SIGTERM, or until a daemon of it ends; the exit code.

    The file `own` says where it is, or what has hindered it. At the end its processes are killed: Ray would
    wait several seconds for them, and what is left on it sees it.
    """
    said = ""
    for attempt in range(1, STARTS + 1):
        try:
            said = _start(own.parent / "ray")
            break
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            ray.shutdown()  # its processes are slow to come up on a busy host; what did come up ends here
            said = f"\ndid not start in {attempt} attempts: {error}"
            log.warning("Ray did not start (%s); trying again", error)
    asked, (waking, woken) = [], os.pipe()

    def end(sign: int, _: object) -> None:
        asked.append(sign)
        os.write(woken, b"\0")

    signal.signal(signal.SIGTERM, end)
    daemons = {os.pidfd_open(one.pid): one.name() for one in _children() if one.name() in DAEMONS}
    replace_text(own, said)
    lost, _, _ = select.select([waking, *daemons], [], [], None if daemons else AGAIN_S)
    if daemons and not asked:
        log.warning("Ray's %s has died, and its workers end", " and ".join(daemons[one] for one in lost))
    for process in _children():  # not the workers below them, which end by themselves
        with suppress(psutil.NoSuchProcess):
            process.kill()
    return 0 if asked else 1


def _children() -> list[psutil.Process]:
    return list(psutil.Process().children())


def _start(folder: Path) -> str:
    ray.init(
        address="local",
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        logging_level="WARNING",
        _temp_dir=str(folder),
        # A worker has an environment and so a process of its own. By default Ray also keeps an idle process
        # for each core: 80 MB and half a percent of a core each.
        _system_config={"prestart_worker_first_driver": False},
    )
    return str(ray.get_runtime_context().gcs_address)


def main() -> None:
    """Run it; the file is the only argument."""
    log_to_stderr()
    ask_kernel(PR_SET_PDEATHSIG, signal.SIGTERM)
    os._exit(keep_own_ray(Path(sys.argv[1])))  # Ray's own end would wait for its daemons


if __name__ == "__main__":
    main()
