"""Several gateways before one core: what the death, the renewal and the end of them leave whole."""

import asyncio
import os
import signal

import aiohttp
import httpx
import psutil
import pytest
from raw_stream import session, stream
from served_fleet import serve
from span_collector import Collector, facts

BODY = {"model": "tiny-llama", "prompt": "def main(", "temperature": 0, "max_tokens": 24, "ignore_eos": True}
LONG = 300  # tokens: seconds on these engines


@pytest.fixture(scope="module")
def collector():
    made = Collector()
    yield made
    made.stop()


@pytest.fixture(scope="module")
def fleet(model_folder, scratch, collector):
    keys = scratch / "few.yaml"
    keys.write_text("- {name: all, key: a}\n- {name: few, key: f, requests_per_minute: 1, burst: 2}\n")
    flags = ("--engine", "emulated", "--workers", "2", "--gateways", "2", "--api-keys", str(keys))
    flags += ("--otlp", collector.url)
    served = serve(model_folder, *flags, "--shutdown-wait", "2s", folder=scratch)
    yield served
    served.stop()


def gateways(fleet):
    return [g for g in fleet.ask("GET", "/v1/fleet")["gateways"] if g["state"] == "serving"]


def workers(fleet):
    return [(w["worker"], w["state"], w["revision"]) for w in fleet.ask("GET", "/v1/fleet")["workers"]]


def ask(fleet, key="a", headers=None, **body):
    headers = {"authorization": f"Bearer {key}"} | (headers or {})
    return httpx.post(f"{fleet.gateway}/v1/completions", json=BODY | body, headers=headers, timeout=60)


async def settled(condition):
    async with asyncio.timeout(200):
        while not await asyncio.to_thread(condition):
            await asyncio.sleep(0.02)


async def streams(fleet, http, count, tokens=LONG):
    """Streams under way, each past its first tokens at its gateway."""
    before = len(fleet.ask("GET", "/v1/requests")["requests"])
    headers = {"authorization": "Bearer a"}
    tasks = [
        asyncio.ensure_future(stream(http, fleet.gateway, headers, prompt=[7 + i] * 20, max_tokens=tokens))
        for i in range(count)
    ]

    def run():
        here = fleet.ask("GET", "/v1/requests")["requests"]
        return sum(r["output_tokens"] > 2 for r in here) >= before + count

    await settled(run)
    return tasks


async def ends(tasks):
    """Whether each stream came whole, and the texts of those that did."""
    got = await asyncio.gather(*tasks, return_exceptions=True)
    texts = {i: g.text for i, g in enumerate(got) if not isinstance(g, Exception) and g.is_done}
    assert all(isinstance(g, aiohttp.ClientError | OSError) or g.is_done or g.error for g in got), got
    return texts


def test_a_request_s_spans_are_in_its_client_s_trace(fleet, collector):
    trace, parent = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
    assert ask(fleet, headers={"traceparent": f"00-{trace}-{parent}-01"}).status_code == 200
    asyncio.run(settled(lambda: "request" in collector.of(trace)[1]))
    spans, names = collector.of(trace)
    assert sorted(names) == ["admission", "engine", "placement", "request"]
    (root,) = (span for span in spans if span.name == "request")
    assert root.parent_span_id.hex() == parent
    told = facts(root)
    assert (told["gen_ai.usage.output_tokens"], told["tokenfleet.outcome"]) == (24, "finished")
    placed = facts(next(span for span in spans if span.name == "placement"))
    assert placed["tokenfleet.ttft_s"] == told["gen_ai.server.time_to_first_token"] > 0
    assert placed["tokenfleet.predicted_ttft_s"] > 0


def test_killed_gateways_take_only_their_own_streams_along_and_are_started_again(fleet):
    async def story():
        async with session() as http:
            undisturbed = await ends(await streams(fleet, http, 12))
            assert len(undisturbed) == 12
            tasks = await streams(fleet, http, 12)
            victim, other = sorted(gateways(fleet), key=lambda g: -g["requests"])
            assert victim["requests"] + other["requests"] == 12
            os.kill(victim["pid"], signal.SIGKILL)
            texts = await ends(tasks)
        assert len(texts) == 12 - victim["requests"]
        assert all(text == undisturbed[i] for i, text in texts.items())
        os.kill(other["pid"], signal.SIGKILL)

    before = workers(fleet)
    asyncio.run(story())
    assert ask(fleet).status_code == 200  # the connection waits for a gateway that takes it
    assert workers(fleet) == before
    assert fleet.metric("tokenfleet_workers_lost_total") == 0
    assert fleet.metric("tokenfleet_requests_total", outcome="failed") == 0


def test_a_request_that_comes_again_under_its_key_is_computed_once_whichever_gateway_it_meets(fleet):
    before = fleet.metric("tokenfleet_requests_total", outcome="finished")
    replies = [ask(fleet, headers={"idempotency-key": "once"}) for _ in range(6)]
    assert {r.json()["id"] for r in replies} == {replies[0].json()["id"]}
    assert fleet.metric("tokenfleet_requests_total", outcome="finished") == before + 1
    assert ask(fleet, headers={"idempotency-key": "once"}, prompt="other").status_code == 422
    assert ask(fleet, headers={"idempotency-key": "x" * 300}).status_code == 400


