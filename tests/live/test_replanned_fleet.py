"""A served fleet plans again from its history, and becomes the new plan's under streams: none is lost."""

import asyncio
import json
import signal
import time
from urllib.error import HTTPError

import httpx
import pytest
from made_history import row, written
from made_plans import document_of, plan_json
from raw_stream import session, stream
from served_fleet import serve

MODEL, STREAMS, TOKENS = "llama-3.1-8b", 24, 400
TPOT_S = 0.0067  # which an H100 misses alone, and two meet
WEIGHT = {"h100-sxm TP1": 1.0, "h100-sxm TP2": 2.0}


def served_plan():
    """Two workers of one H100 each, planned among workers of one and of two."""
    plan = plan_json(2, slo={"ttft_s": 0.4, "tpot_s": TPOT_S})
    (small,) = plan["inputs"]["profiles"]
    large = small | {"tp_degree": 2, "profile": document_of(MODEL, small["gpu"], 2)}
    profiles = [one | {"usd_per_gpu_h": 2.5} for one in (small, large)]
    return plan | {"inputs": plan["inputs"] | {"profiles": profiles}}


@pytest.fixture(scope="module")
def replanned_fleet(model_folder, scratch):
    """The plan on emulated workers, on a folder with an hour of history."""
    data, path, now_s = scratch / "replanned", scratch / "served_plan.json", time.time()
    lengths = {"prompt_tokens": 200, "output_tokens": 20, "model": str(model_folder)}
    written(data / "history", [row(0, arrival_s=now_s - 3660.0 + 9.0 * i, **lengths) for i in range(400)])
    path.write_text(json.dumps(served_plan()))
    flags = "--plan", str(path), "--data", str(data), "--replan-every", "off", "--scale-in-after", "1h"
    flags += "--shutdown-wait", "1h"
    served = serve(model_folder, "--engine", "emulated", *flags, folder=scratch)
    yield served
    assert served.stop() == 0


async def flowing(fleet, is_over):
    """STREAMS at a time until it is over; what each was sent, and the least capacity that served."""
    least = [sum(WEIGHT.values()) * STREAMS]

    async def watch():
        while True:
            workers = (await asyncio.to_thread(fleet.ask, "GET", "/v1/fleet"))["workers"]
            least.append(sum(WEIGHT[w["kind"]] for w in workers if w["state"] == "serving"))
            await asyncio.sleep(0.05)

    async with session() as http:
        asked = {"prompt": [7] * 20, "max_tokens": TOKENS}
        sent, watching = [], asyncio.create_task(watch())
        while not is_over():
            sent += await asyncio.gather(*(stream(http, fleet.gateway, **asked) for _ in range(STREAMS)))
        watching.cancel()
        return sent, min(least)


def test_a_proposal_is_made_shown_and_applied_under_streams_and_none_is_lost_or_changed(replanned_fleet):
    fleet = replanned_fleet
    assert "apply: no proposal is ready to apply; the last one: none" in refused(fleet, "/v1/fleet/apply")
    said = fleet.told("proposal", "--now", "--since", "2h")
    assert said.startswith("Proposed: 2x H100 TP1 → 1x H100 TP2, $5.00/h"), said
    assert "Proposed: 2x H100 TP1 → 1x H100 TP2" in fleet.told("status")
    assert set(kinds(fleet)) == {"h100-sxm TP1"}, "a proposal changes nothing"

    async def story():
        applying = asyncio.create_task(asyncio.to_thread(fleet.told, "apply"))
        sent, least = await flowing(fleet, applying.done)
        return await applying, sent, least

    told, sent, least = asyncio.run(story())
    assert "done, 1 h100-sxm TP2" in told
    assert kinds(fleet) == {"h100-sxm TP2": 1}
    assert {(s.error, s.is_done, s.tokens) for s in sent} == {("", True, TOKENS)}
    assert len({s.text for s in sent}) == 1
    assert least >= 2.0, "the capacity of both plans"
    for lost in ("failed", "rejected"):
        assert fleet.metric("tokenfleet_requests_total", outcome=lost) == 0
    view = fleet.ask("GET", "/v1/fleet")
    assert view["proposal"]["state"] == "applied"
    assert (view["auto"], view["autoscale"]["max_workers"], view["wanted_kinds"]) == (
        True,
        1,
        {"h100-sxm TP2": 1},
    )
    assert "Plan " in fleet.told("status", "--verbose")
    assert refused(fleet, "/v1/fleet/apply").endswith("; applied")


def kinds(fleet):
    wanted = fleet.ask("GET", "/v1/fleet")["wanted_kinds"]
    return {kind: count for kind, count in wanted.items() if count}


def refused(fleet, path):
    with pytest.raises(HTTPError) as why:
        fleet.ask("POST", path, {})
    return json.load(why.value)["error"]["message"]


# The last one: it ends the module's fleet.
def test_a_stream_that_is_open_at_ctrl_c_is_finished_first(replanned_fleet):
    fleet = replanned_fleet
    (left,) = [w["worker"] for w in fleet.ask("GET", "/v1/fleet")["workers"]]
    body = {"model": "tiny-llama", "prompt": "x", "max_tokens": 300, "ignore_eos": True, "stream": True}
    with httpx.stream("POST", f"{fleet.gateway}/v1/completions", json=body, timeout=60) as reply:
        lines = reply.iter_lines()
        next(lines)
        fleet.process.send_signal(signal.SIGINT)
        told = [line for line in lines if line]
    assert fleet.process.wait(timeout=60) == 0
    assert told[-1] == "data: [DONE]"
    waits = "stopping: 1 open request may take 3600 s more (--shutdown-wait)"
    assert fleet.lines_of_end() == [waits, f"stopping {left}", "stopped"]
