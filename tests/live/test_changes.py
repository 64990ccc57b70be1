"""The controller's mirror of a fleet shows what there is, whatever happens and whichever answers are lost."""

import asyncio
import random
from types import SimpleNamespace

import msgspec
import pytest
from front import A, B, C, Front, profile

from controlplane.placement.policies import Policy
from controlplane.snapshot import Pace
from controlplane.types import Slo, WorkerId
from dataplane.live.control.changes import Changes, Mirror
from dataplane.live.control.snapshot_builder import SnapshotBuilder

SLO = Slo(1.0, 0.1)


class Story:
    """A gateway's requests that come, are placed, get tokens, move, lose their worker and end by chance."""

    def __init__(self, seed):
        from dataplane.live.control.operations import FleetFacts, Operations
        from dataplane.live.gateway.demand_count import DemandCount

        self.random, self.sent = random.Random(seed), 0
        self.core = SimpleNamespace(
            attached=lambda: iter(()),
            metrics=None,
            events=(),
            migrations=SimpleNamespace(open={}, usual=Pace(), pairs={}),
            held=lambda: iter(()),
            placement=SimpleNamespace(cached_elsewhere=lambda t: {C: 16 * t.number} if t.worker else {}),
            why_fixed=lambda tracked: "seeded" if tracked.ticket.priority and tracked.worker else None,
        )
        members = [SimpleNamespace(worker=w, kind="", state="serving") for w in (A, B, C)]
        pool = SimpleNamespace(
            members=lambda: iter(members), wanted=3, asked_kinds={"": 3}, cold_start_s=0.0, drain_s=0.0
        )
        facts = FleetFacts("any", "emulated", "", False, None, 0.99, Policy.SPREAD, True)
        self.operations = Operations(facts, self.core, pool, DemandCount())
        self.new_gateway()

    def new_gateway(self):
        from dataplane.live.gateway.connections import RequestBook

        self.core.requests = self.book = RequestBook()

    def happen(self):
        from dataplane.live.gateway.request import Ticket, Tracked

        now = list(self.book)
        which = self.random.random()
        if which < 0.2 or not now:
            self.sent += 1
            request = SimpleNamespace(
                request_id=f"r{self.sent}", prompt_token_ids=[1] * self.random.randint(1, 9)
            )
            self.book.add(Tracked(request, Ticket("", "", SLO, self.random.randint(0, 1)), 0.0, 50))
            return
        tracked = self.random.choice(now)
        if which < 0.5:
            self.book.listen(tracked, self.random.choice((A, B, C)))
        elif which < 0.6:
            self.book.ignore(tracked)
        elif which < 0.75:
            self.book.remove(tracked)
        elif which < 0.8:
            tracked.predicted_tokens += 10
        else:
            tracked.output_token_ids.extend([5] * self.random.randint(1, 3))

    def answer(self, mirror):
        """What the API would say to this mirror, through its encoding."""
        told = self.operations.changes(mirror.book, mirror.version)
        return msgspec.json.decode(msgspec.json.encode(told), type=Changes)


def shown(mirror):
    """Every request of a mirror, in their order: its row, output and expected tokens."""
    columns = (mirror.requests.values(), mirror.seen.output_tokens, mirror.seen.expected_tokens)
    return [
        (row.request_id, row.worker, row.priority, row.fixed, row.cached, row.prompt_tokens, made, expected)
        for row, made, expected in zip(*columns, strict=True)
    ]


def there(book):
    return [
        (
            t.id,
            t.worker,
            t.ticket.priority,
            bool(t.ticket.priority and t.worker),
            {C: 16 * t.number} if t.worker else {},
            t.prompt_tokens,
            len(t.output_token_ids),
            t.predicted_tokens,
        )
        for t in book
    ]


