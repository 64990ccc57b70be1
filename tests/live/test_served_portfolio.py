"""`tokenfleet serve --portfolio`: three models behind one endpoint, and GPUs that follow the load."""

import asyncio
import json
import urllib.error
import urllib.request

import aiohttp
import pytest
from made_plans import plan_of_fleet, portfolio_json
from raw_stream import session, stream
from served_fleet import serve
from test_autoscale import check_whole, four_seats
from test_planned_loop import split_plan

from controlplane.types import Slo
from tokenfleet.cli.main import main

GPUS = 4
MODELS, ADAPTER = ("chat", "code", "mail"), "support"  # of chat


@pytest.fixture(scope="module")
def portfolio(model_folder, scratch):
    """Three models with a right to one worker each, and one GPU more; a worker takes a second to start."""
    path = scratch / "portfolio.json"
    planned = portfolio_json(dict.fromkeys(MODELS, 1), GPUS, 1.0, Slo(2.0, 0.05))
    planned["models"][0]["plan"]["spares"] = {"workers": 0, "reclaims_per_h": 0.01}  # chat is on spot
    planned["models"][0]["adapters"] = [{"name": ADAPTER}]
    path.write_text(json.dumps(planned))
    fleet = serve(
        model_folder, "--portfolio", str(path), "--engine", "emulated", "--profile", four_seats(scratch, 1),
        "--scale-in-after", "20s", "--queue", "60", "--queue-wait", "2m",
        "--reclaim-notice", f"file:{scratch}/notices.json", folder=scratch,
    )  # fmt: skip
    yield fleet
    fleet.stop()


@pytest.fixture
def sharing(model_folder, scratch):
    """Three models, each with a right to a worker on half a GPU, and two GPUs."""
    path = scratch / "sharing.json"
    path.write_text(json.dumps(portfolio_json(dict.fromkeys(MODELS, 1), 2, 1.0, Slo(2.0, 0.05), 2)))
    fleet = serve(
        model_folder, "--portfolio", str(path), "--engine", "emulated", "--profile", four_seats(scratch, 1),
        "--scale-in-after", "20s", "--queue", "60", "--queue-wait", "2m", folder=scratch,
    )  # fmt: skip
    yield fleet
    fleet.stop()


@pytest.fixture
def two_degrees(model_folder, scratch):
    """Chat on a worker of one GPU and one of two, code on one of one GPU, and four GPUs."""
    path = scratch / "degrees.json"
    planned = portfolio_json({"chat": 1, "code": 1}, 4, 1.0, Slo(2.0, 0.05))
    parts = [
        {"gpu": "h100-sxm", "tp_degree": tp, "workers": 1, "usd_per_hour": 5.0 * tp, "role": "any"}
        for tp in (1, 2)
    ]
    chat = planned["models"][0]
    fields = {name: chat["plan"][name] for name in ("slo", "schedule_detail")}
    chat["plan"] = plan_of_fleet(parts, "llama-3.1-8b", **fields)
    path.write_text(json.dumps(planned))
    fleet = serve(
        model_folder, "--portfolio", str(path), "--engine", "emulated", "--scale-in-after", "20s",
        folder=scratch,
    )  # fmt: skip
    yield fleet
    fleet.stop()


def test_a_model_of_two_tp_degrees_has_a_share_of_each_and_gets_its_gpus_back(two_degrees, capsys):
    narrow, wide = "h100-sxm TP1", "h100-sxm TP2"

    def held():
        """The workers of each model and type; at no look are there more GPUs than the limit."""
        seen = two_degrees.ask("GET", "/v1/fleet")
        assert all(limit["held"] <= limit["most"] == 4 for limit in seen["limits"])
        return {(one["name"], one["kind"]): one["held"] for one in seen["shares"]}

    def scale(model, workers, kind):
        two_degrees.ask("POST", f"/models/{model}/v1/fleet/scale", {"workers": workers, "kind": kind})

    whole = {("chat", narrow): 1, ("chat", wide): 1, ("code", narrow): 1}
    assert held() == whole
    listed = two_degrees.ask("GET", "/models/chat/v1/fleet")["workers"]
    assert sorted((w["kind"], w["tp_degree"]) for w in listed) == [(narrow, 1), (wide, 2)]
    for name in ("chat", "code"):
        check_whole(asyncio.run(load_alone(two_degrees, name, 12)), 100)
    assert main(["fleet", "--control", two_degrees.control, "status"]) == 0
    shown = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:4] for line in shown if line[:1] == ["chat"]] == [
        ["chat", "1", "h100-sxm", "1"],
        ["chat", "2", "h100-sxm", "1"],
    ]
    # What one type of chat leaves is code's, for as long as chat does not ask for it again.
    scale("chat", 0, wide)
    scale("code", 3, narrow)
    two_degrees.until(lambda: held() == {("chat", narrow): 1, ("chat", wide): 0, ("code", narrow): 3})
    scale("chat", 1, wide)
    two_degrees.until(lambda: held() == whole)
    for name in ("chat", "code"):
        check_whole(asyncio.run(load_alone(two_degrees, name, 12)), 100)
        for outcome in ("failed", "rejected"):
            assert two_degrees.metric("tokenfleet_requests_total", fleet=name, outcome=outcome) == 0


