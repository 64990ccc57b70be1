"""The core and its gateways over their wire: whose tokens are whose, and what each end's loss leaves."""

import asyncio
import contextlib
import tempfile
import time
from pathlib import Path

import pytest
import uvloop
from front import SLO, A, B, Front, alone, profile
from plain_codec import PlainCodec

from controlplane.errors import BadInput
from controlplane.placement.queue import QueueSettings
from dataplane.http.keys import ApiKey
from dataplane.live.gateway.idempotency import OtherBody, StoredAnswer
from dataplane.live.gateways.core_server import CoreServer
from dataplane.live.gateways.remote_core import CoreGone, RemoteCore
from dataplane.live.gateways.wire import MessageType, message, next_message, pack
from dataplane.live.ledger.request import CURRENT_TICKET, Ticket
from harness.bare_fleet import token_request

STORY_S = 60.0


class Gateway:
    """In the place of a gateway's process: sends requests over its core, and keeps what comes back."""

    def __init__(self):
        self.closed, self.retired, self.open = [], [], (0, 0)
        self.close, self.retire = self.closed.append, self.retired.append  # as its core calls its door
        self.leave = self.core_gone = lambda: None
        self.traffic = lambda: self.open
        self.tokens, self.finish, self.ends = {}, {}, {}

    async def connect(self, address, name):
        self.core = await RemoteCore.connect(address, name, PlainCodec(), self)
        self.pump = asyncio.ensure_future(self._pump())
        return self

    async def _pump(self):
        while True:
            for output in (await self.core.get_output_async()).outputs:
                assert output.request_id not in self.finish, "an output after the end"
                self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    self.finish[output.request_id] = output.finish_reason.name
                    self.ends[output.request_id].set()

    async def send(self, name, prompt=(1, 2, 3), ticket=None, tokens=100):
        ticket = ticket or Ticket(name, "test", SLO, 0)
        CURRENT_TICKET.set(ticket)
        self.ends[name] = asyncio.Event()
        await self.core.add_request_async(token_request(name, prompt, {"max_tokens": tokens}))
        return ticket

    async def until(self, name, tokens):
        while len(self.tokens.get(name, ())) < tokens:
            await asyncio.sleep(0.001)

    async def ended(self, *names):
        await asyncio.gather(*(self.ends[name].wait() for name in names))

    def hang(self):
        """As a stopped process does: it says and hears nothing more."""
        self.core._pulse.cancel()
        self.core._listener.cancel()

    def die(self):
        """As a killed process does: its end of the stream is gone."""
        self.pump.cancel()
        self.hang()
        self.core._writer.transport.abort()


class World:
    """A core with two emulated engines, and gateways before it."""

    def __init__(self, folder, queue):
        self.queue, self.limits, self.gateways, self.fronts = queue, {}, [], []
        self.address = Path(folder) / "core"

    async def start(self, number=1, awaited=()):
        """A core of this number listens, in the place of one that was there."""
        self.front = Front([A, B], profile(), QueueSettings(self.queue, 30.0))
        self.fronts.append(self.front)
        self.front.pump.cancel()
        self.core = self.front.core
        self.server = CoreServer(self.core, PlainCodec(), 64, lambda key: self.limits.get(key, 0.0), number)
        self.server.await_gateways(awaited)
        await self.server.start(self.address)

    async def gateway(self, name):
        self.gateways.append(await Gateway().connect(self.address, name))
        return self.gateways[-1]

    async def until(self, holds):
        while not holds():
            await asyncio.sleep(0.001)

    def outcomes(self, outcome):
        return self.core.metrics.requests.labels(outcome, "normal")._value.get()


def play(story, queue=64):
    async def run():
        with tempfile.TemporaryDirectory() as folder:
            world = World(folder, queue)
            await world.start()
            try:
                await asyncio.wait_for(story(world), STORY_S)
            finally:
                await world.server.close()
                for gateway in world.gateways:
                    gateway.die()
                for front in world.fronts:
                    await front.close()
                await asyncio.sleep(0.01)  # for transports to close

    uvloop.run(run())  # as gateways and cores do


