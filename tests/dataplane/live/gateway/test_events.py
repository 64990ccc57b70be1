"""The event log: followers get past events and new ones, and a slow one holds up no other."""

import asyncio

from dataplane.live.gateway.events import EventLog


async def first(log, count, after=0):
    found = []
    async for event in log.follow(after):
        found.append(event.id)
        if len(found) == count:
            break
    return found


def test_a_follower_gets_what_was_kept_and_then_what_comes():
    async def story():
        log = EventLog()
        log.record(0.0, "launch", "a")
        following = asyncio.create_task(first(log, 3))
        await asyncio.sleep(0)
        log.record(1.0, "drain", "b")
        log.record(2.0, "stop", "c")
        return await following

    assert asyncio.run(story()) == [1, 2, 3]


def test_a_follower_resumes_after_the_last_it_saw():
    async def story():
        log = EventLog()
        for i in range(5):
            log.record(float(i), "scale", "x")
        return await first(log, 2, after=3)

    assert asyncio.run(story()) == [4, 5]


def test_a_follower_that_does_not_read_loses_its_oldest_and_holds_up_nobody():
    async def story():
        log = EventLog(keep=4, follower_keep=2)
        follower = log.follow()
        log.record(0.0, "scale", "first")
        assert (await anext(follower)).id == 1
        asyncio_task = asyncio.ensure_future(anext(follower))
        await asyncio.sleep(0)
        for i in range(5):
            log.record(float(i), "scale", "x")
        got = [(await asyncio_task).id, (await anext(follower)).id]
        await follower.aclose()
        return got

    got = asyncio.run(story())
    assert got == sorted(got)
    assert got[-1] == 6


def test_events_about_a_request_are_found():
    log = EventLog()
    log.record(0.0, "migrate", "x", request_id="r1")
    log.record(0.0, "migrate", "x", request_id="r2")
    assert [event.facts["request_id"] for event in log.about("r2")] == ["r2"]
