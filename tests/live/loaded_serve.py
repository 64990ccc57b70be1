"""A process that has loaded what `tokenfleet serve` loads, and forks emulated fleets from itself.

Each fleet of its own process would load vLLM for ten seconds of CPU time. Fleets of real engines, and one of
emulated ones (`test_serve_command`), begin as an operator's do: Ray reads its settings while it is loaded.

    python -m loaded_serve SOCKET
"""

from __future__ import annotations

import atexit
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import TextIO

from checkout import ROOT

from dataplane.processes.fork_server import PR_SET_PDEATHSIG, SIGNS, ask_kernel, serve_forks

START_S = 300.0


class ForkedServe:
    """A `tokenfleet serve` that was forked, as much of it as tests ask of `subprocess.Popen`."""

    def __init__(self, words: Sequence[str], stderr: Path, environment: dict[str, str]) -> None:
        server = _server()
        self._answers = socket.socket(socket.AF_UNIX)
        self._answers.connect(str(server))
        stdout = server.with_name("stdout")
        os.mkfifo(stdout)
        order = {"words": words, "stdout": str(stdout), "stderr": str(stderr), "environment": environment}
        self._answers.sendall(b"serve\n" + json.dumps(order).encode())
        self._answers.shutdown(socket.SHUT_WR)
        told = b""
        while not told.endswith(b"\n"):  # no further: the exit code follows
            told += self._answers.recv(1)
        self.pid, self.returncode = int(told), None
        self.stdout: TextIO | None = stdout.open()
        stdout.unlink()

    def poll(self) -> int | None:
        return self._ended(0.0)

    def wait(self, timeout: float) -> int:
        if (code := self._ended(timeout)) is None:
            raise subprocess.TimeoutExpired("serve", timeout)
        return code

    def send_signal(self, sign: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sign)

    def _ended(self, seconds: float) -> int | None:
        if self.returncode is None and select.select([self._answers], [], [], seconds)[0]:
            self.returncode = int(self._answers.recv(16))
            self._answers.close()
        return self.returncode


@cache
def _server() -> Path:
    """The socket of this process's server, which ends with it."""
    folder = Path(tempfile.mkdtemp(prefix="tokenfleet-loaded-", dir="/tmp"))  # its path must be short
    atexit.register(shutil.rmtree, folder)
    at, here = folder / "orders", Path(__file__).parent
    known = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT, here, here.parent / "builders")))}
    process = subprocess.Popen([sys.executable, "-m", "loaded_serve", str(at)], cwd=ROOT, env=known)
    atexit.register(process.wait)
    atexit.register(process.kill)
    until_s = time.monotonic() + START_S
    while not at.exists():
        assert process.poll() is None
        assert time.monotonic() < until_s
        time.sleep(0.02)
    return at


def _serve(told: bytes) -> int:
    from tokenfleet.cli.main import main

    order = json.loads(told)
    for descriptor, path in ((1, order["stdout"]), (2, order["stderr"])):
        opened = os.open(path, os.O_WRONLY)
        os.dup2(opened, descriptor)
        os.close(opened)
    os.environ.clear()
    os.environ.update(order["environment"])
    sys.argv = ["tokenfleet", *order["words"]]
    return main()


def run(at: str) -> None:
    from dataplane.startup import loading, use_kernel_cache
    from tokenfleet.cli.serve.processes import prepare_process

    ask_kernel(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.environ["HF_HUB_OFFLINE"] = "1"
    use_kernel_cache()
    prepare_process(False)
    with loading():
        import dataplane.live.control.fleet
        import dataplane.live.control.supervisor
        import dataplane.live.gateway.server
        import dataplane.live.gateways.process
        import dataplane.live.portfolio.broker  # noqa: F401
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNS)
    serve_forks(Path(at), {"serve": _serve})


if __name__ == "__main__":
    run(sys.argv[1])
