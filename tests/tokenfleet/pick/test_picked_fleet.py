"""The picker's parts: any messages, bodies and order of events, and the ledger is empty at the end."""

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest

pytest.importorskip("google.protobuf")

from by_day import examples
from hypothesis import given
from hypothesis import strategies as st
from picked import TARGETS, held, made_fleet

from controlplane.placement.queue import QueueSettings
from controlplane.types import Slo, SloClass, WorkerId
from dataplane.live.engine_api.link import WorkerInfo
from tokenfleet.advise.look import NoCounts
from tokenfleet.pick import messages as wire
from tokenfleet.pick.asked import PickTargets, Unclear, read_body, tenant_of
from tokenfleet.pick.call import Call
from tokenfleet.pick.exchange import Exchange
from tokenfleet.pick.unseen import Unseen
from tokenfleet.pick.watch import ServerLimits, ServerWatch
from tokenfleet.profiles.engine_metrics import EngineCounts

INFO = WorkerInfo(
    worker=WorkerId(""), engine="vllm", model="small", endpoint="", kv_addresses=(), block_tokens=16,
    kv_blocks=4000, kv_bytes_per_token=1, max_model_len=8192, max_seqs=4, max_batched_tokens=2048,
    tp_degree=1, vllm_version="", dtype="", pid=0,
)  # fmt: skip
SERVERS = [WorkerId(f"10.0.0.{n}:8000") for n in (1, 2, 3)]


def message(**of):
    return wire.wire().ProcessingRequest(**of).SerializeToString()


def headers(**of):
    kinds = wire.wire()
    listed = [kinds.Header(key=key.replace("_", "-"), raw_value=value.encode()) for key, value in of.items()]
    return kinds.HttpHeaders(headers=kinds.HeaderMap(headers=listed))


def body(data, ends=True):
    return wire.wire().HttpBody(body=data, end_of_stream=ends)


ASK = json.dumps({"prompt": "x" * 400, "stream": True, "max_tokens": 20}).encode()


class Gateway:
    """An exchange, its replies, and the moves that a gateway makes with it."""

    def __init__(self, fleet, **of):
        self.sent = []
        self.exchange = Exchange(fleet, TARGETS, self.sent.append)
        self.exchange.receive(message(request_headers=headers(**of)))

    def ask(self, data=ASK):
        self.exchange.receive(message(request_body=body(data)))

    def begin(self):
        kinds = wire.wire()
        listed = [
            kinds.Header(key=":status", raw_value=b"200"),
            kinds.Header(key="content-type", raw_value=b"text/event-stream"),
        ]
        answered = kinds.HttpHeaders(headers=kinds.HeaderMap(headers=listed))
        self.exchange.receive(message(response_headers=answered))

    def piece(self, data=b'data: {"x":1}\n\n', ends=False):
        self.exchange.receive(message(response_body=body(data, ends)))

    def replies(self):
        return [wire.wire().ProcessingResponse.FromString(one) for one in self.sent]


def in_a_loop(story, **of):
    async def run():
        fleet = made_fleet(**of)
        for name in SERVERS:
            fleet.attach(replace(INFO, worker=name), "")
        try:
            await story(fleet)
        finally:
            fleet.close()

    asyncio.run(run())


@examples(40)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 25)), max_size=60))
def test_steps_counted_when_the_ledger_is_read_leave_it_as_if_each_was_counted_at_once(some):
    ledgers = []
    for is_prompt in (True, False):
        now = [0.0]

        async def story(fleet, now=now, is_prompt=is_prompt):
            open_ = {}
            for n, more_ms in some:
                now[0] += more_ms / 1000
                if is_prompt:
                    fleet.catch_up()
                if n not in open_:
                    open_[n] = Gateway(fleet)
                    open_[n].ask()
                    open_[n].begin()
                open_[n].piece()
            now[0] += 1.0
            fleet.catch_up()
            ledgers.append((fleet.placement.ledger.workers.copy(), fleet.placement.ledger.requests.copy()))

        in_a_loop(story, clock=lambda now=now: now[0])
    for prompt, late in zip(*ledgers, strict=True):
        for name in prompt.dtype.names:
            np.testing.assert_array_equal(prompt[name], late[name], name)


