"""LoRA adapters of emulated workers: who holds which, where their requests go, and loads that fail."""

import asyncio

import pytest
from front import SLO, A, B, Front

from controlplane.placement.queue import QueueSettings


@pytest.fixture
def play():
    from front import profile

    def run(story, workers=(A, B)):
        async def scene():
            front = Front(workers, profile(), QueueSettings())
            try:
                await asyncio.wait_for(story(front), 30)
            finally:
                await front.close()

        asyncio.run(scene())

    return run


def adapter(named=1, **more):
    from dataplane.live.engine_api.messages import Adapter

    return Adapter(f"a{named}", named, "/somewhere", **more)


async def ask(front, name, lora):
    """Begin a long request of an adapter and return where it went."""
    from dataplane.live.ledger.request import CURRENT_TICKET, Ticket
    from harness.bare_fleet import token_request

    request = token_request(name, [len(name), 2, 3], {"max_tokens": 3000})
    request.lora_request = lora
    CURRENT_TICKET.set(Ticket(name, "test", SLO, 0))
    front.ends.setdefault(name, asyncio.Event())
    await front.core.add_request_async(request)
    await front.until(name, 1)
    return front.core.requests.get(name).worker


def test_requests_go_to_a_holder_of_their_adapter_until_it_is_much_busier(play):
    from dataplane.live.ledger.placement import LEAN

    async def story(front):
        await front.core.add_adapter(adapter())
        (holder,) = front.core.adapters.holders(1)
        went = [await ask(front, f"r{i}", adapter()) for i in range(LEAN + 2)]
        assert went[:LEAN] == [holder] * LEAN
        assert set(went) == {A, B}  # then another loads it, too
        assert sorted(front.core.adapters.holders(1)) == [A, B]

    play(story)


def test_another_adapter_is_loaded_where_fewest_are(play):
    async def story(front):
        for named in (1, 2):
            await front.core.add_adapter(adapter(named))
        assert front.core.adapters.holders(1) != front.core.adapters.holders(2)
        await front.core.add_adapter(adapter(1, load_inplace=True))
        assert len(front.core.adapters.holders(1)) == 1  # replaced where it is, not spread

    play(story)


def test_a_lost_worker_holds_nothing_and_its_loads_fail(play):
    async def story(front):
        engine = front.engines[A]

        async def never(lora):
            engine.kill("kill -9")

        engine.load_adapter = never
        with pytest.raises(RuntimeError, match="a is gone"):
            await front.core.add_adapter(adapter())
        with pytest.raises(RuntimeError, match="no worker"):
            await front.core.add_adapter(adapter())

    play(story, workers=(A,))


def test_a_move_takes_its_adapter_along(play):
    async def story(front):
        source = await ask(front, "r", adapter())
        target = B if source == A else A
        move = await front.core.segments.move(front.core.requests.get("r").id, target, "a test")
        assert move.moved, move
        assert sorted(front.core.adapters.holders(1)) == [A, B]

    play(story)
