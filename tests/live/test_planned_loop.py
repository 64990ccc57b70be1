"""`tokenfleet serve --plan` with its default flags: the count follows demand, and no request is lost."""

import asyncio
import json
import time
from datetime import UTC, datetime

import pytest
from made_plans import plan_json
from raw_stream import session, stream
from served_fleet import serve

PLANNED, TOKENS, STREAMS = 2, 20, 6
HOUR_S = 3600.0


def floored_plan():
    """A plan of two workers whose schedule needs them four hours from now only, and one until then."""
    began_s = time.time() - 2 * HOUR_S
    spans = [(0.0, 6.0, 1), (6.0, 8.0, PLANNED)]
    schedule = [{"start_s": a * HOUR_S, "end_s": b * HOUR_S, "workers": n} for a, b, n in spans]
    line = {"workers_per_rps": 0.001, "intercept": 0.1, "r2": 0.99}
    inputs = plan_json()["inputs"] | {"clock_start_unix_s": began_s}
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