moves = st.lists(
    st.tuples(
        st.sampled_from(["ask", "begin", "piece", "piece", "done", "leave", "retry", "gone", "back", "tick"]),
        st.integers(0, 9),
    ),
    max_size=60,
)


@examples(40)
@given(moves)
def test_after_any_order_of_events_the_ledger_holds_what_runs_and_then_nothing(some):
    async def story(fleet):
        open_ = {}
        for what, n in some:
            one, name = open_.get(n), SERVERS[n % 3]
            if what == "ask" and one is None:
                open_[n] = Gateway(fleet)
                open_[n].ask()
            elif what == "gone" and name in fleet.servers:
                fleet.detach(name)
            elif what == "back" and name not in fleet.servers:
                fleet.attach(replace(INFO, worker=name), "")
            elif what == "tick":
                for server in fleet.servers:
                    fleet.step(server)
                await asyncio.sleep(0)
            elif one is None:
                continue
            elif what == "begin":
                one.begin()
            elif what == "piece":
                one.piece()
            elif what == "retry" and one.exchange._call is not None:
                fleet.served(one.exchange._call, name)
            elif what == "done":
                one.piece(b"data: [DONE]\n\n", ends=True)
            elif what == "leave":
                open_.pop(n).exchange.closed()
            on_servers = sum(len(fleet.running(server)) for server in fleet.servers)
            counted = held(fleet)
            assert counted.get("decoding", 0) + counted.get("queued", 0) == on_servers
        for one in open_.values():
            one.exchange.closed()
        assert (held(fleet), fleet.calls, len(fleet.admission)) == ({}, {}, 0)

    in_a_loop(story, queue=QueueSettings(max_requests=2))


@given(st.lists(st.binary(max_size=80), max_size=6))
def test_any_bytes_are_messages_or_refused(some):
    async def story(fleet):
        gateway = Gateway(fleet)
        for data in some:
            try:
                gateway.exchange.receive(data)
            except ValueError:
                continue
        gateway.exchange.closed()
        assert (held(fleet), fleet.calls) == ({}, {})

    in_a_loop(story)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
FIELDS = (
    "prompt",
    "messages",
    "max_tokens",
    "max_completion_tokens",
    "stream",
    "cache_salt",
    "model",
    "tools",
)


@given(st.dictionaries(st.sampled_from(FIELDS), json_values))
def test_any_json_is_read_or_unclear(document):
    try:
        asked = read_body(json.dumps(document).encode())
    except Unclear:
        return
    assert asked.text_bytes >= 0
    assert asked.most_tokens is None or asked.most_tokens > 0


def test_prompts_are_measured_by_ids_or_by_their_text():
    assert read_body(b'{"prompt": [1, 2, 3]}').token_ids == [1, 2, 3]
    assert read_body(b'{"prompt": [[1, 2, 3]]}').token_ids == [1, 2, 3]
    assert read_body(b'{"prompt": ["ab", "\xc3\xa9"]}').text_bytes == 4
    image = {
        "messages": [
            {"content": [{"type": "text", "text": "ab"}, {"image_url": {"url": "data:" + "x" * 99}}]}
        ]
    }
    asked = read_body(json.dumps(image).encode())
    assert (asked.text_bytes, asked.has_media) == (2 + len("text"), True)
    assert tenant_of({"x-gateway-inference-fairness-id": "t" * 500}) == "t" * 80
    assert tenant_of({"x-llm-d-inference-fairness-id": "one"}) == "one"