def test_the_limit_of_a_key_holds_for_all_gateways_together(fleet):
    codes = [ask(fleet, key="f").status_code for _ in range(6)]
    assert codes == [200, 200, 429, 429, 429, 429]
    assert fleet.metric("tokenfleet_requests_total", outcome="rate_limited") == 4


def test_requests_of_every_gateway_are_moved_and_their_streams_go_on(fleet):
    fleet.until(lambda: len(gateways(fleet)) == 2)

    async def story():
        async with session() as http:
            undisturbed = await ends(await streams(fleet, http, 6))
            tasks = await streams(fleet, http, 6)
            assert all(g["requests"] for g in gateways(fleet))
            for request in fleet.ask("GET", "/v1/requests")["requests"]:
                fleet.ask("POST", "/v1/migrations", {"request_id": request["request_id"]})
            assert await ends(tasks) == undisturbed
        moved = [d for d in fleet.ask("GET", "/v1/fleet")["decisions"] if d["kind"] == "migrate"]
        assert sum("done" in d["reason"] for d in moved) >= 6

    asyncio.run(story())


def test_gateways_are_renewed_under_load_though_the_core_dies_meanwhile_and_no_request_is_lost(fleet):
    async def story():
        old = {g["pid"] for g in gateways(fleet)}
        over = asyncio.Event()
        codes = []

        async def caller(http):
            while not over.is_set():
                reply = await http.post("/v1/completions", json=BODY | {"max_tokens": 2})
                codes.append(reply.status_code)

        auth = {"authorization": "Bearer a"}
        async with (
            session() as http,
            httpx.AsyncClient(base_url=fleet.gateway, headers=auth, timeout=60) as kept,
        ):
            tasks = await streams(fleet, http, 6, tokens=2 * LONG)
            callers = [asyncio.ensure_future(caller(kept)) for _ in range(3)]
            core = fleet.ask("GET", "/v1/fleet")["core"]
            fleet.ask("POST", "/v1/gateways/restart", {"finish_s": 60})
            await settled(lambda: len(old & {g["pid"] for g in gateways(fleet)}) == 1)
            os.kill(core["pid"], signal.SIGKILL)
            await settled(lambda: not any(psutil.pid_exists(pid) for pid in old))
            assert len(await ends(tasks)) == 6
            over.set()
            await asyncio.gather(*callers)
        assert set(codes) == {200}
        assert fleet.ask("GET", "/v1/fleet")["core"]["number"] == core["number"] + 1

    asyncio.run(story())
    assert len(gateways(fleet)) == 2


def test_engine_metrics_are_those_of_all_gateways_together(fleet):
    before = fleet.metric("vllm:generation_tokens_total")
    for _ in range(4):
        ask(fleet)
    # They write what they count every second, and so what they had counted before this test.
    fleet.until(lambda: fleet.metric("vllm:generation_tokens_total") >= before + 4 * 24)


def test_a_killed_core_gets_a_successor_and_every_stream_goes_on_where_it_was(fleet):
    fleet.until(lambda: len(gateways(fleet)) == 2)
    number = fleet.ask("GET", "/v1/fleet")["core"]["number"]

    async def story():
        async with session() as http:
            undisturbed = await ends(await streams(fleet, http, 12))
            fleet.ask("POST", "/v1/fleet/scale", {"workers": 3})
            before = {g["gateway"]: g["pid"] for g in gateways(fleet)}
            tasks = await streams(fleet, http, 12)
            held = asyncio.ensure_future(asyncio.to_thread(ask, fleet, headers={"idempotency-key": "kill"}))
            os.kill(fleet.ask("GET", "/v1/fleet")["core"]["pid"], signal.SIGKILL)
            assert await ends(tasks) == undisturbed
            assert (await held).status_code == 200
            return before

    before = asyncio.run(story())
    view = fleet.ask("GET", "/v1/fleet")
    assert (view["core"]["number"], view["wanted_workers"]) == (number + 1, 3)
    assert {g["gateway"]: g["pid"] for g in gateways(fleet)} == before
    os.kill(next(iter(before.values())), signal.SIGKILL)  # the new core looks after them, too
    fleet.until(lambda: {g["gateway"] for g in gateways(fleet)} - set(before) and len(gateways(fleet)) == 2)
    assert ask(fleet).status_code == 200


def test_the_end_of_serve_ends_every_gateway_and_cuts_streams_with_an_error(fleet):
    async def story():
        async with session() as http:
            tasks = await streams(fleet, http, 4, tokens=7000)
            pids = [g["pid"] for g in gateways(fleet)]
            os.killpg(fleet.process.pid, signal.SIGINT)
            got = await asyncio.gather(*tasks)
        assert {(g.error, g.is_done) for g in got} == {("the fleet is shutting down", False)}
        assert await asyncio.to_thread(fleet.process.wait, 30) == 0
        assert not any(psutil.pid_exists(pid) for pid in pids)

    asyncio.run(story())
