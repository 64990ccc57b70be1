"""The deadline planner against brute force, and what it orders for each kind of request."""

import itertools
import math

import numpy as np
import pytest

from controlplane.errors import BadInput
from controlplane.migration.evacuation import Haven, Leaving, Way, plan_evacuation


def spared(r, havens):
    """What a replay would compute where most of the request is cached."""
    return min(r.lacks(h.worker) for h in havens)


def most_tokens(requests, havens, seconds, way):
    """The most tokens that moves can save from being recomputed; tries every way out for every request."""
    best = 0
    for to in itertools.product(range(-1, len(havens)), repeat=len(requests)):
        moved = [(r, j) for r, j in zip(requests, to, strict=True) if j >= 0]
        spent_s = sum(way.move_s(r.lacks(havens[j].worker)) for r, j in moved)
        fits = all(
            sum(r.tokens for r, at in moved if at == j) <= h.free_tokens
            and sum(at == j for _, at in moved) <= h.seats
            for j, h in enumerate(havens)
        )
        if fits and spent_s <= seconds:
            best = max(best, sum(spared(r, havens) for r, _ in moved))
    return best


def moved(orders):
    return {o.request: o.target for o in orders if o.how == "move"}


@pytest.mark.parametrize("seed", range(150))
def test_no_plan_computes_fewer_tokens_anew(seed):
    rng = np.random.default_rng(seed)
    havens = [
        Haven(f"w{j}", int(rng.integers(0, 120)), int(rng.integers(0, 5))) for j in range(rng.integers(1, 4))
    ]
    requests = []
    for i in range(rng.integers(1, 7)):
        tokens = int(rng.integers(1, 60))
        # Every other seed nothing is cached anywhere.
        cached = {h.worker: int(rng.integers(0, tokens)) * (seed % 2) for h in havens}
        requests.append(Leaving(f"r{i}", tokens, cached=cached.__getitem__))
    way = Way(float(rng.uniform(5, 50)), float(rng.uniform(0, 0.3)))
    seconds = float(rng.uniform(0.1, 12))
    went = moved(plan_evacuation(requests, havens, seconds, way))
    value = sum(spared(r, havens) for r in requests if r.request in went)
    assert value == most_tokens(requests, havens, seconds, way)


@pytest.mark.parametrize("seed", range(40))
def test_a_large_plan_keeps_to_time_memory_and_seats_and_forgets_nobody(seed):
    rng = np.random.default_rng(seed)
    requests = [
        Leaving(f"r{i}", int(rng.integers(1, 9000)), float(rng.choice([math.inf, rng.uniform(0, 30)])))
        for i in range(rng.integers(1, 400))
    ]
    havens = [
        Haven(f"w{j}", int(rng.integers(0, 400_000)), int(rng.integers(0, 80)))
        for j in range(rng.integers(1, 12))
    ]
    way, seconds = Way(float(rng.uniform(1e3, 1e6))), float(rng.uniform(0.1, 60))
    orders = plan_evacuation(requests, havens, seconds, way)
    went, tokens = moved(orders), {r.request: r.tokens for r in requests}
    assert sorted(o.request for o in orders) == sorted(tokens)
    assert sum(way.move_s(tokens[r]) for r in went) <= seconds + 1e-6
    for h in havens:
        here = [tokens[r] for r, w in went.items() if w == h.worker]
        assert sum(here) <= h.free_tokens
        assert len(here) <= h.seats
    assert all((o.target is None) == (o.how == "stay") for o in orders)


def test_all_are_moved_where_time_and_memory_are_enough():
    requests = [Leaving(f"r{i}", 1000 + i) for i in range(300)]
    orders = plan_evacuation(requests, [Haven("a", 400_000, 400)], 60.0, Way(1e5))
    assert len(moved(orders)) == 300


def test_one_that_ends_by_itself_leaves_the_way_to_those_that_do_not():
    requests = [Leaving("ends", 100, remaining_s=2.0), Leaving("stays", 90)]
    orders = plan_evacuation(requests, [Haven("a", 1000, 9)], 10.0, Way(10.0, 0.0))
    assert [(o.request, o.how) for o in orders] == [("stays", "move"), ("ends", "stay")]


def test_what_ends_by_itself_is_moved_last_where_there_is_time_for_all():
    requests = [Leaving("ends", 100, remaining_s=2.0), Leaving("stays", 90)]
    orders = plan_evacuation(requests, [Haven("a", 1000, 9)], 30.0, Way(10.0, 0.0))
    assert [(o.request, o.how) for o in orders] == [("stays", "move"), ("ends", "move")]


def test_what_may_not_move_is_replayed_and_what_may_neither_stays():
    requests = [
        Leaving("seeded", 10, may_move=False),
        Leaving("grammar", 10, may_move=False, may_replay=False),
        Leaving("waiting", 10, has_kv=False),
    ]
    orders = plan_evacuation(requests, [Haven("a", 1000, 9)], 30.0, Way(10.0))
    assert {o.request: o.how for o in orders} == {
        "seeded": "replay",
        "grammar": "stay",
        "waiting": "replay",
    }


def test_a_worker_that_cannot_read_the_kv_takes_replays_only():
    orders = plan_evacuation([Leaving("r", 10)], [Haven("other", 1000, 9, reads_kv=False)], 30.0, Way(1e6))
    assert [(o.how, o.target) for o in orders] == [("replay", "other")]


def test_replays_are_spread_by_what_is_free():
    requests = [Leaving(f"r{i}", 100, may_move=False) for i in range(4)]
    orders = plan_evacuation(requests, [Haven("a", 1000, 9), Haven("b", 1000, 9)], 5.0, Way(1e6))
    assert sorted(o.target for o in orders) == ["a", "a", "b", "b"]


def test_nowhere_to_go_is_refused_and_only_where_somebody_must_go():
    with pytest.raises(BadInput, match="nowhere to go"):
        plan_evacuation([Leaving("r", 10)], [], 30.0, Way(1e6))
    assert plan_evacuation([], [], 30.0, Way(1e6)) == ()
    with pytest.raises(BadInput, match="tokens_per_s"):
        Way(0.0)


def test_a_move_is_planned_in_the_time_that_what_the_haven_lacks_takes():
    cached = {"warm": 990, "cold": 0}.__getitem__
    havens = [Haven("cold", 1000, 4), Haven("warm", 5000, 4)]
    plan = plan_evacuation([Leaving("r", 1000, cached=cached)], havens, 2.0, Way(10.0, 0.0))
    assert moved(plan) == {"r": "warm"}  # the cold one is the better fit, and would take 100 s


def test_a_replay_goes_where_least_of_it_is_computed_anew():
    cached = {"free": 0, "warm": 800}.__getitem__
    havens = [Haven("free", 9000, 4), Haven("warm", 2000, 4)]
    r = Leaving("r", 1000, may_move=False, cached=cached)
    (order,) = plan_evacuation([r], havens, 60.0, Way(1e6))
    assert (order.how, order.target) == ("replay", "warm")
