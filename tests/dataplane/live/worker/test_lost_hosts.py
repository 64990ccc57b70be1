"""Both ends of a link when nothing comes over it any more, and when something does after all."""

import asyncio
import time
from dataclasses import replace

import pytest
import zmq.asyncio
from far_worker import FAR, TELEMETRY, FarWorker
from front import B, Front, profile, until
from plain_codec import PlainCodec
from zmq.constants import Flag
from zmq.error import Again

from controlplane.placement.queue import QueueSettings
from dataplane.live.emulated.engine import EmulatedEngine, Fabric
from dataplane.live.engine_api import wire
from dataplane.live.engine_api.link import Lost, Silence
from dataplane.live.engine_api.wire import new_key, public_key
from dataplane.live.worker.link import WorkerLink


@pytest.fixture
def play():
    """Runs a story with a far worker, a link to it, and how soon its silence counts."""

    def run(story, suspect_s=1e6, silence_s=1e6):
        patience = wire.LinkTimings(0.005, suspect_s, silence_s)

        async def scene():
            context, key = zmq.asyncio.Context(), new_key()
            far = FarWorker(public_key(key), EmulatedEngine(FAR, profile(), Fabric()).info)
            link = await WorkerLink.connect(far.info, key, context, PlainCodec(), patience=patience)
            try:
                await asyncio.wait_for(story(far, link), 60)
            finally:
                if not link._socket.closed:  # by the fleet that it was lost to
                    await link.close()
                far.close()
                context.destroy(linger=0)

        asyncio.run(scene())

    return run


def test_silence_is_said_and_so_is_its_end(play):
    async def story(far, link):
        assert await link.receive() == Silence(is_over=False)
        await far.load()
        assert await link.receive() == Silence(is_over=True)
        assert await link.receive() == TELEMETRY

    play(story, suspect_s=0.05)


def test_a_core_that_stood_still_itself_gives_up_no_worker(play):
    async def story(far, link):
        time.sleep(1.0)  # the loop stands, as on a paused machine, for longer than a worker may be silent
        await asyncio.sleep(0.05)
        await far.load()
        assert await link.receive() == TELEMETRY

    play(story, silence_s=0.5)


def test_a_queue_that_nobody_empties_does_not_hide_that_nobody_speaks(play):
    async def story(far, link):
        async def full(frames, flags=0, **options):
            if flags & Flag.DONTWAIT:
                raise Again
            await asyncio.Event().wait()

        object.__setattr__(link._socket, "send_multipart", full)
        try:
            assert isinstance(await link.receive(), Lost)
        finally:
            object.__delattr__(link._socket, "send_multipart")

    play(story, silence_s=0.05)


def test_nothing_follows_the_end_of_a_link_whatever_the_worker_still_says(play):
    async def story(far, link):
        assert isinstance(await link.receive(), Lost)
        for _ in range(10):
            await far.load()
        while link._tasks[0].done() is False:  # it has heard the worker, and stopped listening
            await asyncio.sleep(0)
        assert isinstance(await link.receive(), Lost)
        assert isinstance(await link.receive(), Lost)

    play(story, silence_s=0.05)


def test_a_worker_that_comes_back_after_its_requests_were_replayed_changes_nothing(play):
    async def story(far, link):
        front = Front((), profile(), QueueSettings())
        try:
            front.core.attach(link)
            sending = asyncio.ensure_future(front.send("r"))
            await far.has_segment.wait()
            await far.tokens(7, 8)
            await front.until("r", 2)
            await sending
            front.engines[B] = front.launch(B)
            front.core.attach(front.engines[B])
            link.patience = replace(link.patience, suspect_s=0.0)
            await until(lambda: "silent" in [e.kind for e in front.events])
            link.patience = replace(link.patience, silence_s=0.0)
            await until(lambda: front.core.link(FAR) is None)
            await far.tokens(666)
            await front.ended("r")
            await far.tokens(666)
            replays = [e for e in front.events if e.kind == "replay"]
            assert (front.finish["r"], front.tokens["r"][:2]) == ("LENGTH", [7, 8])
            assert (len(front.tokens["r"]), 666 in front.tokens["r"], len(replays)) == (100, False, 1)
            assert [e.kind for e in front.events if e.kind in ("silent", "heard")] == ["silent"]
        finally:
            await front.close()

    play(story)
