"""Ways to choose a server, before the same emulated engines in virtual time: attainment without a machine.

Requests arrive as a load says. Engines are `vllm_like.Batch`. A way is the picker's own fleet (the ledger,
queue and counters that `tokenfleet pick` runs, without HTTP and Envoy), or a baseline.

What the picker hears of answers can be late. Each piece waits `lag_s`; with `bunch_s` the picker also reads
only at multiples of that, as a process does that gets its processor now and then. It chooses at once, and
clients get pieces at once: what is measured is the choice, not the passing on.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from controlplane.perfmodel.profile import Profile
from controlplane.placement.lengths import LengthTable
from controlplane.placement.queue import QueueSettings
from controlplane.types import Slo, WorkerId
from dataplane.live.engine_api.link import WorkerInfo
from dataplane.live.gateway.history import History
from harness.virtual import run
from harness.vllm_like import BATCHED, KV_TOKENS, Batch, Running
from tokenfleet.pick.asked import AskedBody
from tokenfleet.pick.call import Asker, Call, PromptLengths
from tokenfleet.pick.fleet import PickedFleet
from tokenfleet.pick.subsets import SubsetPlacement
from tokenfleet.pick.unseen import Unseen
from tokenfleet.profiles.engine_metrics import EngineCounts

SCRAPE_S, INSTANT_S = 0.5, 1e-6
BYTES_A_TOKEN, SESSION_IDS = 4, 100_000
STEP_S, REQUEST_S, TOKEN_S, SEATS = 15e-3, 1e-3, 20e-6, 32
SLO = Slo(0.5, 0.06)
TURNS = 5
PEAK = (64.0, 6.0)  # requests/s, half as many again as four such engines carry, and seconds
PROFILE = """schema: tokenfleet.profile/1
model: small
gpu: made
tp_degree: 1
step: {{base_s: {0}, per_prefill_token_s: {1}, per_sequence_s: {2}, per_context_token_s: 0.0}}
kv: {{capacity_tokens: 400000, block_tokens: 16, bytes_per_token: 1}}
engine: {{name: vllm, version: 0.32.0, mode: chunked, max_batched_tokens: 2048, max_seqs: {3}}}
residuals: {{mean_relative: 0.0, p95_relative: 0.0, max_relative: 0.0, samples: 100}}
source: {{kind: composed, what: harness.vllm_like, licence: none, date: '2026-11-25'}}
"""


@dataclass(frozen=True)
class Ask:
    """A request: when it comes, its prompt's tokens, the words it makes, and its session (0: none)."""

    at_s: float
    prompt: int
    words: int
    session: int = 0


def tailed(seed: int, rate: float, seconds: float) -> list[Ask]:
    """Poisson arrivals; prompts and outputs of long tails."""
    draw = np.random.default_rng(seed)
    arrivals = np.cumsum(draw.exponential(1 / rate, int(rate * seconds)))
    prompts = np.clip(draw.lognormal(7.6, 1.1, len(arrivals)), 100, 24_000) / 4
    words = np.clip(draw.lognormal(3.6, 0.8, len(arrivals)), 4, 300)
    return [Ask(float(at), int(n), int(m)) for at, n, m in zip(arrivals, prompts, words, strict=True)]


def turns(seed: int, rate: float, seconds: float) -> list[Ask]:
    """Sessions of TURNS requests. Each request begins with the prompt and answer before it."""
    draw = np.random.default_rng(seed)
    starts = np.cumsum(draw.exponential(TURNS / rate, int(rate * seconds / TURNS)))
    found = []
    for session, start in enumerate(starts, 1):
        at_s, prompt = float(start), int(np.clip(draw.lognormal(6.6, 0.8), 50, 6000))
        for _ in range(TURNS):
            words = int(np.clip(draw.lognormal(3.6, 0.8), 4, 300))
            found.append(Ask(at_s, prompt, words, session))
            at_s, prompt = at_s + float(draw.exponential(2.0)), prompt + words + 100
    return sorted(found, key=lambda ask: ask.at_s)


def small_engine(longer_s: float = 0.0) -> Batch:
    """An engine whose steps are so much longer than the profile says."""
    return Batch(STEP_S + longer_s, SEATS, REQUEST_S, TOKEN_S)


def write_profile(folder: Path, slower: float) -> Path:
    """The profile of engines whose steps take `slower` times the time of `small_engine`."""
    file = folder / f"small-{slower:g}.yaml"
    file.write_text(PROFILE.format(STEP_S * slower, TOKEN_S * slower, REQUEST_S * slower, SEATS))
    return file


@dataclass(frozen=True)
class Seen:
    """What its client saw: the time to the first token, and for each after it; infinite where refused."""

    ttft_s: float
    tpot_s: float


class Way(Protocol):
    """A way to choose a server. One for each run."""

    async def choose(self, ask: Ask) -> tuple[int, Any] | None:
        """The engine's number, and what to hand to `got` and `over`; None where it is refused."""

    def got(self, of: Any) -> None:
        """A piece of its answer has passed."""

    def over(self, of: Any) -> None:
        """Its answer has ended."""

    async def run(self) -> None:
        """What it does meanwhile, until cancelled."""


