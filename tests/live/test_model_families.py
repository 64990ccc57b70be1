"""Models that are no plain Llama, each on two real workers: the same text moved, replayed, or neither."""

import asyncio
import json
import os
import re
import signal
import urllib.request
from functools import partial
from urllib.error import HTTPError

import psutil
import pytest
from conftest import run_example
from raw_stream import session, stream
from served_fleet import serve

from harness import served
from harness.served import about_image, begun

FLAGS = ("--dtype", "float32", "--max-model-len", "4096", "--kv-cache-memory-bytes", str(96 << 20))
COLOURS = {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 300, "maxItems": 300}
AS_JSON = {"type": "json_schema", "json_schema": {"name": "colours", "schema": COLOURS}}


def made(scratch, family, name="", *flags):
    folder = scratch / (name or family)
    run_example("tiny_models.py", family, str(folder), *flags)
    return folder


def family_fleet(family, *more):
    """A fixture: two workers of a family, with these vLLM flags more."""

    @pytest.fixture
    def fleet(live_extra, scratch):
        # By load: step times need not be measured.
        flags = ("--workers", "2", "--policy", "jsq")
        served = serve(made(scratch, family), *flags, engine_flags=(*FLAGS, *more), folder=scratch)
        yield served
        served.stop()

    return fleet


gemma_fleet = family_fleet("gemma3")
# Where processors have AMX vLLM takes kernels for it, which refuse float32.
deepseek_fleet = family_fleet("deepseek", "--attention-backend", "CPU_MLA")
image_fleet = family_fleet("blip2")


@pytest.fixture(scope="module")
def lora_fleet(model_folder, scratch):
    one = made(scratch, "lora", "one")
    lora = ("--enable-lora", "--max-loras", "2", "--max-lora-rank", "8", "--lora-modules", f"one={one}")
    flags = ("--workers", "2", "--policy", "jsq")  # as above
    served = serve(model_folder, *flags, engine_flags=(*FLAGS, *lora), folder=scratch)
    yield served
    served.stop()


NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4, "prompt_lookup_min": 1}


@pytest.fixture
def drafting_fleet(model_folder, scratch):
    flags = (*FLAGS, "--speculative-config", json.dumps(NGRAM))
    served = serve(model_folder, "--workers", "2", engine_flags=flags, folder=scratch)
    yield served
    served.stop()


def body(**more):
    return {"prompt": [(7 * k) % 2000 + 5 for k in range(90)], "max_tokens": 900} | more


SHORTER = 300  # tokens of a stream with adapters: a step takes twice the time, and a move no longer


def where(fleet, name):
    requests = fleet.ask("GET", "/v1/requests")["requests"]
    return next(r for r in requests if r["x_request_id"] == name)


def move(fleet, name):
    """Move a running request, and return the move's record."""
    begun_move = fleet.ask("POST", "/v1/migrations", {"request_id": name})["id"]
    return fleet.until(
        lambda: (m := fleet.ask("GET", f"/v1/migrations/{begun_move}")) and not m["open"] and m
    )


def kill(fleet, name, process="EngineCore"):
    """Kill a process of the worker that a request runs on, and return the worker.

    The other one is enough from then on, so none takes its place.
    """
    lost = fleet.metric("tokenfleet_workers_lost_total")
    worker = where(fleet, name)["worker"]
    pid = next(w["pid"] for w in fleet.ask("GET", "/v1/fleet")["workers"] if w["worker"] == worker)
    actor = psutil.Process(pid)
    family = (actor, *actor.children(recursive=True))
    os.kill(next(one.pid for one in family if process in one.name()), signal.SIGKILL)
    fleet.until(lambda: fleet.metric("tokenfleet_workers_lost_total") > lost)
    fleet.ask("POST", "/v1/fleet/scale", {"workers": 1})
    return worker


