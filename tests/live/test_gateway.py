"""The endpoint as OpenAI's own client meets it. On emulated engines: the protocol is the same."""

import asyncio
import json
import socket
import urllib.error
import urllib.request

import httpx
import openai
import pytest

from tokenfleet.cli.main import main

MODEL = "tiny-llama"
LONG = {"ignore_eos": True}


@pytest.fixture
def client(emulated_fleet):
    return openai.OpenAI(base_url=f"{emulated_fleet.gateway}/v1", api_key="any", max_retries=0)


def complete(client, **more):
    settings = {"model": MODEL, "prompt": "def main(", "temperature": 0.0, "max_tokens": 24} | more
    return client.completions.create(extra_body=LONG, **settings)


def test_the_model_is_listed_under_its_folders_name(client):
    assert client.models.list().data[0].id == MODEL


def test_a_streamed_completion_equals_the_whole_one_and_ends_with_a_usage_chunk(client):
    whole = complete(client)
    text, reasons, usages = "", [], []
    for chunk in complete(client, stream=True, stream_options={"include_usage": True}):
        if chunk.choices:
            text += chunk.choices[0].text
            reasons.append(chunk.choices[0].finish_reason)
        else:
            usages.append(chunk.usage)
    assert text == whole.choices[0].text
    assert (reasons[-1], set(reasons[:-1])) == ("length", {None})
    assert [u.completion_tokens for u in usages] == [24] == [whole.usage.completion_tokens]


def test_chat_streams_and_answers(client):
    messages = [{"role": "user", "content": "hello"}]
    whole = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=10, temperature=0, extra_body=LONG
    )
    stream = client.chat.completions.create(
        model=MODEL, messages=messages, max_tokens=10, temperature=0, stream=True, extra_body=LONG
    )
    text = "".join(c.choices[0].delta.content or "" for c in stream if c.choices)
    assert text == whole.choices[0].message.content


def test_several_choices_of_several_prompts_come_back_in_order(client):
    reply = complete(client, prompt=["one", "two"], n=3, temperature=0.8, max_tokens=4)
    assert [choice.index for choice in reply.choices] == list(range(6))


def test_logprobs_and_responses_are_served(client):
    reply = complete(client, logprobs=2, max_tokens=5)
    assert len(reply.choices[0].logprobs.token_logprobs) == 5
    assert client.responses.create(model=MODEL, input="hi", max_output_tokens=6).id


def test_the_async_client_streams_many_at_once(emulated_fleet):
    async def story():
        async with openai.AsyncOpenAI(base_url=f"{emulated_fleet.gateway}/v1", api_key="any") as client:

            async def one(i):
                stream = await client.completions.create(
                    model=MODEL, prompt=[9 + i] * 20, max_tokens=30, stream=True, extra_body=LONG
                )
                return "".join([chunk.choices[0].text async for chunk in stream])

            texts = await asyncio.gather(*(one(i) for i in range(40)))
            again = await asyncio.gather(*(one(i) for i in range(40)))
            assert texts == again
            assert len(set(texts)) > 30

    asyncio.run(story())


def test_a_stop_string_ends_a_request_that_counts_as_finished(client, emulated_fleet):
    text = complete(client, max_tokens=60).choices[0].text
    before = emulated_fleet.metric("tokenfleet_requests_total", outcome="finished")
    reply = complete(client, max_tokens=60, stop=[text[20:24]])
    assert reply.choices[0].finish_reason == "stop"
    assert reply.choices[0].text == text[: text.index(text[20:24])]
    emulated_fleet.until(
        lambda: emulated_fleet.metric("tokenfleet_requests_total", outcome="finished") == before + 1
    )


@pytest.mark.parametrize(
    ("change", "status"),
    [
        ({"model": "nobody"}, openai.NotFoundError),
        ({"prompt": [7] * 40_000}, openai.BadRequestError),
        ({"max_tokens": 10**9}, openai.BadRequestError),
        ({"max_tokens": -1}, openai.BadRequestError),
        ({"temperature": -3}, openai.BadRequestError),
    ],
)
def test_what_cannot_be_served_is_refused_in_openais_shape(client, change, status):
    with pytest.raises(status) as refused:
        complete(client, **change)
    assert refused.value.body["message"]
    assert complete(client).choices[0].finish_reason == "length"


def test_malformed_json_is_a_400(emulated_fleet):
    reply = httpx.post(
        f"{emulated_fleet.gateway}/v1/completions",
        content=b"{not json",
        headers={"content-type": "application/json"},
    )
    assert reply.status_code == 400
    assert "message" in reply.json()["error"]


def raw(fleet, headers=None, **body):
    settings = {"model": MODEL, "prompt": "x", "max_tokens": 4} | LONG | body
    return httpx.post(f"{fleet.gateway}/v1/completions", json=settings, headers=headers, timeout=60)


def test_the_answer_names_its_worker_and_keeps_the_request_id(emulated_fleet):
    reply = raw(emulated_fleet, {"x-request-id": "mine-1"})
    assert reply.headers["x-request-id"] == "mine-1"
    assert reply.headers["x-tokenfleet-worker"].startswith("w")
    assert "mine-1" in reply.json()["id"]


