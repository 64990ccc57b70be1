"""A fleet's own Ray on this machine, as a program: it starts Ray, writes its address, ends with its parent.

It imports Ray and nothing else of weight: it only waits. The supervisor runs it as
`python -m dataplane.live.pool.own_ray FILE`. The file gets Ray's address, or an empty line and then the
reason why there is none.
"""

from __future__ import annotations

import logging
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path

import psutil
import ray

from dataplane.live.engine_api.processes import replace_text
from dataplane.processes.fork_server import PR_SET_PDEATHSIG, ask_kernel
from dataplane.startup import log_to_stderr

log = logging.getLogger("tokenfleet.ray")
STARTS = 3
OBJECT_STORE_BYTES = 80 << 20  # nothing of ours travels through it; Ray's least is 75 MiB


def keep_own_ray(own: Path) -> None:
    """Run a local Ray until SIGTERM; the file `own` says where it is, or what has hindered it.

    At the end its processes are killed: Ray would wait several seconds for them, and what is left on it sees
    it.
    """
    said, done = "", threading.Event()
    for attempt in range(1, STARTS + 1):
        try:
            said = _start(own.parent / "ray")
            break
        except (ConnectionError, ValueError, RuntimeError, OSError) as error:
            ray.shutdown()  # its processes are slow to come up on a busy host; what did come up ends here
            said = f"\ndid not start in {attempt} attempts: {error}"
            log.warning("Ray did not start (%s); trying again", error)
    signal.signal(signal.SIGTERM, lambda *_: done.set())
    replace_text(own, said)
    done.wait()
    for process in psutil.Process().children():  # not the workers below them, which end by themselves
        with suppress(psutil.NoSuchProcess):
            process.kill()


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
    keep_own_ray(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
