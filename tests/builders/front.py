"""A front end without HTTP, over a FleetCore of emulated engines in this process."""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager

import numpy as np

from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.profile import Profile, Residuals, Source
from controlplane.perfmodel.step import StepModel
from controlplane.placement.lengths import LengthTable
from controlplane.types import Slo, WorkerId

SLO = Slo(10.0, 1.0)
LONGEST_WAIT_S = 25.0  # of a story: none takes a tenth of it on free cores
A, B, C = WorkerId("a"), WorkerId("b"), WorkerId("c")


def profile(blocks=4096, max_seqs=64):
    return Profile(
        model="any",
        gpu="none",
        tp_degree=1,
        step=StepModel(0.002, 1e-6, 1e-5, 1e-9),
        kv=KvModel(capacity_tokens=blocks * 16, block_tokens=16, bytes_per_token=1000),
        engine=EngineLimits(max_batched_tokens=2048, max_seqs=max_seqs),
        residuals=Residuals(0.0, 0.0, 0.0, 1),
        source=Source("composed", "a test", "none", "2026-01-01"),
    )


def alone(prompt, tokens):
    """What a request with this prompt gets where nothing happens to it."""
    from dataplane.live.emulated.segment import Noise

    return Noise().continuation(prompt, tokens)


def unprofiled(workers=8):
    """Placement on workers whose step times are not known."""
    from dataplane.live.ledger.placement import Placement

    return Placement({}, workers, LengthTable.constant(200), np.random.default_rng(0))


class Front:
    """In AsyncLLM's place: sends requests, and keeps what comes back for each."""

    def __init__(self, workers, profile, waiting, placement=None, roles=None):
        from dataplane.live.emulated.engine import EmulatedEngine, Fabric
        from dataplane.live.gateway.events import EventLog
        from dataplane.live.gateway.fleet_core import CoreSettings, FleetCore
        from dataplane.live.gateway.metrics import Metrics

        self.fabric = Fabric(speed=2.0)
        self.launch = lambda worker, other=None, model="emulated": EmulatedEngine(
            worker, other or profile, self.fabric, model=model
        )
        self.engines = {worker: self.launch(worker) for worker in workers}
        self.events = EventLog()
        self.core = FleetCore(
            CoreSettings(8, SLO, waiting), placement or unprofiled(), Metrics(), self.events, lambda *_: 200
        )
        for worker, engine in self.engines.items():
            self.core.attach(engine, role=(roles or {}).get(worker, "any"))
        self.tokens, self.finish, self.ends = {}, {}, {}
        self.pump = asyncio.ensure_future(self._pump())

    async def _pump(self):
        while True:
            batch = await self.core.get_output_async()
            for output in batch.outputs:
                assert output.request_id not in self.finish, "an output after the end"
                self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    self.finish[output.request_id] = output.finish_reason.name
                    self.ends.setdefault(output.request_id, asyncio.Event()).set()

    async def send(self, name, prompt=(1, 2, 3), ticket=None, **params):
        from dataplane.live.ledger.request import CURRENT_TICKET, Ticket
        from harness.bare_fleet import token_request

        request = token_request(name, prompt, {"max_tokens": 100} | params)
        ticket = ticket or Ticket(name, "test", SLO, 0)
        CURRENT_TICKET.set(ticket)
        self.ends.setdefault(name, asyncio.Event())
        await self.core.add_request_async(request)
        return ticket

    async def until(self, name, tokens):
        await until(lambda: len(self.tokens.get(name, ())) >= tokens, every_s=0.001)

    async def ended(self, *names):
        await asyncio.gather(*(self.ends[name].wait() for name in names))

    async def close(self):
        self.pump.cancel()
        for at in list(self.core.attached()):
            await self.core.detach(at.worker)
        self.core.admission.close()


class FrontHost:
    """Launches a front's emulated engines, by the profile of their kind where kinds have one of their own.

    The next `failures` launches fail, and all of `broken` models; nothing is `stopped` before `may_stop`.
    `lack`: why there is no room for one more. `told`: the notices of workers. `hung` ones do not answer;
    `asked` counts how often each was.
    """

    def __init__(self, front, profiles=None):
        self.front, self.profiles = front, profiles or {}
        self.kinds, self.failures, self.stopped = {}, 0, []
        self.broken, self.lack, self.told, self.left = set(), None, {}, {}
        self.hung, self.asked = set(), Counter()
        self.may_stop = asyncio.Event()
        self.may_stop.set()

    async def launch(self, worker, kind, revision, say):
        if self.failures or revision.model in self.broken:
            self.failures = max(0, self.failures - 1)
            raise RuntimeError("no such model")
        self.kinds[worker] = kind
        engine = self.front.launch(worker, self.profiles.get(kind), revision.model)
        self.front.engines[worker] = engine
        return engine

    async def notices(self, source):
        return self.told

    def room(self, kind):
        return self.lack

    async def stop(self, worker):
        self.stopped.append(worker)
        await self.may_stop.wait()
        if worker in self.front.engines:
            await self.front.engines[worker].close()

    async def adopt(self, workers):
        from dataplane.live.pool.member import Adopted

        engines, found = self.front.engines, {}
        for worker in workers:
            if not engines[worker].is_lost:
                segments = self.left.get(worker, ())
                await engines[worker].abort(segments)
                found[worker] = Adopted(engines[worker], segments)
        return found

    async def is_healthy(self, worker):
        self.asked[worker] += 1
        return worker not in self.hung and not self.front.engines[worker].is_lost

    async def close(self):
        pass