def test_each_gateway_gets_the_tokens_of_its_own_requests_and_one_ledger_spreads_them_all():
    async def story(world):
        gateways = [await world.gateway(name) for name in ("g0", "g1")]
        names = [(g, f"{i}-{k}", [i + 1, k + 1]) for k in range(6) for i, g in enumerate(gateways)]
        for gateway, name, prompt in names:
            await gateway.send(name, prompt)
        await world.until(lambda: len(world.core.requests) == 12)
        spread = [len(world.core.requests.on_worker(worker)) for worker in (A, B)]
        assert spread == [6, 6]
        for gateway, name, prompt in names:
            await gateway.ended(name)
            assert gateway.tokens[name] == alone(prompt, 100)
        assert len(gateways[0].finish) == len(gateways[1].finish) == 6

    play(story)


def test_a_ticket_has_its_worker_with_the_first_token():
    async def story(world):
        gateway = await world.gateway("g0")
        ticket = await gateway.send("r")
        await gateway.until("r", 1)
        assert ticket.worker in (A, B)

    play(story)


def test_a_refusal_is_on_the_ticket_when_its_request_ends():
    async def story(world):
        gateway = await world.gateway("g0")
        for worker in (A, B):
            world.core.set_open(worker, False)
        ticket = await gateway.send("r")
        await gateway.ended("r")
        assert gateway.finish["r"] == "ERROR"
        assert "full" in ticket.rejection.reason
        assert ticket.rejection.retry_after_s > 0

    play(story, queue=0)


def test_what_a_gateway_ends_is_over_in_the_core_and_counts_as_what_it_was():
    async def story(world):
        gateway = await world.gateway("g0")
        await gateway.send("stopped", tokens=5000)
        left = await gateway.send("left", tokens=5000)
        await gateway.until("stopped", 3)
        await gateway.core.abort_requests_async(["stopped"])
        left.client_left = True
        await gateway.core.abort_requests_async(["left"])
        await world.until(lambda: not len(world.core.requests))
        assert (world.outcomes("finished"), world.outcomes("aborted")) == (1, 1)
        seen = len(gateway.tokens["stopped"])
        await gateway.send("next", tokens=20)
        await gateway.ended("next")
        assert len(gateway.tokens["stopped"]) == seen

    play(story)


def test_a_client_that_leaves_takes_all_parts_of_its_ticket_along():
    async def story(world):
        gateway = await world.gateway("g0")
        ticket = await gateway.send("a", tokens=5000)
        await gateway.send("b", ticket=ticket, tokens=5000)
        await gateway.until("b", 2)
        await gateway.core.abandon(ticket)
        await gateway.ended("a", "b")
        assert set(gateway.finish.values()) == {"ABORT"}
        assert not ticket.requests
        assert not world.server.connected("g0").tickets

    play(story)


def test_the_requests_of_a_gateway_that_dies_end_and_no_others():
    async def story(world):
        dying, other = [await world.gateway(name) for name in ("g0", "g1")]
        for i in range(4):
            await dying.send(f"d{i}", tokens=5000)
            await other.send(f"o{i}", [i + 1], tokens=300)
        await dying.until("d3", 2)
        dying.die()
        await other.ended(*(f"o{i}" for i in range(4)))
        await world.until(lambda: not len(world.core.requests))
        assert all(other.tokens[f"o{i}"] == alone([i + 1], 300) for i in range(4))
        assert world.outcomes("aborted") == 4
        assert world.core.metrics.lost_workers._value.get() == 0

    play(story)


def test_a_lost_cores_successor_takes_over_every_request_and_no_token_is_lost_or_comes_twice():
    prompts = [[i + 1, 7] for i in range(12)]

    async def story(world):
        gateways = [await world.gateway(name) for name in ("g0", "g1")]
        for i, prompt in enumerate(prompts):
            await gateways[i % 2].send(f"r{i}", prompt)
        await gateways[0].until("r0", 20)
        await world.server.close()
        late = await gateways[0].send("late", [9, 9])  # while there is no core
        left = await gateways[1].send("left", tokens=100_000)
        await gateways[1].core.abandon(left)
        await world.start(2)
        for i, prompt in enumerate(prompts):
            await gateways[i % 2].ended(f"r{i}")
            assert gateways[i % 2].tokens[f"r{i}"] == alone(prompt, 100)
        await gateways[0].ended("late")
        assert gateways[0].tokens["late"] == alone([9, 9], 100)
        assert late.failure is None
        await world.until(lambda: not len(world.core.requests))
        assert world.outcomes("aborted") == 1  # whose client left meanwhile
        assert not gateways[0].closed

    play(story)