async def disturbed(fleet, model, disturb, **more):
    """A stream left alone, and the same one with `disturb(name)` called in its midst."""
    name = f"r{os.urandom(4).hex()}"
    async with session() as http:
        expected = await stream(http, fleet.gateway, **body(model=model, **more))
        running = asyncio.create_task(
            stream(http, fleet.gateway, {"x-request-id": name}, **body(model=model, **more))
        )
        await begun(fleet, 1, [running])
        told = await asyncio.to_thread(disturb, fleet, name)
        return expected, await running, told


def moved(fleet, model):
    """Check that a stream is the same when it is moved; return the move's record."""
    expected, got, record = asyncio.run(disturbed(fleet, model, move))
    assert record["outcome"] == "done", record
    assert got == expected
    assert got.is_done
    return record


def post(fleet, path, asked):
    """The gateway's reply, and its status."""
    request = urllib.request.Request(fleet.gateway + path, json.dumps(asked).encode())
    request.add_header("content-type", "application/json")
    try:
        with urllib.request.urlopen(request, timeout=60) as reply:
            return reply.status, reply.read().decode()
    except HTTPError as error:
        return error.code, error.read().decode()


def adapters(fleet):
    return [w["adapters"] for w in fleet.ask("GET", "/v1/fleet")["workers"]]


def test_adapters_are_loaded_where_they_are_asked_for(lora_fleet, scratch):
    two = made(scratch, "lora", "two", "--seed", "2")
    status, told = post(lora_fleet, "/v1/load_lora_adapter", {"lora_name": "two", "lora_path": str(two)})
    assert status == 200, told
    with urllib.request.urlopen(f"{lora_fleet.gateway}/v1/models") as reply:
        assert {"tiny-llama", "one", "two"} <= {model["id"] for model in json.load(reply)["data"]}
    asked = [body(model=name, max_tokens=20, temperature=0) for name in ("tiny-llama", "one", "two")]
    texts = {json.loads(post(lora_fleet, "/v1/completions", ask)[1])["choices"][0]["text"] for ask in asked}
    assert len(texts) == 3
    # Each was loaded once, and its requests went where it was.
    assert sorted(a for held in adapters(lora_fleet) for a in held) == [1, 2]


def test_a_move_brings_its_adapter_along(lora_fleet):
    held = sum(1 in held for held in adapters(lora_fleet))
    expected, got, record = asyncio.run(disturbed(lora_fleet, "one", move, max_tokens=SHORTER))
    assert record["outcome"] == "done", record
    assert got == expected
    assert (held, sum(1 in held for held in adapters(lora_fleet))) == (1, 2)


def test_adapters_that_are_not_there_are_one_clear_error_and_harm_nobody(lora_fleet, scratch):
    assert post(lora_fleet, "/v1/completions", body(model="three"))[0] == 404
    # vLLM's CPU engine dies of these.
    assert post(lora_fleet, "/v1/completions", body(model="one", prompt_logprobs=1))[0] >= 400
    missing = {"lora_name": "three", "lora_path": str(scratch / "nowhere")}
    status, told = post(lora_fleet, "/v1/load_lora_adapter", missing)
    assert status == 404, told
    assert "three" in told
    assert post(lora_fleet, "/v1/completions", body(model="one", max_tokens=2))[0] == 200


def test_a_grammar_goes_on_where_it_was_moved_or_replayed(lora_fleet):
    asked = {"response_format": AS_JSON, "ignore_eos": False, "max_tokens": SHORTER}
    begun_list = re.compile(r'\[\s*("(red|green|blue)"\s*(,\s*|\]|$))*("?[a-z]*)?')  # noise is mostly blanks
    expected, got, record = asyncio.run(disturbed(lora_fleet, "tiny-llama", move, **asked))
    assert record["outcome"] == "done", record
    assert got == expected
    assert begun_list.fullmatch(got.text), got.text
    # The last: it costs a worker, whose own process is killed (`test_served_vllm` kills an engine's).
    ends = partial(kill, process="ray::")
    expected, got, gone = asyncio.run(disturbed(lora_fleet, "one", ends, **asked))
    assert (got.error, got.is_done, got.tokens) == ("", True, expected.tokens)
    assert begun_list.fullmatch(got.text), got.text
    told = lora_fleet.log.read_text()
    why = "its process, or the connection to it, is gone; 1 request goes on elsewhere"
    assert f" s  {gone} lost: {why}" in told
    assert "(raylet) A worker died" not in told  # our line has the cause
    lora_fleet.stop()  # before another fleet needs the processors