@asynccontextmanager
async def pool_on(front, groups, most, profiles=None, **more):
    """A started pool of worker groups, with `most` workers, on a front's engines. It closes both."""
    from dataplane.live.pool.fleet_types import FleetTypes
    from dataplane.live.pool.pool import WorkerPool

    pool = WorkerPool(FrontHost(front, profiles), front.core, most, FleetTypes(groups), **more)
    try:
        await asyncio.wait_for(pool.start(), LONGEST_WAIT_S)
        yield pool
    finally:
        await pool.close()
        await front.close()


class PoolStory:
    """A pool of worker groups on the engines of a front, and streams through it."""

    def __init__(self, groups, most, profiles=None, **more):
        from controlplane.placement.queue import QueueSettings
        from dataplane.live.pool.fleet_types import FleetTypes
        from dataplane.live.pool.pool import WorkerPool

        self.front = Front((), profile(), QueueSettings())
        self.host = FrontHost(self.front, profiles)
        self.pool = WorkerPool(self.host, self.front.core, most, FleetTypes(groups), **more)

    async def watch(self):
        """Runs while the story is played."""
        raise NotImplementedError

    async def streams(self, count, tokens, **params):
        prompts = {f"r{i}": [i + 1] * 30 for i in range(count)}
        for name, prompt in prompts.items():
            await self.front.send(name, prompt, max_tokens=tokens, **params)
        await asyncio.gather(*(self.front.until(name, 3) for name in prompts))
        return prompts


def play_watched(begun, play_it):
    """Play `play_it` on the story that `begun()` makes: its pool is started, and its watch runs meanwhile."""

    async def scene():
        story = begun()
        try:
            await story.pool.start()
            watching = asyncio.ensure_future(story.watch())
            await asyncio.wait_for(play_it(story), 60)
            watching.cancel()
        finally:
            await story.pool.close()
            await story.front.close()

    asyncio.run(scene())


async def emptied(front):
    """Wait until no KV block of a front's engines is held; no request may be left before."""
    assert len(front.core.requests) == len(front.core.admission) == 0
    await until(lambda: len(front.core.handovers) == 0)
    for engine in front.engines.values():
        held = engine.batch
        await until(lambda e=engine, b=held: e.is_lost or b.free_blocks == b.total_blocks)


async def until(holds, every_s=0.005):
    """Wait until `holds()`. Raises TimeoutError after LONGEST_WAIT_S."""
    async with asyncio.timeout(LONGEST_WAIT_S):
        while not holds():
            await asyncio.sleep(every_s)


class Deaths:
    """A fleet whose core dies and gets a successor, with the engines that it leaves and its record."""

    def __init__(self, folder):
        self.file = folder / "record.json"
        self.engines, self.cores, self.left, self.requests = {}, [], {}, []

    async def core(self, workers=3, most=6, **others):
        from controlplane.placement.queue import QueueSettings
        from controlplane.worker_type import WorkerGroup, WorkerType
        from dataplane.live.engine_api.processes import Record
        from dataplane.live.pool.fleet_types import FleetTypes
        from dataplane.live.pool.pool import FIRST, WorkerPool
        from dataplane.live.pool.roster import PoolRecord

        front = Front((), profile(), QueueSettings())
        front.engines = self.engines
        types = FleetTypes([WorkerGroup(WorkerType(None), workers)])
        record = Record(self.file)
        before = record.part("pool", PoolRecord)
        first = FIRST if before is None else before.revision
        host = FrontHost(front)
        host.left = self.left
        pool = WorkerPool(host, front.core, most, types, first, record=record, **others)
        self.cores.append((front, pool))
        await pool.start()
        return front, pool

    async def die(self):
        """As kill -9: nothing of the core runs on, and its engines do."""
        front, pool = self.cores[-1]
        pool._record_file.note = lambda **facts: None
        self.requests = list(front.core.requests)
        there = [at.worker for at in front.core.attached()]
        self.left = {w: [t.segment for t in front.core.requests.on_worker(w)] for w in there}
        tasks = [*pool.tasks, front.core.admission._dispatcher, front.pump]
        tasks += [at.reader for at in front.core.attached()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def played(self, story):
        async def scene():
            try:
                await asyncio.wait_for(story(), 60)
            finally:
                front, pool = self.cores[-1]
                await pool.close()
                await front.close()

        asyncio.run(scene())