def test_what_comes_at_the_moment_of_a_cores_death_waits_for_its_successor():
    """uvloop raises where one writes to a connection that broke, before the reader hears of it."""

    async def story(world):
        gateway = await world.gateway("g0")
        gateway.core._writer.transport.abort()
        await asyncio.sleep(0)
        await gateway.send("r")
        await world.server.close()
        await world.start(2)
        await gateway.ended("r")
        assert gateway.tokens["r"] == alone((1, 2, 3), 100)

    play(story)


def test_what_was_claimed_or_asked_of_a_lost_core_is_asked_of_its_successor():
    async def story(world):
        first, second = [await world.gateway(name) for name in ("g0", "g1")]
        assert await first.core.claim("k", b"d") is None
        waiting = asyncio.ensure_future(second.core.claim("k", b"d"))
        await asyncio.sleep(0.01)
        again = first.core._find_successor
        may_return = asyncio.Event()

        async def late():
            await may_return.wait()
            return await again()

        first.core._find_successor = late
        await world.server.close()
        await world.start(2, ["g0", "g1"])
        await world.until(lambda: world.server.connected("g1"))
        await asyncio.sleep(0.05)  # for what it should not be told
        assert not waiting.done()
        may_return.set()
        await first.core.settle("k", StoredAnswer(200, [], b"answer"))
        assert (await waiting).body == b"answer"

    play(story)


def test_a_core_that_comes_back_after_its_successor_gets_no_gateway():
    async def story(world):
        gateway = await world.gateway("g0")
        await gateway.send("r", [3, 4], tokens=400)
        await gateway.until("r", 5)
        await world.server.close()
        await world.start(1)  # as if it had only been paused
        back = world.core
        await asyncio.sleep(0.1)
        assert not len(back.requests)
        await world.server.close()
        await world.start(2)
        await gateway.ended("r")
        assert gateway.tokens["r"] == alone([3, 4], 400)

    play(story)


def test_when_no_core_comes_every_request_ends_in_an_error_and_no_question_waits(monkeypatch):
    monkeypatch.setattr("dataplane.live.gateways.remote_core.SUCCESSOR_S", 0.0)

    async def story(world):
        gateway = await world.gateway("g0")
        ticket = await gateway.send("r", tokens=5000)
        await gateway.until("r", 2)
        await gateway.core.claim("k", b"d")
        waiting = asyncio.ensure_future(gateway.core.claim("k", b"d"))
        await asyncio.sleep(0)
        await world.server.close()
        await gateway.ended("r")
        assert gateway.finish["r"] == "ERROR"
        assert "core is gone" in ticket.failure
        assert gateway.closed == ["the fleet's core is gone"]
        with pytest.raises(CoreGone):
            await waiting
        late = await gateway.send("late")
        await gateway.ended("late")
        assert late.failure

    play(story)


def test_a_gateway_that_stood_still_itself_does_not_give_its_core_up(monkeypatch):
    """As on a paused machine: it waits for the successor for as long as it runs."""
    monkeypatch.setattr("dataplane.live.gateways.remote_core.SUCCESSOR_S", 2.0)

    async def story(world):
        gateway = await world.gateway("g0")
        await gateway.send("r", tokens=400)
        await gateway.until("r", 5)
        await world.server.close()
        await world.until(lambda: gateway.core._is_lost)
        time.sleep(2.5)
        await world.start(2)
        await gateway.ended("r")
        assert gateway.tokens["r"] == alone((1, 2, 3), 400)

    play(story)


def test_a_gateway_that_gives_up_ends_its_streams_in_an_error_that_says_why():
    async def story(world):
        leaving, other = [await world.gateway(name) for name in ("g0", "g1")]
        ticket = await leaving.send("r", tokens=100_000)
        await other.send("o", tokens=300)
        await leaving.until("r", 2)
        await leaving.core._close(0.05)
        assert leaving.finish["r"] == "ERROR"
        assert "shutting down" in ticket.failure
        await other.ended("o")
        assert other.finish["o"] == "LENGTH"

    play(story)


def test_a_gateway_that_leaves_waits_for_what_is_open_and_for_what_still_comes():
    async def story(world):
        gateway = await world.gateway("g0")
        gateway.open = 1, 1
        await gateway.send("r", tokens=50)
        world.server.retire("g0", 30.0)
        await world.until(lambda: gateway.retired == [30.0])
        leaving = asyncio.ensure_future(gateway.core._close(30.0))
        await gateway.ended("r")
        await gateway.send("late", tokens=50)
        await gateway.ended("late")
        assert not leaving.done()
        gateway.open = 0, 0
        await leaving
        assert set(gateway.finish.values()) == {"LENGTH"}

    play(story)