@pytest.mark.parametrize("seed", range(20))
def test_a_mirror_shows_what_there_is_after_any_story_and_any_fate_of_its_answers(live_extra, seed):
    story, chance = Story(seed), random.Random(seed + 1000)
    mirrors, late = [Mirror(), Mirror()], []  # of two controllers, that know nothing of each other
    for _ in range(400):
        for _ in range(chance.randint(0, 5)):
            story.happen()
        i = chance.randrange(2)
        told = story.answer(mirrors[i])
        fate = chance.random()
        late.append((i, told))
        if fate < 0.15:
            continue  # lost, or on its way for long
        if fate < 0.3:  # an answer of before comes now, perhaps for the second time, perhaps to the other
            j, old = chance.choice(late)
            mirrors[j if chance.random() < 0.8 else 1 - j].take(old)
        elif fate < 0.33:
            mirrors[i] = Mirror()  # a controller died and is back
            told = story.answer(mirrors[i])
        elif fate < 0.35:
            story.new_gateway()
            told = story.answer(mirrors[i])
        if not mirrors[i].take(told):
            mirrors[i] = Mirror()
            assert mirrors[i].take(story.answer(mirrors[i]))
        assert shown(mirrors[i]) == there(story.book)


def test_an_answer_names_what_changed_and_no_more(live_extra):
    story, mirror = Story(0), Mirror()
    while len(story.book) < 50:
        story.happen()
    mirror.take(story.answer(mirror))
    assert len(mirror.seen.requests) == 50
    first, second, third, *_ = story.book
    story.book.listen(first, B)
    story.book.remove(second)
    third.output_token_ids.append(7)
    told = story.answer(mirror)
    assert [row.request_id for row in told.requests] == [first.id]
    assert mirror.take(told)
    assert shown(mirror) == there(story.book)


def test_an_answer_that_does_not_join_on_is_not_taken(live_extra):
    story, ahead, behind = Story(1), Mirror(), Mirror()
    story.happen()
    behind.take(story.answer(behind))
    for _ in range(30):
        story.happen()
    ahead.take(story.answer(ahead))
    before = shown(behind)
    assert not behind.take(story.answer(ahead))
    assert shown(behind) == before
    story.new_gateway()
    strange = msgspec.structs.replace(story.answer(Mirror()), since=1)
    assert not behind.take(strange)


def test_a_running_fleet_is_seen_through_the_mirror_as_it_is(live_extra):
    """Arrivals, tokens, a move, a killed worker, replays, ends: each look against the gateway's own."""
    from controlplane.placement.queue import QueueSettings
    from dataplane.live.control.operations import FleetFacts, Operations
    from dataplane.live.gateway.demand_count import DemandCount

    async def story():
        front = Front((A, B, C), profile(), QueueSettings())
        members = [SimpleNamespace(worker=w, kind="", state="serving") for w in (A, B, C)]
        pool = SimpleNamespace(
            members=lambda: iter(members), wanted=3, asked_kinds={"": 3}, cold_start_s=0.0, drain_s=0.0
        )
        facts = FleetFacts("any", "emulated", "", False, None, 0.99, Policy.SPREAD, True)
        arrived = DemandCount()
        front.core.on_arrival.append(arrived.add)
        operations = Operations(facts, front.core, pool, arrived)
        mirror, builder, states = Mirror(), SnapshotBuilder(), set()

        def look():
            assert mirror.take(operations.changes(mirror.book, mirror.version))
            seen = builder.snapshot(mirror, 0.0)
            for load in seen.workers:
                here = front.core.requests.on_worker(WorkerId(load.worker))
                both = [*load.requests, *load.waiting]
                assert sorted((r.request, r.tokens, r.generated) for r in both) == sorted(
                    (t.id, t.context_tokens, len(t.output_token_ids)) for t in here
                )
                states.update((t.stays, t.state) for t in here)
            return seen

        names = [f"r{i}" for i in range(30)]
        try:
            for i, name in enumerate(names):
                await front.send(name, [i + 1] * 10, max_tokens=100 + i)
                look()
            await front.until("r0", 10)
            look()
            moving = asyncio.ensure_future(front.core.move("r0", B, "a test"))
            while not moving.done():
                look()
                await asyncio.sleep(0.001)
            front.engines[A].kill("kill -9")
            while len(front.core.requests):
                look()
                await asyncio.sleep(0.005)
            assert look().waiting_requests == 0
            assert not mirror.requests
            assert {(1, "prefilling"), (1, "decoding"), (2, "decoding")} <= states
        finally:
            await front.close()

    asyncio.run(asyncio.wait_for(story(), 60))
