"""Helper processes of the service: they end with the process that asked, and one makes scorecards.

A scorecard's replays take processor time that a gateway must not lose. Folder and plan are arguments; stdout
has one line, the scorecard or `{"error", "unknown"}`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from controlplane.errors import BadInput, ControlPlaneError
from dataplane.http.rules import UnknownName
from dataplane.kernel_cache import use_kernel_cache


def end_with_asker() -> None:
    """From now on this process ends, with code 3, once the other end of its stdin is closed.

    However that one ends: the kernel closes its pipes.
    """

    def wait() -> None:
        sys.stdin.buffer.read()
        os._exit(3)

    threading.Thread(target=wait, name="end-with-asker", daemon=True).start()


TIMEOUT_S = 300.0
NICENESS = 5
ROOT = str(Path(__file__).resolve().parents[2])


def scorecard_beside(data: Path, plan: str) -> dict[str, Any]:
    """`scorecard_of` in another process. Raises what it raises, BadInput when it takes too long."""
    with subprocess.Popen(
        [sys.executable, "-m", "tokenfleet.service.score_process", str(data), plan],
        stdin=subprocess.PIPE,  # held open until it is done, see end_with_asker
        stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([ROOT, os.environ.get("PYTHONPATH", "")])},
    ) as process:
        limit = threading.Timer(TIMEOUT_S, process.kill)
        limit.start()
        assert process.stdout is not None
        text = process.stdout.read()
        limit.cancel()
    try:
        said: dict[str, Any] = json.loads(text)
    except ValueError:
        how = f"code {process.returncode}" if process.returncode >= 0 else f"signal {-process.returncode}"
        raise BadInput(f"scorecard: its process was ended by {how}; it may take {TIMEOUT_S:g} s") from None
    if "error" in said:
        raise UnknownName(said["error"]) if said["unknown"] else BadInput(said["error"])
    return said


def main() -> int:
    """Print the scorecard."""
    os.nice(NICENESS)
    end_with_asker()
    use_kernel_cache()
    from tokenfleet.service.scorecard import scorecard_of

    try:
        said = scorecard_of(Path(sys.argv[1]), sys.argv[2])
    except ControlPlaneError as error:
        said = {"error": " ".join(str(error).split()), "unknown": isinstance(error, UnknownName)}
    print(json.dumps(said, allow_nan=False))
    return 0


if __name__ == "__main__":
    sys.exit(main())
