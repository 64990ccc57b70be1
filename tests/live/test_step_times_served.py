"""A served fleet says how far its steps are from the profile, and hands their refit to placement."""

import json
import time
import urllib.request

import pytest
from served_fleet import ServedFleet

pytestmark = pytest.mark.live
PATIENCE_S = 120.0


def complete(fleet: ServedFleet, tokens: int) -> None:
    model = json.load(urllib.request.urlopen(f"{fleet.gateway}/v1/models", timeout=60))["data"][0]["id"]
    body = {"model": model, "prompt": list(range(3, 40)), "max_tokens": tokens, "ignore_eos": True}
    request = urllib.request.Request(f"{fleet.gateway}/v1/completions", json.dumps(body).encode())
    request.add_header("content-type", "application/json")
    assert json.load(urllib.request.urlopen(request, timeout=120))["usage"]["completion_tokens"] == tokens


def test_steps_are_held_against_the_profile_while_they_happen(emulated_fleet: ServedFleet) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while True:
        complete(emulated_fleet, 40)
        (view,) = emulated_fleet.ask("GET", "/v1/fleet")["step_times"]
        if view["steps"] >= 3 or time.monotonic() > deadline_s:
            break
    assert view["steps"] >= 3
    assert view["variant"] == "h100-sxm TP1"
    # An emulated step lasts at least as long as the profile says; the host adds what it adds.
    assert view["slowdown"] > 0.9
    assert view["step"]["base_s"] > 0
    assert set(view["workers"]) <= {w["worker"] for w in emulated_fleet.ask("GET", "/v1/fleet")["workers"]}
    with urllib.request.urlopen(f"{emulated_fleet.control}/metrics", timeout=60) as reply:
        text = reply.read().decode()
    assert 'tokenfleet_step_profile_ratio{variant="h100-sxm TP1"}' in text
    assert 'tokenfleet_step_error_ratio{model="refit",variant="h100-sxm TP1"}' in text
    assert "tokenfleet_step_drifts_total" in text