@pytest.mark.nightly
def test_sliding_and_full_attention_in_turns_move_with_their_kv_and_are_replayed(gemma_fleet):
    assert [w["fixed"] for w in gemma_fleet.ask("GET", "/v1/fleet")["workers"]] == [None, None]
    assert moved(gemma_fleet, "gemma3")["mode"] == "live"
    expected, got, _ = asyncio.run(disturbed(gemma_fleet, "gemma3", kill))
    assert got == expected
    assert got.is_done


@pytest.mark.nightly
def test_latent_kv_and_experts_move_with_their_kv_without_a_prefix_cache(deepseek_fleet):
    # These kernels of vLLM have no prefix cache.
    record = moved(deepseek_fleet, "deepseek")
    assert record["bytes"] > 0
    assert record["mode"] in ("stop-and-copy", "live")
    # They compute a prompt in another way than single tokens: a replay is whole, but not the same text.
    expected, got, _ = asyncio.run(disturbed(deepseek_fleet, "deepseek", kill))
    assert (got.error, got.is_done, got.tokens) == ("", True, expected.tokens)


def drafted(fleet):
    """Tokens that engines have drafted, and those of them that were right."""
    with urllib.request.urlopen(fleet.gateway + "/metrics") as reply:
        text = reply.read().decode()
    names = ("draft", "accepted")
    found = [re.findall(rf"^vllm:spec_decode_num_{n}_tokens_total\S* (\S+)", text, re.M) for n in names]
    return [sum(map(float, values)) for values in found]


@pytest.mark.nightly
def test_engines_that_take_drafts_move_and_replay_but_not_what_has_penalties(drafting_fleet):
    fleet = drafting_fleet
    assert [w["fixed"] for w in fleet.ask("GET", "/v1/fleet")["workers"]] == [None, None]
    assert fleet.ask("GET", "/v1/fleet")["step_times"] == []  # a step makes several tokens
    assert moved(fleet, "tiny-llama")["mode"] == "live"
    tokens, right = drafted(fleet)
    assert tokens > right > 0

    def refused(fleet, name):
        return where(fleet, name)["fixed"]

    penalised = {"presence_penalty": 0.5}
    expected, got, why = asyncio.run(disturbed(fleet, "tiny-llama", refused, **penalised))
    assert why == "penalties: an engine that takes drafts would not count the tokens so far"
    assert got == expected
    expected, got, _ = asyncio.run(disturbed(fleet, "tiny-llama", kill))
    assert got == expected
    assert got.is_done


async def asked_about(fleet, image, disturb=None):
    """The answer to one question about an image, with `disturb(name)` called in its midst."""
    name = f"r{os.urandom(4).hex()}"
    question = {"model": "blip2", "messages": about_image(image, "What is it?"), "max_tokens": 600}
    async with session() as http:
        running = asyncio.create_task(served.stream(http, fleet.gateway, question, {"x-request-id": name}))
        if disturb is not None:
            await begun(fleet, 1, [running])
            await asyncio.to_thread(disturb, fleet, name)
        got = await running
    assert (got.error, got.is_done) == ("", True)
    return got.content


@pytest.mark.nightly
def test_images_are_looked_at_and_go_along_with_their_requests(image_fleet):
    outcomes = []
    one, other = (asyncio.run(asked_about(image_fleet, image)) for image in (1, 2))
    assert one != other
    assert asyncio.run(asked_about(image_fleet, 1, lambda *what: outcomes.append(move(*what)))) == one
    assert outcomes[0]["outcome"] == "done", outcomes
    assert asyncio.run(asked_about(image_fleet, 2, kill)) == other