@pytest.mark.parametrize("of", ["x-llm-d", "x-gateway"])
def test_llm_ds_headers_name_the_class_and_the_targets(of):
    batch = SloClass("batch", Slo(60.0, 2.0), 0.9)
    targets, named = PickTargets(Slo(2.0, 0.5), {"batch": batch}), f"{of}-inference-objective"
    assert targets.of({named: "batch"}) == ("batch", batch.slo)
    assert targets.of({named: "another's"}) == ("", targets.plain)
    both = {"x-llm-d-slo-ttft-ms": "700", "x-slo-ttft-ms": "900", "x-llm-d-slo-tpot-ms": "80"}
    assert targets.of({named: "batch", **both}) == ("batch", Slo(0.7, 0.08))
    with pytest.raises(Unclear, match="x-llm-d-slo-ttft-ms: expected milliseconds above 0, got 'soon'"):
        targets.of({"x-llm-d-slo-ttft-ms": "soon"})


@pytest.mark.parametrize("size", [0, 1, 130, 20_000, 62 * 1024, 200_000])
@pytest.mark.parametrize("stage", ["request_body", "response_body"])
def test_a_body_given_back_in_pieces_is_the_body(stage, size):
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    replies = [wire.wire().ProcessingResponse.FromString(one) for one in wire.body_pieces(stage, data, True)]
    pieces = [getattr(one, stage).response.body_mutation.streamed_response for one in replies]
    assert b"".join(one.body for one in pieces) == data
    assert [one.end_of_stream for one in pieces] == [False] * (len(pieces) - 1) + [True]
    assert all([of.name for of, _ in one.ListFields()] == [stage] for one in replies)


def test_the_choice_stands_in_header_and_metadata_with_others_to_try():
    async def story(fleet):
        gateway = Gateway(fleet, x_slo_class="batch")
        gateway.ask()
        picked, *_ = gateway.replies()
        (option,) = picked.request_headers.response.header_mutation.set_headers
        (space,) = picked.dynamic_metadata.fields
        inner = {field.key: field.value.string_value for field in space.value.struct_value.fields}
        addresses = option.header.raw_value.decode().split(",")
        assert sorted(addresses) == sorted(SERVERS)
        assert (option.header.key, space.key) == (wire.DESTINATION, "envoy.lb")
        ((name, call),) = fleet.calls.items()
        assert inner == {wire.DESTINATION: ",".join(addresses), wire.CALL: name}
        assert (call.slo_class, call.slo.ttft_s, call.worker) == ("batch", 60.0, addresses[0])
        gateway.exchange.closed()

    in_a_loop(story)


def test_bytes_of_a_token_are_learned_from_usage():
    async def story(fleet):
        for _ in range(200):
            gateway = Gateway(fleet)
            gateway.ask()
            gateway.begin()
            usage = b'data: {"usage":{"prompt_tokens":50,"completion_tokens":2}}\n\ndata: [DONE]\n\n'
            gateway.piece(usage, ends=True)
        assert fleet.lengths.bytes_a_token == pytest.approx(400 / 50, rel=0.01)
        assert set(fleet.history._prompts) == {50}
        assert fleet.history.lengths.predict(50) == pytest.approx(2, abs=0.5)

    in_a_loop(story)


def test_prompts_that_share_a_prefix_stay_together_where_tokens_are_known():
    def tokenize(document):
        return [int(one) for one in document["prompt"].split()]

    def words(begin, count=1600):
        return " ".join(str(begin + n) for n in range(count))

    async def story(fleet):
        async def once(prompt):
            gateway = Gateway(fleet)
            gateway.ask(json.dumps({"prompt": prompt, "stream": True, "max_tokens": 2}).encode())
            async with asyncio.timeout(10):
                while not fleet.calls:  # a long prompt is tokenized on another thread
                    await asyncio.sleep(0.001)
            (call,) = fleet.calls.values()
            worker = call.worker
            gateway.begin()
            gateway.piece()
            fleet.step(worker)
            gateway.piece(b"data: [DONE]\n\n", ends=True)
            return worker

        homes = {begin: await once(words(begin)) for begin in (0, 10_000, 20_000)}
        for begin, home in homes.items():
            assert {await once(words(begin) + f" {n} 7 7") for n in range(4)} == {home}
        assert fleet.lengths.counts == {"tokens": 15}

    in_a_loop(story, tokenize=tokenize)


