"""What a controller costs the gateway's event loop: 200 emulated workers, 4,096 requests in flight.

FleetCore, the emulated engines and the control API share one loop, as in `serve`; the controller is the
fleet's own process. Each callback of the loop is timed and counted for the part of the program that began it:

    control     the control API (its HTTP, its answers), and what the controller has the fleet do
    telemetry   what is learned from the workers' loads
    history     what is kept of their steps, and of requests that end
    queue       looks at what waits for a worker
    engines     the emulated engines themselves, which are other processes in a real fleet
    gateway     tokens in and out

Shares: processor time over the wall clock's. `late`: how much later than asked a sleeper of 5 ms woke.
"""

from __future__ import annotations

import asyncio
import contextvars
import gc
import os
import sys
import tempfile
import time
from asyncio import events as asyncio_events
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.profile import Profile, Residuals, Source
from controlplane.perfmodel.step import StepModel
from controlplane.placement.lengths import LengthTable
from controlplane.placement.queue import QueueSettings
from controlplane.types import Slo
from controlplane.worker_type import WorkerGroup, WorkerType
from dataplane.http.keys import KeyRing
from dataplane.http.server import QuietServer, bind, until_answering
from dataplane.live.control.api import control_app
from dataplane.live.control.controller_process import ControllerProcess, ControllerSettings
from dataplane.live.control.fleet_state import DemandCount
from dataplane.live.control.operations import Operations
from dataplane.live.control.step_times import StepTimes
from dataplane.live.emulated.segment import Noise
from dataplane.live.gateway.events import EventLog
from dataplane.live.gateway.fleet_core import CoreSettings, FleetCore
from dataplane.live.gateway.history import History
from dataplane.live.gateway.metrics import Metrics
from dataplane.live.ledger.placement import Placement
from dataplane.live.ledger.request import CURRENT_TICKET, Ticket
from dataplane.live.pool.emulated_host import EmulatedHost
from dataplane.live.pool.fleet_types import FleetTypes
from dataplane.live.pool.pool import WorkerPool
from experiments.lib.results import bar, flags, show
from harness.bare_fleet import bare_facts, token_request

SHARE = 0.02
PROBE_S = 0.005
SLO = Slo(10.0, 2.0)
PART: contextvars.ContextVar[str] = contextvars.ContextVar("part", default="gateway")
CONTROL_PARTS = ("control", "telemetry", "history")


def a_profile(step_s: float) -> Profile:
    """Workers whose step takes so long whatever it carries, with seats and KV for more than they get."""
    return Profile(
        "any", "none", 1, StepModel(step_s, 1e-7, 1e-6, 1e-9), KvModel(200_000), EngineLimits(max_seqs=256),
        Residuals(0.0, 0.0, 0.0, 1), Source("composed", "a benchmark", "none", "2026-01-01"),
    )  # fmt: skip


class Account:
    """Seconds of the loop by part."""

    def __init__(self) -> None:
        self.spent_s: Counter[str] = Counter()
        self.late_s: list[float] = []
        self._inner_s = 0.0  # of what is counted for itself within a callback

    def watch(self) -> None:
        """Time each callback of every loop from now on."""
        run = asyncio_events.Handle._run

        def timed(handle: Any) -> None:
            inner_s, began_s = self._inner_s, time.thread_time()
            run(handle)
            took_s = time.thread_time() - began_s - (self._inner_s - inner_s)
            self.spent_s[handle._context.get(PART, "gateway")] += took_s

        asyncio_events.Handle._run = timed  # type: ignore[method-assign]

    def counted(self, part: str, call: Callable[..., None]) -> Callable[..., None]:
        """The call, its time counted for a part."""

        def timed(*arguments: Any) -> None:
            began_s = time.thread_time()
            call(*arguments)
            took_s = time.thread_time() - began_s
            self.spent_s[part] += took_s
            self._inner_s += took_s

        return timed

    async def probe(self) -> None:
        """Sleep and wake, and note how late."""
        while True:
            began_s = time.perf_counter()
            await asyncio.sleep(PROBE_S)
            self.late_s.append(time.perf_counter() - began_s - PROBE_S)


def of(part: str, call: Callable[..., Any], *arguments: Any) -> Any:
    """Call, in a context whose tasks and callbacks count for `part`."""
    context = contextvars.copy_context()
    context.run(PART.set, part)
    return context.run(call, *arguments)


