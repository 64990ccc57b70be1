"""The broker over servers that stand in for fleets: limits in transit, lost answers, and its successor."""

import asyncio
import random
from contextlib import asynccontextmanager

import pytest

web = pytest.importorskip("aiohttp.web")

from controlplane.scaler.shares import Limits, Tenant  # noqa: E402
from dataplane.live.portfolio.broker import Broker, FrontSettings  # noqa: E402
from dataplane.live.portfolio.front import session  # noqa: E402

GPUS, KIND = 6, "h100 TP1"
MODELS = ("chat", "code", "mail")


class Fleet:
    """A model's fleet as the broker knows it; it goes one worker towards its share at each `step`."""

    def __init__(self):
        self.share, self.asked, self.held = 2, 2, 2
        self.refuses = self.forgets = False  # answers nothing at all; does as told, and then does not say so

    async def answer(self, request):
        assert request.headers["authorization"] == "Bearer k"
        assert request.content_type == "application/json"
        if self.refuses:
            request.transport.abort()
        if request.method == "PUT" and not self.refuses:
            self.share = (await request.json())["workers"][KIND]
            if self.forgets:
                request.transport.abort()
        told = {"workers": self.share, "asked": self.asked, "needed": self.asked, "held": self.held}
        told = {name: {KIND: n} for name, n in told.items()}
        return web.json_response(told | {"cold_start_s": 0.0, "drain_s": 0.0})

    def step(self):
        wanted = min(self.asked, self.share)
        self.held += (wanted > self.held) - (wanted < self.held)


@asynccontextmanager
async def served():
    """Three fleets with a right to two workers each, and a function that makes a broker of their six GPUs."""
    fleets, runners, urls = {name: Fleet() for name in MODELS}, [], {}
    for name, fleet in fleets.items():
        app = web.Application()
        app.router.add_route("*", "/v1/fleet/share", fleet.answer)
        runners.append(web.AppRunner(app, shutdown_timeout=0.1))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
        urls[name] = f"http://127.0.0.1:{runners[-1].addresses[0][1]}"
    tenants = tuple(Tenant(name, "h100", 1, 5.0, right=2, share=2, kind=KIND) for name in MODELS)
    settings = FrontSettings(
        "", 0, "", 0, {}, urls, 1, None, tenants, Limits({"h100": GPUS}), hold_s=0.0, key="k"
    )
    async with session() as http:
        try:
            yield fleets, lambda: Broker(settings, http)
        finally:
            for runner in runners:
                await runner.cleanup()


def held(fleets):
    return {name: fleet.held for name, fleet in fleets.items()}


async def look(broker, fleets):
    await broker.look()
    for fleet in fleets.values():
        fleet.step()
    assert sum(fleet.held for fleet in fleets.values()) <= GPUS


def test_a_gpu_goes_to_another_model_only_once_it_is_free():
    async def story():
        async with served() as (fleets, make):
            broker = make()
            fleets["chat"].asked, fleets["code"].asked = 4, 1
            await look(broker, fleets)  # code drains
            assert held(fleets) == {"chat": 2, "code": 1, "mail": 2}
            assert fleets["chat"].share == 2
            await look(broker, fleets)
            assert held(fleets) == {"chat": 3, "code": 1, "mail": 2}
            (limit,) = broker.view["limits"]
            assert limit == {"name": "gpus.h100", "most": 6.0, "held": 5.0}
            assert [(c["model"], c["share"]) for c in broker.view["changes"]] == [("code", 1), ("chat", 3)]

    asyncio.run(story())


def test_a_fleet_that_does_not_answer_keeps_what_it_has():
    async def story():
        async with served() as (fleets, make):
            broker = make()
            await look(broker, fleets)
            fleets["code"].refuses, fleets["code"].asked, fleets["chat"].asked = True, 1, 4
            for _ in range(3):
                await look(broker, fleets)
            assert (fleets["code"].share, fleets["chat"].share) == (2, 2)
            assert not broker.view["shares"][1]["heard"]
            fleets["code"].refuses = False
            for _ in range(3):
                await look(broker, fleets)
            assert held(fleets) == {"chat": 3, "code": 1, "mail": 2}

    asyncio.run(story())


def test_a_broker_that_knows_not_all_fleets_changes_nothing():
    async def story():
        async with served() as (fleets, make):
            fleets["mail"].refuses, fleets["code"].asked, fleets["chat"].asked = True, 1, 4
            broker = make()
            for _ in range(3):
                await look(broker, fleets)
            assert [fleet.share for fleet in fleets.values()] == [2, 2, 2]

    asyncio.run(story())


@pytest.mark.parametrize("seed", range(4))
def test_limits_hold_through_lost_answers_and_lost_brokers(seed):
    async def story():
        rng = random.Random(seed)
        async with served() as (fleets, make):
            broker = make()
            for _ in range(40):
                for fleet in fleets.values():
                    fleet.refuses, fleet.forgets = rng.random() < 0.1, rng.random() < 0.2
                    if rng.random() < 0.3:
                        fleet.asked = rng.randint(1, 6)
                if rng.random() < 0.1:
                    broker = make()
                await look(broker, fleets)
            for fleet in fleets.values():
                fleet.refuses = fleet.forgets = False
            fleets["chat"].asked, fleets["code"].asked, fleets["mail"].asked = 2, 2, 6
            for _ in range(12):
                await look(broker, fleets)
            assert held(fleets) == {"chat": 2, "code": 2, "mail": 2}

    asyncio.run(story())
