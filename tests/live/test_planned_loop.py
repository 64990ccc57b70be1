"""`tokenfleet serve --plan`: count and roles follow demand, and no request is lost."""

import asyncio
import itertools
import json
import time
from dataclasses import replace
from datetime import UTC, datetime

import pytest
from made_plans import PROFILE, plan_json, plan_of_fleet
from raw_stream import session, stream
from served_fleet import serve

from controlplane.types import EngineMode
from tokenfleet.profiles.form import profile_document

PLANNED, TOKENS, STREAMS = 2, 20, 6
HOUR_S = 3600.0


def floored_plan():
    """A plan of two workers whose schedule needs them four hours from now only, and one until then."""
    began_s = time.time() - 2 * HOUR_S
    spans = [(0.0, 6.0, 1), (6.0, 8.0, PLANNED)]
    schedule = [{"start_s": a * HOUR_S, "end_s": b * HOUR_S, "workers": n} for a, b, n in spans]
    line = {"workers_per_rps": 0.001, "intercept": 0.1, "r2": 0.99}
    # The line needs both for this rate, which is far above what the test sends.
    busiest = {"start_s": 0.0, "end_s": 8 * HOUR_S, "requests": 9, "rate_rps": 2000.0}
    busiest |= {"prompt_tokens": 20.0, "output_tokens": 20.0}
    inputs = plan_json()["inputs"] | {"clock_start_unix_s": began_s, "phases": [busiest]}
    return plan_json(PLANNED, schedule=schedule, demand_line=line, inputs=inputs), began_s + 6 * HOUR_S


@pytest.fixture(scope="module")
def planned_fleet(model_folder, scratch):
    """The plan on emulated workers: of all flags only those that a host without GPUs needs."""
    plan, rises_s = floored_plan()
    path = scratch / "planned_loop.json"
    path.write_text(json.dumps(plan))
    served = serve(model_folder, "--engine", "emulated", "--plan", str(path), folder=scratch)
    yield served, rises_s
    assert served.stop() == 0


async def flowing(fleet, is_over):
    """Streams, STREAMS at a time, until `is_over`; return what each was sent."""
    async with session() as http:
        sent = []
        while not await asyncio.to_thread(is_over):
            asked = {"prompt": [7] * 20, "max_tokens": TOKENS}
            sent += await asyncio.gather(*(stream(http, fleet.gateway, **asked) for _ in range(STREAMS)))
        return sent


@pytest.mark.nightly
def test_a_served_plan_gives_back_what_the_demand_does_not_need_and_loses_nothing(planned_fleet):
    fleet, rises_s = planned_fleet
    view = fleet.ask("GET", "/v1/fleet")
    assert (view["auto"], view["autoscale"]["min_workers"], view["autoscale"]["max_workers"]) == (
        True,
        1,
        PLANNED,
    )
    assert f"autoscaling from 1 to {PLANNED} workers, {PLANNED} at the start" in fleet.log.read_text()
    deadline_s = time.monotonic() + 400.0

    def is_over():
        assert time.monotonic() < deadline_s, "the count has not changed"
        view = fleet.ask("GET", "/v1/fleet")
        return view["wanted_workers"] == 1 == len(view["workers"])

    sent = asyncio.run(flowing(fleet, is_over))
    assert sent
    assert {(s.error, s.is_done, s.tokens) for s in sent} == {("", True, TOKENS)}
    for lost in ("failed", "rejected"):
        assert fleet.metric("tokenfleet_requests_total", outcome=lost) == 0
    floor = fleet.ask("GET", "/v1/fleet")["autoscale"]["floor"]
    assert (floor["workers"], floor["then_workers"]) == (1, PLANNED)
    assert abs(floor["until_unix_s"] - rises_s) < 600.0, "a cold start early"
    until = f"{datetime.fromtimestamp(floor['until_unix_s'], UTC):%H:%M} UTC, then {PLANNED}"
    assert "Floor: at least 1 worker until " in (said := fleet.told("status"))
    assert until in said


def split_plan():
    """A plan of one prefill and three decode workers, slow enough that few requests fill one."""
    profile = PROFILE.with_engine(EngineMode.SPLIT, 8192, 4)
    assert profile.prefill is not None
    slow = replace(profile, step=profile.step.scaled(4.0, 4.0), prefill=profile.prefill.scaled(20.0))
    part = {"gpu": PROFILE.gpu, "tp_degree": 1, "usd_per_hour": 5.0}
    parts = [part | {"role": "prefill", "workers": 1}, part | {"role": "decode", "workers": 3}]
    targets = {"ttft_s": 4.0, "tpot_s": 0.1}
    plan = plan_of_fleet(parts, PROFILE.model, slo=targets, engine_mode=str(EngineMode.SPLIT))
    plan["inputs"]["profiles"] = plan["inputs"]["profiles"][:1]
    plan["inputs"]["profiles"][0] |= {"profile": profile_document(slow)}
    return plan


@pytest.fixture
def split_fleet(model_folder, scratch):
    path = scratch / "split_plan.json"
    path.write_text(json.dumps(split_plan()))
    flags = ("--engine", "emulated", "--plan", str(path), "--scale-in-after", "60s")
    served = serve(model_folder, *flags, folder=scratch)
    yield served
    assert served.stop() == 0


def roles(fleet):
    """The role of each worker that serves."""
    workers = fleet.ask("GET", "/v1/fleet")["workers"]
    return {w["worker"]: w["role"] for w in workers if w["state"] == "serving"}


async def sent_until(fleet, is_over, prompt, tokens):
    """STREAMS clients, no two prompts alike, until `is_over`; return what each request was sent."""
    numbers, sent = itertools.count(), []
    async with session() as http:

        async def client():
            while not await asyncio.to_thread(is_over):
                n = next(numbers)
                asked = {"prompt": [3 + n % 200, 3 + n // 200] + [7] * prompt, "max_tokens": tokens}
                sent.append(await stream(http, fleet.gateway, **asked))

        await asyncio.wait_for(asyncio.gather(*(client() for _ in range(STREAMS + 2))), 300)
    return sent


@pytest.mark.nightly
def test_a_worker_changes_its_role_where_answers_give_way_to_prompts_and_loses_nothing(split_fleet):
    before = roles(split_fleet)
    assert sorted(before.values()) == ["decode"] * 3 + ["prefill"]
    answers = itertools.count()
    sent = [(s, 60) for s in asyncio.run(sent_until(split_fleet, lambda: next(answers) > 60, 20, 60))]
    assert roles(split_fleet) == before

    def is_traded():
        return list(roles(split_fleet).values()).count("prefill") > 1

    sent += [(s, 4) for s in asyncio.run(sent_until(split_fleet, is_traded, 3000, 4))]
    assert [(s.error, s.is_done, s.tokens) for s, _ in sent] == [("", True, tokens) for _, tokens in sent]
    for lost in ("failed", "rejected"):
        assert split_fleet.metric("tokenfleet_requests_total", outcome=lost) == 0
    after = roles(split_fleet)
    assert after.keys() == before.keys(), "none was started, and none has gone"
    scaling = split_fleet.ask("GET", "/v1/fleet")["scaling"]
    traded = [event["reason"] for event in scaling if " becomes a " in event["reason"]]
    changed = {worker for worker, role in after.items() if role != before[worker]}
    assert changed
    assert {reason.partition(" worker: h100-sxm TP1 prefill: ")[0] for reason in traded} == {
        f"{worker} becomes a prefill" for worker in changed
    }
    said = split_fleet.told("explain")
    assert f"{1 + len(changed)} h100-sxm TP1 prefill" in said
    assert all(reason in said for reason in traded)