class Clients:
    """So many requests in flight: one that ends is followed by another."""

    def __init__(self, core: FleetCore, rng: np.random.Generator) -> None:
        self.core, self._rng, self._sent = core, rng, 0
        self.tokens = 0

    async def send(self, tokens: int) -> None:
        """Send a request for so many tokens."""
        self._sent += 1
        name = f"chatcmpl-{self._sent:08x}-0123456789abcdef"
        CURRENT_TICKET.set(Ticket(name, "anyone", SLO, int(self._sent % 10 == 0)))
        prompt = [7] * int(self._rng.integers(20, 400))
        await self.core.add_request_async(token_request(name, prompt, {"max_tokens": tokens}))

    async def read(self, output_tokens: int) -> None:
        """Read the fleet's outputs for ever."""
        while True:
            batch = await self.core.get_output_async()
            for output in batch.outputs:
                self.tokens += len(output.new_token_ids)
                if output.finish_reason is not None:
                    await self.send(int(self._rng.integers(output_tokens // 2, output_tokens * 3 // 2)))


async def measured(asked: Any) -> dict[str, Any]:
    """One fleet under load, for so long; its row."""
    account, events, metrics = Account(), EventLog(), Metrics()
    account.watch()
    profile = a_profile(asked.step_ms / 1e3)
    kind = WorkerType.of(profile)
    types = FleetTypes([WorkerGroup(kind, asked.workers)])
    step_times = StepTimes({kind.name: profile}, events)
    placement = Placement(
        {kind.name: profile}, asked.workers, LengthTable.constant(asked.output), np.random.default_rng(0)
    )
    folder = tempfile.TemporaryDirectory(prefix="tokenfleet-heartbeat-")
    history = History(asked.output, Path(folder.name), "any")
    core = of(
        "queue", FleetCore, CoreSettings(asked.workers, SLO, QueueSettings()), placement, metrics, events,
        history.expected_tokens, history.expected_tokens,
    )  # fmt: skip
    core.on_end.append(account.counted("history", history.add))
    core.on_step.append(account.counted("history", history.add_step))
    core.on_step.append(account.counted("telemetry", step_times.add))
    step_times.attached = lambda: {at.worker for at in core.attached()}
    step_times.kind_of = core.kind_of
    arrived = DemandCount()
    core.on_arrival.append(arrived.add)
    host = EmulatedHost({kind.name: profile}, 8192, Noise())
    launch = host.launch
    host.launch = lambda *what: of("engines", asyncio.ensure_future, launch(*what))  # type: ignore[method-assign]
    pool = WorkerPool(host, core, asked.workers, types)
    await pool.start()
    facts = bare_facts()
    operations = Operations(facts, core, pool, arrived, step_times)
    server = QuietServer(control_app(operations, KeyRing(())))
    listening = bind("127.0.0.1", 0, "port")
    port = listening.getsockname()[1]
    serving = of("control", asyncio.ensure_future, server.serve(sockets=[listening]))
    await until_answering("127.0.0.1", port, serving)
    gc.collect()
    gc.freeze()  # as vLLM's server does when it starts
    clients = Clients(core, np.random.default_rng(asked.seed))
    reading = asyncio.ensure_future(clients.read(asked.output))
    for i in range(asked.requests):
        await clients.send(asked.output // 2 + i % asked.output)  # they do not end all at once
        if i % 50 == 0:
            await asyncio.sleep(0)
    settings = ControllerSettings(f"http://127.0.0.1:{port}", None, False, os.getpid(), (kind,), None, None)
    controller = ControllerProcess(events)
    controller.tell(settings)
    of("control", controller.start)
    await asyncio.sleep(asked.warm_s)
    probing = asyncio.ensure_future(account.probe())
    account.spent_s.clear()
    clients.tokens, began_s = 0, time.perf_counter()
    await asyncio.sleep(asked.for_s)
    wall_s = time.perf_counter() - began_s
    row = {f"{part}_share": round(spent_s / wall_s, 4) for part, spent_s in sorted(account.spent_s.items())}
    late_ms = np.percentile(account.late_s, (50, 99, 100)) * 1e3
    row |= dict(zip(("late_p50_ms", "late_p99_ms", "late_max_ms"), late_ms.round(1).tolist(), strict=True))
    row |= {
        "in_flight": len(core.requests),
        "waiting": len(core.admission),
        "tokens_s": round(clients.tokens / wall_s),
    }
    probing.cancel()
    reading.cancel()
    await controller.close()
    server.should_exit = True
    await serving
    await pool.close()
    core.admission.close()
    history.close()
    folder.cleanup()
    return {"workers": asked.workers, "requests": asked.requests} | row


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--workers", type=int, default=200)
    parser.add_argument("--requests", type=int, default=4096)
    parser.add_argument("--step-ms", type=float, default=500.0, help="of each worker")
    parser.add_argument("--output", type=int, default=120, help="mean tokens of a request")
    parser.add_argument("--warm-s", type=float, default=8.0)
    parser.add_argument("--for-s", type=float, default=30.0)
    asked = parser.parse_args()
    if asked.quick:
        asked.workers, asked.requests, asked.warm_s, asked.for_s = 20, 400, 2.0, 5.0
    row = asyncio.run(measured(asked))
    share = sum(float(row.get(f"{part}_share", 0.0)) for part in CONTROL_PARTS)
    return show("heartbeat", [row], {"control work, share of the loop": bar(round(share, 4), SHARE)}, asked)


if __name__ == "__main__":
    sys.exit(main())