class Fewest:
    """Requests in flight, as a proxy knows them exactly. `chance`: Envoy's two draws; else round robin."""

    def __init__(self, engines: Sequence[Batch], seed: int, chance: bool) -> None:
        self._active = [0] * len(engines)
        self._draw, self._turn = np.random.default_rng(seed) if chance else None, 0

    async def choose(self, ask: Ask) -> tuple[int, Any] | None:
        self._turn += 1
        n = self._turn % len(self._active)
        if self._draw is not None:
            one, other = self._draw.integers(0, len(self._active), 2).tolist()
            n = other if self._active[other] < self._active[one] else one
        self._active[n] += 1
        return n, n

    def got(self, of: Any) -> None: ...

    def over(self, of: Any) -> None:
        self._active[of] -= 1

    async def run(self) -> None: ...


class LlmdDefault:
    """llm-d-router 0.8's default profile, written from its documents: weights 3, 2, 2.

    prefix-cache-scorer: the share of the prompt that was sent to a server before. queue-scorer: 1 at the
    shortest of the queues that metrics tell of, 0 at the longest, 1 for all where they are alike.
    kv-cache-utilization-scorer: 1 less the share of KV in use. Metrics are read every 50 ms. Ties by lot.
    """

    PREFIX, QUEUE, FREE, REFRESH_S = 3.0, 2.0, 2.0, 0.05

    def __init__(self, engines: Sequence[Batch], seed: int) -> None:
        self._engines, self._draw = engines, np.random.default_rng(seed)
        self._told = [one.told() for one in engines]
        self._sent: list[dict[int, int]] = [{} for _ in engines]  # tokens, by session

    async def choose(self, ask: Ask) -> tuple[int, Any] | None:
        waiting = [one["waiting"] for one in self._told]
        least, most = min(waiting), max(waiting)
        scores = [
            self.QUEUE * ((most - one["waiting"]) / (most - least) if most > least else 1.0)
            + self.FREE * (1.0 - one["kv_share"])
            + self.PREFIX * sent.get(ask.session, 0) / ask.prompt
            for one, sent in zip(self._told, self._sent, strict=True)
        ]
        n = int(self._draw.choice([n for n, score in enumerate(scores) if score == max(scores)]))
        if ask.session:
            self._sent[n][ask.session] = ask.prompt
        return n, None

    def got(self, of: Any) -> None: ...

    def over(self, of: Any) -> None: ...

    async def run(self) -> None:
        while True:
            self._told = [one.told() for one in self._engines]
            await asyncio.sleep(self.REFRESH_S)


class _Asker(Asker):
    """Waits for the picker's choice: a server, or None where it refuses."""

    def __init__(self) -> None:
        self.choice: asyncio.Future[str | None] = asyncio.get_running_loop().create_future()

    def picked(self, name: str, addresses: Sequence[str]) -> None:
        self.choice.set_result(addresses[0])

    def refused(self, status: int, why: str, reason: str, retry_after_s: int | None = None) -> None:
        self.choice.set_result(None)


class Picked:
    """`tokenfleet pick`: what it knows is `lag_s` late, and read every `bunch_s`."""

    is_streamed, scrape_s = True, SCRAPE_S

    def __init__(
        self, engines: Sequence[Batch], profile: Profile, slo: Slo, lag_s: float = 0.0, bunch_s: float = 0.0
    ) -> None:
        self._loop, self._engines, self._slo = asyncio.get_running_loop(), engines, slo
        self._lag_s, self._bunch_s = lag_s, bunch_s
        prior = LengthTable.constant(256.0)
        placement = SubsetPlacement({"": profile}, 16, prior, np.random.default_rng(0))
        history = History(256.0, None, "small")
        clock = self._loop.time
        self.fleet = PickedFleet(placement, history, QueueSettings(), PromptLengths(), 1, clock)
        self.unseen = Unseen(self.fleet)
        self.names = [WorkerId(f"10.0.0.{n}:8000") for n in range(len(engines))]
        for name in self.names:
            self.fleet.attach(_info(name, profile), "")

    async def choose(self, ask: Ask) -> tuple[int, Any] | None:
        asker = _Asker()
        call = Call(asker, self._slo, "", "", is_streamed=self.is_streamed)
        first = ask.session * SESSION_IDS
        ids = list(range(first, first + ask.prompt)) if ask.session else None
        asked = AskedBody(text_bytes=ask.prompt * BYTES_A_TOKEN, token_ids=ids, streams=True)
        self.fleet.ask(call, asked)
        chosen = await asker.choice
        return None if chosen is None else (self.names.index(chosen), call)

    def got(self, of: Any) -> None:
        self._late(self.fleet.got, of, 1)

    def over(self, of: Any) -> None:
        self._late(self.fleet.over, of, "finished")

    def _late(self, act: Any, *of: Any) -> None:
        at_s = self._loop.time() + self._lag_s
        if self._bunch_s:
            at_s = math.ceil(at_s / self._bunch_s) * self._bunch_s
        self._loop.call_at(at_s, act, *of)

    async def run(self) -> None:
        try:
            while True:
                asked_s, had = self._loop.time(), Counter(call.worker for call in self.fleet.calls.values())
                pages = [EngineCounts(asked_s, one.told(), KV_TOKENS, 16) for one in self._engines]
                if self._lag_s or self._bunch_s:
                    await asyncio.sleep(self._lag_s + self._bunch_s / 2)
                for name, page in zip(self.names, pages, strict=True):
                    self.unseen.heard(name, page, asked_s, had[name])
                await asyncio.sleep(self.scrape_s)
        finally:
            self.fleet.close()


