"""Traffic as it might have come: what a draw keeps and what it changes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from planning_builders import poisson

from controlplane.workload import Workload
from tokenfleet.planning.replicates import next_like, resampled

workloads = st.builds(
    lambda gaps, seed: (
        Workload(np.cumsum(gaps), np.arange(1, len(gaps) + 1), np.full(len(gaps), 5)),
        np.random.default_rng(seed),
    ),
    st.lists(st.floats(0.0, 50.0), min_size=1, max_size=60),
    st.integers(0, 2**32 - 1),
)


@given(workloads)
def test_a_draw_is_a_workload_made_of_the_trace_s_own_requests(
    drawn_from: tuple[Workload, np.random.Generator],
) -> None:
    workload, rng = drawn_from
    drawn = resampled(workload, rng)
    assert len(drawn) >= 1
    assert set(drawn.prompt_tokens) <= set(workload.prompt_tokens)
    assert drawn.arrival_s[-1] <= workload.arrival_s[-1] + 60.0


def test_the_same_draw_gives_the_same_workload_and_another_another() -> None:
    workload = poisson()
    first, again, other = (resampled(workload, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert np.array_equal(first.arrival_s, again.arrival_s)
    assert not np.array_equal(first.prompt_tokens[:50], other.prompt_tokens[:50])


def test_the_rate_stays_on_average() -> None:
    workload = poisson(requests=4000)
    counts = [len(resampled(workload, np.random.default_rng(seed))) for seed in range(40)]
    assert abs(np.mean(counts) / 4000 - 1.0) < 0.02


def test_the_next_traffic_scatters_by_the_trace_s_own_chance_as_well() -> None:
    # The count of Poisson traffic, foretold from one count of it, is off by twice the variance of a count.
    workload = poisson(requests=1000)
    once, twice = (
        np.var([len(draw(workload, np.random.default_rng(seed))) for seed in range(400)])
        for draw in (resampled, next_like)
    )
    assert 1.5 < twice / once < 2.7


def test_the_shape_of_the_day_stays() -> None:
    # Ten times as busy in the second half: a bootstrap of any block to any place would flatten it.
    arrival_s = np.concatenate((np.linspace(0, 5000, 500, endpoint=False), np.linspace(5000, 10000, 5000)))
    workload = Workload(arrival_s, np.full(5500, 10), np.full(5500, 10))
    for seed in range(5):
        drawn = resampled(workload, np.random.default_rng(seed))
        early = (drawn.arrival_s < 3500).sum() / 3500
        late = (drawn.arrival_s > 6500).sum() / 3500
        assert 8.0 < late / early < 12.0


def test_one_request_or_one_instant_comes_back_as_it_is() -> None:
    together = Workload(np.zeros(3), np.full(3, 5), np.full(3, 5))
    assert resampled(together, np.random.default_rng(0)) is together