def test_a_request_id_that_could_split_a_header_is_replaced(emulated_fleet):
    reply = raw(emulated_fleet, {"x-request-id": "a b"})
    assert reply.headers["x-request-id"] != "a b"


@pytest.mark.parametrize(
    "headers",
    [
        {"x-llm-d-slo-ttft-ms": "soon"},
        {"x-llm-d-slo-tpot-ms": "-1"},
        {"x-slo-ttft-ms": "nan"},
        {"x-tokenfleet-priority": "urgent"},
        {"x-slo-class": "nobody"},
    ],
)
def test_a_header_that_makes_no_sense_is_a_400_that_names_it(emulated_fleet, headers):
    reply = raw(emulated_fleet, headers)
    assert reply.status_code == 400
    assert next(iter(headers)) in reply.json()["error"]["message"]


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("nobody", "slo_class: must be one of batch, hasty, got 'nobody'"),
        (7, "slo_class: the name of a class, got '7'"),
    ],
)
def test_a_body_that_names_no_class_is_a_400_that_says_which_there_are(emulated_fleet, asked, says):
    reply = raw(emulated_fleet, slo_class=asked)
    assert (reply.status_code, reply.json()["error"]["message"]) == (400, says)


def test_a_request_has_the_targets_of_its_class_and_each_class_has_an_attainment(emulated_fleet, capsys):
    def attained(name):
        return next(
            (c["met"], c["of"])
            for c in emulated_fleet.ask("GET", "/v1/fleet")["classes"]
            if c["name"] == name
        )

    before = {name: attained(name) for name in ("batch", "hasty")}
    assert raw(emulated_fleet, {"x-slo-class": "batch"}, max_tokens=20, slo_class="hasty").is_success
    assert raw(emulated_fleet, {"x-llm-d-inference-objective": "batch"}, max_tokens=20).is_success
    assert raw(emulated_fleet, {"x-llm-d-inference-objective": "another's"}, max_tokens=20).is_success
    assert raw(emulated_fleet, max_tokens=20, slo_class="hasty").is_success  # in place of the header
    (batch_met, batch_of), (hasty_met, hasty_of) = before["batch"], before["hasty"]
    emulated_fleet.until(lambda: attained("hasty")[1] == hasty_of + 1)
    assert attained("batch") == (batch_met + 2, batch_of + 2)
    assert attained("hasty") == (hasty_met, hasty_of + 1)
    assert (
        emulated_fleet.metric("tokenfleet_slo_requests_total", slo_class="hasty", met="true", target="both")
        == 0
    )
    assert main(["fleet", "--control", emulated_fleet.control, "status"]) == 0
    assert f"Class batch: 100 % of {batch_of + 2}" in capsys.readouterr().out


def test_slo_hits_are_counted_per_request(emulated_fleet):
    def count(met):
        return emulated_fleet.metric("tokenfleet_slo_requests_total", target="both", met=met)

    hits, misses = count("true"), count("false")
    assert raw(emulated_fleet, {"x-slo-ttft-ms": "500000", "x-llm-d-slo-tpot-ms": "50000"}).is_success
    emulated_fleet.until(lambda: count("true") == hits + 1)
    assert raw(emulated_fleet, {"x-llm-d-slo-tpot-ms": "0.001"}, max_tokens=40).is_success
    emulated_fleet.until(lambda: count("false") == misses + 1)


def test_a_clients_word_to_the_engine_about_moves_is_dropped(emulated_fleet):
    reply = raw(emulated_fleet, vllm_xargs={"tokenfleet_prior_tokens": [1, 2]}, presence_penalty=1.0)
    assert reply.status_code == 200


def running(fleet):
    return len(fleet.ask("GET", "/v1/requests")["requests"])


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_ends_its_request_in_the_engine(emulated_fleet, stream):
    emulated_fleet.until(lambda: running(emulated_fleet) == 0)
    aborted = emulated_fleet.metric("tokenfleet_requests_total", outcome="aborted")
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 7000, "stream": stream} | LONG).encode()
    host, port = emulated_fleet.gateway.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        head = "POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        connection.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body)
        emulated_fleet.until(lambda: running(emulated_fleet) == 1)
    emulated_fleet.until(lambda: running(emulated_fleet) == 0)
    assert emulated_fleet.metric("tokenfleet_requests_total", outcome="aborted") == aborted + 1


def kv_used(fleet):
    workers = fleet.ask("GET", "/v1/fleet")["workers"]
    return [w["telemetry"]["kv_used_blocks"] for w in workers if w["telemetry"] is not None]


def test_no_kv_block_is_in_use_once_all_is_quiet(emulated_fleet):
    emulated_fleet.until(lambda: running(emulated_fleet) == 0)
    emulated_fleet.until(lambda: not any(kv_used(emulated_fleet)))


def test_vllms_own_metrics_pass_through_by_worker(client, emulated_fleet):
    complete(client)
    with urllib.request.urlopen(f"{emulated_fleet.control}/metrics") as reply:
        text = reply.read().decode()
    lines = [line for line in text.splitlines() if line.startswith("vllm:generation_tokens_total{")]
    assert lines
    assert all('worker="w' in line and "engine=" not in line for line in lines)