class Unheard(Picked):
    """`tokenfleet pick` where Envoy keeps answers to itself: it learns when one begins and when it ends."""

    is_streamed = False

    def __init__(self, engines: Sequence[Batch], profile: Profile, slo: Slo, scrape_s: float) -> None:
        super().__init__(engines, profile, slo)
        self.scrape_s = scrape_s

    def got(self, of: Any) -> None:
        of.is_answered = True


class Gateway(Picked):
    """Our own gateway with moves off: the same placement, told by each engine of each step as it ends."""

    def __init__(self, engines: Sequence[Batch], profile: Profile, slo: Slo) -> None:
        super().__init__(engines, profile, slo)
        self._made: list[dict[Call, int]] = [{} for _ in engines]
        for n, engine in enumerate(engines):
            engine.on_step = partial(self._later, self._step, n)

    def got(self, of: Any) -> None:
        made = self._made[self.names.index(of.worker)]
        made[of] = made.get(of, 0) + 1

    def over(self, of: Any) -> None:
        self._later(self._later, self.fleet.over, of, "finished")  # after the step that made its last token

    def _later(self, act: Any, *of: Any) -> None:
        """Once all that happens at this moment has happened."""
        self._loop.call_later(INSTANT_S, act, *of)

    def _step(self, n: int, prefilled: int) -> None:
        """A step of an engine: who got tokens, and how many tokens of prompts it computed."""
        made, self._made[n], now_s = self._made[n], {}, self._loop.time()
        got = [(call.tracked, tokens) for call, tokens in made.items() if call.tracked is not None]
        is_step = self.fleet.placement.advance(self.names[n], got, now_s, None, prefilled)
        for tracked, tokens in got:
            tracked.first_token_s = now_s if tracked.first_token_s is None else tracked.first_token_s
            tracked.output_token_ids.extend([0] * tokens)
        if is_step:
            self.fleet.placement.begin_step(self.names[n], now_s)
        self.fleet.admission.look()

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self.fleet.close()


def _info(name: WorkerId, profile: Profile) -> WorkerInfo:
    return WorkerInfo(
        worker=name, engine="vllm", model="small", endpoint=name, kv_addresses=(), block_tokens=16,
        kv_blocks=KV_TOKENS // 16, kv_bytes_per_token=1, max_model_len=32_768,
        max_seqs=profile.engine.max_seqs, max_batched_tokens=BATCHED, tp_degree=1,
        vllm_version="", dtype="", pid=0,
    )  # fmt: skip


async def _one(engines: Sequence[Batch], way: Way, ask: Ask) -> Seen:
    loop = asyncio.get_running_loop()
    await asyncio.sleep(ask.at_s - loop.time())
    chosen = await way.choose(ask)
    if chosen is None:
        return Seen(math.inf, math.inf)
    engine, of = engines[chosen[0]], chosen[1]
    running: Running = engine.begin(ask.prompt, ask.words, ask.session)
    first_s = 0.0
    for n in range(ask.words):
        await running.out.get()
        first_s = first_s if n else loop.time()
        way.got(of)
    engine.end(running)
    way.over(of)
    return Seen(first_s - ask.at_s, (loop.time() - first_s) / max(ask.words - 1, 1))


async def _all(engines: Sequence[Batch], way: Way, asks: Sequence[Ask]) -> list[Seen]:
    meanwhile = [asyncio.create_task(one.steps()) for one in engines]
    meanwhile.append(asyncio.create_task(way.run()))
    seen = await asyncio.gather(*(_one(engines, way, ask) for ask in asks))
    for task in meanwhile:
        task.cancel()
    return seen


def seen_by(make_engines: Any, make_way: Any, asks: Sequence[Ask]) -> list[Seen]:
    """What clients see of a way, made from its engines within the virtual loop."""

    async def story() -> list[Seen]:
        engines = make_engines()
        return await _all(engines, make_way(engines), asks)

    return run(story())


def in_slo(seen: Sequence[Seen], slo: Slo) -> float:
    """The share of requests within both targets."""
    return float(np.mean([one.ttft_s <= slo.ttft_s and one.tpot_s <= slo.tpot_s for one in seen]))