def test_servers_counters_correct_the_ledger_within_two_looks():
    def page(running, ended=10.0, firsts=0.0):
        values = {"running": running, "waiting": 0.0, "first_tokens": firsts, "gaps": 0.0, "ended": ended}
        return EngineCounts(0.0, values | {"ended_prompt_tokens": 1000.0, "ended_output_tokens": 500.0})

    async def story(fleet):
        unseen, server = Unseen(fleet), SERVERS[0]
        for n, running in enumerate((0, 3, 3, 3, 1, 1, 1, 0, 0)):
            unseen.heard(server, page(float(running)), fleet.clock() + 1.0)
            assert len(fleet.running(server)) == (0, 0, 3, 3, 1, 1, 1, 0, 0)[n]
        assert held(fleet) == {}
        for _ in range(3):  # a slow page: what it counts was known when it was asked for, and has ended
            unseen.heard(server, page(1.0), fleet.clock(), 1)
        assert held(fleet) == {}
        unseen.gone(server)
        unseen.heard(server, page(2.0), fleet.clock())  # the first look at it: nothing was before
        assert len(fleet.running(server)) == 2
        unseen.gone(server)
        fleet.detach(server)
        assert (held(fleet), len(unseen)) == ({}, 0)

    in_a_loop(story)


def test_a_request_that_its_server_does_not_count_is_on_none_until_its_answer_names_one():
    def page(running):
        return EngineCounts(0.0, {"running": running, "waiting": 0.0, "first_tokens": 0.0, "gaps": 0.0})

    async def story(fleet):
        unseen, gateway = Unseen(fleet), Gateway(fleet)
        gateway.ask()
        (call,) = fleet.calls.values()
        first = call.worker
        unseen.heard(first, page(0.0), call.placed_s)  # it may not have arrived yet
        assert call.worker == first
        unseen.heard(first, page(0.0), call.placed_s + 1.0)
        assert (call.worker, held(fleet), dict(unseen.counts)) == (None, {}, {"ended": 0, "lost": 1})
        other = next(one for one in SERVERS if one != first)
        fleet.served(call, other)
        assert (call.worker, fleet.placement.load(other)) == (other, 1)
        unseen.heard(other, page(0.0), call.placed_s + 1.0)  # its answer has begun: its stream tells its end
        assert call.worker == other
        gateway.exchange.closed()
        assert (held(fleet), fleet.calls) == ({}, {})

    in_a_loop(story)


def test_a_request_that_has_just_begun_its_answer_hides_none_that_its_server_lacks():
    def page(running):
        return EngineCounts(0.0, {"running": running, "waiting": 0.0, "first_tokens": 0.0, "gaps": 0.0})

    async def story(fleet):
        unseen, lacked, begun = Unseen(fleet), Gateway(fleet), Gateway(fleet)
        for one in (lacked, begun):
            one.ask()
        gone, there = fleet.calls.values()
        fleet.put(there, gone.worker)
        gone.placed_s, asked_s = there.placed_s - 1.0, fleet.clock() + 0.01
        unseen.heard(gone.worker, page(1.0), asked_s)  # the one that it counts may be either
        assert dict(unseen.counts) == {}
        fleet.got(there, 1)
        unseen.heard(there.worker, page(1.0), fleet.clock())
        assert (gone.worker, there.worker is None, unseen.counts["lost"]) == (None, False, 1)
        for one in (lacked, begun):
            one.exchange.closed()

    in_a_loop(story)


