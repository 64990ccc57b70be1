"""A `tokenfleet api` process that an experiment starts, asks, kills and starts again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

from experiments.lib.public_data import ROOT
from harness.served import free_port


class Service:
    """A `tokenfleet api` on one port and folder, however often it is killed."""

    def __init__(self, data: Path, parallel: int, *flags: str) -> None:
        self.port, self.data = free_port(), data
        self._flags = ["--port", str(self.port), "--data", str(data), "--parallel", str(parallel), *flags]
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        """Start it and return once it answers."""
        run = [
            sys.executable,
            "-m",
            "tokenfleet",
            "api",
        ]
        self._process = subprocess.Popen(
            [*run, *self._flags],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.startswith("ready "):
            raise SystemExit(f"tokenfleet api did not start: {line!r}")

    def end(self, sign: int) -> None:
        """Send a signal and wait for its end."""
        if self._process is not None:
            self._process.send_signal(sign)
            self._process.wait(timeout=60)
            assert self._process.stdout is not None
            self._process.stdout.close()
            self._process = None

    def ask(self, method: str, path: str, body: Any = None, **headers: str) -> Any:
        """The reply's JSON; asked again for a while when nobody answers, as a client would."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        for _ in range(600):
            request = urllib.request.Request(
                f"http://127.0.0.1:{self.port}{path}",
                None if body is None else json.dumps(body).encode(),
                {"content-type": "application/json"} | named,
                method=method,
            )
            try:
                with urllib.request.urlopen(request, timeout=30) as reply:
                    return json.load(reply)
            except urllib.error.HTTPError as error:
                if error.code != 429:
                    raise SystemExit(f"{method} {path}: {error.code} {error.read().decode()}") from None
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                pass
            time.sleep(0.1)
        raise SystemExit("the service does not come back")
