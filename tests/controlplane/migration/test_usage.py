"""Virtual usage and free room (`freeness`): the paper's rules one request at a time; an order that holds."""

import math
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import BadInput
from controlplane.migration.usage import (
    Reading,
    freeness,
    headroom_tokens,
    virtual_usage,
)
from controlplane.placement.policies import PlacementSettings
from controlplane.snapshot import Load, RunningRequest, WorkerLoad
from controlplane.types import RequestId, WorkerId

CAPACITY = 13_616  # LLaMA-7B on an A10
HIGH = Reading(headroom=0.75)
READINGS = (Reading(), HIGH)

requests = st.builds(
    lambda name, tokens, high: RunningRequest(RequestId(str(name)), tokens, high),
    st.integers(0, 999),
    st.integers(1, 3000),
    st.integers(0, 1),
)
workers = st.builds(
    lambda running, waiting: WorkerLoad(WorkerId("w"), "serving", CAPACITY, tuple(running), tuple(waiting)),
    st.lists(requests, max_size=6),
    st.lists(requests, max_size=4),
)


def of_one_request(worker: WorkerLoad, i: int, waits: bool, reading: Reading) -> float:
    """The paper's CalcVirtualUsage, for one request."""
    if waits:
        return worker.waiting[i].tokens if i == 0 else 0.0
    high = sum(r.priority for r in worker.requests)
    if not worker.requests[i].priority or not reading.headroom:
        return worker.requests[i].tokens
    return worker.requests[i].tokens + reading.headroom * CAPACITY / high


@given(workers, st.sampled_from(READINGS))
def test_a_workers_usage_is_the_sum_over_its_requests(worker, reading):
    parts = [of_one_request(worker, i, False, reading) for i in range(len(worker.requests))]
    parts += [of_one_request(worker, i, True, reading) for i in range(len(worker.waiting))]
    assert virtual_usage(worker.counted(), CAPACITY, False, reading) == pytest.approx(sum(parts))


@given(st.lists(st.tuples(workers, st.booleans()), min_size=3, max_size=6), st.sampled_from(READINGS))
def test_freeness_orders_workers_strictly_and_weakly(seen, reading):
    f = [freeness(w.counted(), CAPACITY, drains, reading) for w, drains in seen]
    assert not any(math.isnan(x) for x in f)
    for x in f:
        assert not x < x
        for y in f:
            assert not (x < y and y < x)
            for z in f:
                assert not (x < y and y < z) or x < z
                # What is not ordered is equivalent, and that is transitive too.
                same = [not (a < b or b < a) for a, b in pairwise((x, y, z))]
                assert not all(same) or not (x < z or z < x)


def test_an_idle_worker_is_infinitely_free():
    assert freeness(Load(), CAPACITY, False) == math.inf


def test_a_draining_worker_is_infinitely_full_whatever_it_holds():
    assert virtual_usage(Load(), CAPACITY, True) == math.inf
    assert freeness(Load(), CAPACITY, True) == -math.inf
    assert freeness(Load(running=3, held_tokens=30), CAPACITY, True) == -math.inf


def test_only_the_head_of_the_queue_counts():
    load = Load(running=1, held_tokens=600, waiting=2, head_tokens=400, waiting_tokens=1000)
    assert freeness(load, 2000, False) == (2000 - 600 - 400) / 2


def test_freeness_is_negative_when_the_head_asks_for_more_than_there_is():
    assert freeness(Load(running=1, held_tokens=900, waiting=1, head_tokens=500), 1000, False) == -200


def test_one_high_priority_request_fills_a_worker_up_to_its_headroom():
    load = Load(running=2, held_tokens=500, high=1)
    assert headroom_tokens(load, CAPACITY, HIGH) == 0.75 * CAPACITY
    assert freeness(load, CAPACITY, False, HIGH) == (0.25 * CAPACITY - 500) / 2
    assert headroom_tokens(Load(running=2, held_tokens=500), CAPACITY, HIGH) == 0


@given(workers, requests, st.sampled_from(READINGS))
def test_a_request_more_leaves_the_worker_less_free(worker, request_, reading):
    load = worker.counted()
    after = freeness(load.with_request(request_, worker.worker), CAPACITY, False, reading)
    before = freeness(load, CAPACITY, False, reading)
    assert after < before or before < 0  # what is missing is shared by one more


def test_counting_the_lists_gives_what_a_plane_would_give():
    running = (RunningRequest(RequestId("a"), 100, 1, remaining_tokens=7, tpot_s=0.05),)
    waiting = (RunningRequest(RequestId("b"), 40, tpot_s=0.03), RunningRequest(RequestId("c"), 60))
    counted = WorkerLoad(WorkerId("w"), "serving", 1000, running, waiting).counted()
    assert counted == Load(1, 100, 2, 40, 100, 1, 7, 0.03)


@pytest.mark.parametrize("headroom", [-0.1, 1.0, float("nan")])
def test_headroom_is_a_share_below_the_whole(headroom):
    with pytest.raises(BadInput, match="headroom"):
        Reading(headroom=headroom)
    with pytest.raises(BadInput, match="headroom"):
        PlacementSettings(headroom=headroom)