def test_a_request_that_is_retried_is_on_the_server_that_counts_it_before_its_answer_begins():
    def page(running):
        return EngineCounts(0.0, {"running": running, "waiting": 0.0, "first_tokens": 0.0, "gaps": 0.0})

    async def story(fleet):
        unseen = Unseen(fleet)
        waiting, answered = Gateway(fleet), Gateway(fleet)
        for one in (waiting, answered):
            one.ask()
        call, begun = fleet.calls.values()
        dead, other = call.worker, next(one for one in SERVERS if one not in (call.worker, begun.worker))
        answered.begin()
        fleet.served(begun, dead)
        unseen.refused(dead, call.placed_s - 1.0)  # it was placed after the look
        assert call.worker == dead
        unseen.refused(dead, fleet.clock())
        assert (call.worker, begun.worker) == (None, dead)  # an answer that has begun tells its own end
        unseen.heard(other, page(1.0), fleet.clock())
        assert (call.worker, fleet.running(other)) == (other, [call])
        unseen.heard(other, page(1.0), call.placed_s + 1.0)
        assert dict(unseen.counts) == {"lost": 1}  # no request of another picker was added
        for one in (waiting, answered):
            one.exchange.closed()
        assert (held(fleet), fleet.calls) == ({}, {})

    in_a_loop(story)


class Looked:
    """Servers whose pages a test writes, and a watch over them."""

    def __init__(self, fleet):
        self.of, self.lines = {}, []
        limits = ServerLimits(4, 2048)
        self.watch = ServerWatch(self, fleet, Unseen(fleet), limits, self.lines.append)

    async def pages(self, at_s):
        return dict(self.of)

    def counts(self, server, running):
        values = {"running": float(running), "waiting": 0.0, "first_tokens": 0.0, "gaps": 0.0}
        self.of[server] = EngineCounts(0.0, values)


def test_one_look_moves_a_retried_request_to_the_server_that_has_it_in_whatever_order_servers_are_listed():
    async def story(fleet):
        gateway = Gateway(fleet)
        gateway.ask()
        (call,) = fleet.calls.values()
        call.placed_s -= 1.0  # it has had time to arrive
        lacks, has, third = call.worker, *(one for one in SERVERS if one != call.worker)
        looked = Looked(fleet)
        for server in (has, lacks, third):
            looked.counts(server, int(server == has))
        await looked.watch.look()
        assert (call.worker, fleet.running(has)) == (has, [call])
        gateway.exchange.closed()

    in_a_loop(story)


def test_a_server_that_refuses_a_connection_gets_no_more_until_it_answers_again():
    async def story(fleet):
        looked, dead = Looked(fleet), SERVERS[0]
        for server in SERVERS:
            looked.counts(server, 0)

        async def placed(count):
            gateways = [Gateway(fleet) for _ in range(count)]
            for one in gateways:
                one.ask()
            at = [call.worker for call in fleet.calls.values()]
            for one in gateways:
                one.exchange.closed()
            return at

        looked.of[dead] = NoCounts("does not answer: connection refused", refuses=True)
        for _ in range(2):
            await looked.watch.look()
        assert dead not in await placed(6)
        down = f"{dead}: does not answer: connection refused; chosen last until it answers"
        assert looked.lines == [down]
        looked.counts(dead, 0)
        await looked.watch.look()
        assert looked.lines == [down, f"{dead}: answers again"]
        assert dead in await placed(6)

    in_a_loop(story)


def test_a_fleet_without_step_times_places_by_load():
    async def story(fleet):
        gateways = [Gateway(fleet) for _ in range(9)]
        for one in gateways:
            one.ask()
        assert [len(fleet.running(server)) for server in SERVERS] == [3, 3, 3]
        for one in gateways:
            one.exchange.closed()

    async def run():
        fleet = made_fleet(is_known=False)
        for name in SERVERS:
            fleet.attach(replace(INFO, worker=name), "unknown")
        await story(fleet)
        assert held(fleet) == {}
        fleet.close()

    asyncio.run(run())


def test_warming_up_leaves_nothing_behind():
    async def story(fleet):
        fleet.warm_up(TARGETS.plain)
        assert (held(fleet), fleet.calls, dict(fleet.counts)) == ({}, {}, {})
        assert {
            one.value for one in next(iter(fleet.times.collect())).samples if "created" not in one.name
        } == {0.0}
        assert Call(None, TARGETS.plain, "", "").worker is None

    in_a_loop(story)
