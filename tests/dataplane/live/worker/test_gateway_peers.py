"""A worker's gateways: each gets its own outputs, and a slow or silent one harms no other."""

import asyncio

from plain_codec import PlainCodec
from zmq.error import Again, ZMQError

from dataplane.live.engine_api import wire
from dataplane.live.engine_api.messages import (
    EngineLoad,
    Finish,
    SegmentOutput,
    StepOutputs,
)
from dataplane.live.worker.gateway_peers import GatewayPeers


class Socket:
    """Keeps what is sent to each gateway; `stuck` ones take nothing, `gone` ones cannot be routed to."""

    def __init__(self):
        self.sent, self.stuck, self.gone = {}, set(), set()

    async def send_multipart(self, frames, flags=0, copy=True):
        name, *rest = frames
        if name in self.gone:
            raise ZMQError
        if name in self.stuck:
            raise Again
        self.sent.setdefault(name, []).append(rest)

    def outputs(self, name):
        batches = [
            PlainCodec().outputs(frames) for kind, *frames in self.sent.get(name, ()) if kind == wire.OUTPUTS
        ]
        return [output.request_id for batch in batches for output in batch.outputs]


def run(story):
    async def play():
        socket, aborted = Socket(), []

        async def abort(segments):
            aborted.extend(segments)

        peers = GatewayPeers(socket, abort, PlainCodec())
        await peers.welcome(b"g", b"info")
        await peers.welcome(b"h", b"info")
        await story(peers, socket, aborted)
        await peers.dismiss_all("the end")

    asyncio.run(play())


def batch(*names, finish=None):
    return StepOutputs(
        outputs=[SegmentOutput(name, [7], finish_reason=finish) for name in names],
        scheduler_stats=EngineLoad(),
    )


async def breathe():
    for _ in range(5):
        await asyncio.sleep(0)


def test_each_gateway_gets_the_outputs_of_its_own_segments():
    async def story(peers, socket, aborted):
        peers.admit(peers.get(b"g"), "mine")
        peers.admit(peers.get(b"h"), "yours")
        await peers.deliver(batch("mine", "yours", "nobody's"))
        await breathe()
        assert (socket.outputs(b"g"), socket.outputs(b"h")) == (["mine"], ["yours"])

    run(story)


def test_an_ended_segment_is_forgotten():
    async def story(peers, socket, aborted):
        peers.admit(peers.get(b"g"), "mine")
        await peers.deliver(batch("mine", finish=Finish.LENGTH))
        assert len(peers) == 0

    run(story)


def test_a_gateway_cannot_end_anothers_segment():
    async def story(peers, socket, aborted):
        peers.admit(peers.get(b"g"), "mine")
        await peers.abort(peers.get(b"h"), ["mine"])
        assert (aborted, len(peers)) == ([], 1)

    run(story)


def test_a_gateway_that_takes_nothing_is_dropped_and_the_other_goes_on():
    async def story(peers, socket, aborted):
        socket.stuck.add(b"g")
        peers.admit(peers.get(b"g"), "mine")
        peers.admit(peers.get(b"h"), "yours")
        for _ in range(wire.QUEUED_BATCHES + 2):
            await peers.deliver(batch("mine", "yours"))
            await breathe()
        assert peers.get(b"g") is None
        assert aborted == ["mine"]
        assert len(socket.outputs(b"h")) == wire.QUEUED_BATCHES + 2

    run(story)


def test_a_gateway_that_cannot_be_routed_to_is_dropped_with_its_segments():
    async def story(peers, socket, aborted):
        socket.gone.add(b"g")
        peers.admit(peers.get(b"g"), "mine")
        await breathe()
        await peers.deliver(batch("mine"))
        await breathe()
        await peers.deliver(batch("mine"))
        assert peers.get(b"g") is None
        assert aborted == ["mine"]

    run(story)


def test_silence_is_noticed():
    async def story(peers, socket, aborted):
        peer, beat_s = peers.get(b"g"), wire.PATIENCE.silence_s / 4
        assert [peers.silent(beat_s) for _ in range(4)] == [[]] * 4
        assert peer in peers.silent(beat_s)
        peer.unheard = 0
        assert peer not in peers.silent(beat_s)

    run(story)
