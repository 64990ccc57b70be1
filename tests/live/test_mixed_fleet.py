"""A plan's mix of worker kinds, served: counted, shown and scaled by kind."""

import asyncio

import httpx
import pytest
from made_plans import SLO
from raw_stream import session, stream
from served_fleet import serve

from harness.served import begun
from tokenfleet.cli.main import main

pytestmark = pytest.mark.live
LARGE, SMALL = "h100-sxm TP2", "a100-sxm TP1"


def kinds_of(fleet):
    return sorted(w["kind"] for w in fleet.ask("GET", "/v1/fleet")["workers"] if w["state"] == "serving")


def complete(fleet, tokens=20):
    body = {"model": "tiny-llama", "prompt": "x", "max_tokens": tokens, "ignore_eos": True}
    reply = httpx.post(f"{fleet.gateway}/v1/completions", json=body, timeout=60)
    assert reply.json()["usage"]["completion_tokens"] == tokens
    return reply.headers["x-tokenfleet-worker"]


def test_a_mixed_plan_starts_its_kinds_and_says_so(mixed_fleet, capsys):
    view = mixed_fleet.ask("GET", "/v1/fleet")
    assert view["wanted_kinds"] == {LARGE: 1, SMALL: 2}
    assert kinds_of(mixed_fleet) == [SMALL, SMALL, LARGE]
    assert {w["kind"]: w["tp_degree"] for w in view["workers"]} == {LARGE: 2, SMALL: 1}
    assert [times["variant"] for times in view["step_times"]] == [LARGE, SMALL]
    complete(mixed_fleet)
    assert main(["fleet", "--control", mixed_fleet.control, "status"]) == 0
    shown = capsys.readouterr().out
    assert f"3 of 3 workers: 1 {LARGE}, 2 {SMALL} (" in " ".join(shown.split())


def test_a_fleet_from_an_export_places_by_the_plans_targets_and_policy(mixed_fleet, capsys):
    view = mixed_fleet.ask("GET", "/v1/fleet")
    assert view["slo"] == {"ttft_s": SLO.ttft_s, "tpot_s": SLO.tpot_s}
    assert view["placement"] == {
        "policy": "best-fit",
        "by": "targets",
        "step_times_known": True,
        "unmeasured": {},
    }
    assert {(w["kind"], w["max_seqs"]) for w in view["workers"]} == {(LARGE, 256), (SMALL, 256)}
    assert view["max_workers"] == 3
    assert main(["fleet", "--control", mixed_fleet.control, "status", "--verbose"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "Placement: best-fit, for TTFT 400 ms, TPOT 30 ms" in shown
    # The plan's packing: while one worker can take them within their targets, no other gets any.
    assert len({complete(mixed_fleet) for _ in range(4)}) == 1


def test_kinds_are_scaled_one_by_one(mixed_fleet, capsys):
    control = ["fleet", "--control", mixed_fleet.control, "scale"]
    assert main([*control, "2"]) == 2
    assert f"one of this fleet's types: {LARGE}, {SMALL}" in " ".join(capsys.readouterr().err.split())
    assert main([*control, "1", "--kind", "b200"]) == 2
    capsys.readouterr()
    assert main([*control, "1", "--kind", SMALL]) == 0
    mixed_fleet.until(lambda: kinds_of(mixed_fleet) == [SMALL, LARGE])
    assert main([*control, "0", "--kind", LARGE]) == 0
    mixed_fleet.until(lambda: kinds_of(mixed_fleet) == [SMALL])
    complete(mixed_fleet)
    assert main([*control, "1", "--kind", LARGE]) == 0
    mixed_fleet.until(lambda: kinds_of(mixed_fleet) == [SMALL, LARGE])
    complete(mixed_fleet)


@pytest.mark.nightly
def test_real_workers_of_two_tp_degrees_hand_requests_to_each_other(model_folder, scratch):
    flags = ("--dtype", "float32", "--max-model-len", "2048", "--kv-cache-memory-bytes", str(64 << 20))
    kinds = ("--kind", "tp=1", "--kind", "tp=2", "--policy", "jsq")
    fleet = serve(model_folder, *kinds, engine_flags=flags, folder=scratch)

    async def story():
        async with session() as http:
            asked = {"prompt": [7] * 30, "max_tokens": 300}
            alone = await stream(http, fleet.gateway, **asked)
            both = [asyncio.ensure_future(stream(http, fleet.gateway, **asked)) for _ in range(2)]
            await begun(fleet, 2, both)
            left = next(w["kind"] for w in fleet.ask("GET", "/v1/fleet")["workers"] if w["requests"])
            await asyncio.to_thread(fleet.ask, "POST", "/v1/fleet/scale", {"workers": 0, "kind": left})
            return left, alone, await asyncio.gather(*both)

    try:
        left, alone, moved = asyncio.run(story())
        # KV does not fit from one to the other: computed anew, and in fp32 the text is the same.
        assert [(s.text, s.tokens, s.is_done) for s in moved] == [(alone.text, 300, True)] * 2
        fleet.until(lambda: kinds_of(fleet) == [kind for kind in ("TP1", "TP2") if kind != left])
        said = [d["reason"] for d in fleet.ask("GET", "/v1/fleet")["decisions"] if d["kind"] == "migrate"]
        assert any("done" in why and "recomputed" in why for why in said)
    finally:
        fleet.stop()
