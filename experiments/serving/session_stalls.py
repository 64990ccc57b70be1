"""How long does a process wait for a processor while engines in the same, or in another session compute?

    python experiments/serving/session_stalls.py [--quick] [--format table|json]

Linux may share processors out by session (`/proc/sys/kernel/sched_autogroup_enabled`). Two real workers serve
six streams; beside them one process computes and four only sleep, 10 ms at a time, all in the fleet's session
or all in another. A sleeper's wait is what a sleep takes beyond its 10 ms: what a controller, a gateway or a
client in its place would wait.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from experiments.lib.results import bar, flags, show
from harness.served import Server, fleet, session, stream, tiny_model

SETTING = Path("/proc/sys/kernel/sched_autogroup_enabled")
STREAMS, TOKENS, SLEEPERS = 6, 1500, 4
SLEEPER = """
import json, sys, time
waits = []
end = time.time() + float(sys.argv[1])
while time.time() < end:
    begun = time.perf_counter()
    time.sleep(0.01)
    waits.append(time.perf_counter() - begun - 0.01)
waits.sort()
print(json.dumps({"p99_s": waits[int(0.99 * len(waits))], "worst_s": waits[-1]}))
"""
COMPUTES = "import sys, time\nend = time.time() + float(sys.argv[1])\nwhile time.time() < end: pass"


async def served(server: Server, seconds: float) -> None:
    """Streams, one after another in each of six places, until so many seconds are over."""
    clock = asyncio.get_running_loop().time
    until_s = clock() + seconds
    async with session() as http:

        async def place(i: int) -> None:
            while clock() < until_s:
                body = {"prompt": [5 + i] * 20, "max_tokens": TOKENS}
                await stream(http, server.gateway, body)

        await asyncio.gather(*(place(i) for i in range(STREAMS)))


def waits(server: Server, seconds: float, is_apart: bool) -> dict[str, Any]:
    """The worst waits of sleepers beside the fleet, in its session or `is_apart`."""

    def begin(code: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", code, str(seconds)]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=is_apart)

    busy, sleepers = begin(COMPUTES), [begin(SLEEPER) for _ in range(SLEEPERS)]
    asyncio.run(served(server, seconds))
    told = [json.loads(sleeper.communicate()[0]) for sleeper in sleepers]
    busy.communicate()
    row: dict[str, Any] = {"session": "another" if is_apart else "the fleet's"}
    return row | {name: max(t[name] for t in told) for name in ("p99_s", "worst_s")}


def main() -> int:
    asked = flags(__doc__).parse_args()
    seconds = 12.0 if asked.quick else 40.0
    with tiny_model() as model, fleet(model, "--workers", "2") as server:
        rows = [waits(server, seconds, is_apart) for is_apart in (False, True)]
    setting = SETTING.read_text().strip() if SETTING.exists() else "none"
    rows.append({"session": f"sched_autogroup_enabled: {setting}"})
    return show("session_stalls", rows, {"in one session (s)": bar(rows[0]["worst_s"], 0.5)}, asked)


if __name__ == "__main__":
    sys.exit(main())
