"""A `tokenfleet serve` process, as the tests drive it."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checkout import ROOT
from loaded_serve import ForkedServe

Served = subprocess.Popen[str] | ForkedServe


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@dataclass
class ServedFleet:
    """A `tokenfleet serve` process, and how to reach it."""

    process: Served
    gateway: str
    control: str
    log: Path
    trust: ssl.SSLContext | None = None
    key: str = ""

    def ask(self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Any:
        """The control API's JSON; raises urllib's HTTPError."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"authorization": f"Bearer {self.key}"} | (headers or {})
        request = urllib.request.Request(self.control + path, data, headers, method=method)
        request.add_header("content-type", "application/json")
        with urllib.request.urlopen(request, timeout=20, context=self.trust) as reply:
            return json.load(reply)

    def metric(self, name: str, **labels: str) -> float:
        """The sum of a metric's samples that carry these labels."""
        request = urllib.request.Request(
            f"{self.control}/metrics", headers={"authorization": f"Bearer {self.key}"}
        )
        with urllib.request.urlopen(request, timeout=20, context=self.trust) as reply:
            lines = reply.read().decode().splitlines()
        wanted = [f'{label}="{value}"' for label, value in labels.items()]
        found = [line for line in lines if line.split("{")[0].split(" ")[0] == name]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found if all(w in line for w in wanted))

    def told(self, *words: str) -> str:
        """What `tokenfleet fleet` with these words prints of it."""
        start = "import sys; from tokenfleet.cli.main import main; sys.exit(main())"
        command = [sys.executable, "-c", start, "fleet", "--control", self.control, *words]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=60, env={"COLUMNS": "300"}
        ).stdout

    def until(self, holds: Any, seconds: float = 60.0) -> Any:
        """Wait until `holds()` is true, and return it; the fleet is another process, so this looks."""
        deadline = time.monotonic() + seconds
        while not (value := holds()):
            assert time.monotonic() < deadline, f"did not happen; log:\n{self.log.read_text()[-3000:]}"
            time.sleep(0.02)
        return value

    def lines_of_end(self) -> list[str]:
        """What `serve` has printed of its end, without its clock."""
        lines = [line.partition(" s  ")[2] for line in self.log.read_text().splitlines()]
        return [line for line in lines if line.startswith("stop")]

    def stop(self) -> int:
        """End it as an operator would, and return its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        code = self.process.wait(timeout=60)
        if self.process.stdout is not None:
            self.process.stdout.close()
        return code


def serve(
    model: Path,
    *flags: str,
    engine_flags: tuple[str, ...] = (),
    folder: Path,
    environment: dict[str, str] | None = None,
    trust: ssl.SSLContext | None = None,
    key: str = "",
) -> ServedFleet:
    """Start `tokenfleet serve` and return once it says that it is ready.

    Over TLS its control API is asked with `trust`, and with `key` where it has keys.

    It keeps its files under `folder`, unless `environment` says otherwise. That adds to our environment.
    """
    gateway, control = free_port(), free_port()
    log = folder / f"serve-{gateway}.log"
    ports = ("--port", str(gateway), "--control-port", str(control))
    words = ["serve", "--model", str(model), *ports, *flags, "--", *engine_flags]
    known = os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    known |= {"TOKENFLEET_DATA": str(folder / "data")} | (environment or {})
    with log.open("w") as errors:
        process: Served
        if "emulated" in flags and environment is None:
            process = ForkedServe(words, log, known)
        else:
            command = [sys.executable, "-m", "tokenfleet", *words]
            process = subprocess.Popen(
                command,
                cwd=ROOT,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                process_group=0,
                env=known,
            )
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line.startswith("ready "), f"serve said {line!r}; log:\n{log.read_text()[-4000:]}"
    _, gateway_url, _, control_url = line.split()
    return ServedFleet(process, gateway_url, control_url, log, trust, key)