def test_keys_and_answers_are_the_cores_for_all_gateways():
    async def story(world):
        one, two = [await world.gateway(name) for name in ("g0", "g1")]
        world.limits = {"few": 7.0, "unasked": 7.0}
        assert await one.core.allow(ApiKey("few", "x", tokens_per_minute=1.0)) == 7.0
        assert await two.core.allow(ApiKey("many", "y", requests_per_minute=1.0)) == 0.0
        assert await two.core.allow(ApiKey("unasked", "z")) == 0.0  # without a limit, nobody is asked
        assert await one.core.claim("k", b"d") is None
        with pytest.raises(OtherBody):
            await two.core.claim("k", b"e")
        second = asyncio.ensure_future(two.core.claim("k", b"d"))
        answer = StoredAnswer(200, [(b"content-type", b"text/plain")], b"\x00\xff")
        await one.core.settle("k", answer)
        assert await second == answer

    play(story)


def test_what_a_dead_gateway_was_to_answer_its_clients_other_gateway_answers():
    async def story(world):
        one, two = [await world.gateway(name) for name in ("g0", "g1")]
        assert await one.core.claim("k", b"d") is None
        second = asyncio.ensure_future(two.core.claim("k", b"d"))
        one.die()
        assert await second is None

    play(story)


def test_a_gateway_that_hangs_is_parted_with_and_one_without_requests_that_runs_is_not(monkeypatch):
    monkeypatch.setattr("dataplane.live.gateways.wire.PULSE_S", 0.01)

    async def story(world):
        one, two = [await world.gateway(name) for name in ("g0", "g1")]
        await one.send("r", tokens=100_000)
        one.hang()
        await world.until(lambda: world.server.connected("g0") is None)
        assert world.outcomes("aborted") == 1
        await two.send("s")
        await two.ended("s")

    play(story)


def test_a_stranger_is_sent_away_and_others_do_not_notice():
    async def story(world):
        gateway = await world.gateway("g0")
        await gateway.send("r", tokens=200)
        for first in (
            message(MessageType.HELLO, pack([999, "0.0", "old"])),
            message(MessageType.ABORT, pack([[], False])),
            message(MessageType.HELLO, pack("what")),
            [b"\xff\x01\x04\x00\x00\x00abcd"],
            [b"GET / HTTP/1.1\r\n\r\n" * 20],
        ):
            reader, writer = await asyncio.open_unix_connection(world.address)
            writer.writelines(first)
            with contextlib.suppress(ConnectionError):
                await reader.read()  # to its end
            writer.close()
        await gateway.ended("r")
        assert gateway.tokens["r"] == alone((1, 2, 3), 200)

    play(story)


def test_a_gateway_of_another_version_is_refused_in_words(monkeypatch):
    monkeypatch.setattr("dataplane.live.gateways.remote_core.WIRE_VERSION", 0)

    async def story(world):
        with pytest.raises(BadInput, match="wire"):
            await world.gateway("g0")

    play(story)


def test_a_message_is_read_as_it_was_written_and_half_of_one_is_the_end():
    async def story(world):
        reader = asyncio.StreamReader()
        whole = b"".join(message(MessageType.OUTPUTS, b"", b"abc", b"x" * 70_000))
        reader.feed_data(whole + whole[:-1])
        reader.feed_eof()
        kind, frames = await next_message(reader)
        assert (kind, [bytes(f) for f in frames]) == (MessageType.OUTPUTS, [b"", b"abc", b"x" * 70_000])
        with pytest.raises(EOFError):
            await next_message(reader)

    play(story)


def test_what_a_gateway_counts_is_in_the_file_that_all_share_once_it_is_written(monkeypatch, tmp_path):
    from prometheus_client import CollectorRegistry
    from prometheus_client.multiprocess import MultiProcessCollector
    from prometheus_client.values import MultiProcessValue

    from dataplane.live.gateways.wire import Unwritten

    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    unwritten = Unwritten(MultiProcessValue())
    made = unwritten.value()("counter", "tokens", "tokens_total", ["of"], ["w0"], "help")
    registry = CollectorRegistry()
    MultiProcessCollector(registry, str(tmp_path))

    def told():
        return registry.get_sample_value("tokens_total", {"of": "w0"})

    made.inc(3)
    made.inc(4)
    assert (made.get(), told()) == (7.0, 0.0)
    unwritten.write()
    assert told() == 7.0
    made.inc(1)
    unwritten.write()
    unwritten.write()
    assert told() == 8.0
