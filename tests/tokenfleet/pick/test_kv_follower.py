"""KV events over real ZMQ sockets, in vLLM's form: followed, replayed, begun again where lost."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest

pytest.importorskip("zmq")
pytest.importorskip("google.protobuf")

import zmq
import zmq.asyncio
from front import until
from picked import free_ports, made_fleet
from test_picked_fleet import INFO

from controlplane.errors import BadInput
from controlplane.types import WorkerId
from tokenfleet.pick.kv_events import END, KvFollower, port_of

BLOCK = 16


def stored(number, parent=None):
    """vLLM's event of a block that holds sixteen times the same token."""
    return {
        "type": "BlockStored",
        "block_hashes": [number],
        "parent_block_hash": parent,
        "token_ids": [number] * BLOCK,
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
    }


def removed(number):
    return {"type": "BlockRemoved", "block_hashes": [number], "medium": "GPU"}


class Publisher:
    """vLLM's publisher: numbered batches, and a replay of those that it still has."""

    def __init__(self, context, port, replay_port):
        self.out, self.replay = context.socket(zmq.PUB), context.socket(zmq.ROUTER)
        self.out.bind(f"tcp://127.0.0.1:{port}")
        self.replay.bind(f"tcp://127.0.0.1:{replay_port}")
        self.kept, self.number, self.asked = {}, 0, 0

    async def publish(self, *events, heard=True):
        payload = msgspec.msgpack.encode([0.0, list(events), 0])
        self.kept[self.number] = payload
        if heard:
            await self.out.send_multipart([b"kv", self.number.to_bytes(8, "big"), payload])
        self.number += 1

    async def answer(self):
        while True:
            client, _, first = await self.replay.recv_multipart()
            self.asked += 1
            for number in sorted(n for n in self.kept if n >= int.from_bytes(first, "big")):
                parts = [client, b"", b"kv", number.to_bytes(8, "big"), self.kept[number]]
                await self.replay.send_multipart(parts)
            await self.replay.send_multipart([client, b"", b"", END, b""])


@asynccontextmanager
async def followed(before=()):
    port, replay_port, serving = free_ports(3)
    context = zmq.asyncio.Context()
    publisher = Publisher(context, port, replay_port)
    for events in before:
        await publisher.publish(*events)
    answering = asyncio.create_task(publisher.answer())
    fleet = made_fleet()
    server = WorkerId(f"127.0.0.1:{serving}")
    fleet.attach(replace(INFO, worker=server), "")
    follower = KvFollower(fleet, str(port), str(replay_port), fleet.block_tokens)
    follower.told(server, True)
    try:
        yield publisher, follower, lambda: cached(fleet, server)
    finally:
        await follower.close()
        answering.cancel()
        context.destroy(linger=0)
        fleet.close()


def cached(fleet, server):
    """How many blocks the ledger believes a server to have."""
    caches = fleet.placement.ledger.caches
    row = fleet.placement.worker_rows[server]
    return int(caches.workers[row]["asleep"])


def test_a_late_follower_hears_what_was_before_and_what_comes_and_replays_a_gap():
    async def story():
        before = [[stored(1)], [stored(2, 1), stored(3, 2)]]
        async with followed(before) as (publisher, follower, blocks):
            await until(lambda: blocks() == 3)
            assert publisher.asked == 1
            await publisher.publish(removed(3))
            await until(lambda: blocks() == 2)
            await publisher.publish(stored(4, 2), heard=False)
            await publisher.publish(stored(5, 4))
            await until(lambda: blocks() == 4)
            assert (publisher.asked, follower.counts["lost"]) == (2, 0)
            assert follower.counts["taken"] == 5
            publisher.number, publisher.kept = 0, {}  # vLLM has started again
            await publisher.publish(stored(8))
            await until(lambda: blocks() == 1)

    asyncio.run(story())


def test_events_lost_for_good_empty_the_mirror_and_unreadable_ones_are_counted():
    async def story():
        async with followed([[stored(1)], [stored(2, 1)]]) as (publisher, follower, blocks):
            await until(lambda: blocks() == 2)
            publisher.kept.clear()
            publisher.number += 5
            publisher_kept = publisher.kept
            await publisher.publish(stored(9))
            publisher_kept.clear()
            await until(lambda: blocks() == 1)
            assert follower.counts["lost"] == 1
            await publisher.out.send_multipart([b"kv", publisher.number.to_bytes(8, "big"), b"\xc1"])
            await until(lambda: follower.counts["unreadable"] == 1)
            publisher.number += 1
            publisher.kept.clear()
            await publisher.publish(["BlockStored", [1]])  # the form of older versions
            await until(lambda: follower.counts["unreadable"] == 2)
            assert blocks() == 1

    asyncio.run(story())


def test_a_port_is_a_number_or_an_offset_from_the_servers_own():
    server = WorkerId("10.0.0.1:8000")
    assert port_of("5557", server, "--kv-events") == "tcp://10.0.0.1:5557"
    assert port_of("+100", server, "--kv-events") == "tcp://10.0.0.1:8100"
    with pytest.raises(BadInput, match=r"--kv-events: expected PORT or \+N, got 'tcp'"):
        KvFollower(None, "tcp", None, lambda server: 16)