@pytest.fixture
def split(model_folder, scratch):
    """Chat on one prefill and three decode workers, code on one worker, and five GPUs."""
    path = scratch / "split.json"
    planned = portfolio_json({"chat": 1, "code": 1}, 5, 1.0, Slo(2.0, 0.05))
    chat = planned["models"][0]
    chat["plan"] = split_plan() | {"schedule_detail": chat["plan"]["schedule_detail"]}
    path.write_text(json.dumps(planned))
    fleet = serve(
        model_folder, "--portfolio", str(path), "--engine", "emulated", "--scale-in-after", "2m",
        folder=scratch,
    )  # fmt: skip
    yield fleet
    fleet.stop()


@pytest.mark.nightly
def test_a_model_of_prefill_and_decode_workers_trades_roles_within_its_shares(split):
    prefill, decode, plain = "h100-sxm TP1 prefill", "h100-sxm TP1 decode", "h100-sxm TP1"

    def held():
        """The workers of each model and type; at no look are there more GPUs than the limit."""
        seen = split.ask("GET", "/v1/fleet")
        assert all(limit["held"] <= limit["most"] == 5 for limit in seen["limits"])
        assert {one["name"]: one["right"] for one in seen["shares"] if one["kind"] == decode} == {"chat": 3}
        return tuple(
            next(one["held"] for one in seen["shares"] if (one["name"], one["kind"]) == of)
            for of in (("chat", prefill), ("chat", decode), ("code", plain))
        )

    def scale(model, kinds):
        for kind, workers in kinds.items():
            split.ask("POST", f"/models/{model}/v1/fleet/scale", {"workers": workers, "kind": kind})

    def serve_both():
        for name in ("chat", "code"):
            check_whole(asyncio.run(load_alone(split, name, 8)), 100)
            for outcome in ("failed", "rejected"):
                assert split.metric("tokenfleet_requests_total", fleet=name, outcome=outcome) == 0

    assert held() == (1, 3, 1)
    serve_both()
    # No GPU is free: what decode gives up is prefill's once it has been given back.
    scale("chat", {decode: 2, prefill: 2})
    split.until(lambda: held() == (2, 2, 1))
    serve_both()
    # What chat does not ask for is code's; asked for again it is chat's.
    scale("chat", {prefill: 1})
    scale("code", {plain: 2})
    split.until(lambda: held() == (1, 2, 2))
    serve_both()
    scale("chat", {decode: 3})
    split.until(lambda: held() == (1, 3, 1))
    serve_both()


async def load_alone(fleet, model, streams):
    """Load one model with `streams` streams at once."""
    async with session() as http:
        asked = {"model": model, "prompt": [5] * 20, "max_tokens": 100}
        return await asyncio.gather(*(stream(http, fleet.gateway, **asked) for _ in range(streams)))


def test_three_models_serve_on_two_gpus_and_a_fourth_half_goes_to_who_asks_for_it(sharing):
    first = sharing.ask("GET", "/v1/fleet")
    assert {one["gpus_per_worker"] for one in first["shares"]} == {0.5}
    assert first["limits"] == [{"name": "gpus.h100-sxm", "most": 2.0, "held": 2}]  # half of one is free
    for name in MODELS:
        check_whole(asyncio.run(load(sharing, name, 6, 1.0, [])), 100)
    # All ask for more at once; one worker fits in, and at no look more GPUs are held than there are.
    for name in MODELS:
        sharing.ask("POST", f"/models/{name}/v1/fleet/scale", {"workers": 3})
    sharing.until(lambda: all(one["asked"] == 3 for one in view(sharing).values()))
    sharing.until(lambda: sorted(workers(sharing).values()) == [1, 1, 2])
    for name in MODELS:
        check_whole(asyncio.run(load(sharing, name, 6, 1.0, [])), 100)
    assert sorted(workers(sharing).values()) == [1, 1, 2]


def view(fleet):
    """What the front tells of all models; at no look more GPUs are held than there are."""
    seen = fleet.ask("GET", "/v1/fleet")
    assert all(limit["held"] <= limit["most"] for limit in seen["limits"])
    return {one["name"]: one for one in seen["shares"]}


def workers(fleet):
    return {name: one["held"] for name, one in view(fleet).items()}


async def load(fleet, model, streams, spread_s, seen):
    """Load one model with `streams` streams over `spread_s`; read the front before each."""
    async with session() as http:

        async def one(i):
            await asyncio.sleep(spread_s * i / streams)
            seen.append(await asyncio.to_thread(workers, fleet))
            return await stream(http, fleet.gateway, model=model, prompt=[5 + i % 50] * 20, max_tokens=100)

        return await asyncio.gather(*(one(i) for i in range(streams)))


async def statuses(fleet, model, streams):
    """The statuses of `streams` requests at once."""
    async with session() as http:
        body = {"model": model, "prompt": [5] * 20, "max_tokens": 100, "ignore_eos": True}

        async def one():
            async with http.post(f"{fleet.gateway}/v1/completions", json=body) as reply:
                return reply.status

        return await asyncio.gather(*(one() for _ in range(streams)))


def test_one_endpoint_lists_all_models_and_routes_by_their_names(portfolio):
    async def story():
        async with aiohttp.ClientSession(portfolio.gateway) as http:
            async with http.get("/v1/models") as reply:
                listed = {one["id"]: one["parent"] for one in (await reply.json())["data"]}
            assert listed == {"chat": None, ADAPTER: "chat", "code": None, "mail": None}
            for name in (*MODELS, ADAPTER):
                body = {"model": name, "prompt": "hello", "max_tokens": 3}
                async with http.post("/v1/completions", json=body) as reply:
                    assert (reply.status, (await reply.json())["model"]) == (200, name)
            async with http.post("/v1/completions", json={"model": "none", "prompt": "hello"}) as reply:
                error = (await reply.json())["error"]
                assert (reply.status, error["type"], error["param"]) == (404, "NotFoundError", "model")

    asyncio.run(story())


def test_operators_see_all_models_and_steer_each_by_its_name(portfolio):
    assert workers(portfolio) == dict.fromkeys(MODELS, 1)
    assert portfolio.ask("GET", "/models/mail/v1/fleet")["flags"] == ["--served-model-name", "mail"]
    assert portfolio.metric("tokenfleet_workers", fleet="code", state="serving") == 1
    seen = {one["name"]: one["gap"] for one in portfolio.ask("GET", "/v1/fleet")["models"]}
    assert seen == {name: portfolio.ask("GET", f"/models/{name}/v1/fleet")["gap"] for name in MODELS}
    # An operator may ask for any number: the share is not exceeded.
    portfolio.ask("POST", "/models/mail/v1/fleet/scale", {"workers": 4})
    portfolio.until(lambda: view(portfolio)["mail"]["asked"] == 4)
    portfolio.until(lambda: workers(portfolio)["mail"] == 2)
    portfolio.ask("POST", "/models/mail/v1/fleet/scale", {"workers": 1})
    portfolio.ask("POST", "/models/mail/v1/fleet/scale", {"auto": True})
    portfolio.until(lambda: workers(portfolio) == dict.fromkeys(MODELS, 1))
    with pytest.raises(urllib.error.HTTPError, match="404"):
        portfolio.ask("POST", "/v1/fleet/scale", {"workers": 1})


def test_a_gpu_follows_the_load_from_one_model_to_another_and_no_request_is_lost(portfolio):
    def loaded_until_it_has_two(model):
        seen = []
        while workers(portfolio)[model] < 2:
            check_whole(asyncio.run(load(portfolio, model, 40, 2.0, seen)), 100)
        assert all(sum(held.values()) <= GPUS for held in seen)

    loaded_until_it_has_two("code")
    portfolio.until(lambda: workers(portfolio) == {"chat": 1, "code": 2, "mail": 1})
    loaded_until_it_has_two("chat")
    # It was taken from where it is no longer needed, though its own fleet would have kept it for longer.
    portfolio.until(lambda: workers(portfolio) == {"chat": 2, "code": 1, "mail": 1})
    for name in MODELS:
        for outcome in ("failed", "rejected"):
            assert portfolio.metric("tokenfleet_requests_total", fleet=name, outcome=outcome) == 0


def test_only_the_model_that_is_out_of_its_share_turns_requests_away(portfolio):
    async def story():
        return await asyncio.gather(
            statuses(portfolio, "mail", 160),
            load(portfolio, "chat", 20, 2.0, []),
            load(portfolio, "code", 10, 2.0, []),
        )

    mail, chat, code = asyncio.run(story())
    assert set(mail) == {200, 429}
    check_whole([*chat, *code], 100)


def test_a_model_evacuates_its_worker_that_is_reclaimed_within_its_share(portfolio, scratch):
    async def story():
        running = asyncio.create_task(load(portfolio, "chat", 20, 4.0, []))
        await asyncio.sleep(1.0)
        named = {"deadline_s": 30, "workers": [gone]}
        await asyncio.to_thread((scratch / "notices.json").write_text, json.dumps(named))
        return await running

    def serving(model):
        listed = portfolio.ask("GET", f"/models/{model}/v1/fleet")["workers"]
        return {w["worker"] for w in listed if w["state"] == "serving"}

    portfolio.until(lambda: all(workers(portfolio)[name] == 1 for name in ("code", "mail")))
    portfolio.ask("POST", "/models/chat/v1/fleet/scale", {"workers": 2})
    portfolio.until(lambda: len(serving("chat")) == 2)
    others = {name: serving(name) for name in ("code", "mail")}
    gone = max(serving("chat"))  # another model's only worker of this name has nowhere to go, and stays
    check_whole(asyncio.run(story()), 100)
    # Another has come in its place, though there was no GPU beside those that all hold.
    portfolio.until(lambda: len(serving("chat")) == 2 and gone not in serving("chat"))
    assert workers(portfolio) == {"chat": 2, "code": 1, "mail": 1}
    assert {name: serving(name) for name in others} == others
