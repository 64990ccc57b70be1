"""Traffic as it might have come: what a draw keeps and what it changes."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from planning_builders import BLOCK, SYSTEM, offsets, poisson, talks

from controlplane.errors import BadInput
from controlplane.prefixes import Prefixes, Sessions
from controlplane.workload import Workload
from tokenfleet.planning.traffic.draws import (
    TEMPLATE,
    Units,
    busier,
    drawn_anew,
    families,
    next_like,
    units_of,
)

workloads = st.builds(
    lambda gaps, seed: (
        Workload(np.cumsum(gaps), np.arange(1, len(gaps) + 1), np.full(len(gaps), 5)),
        np.random.default_rng(seed),
    ),
    st.lists(st.floats(0.0, 50.0), min_size=1, max_size=60),
    st.integers(0, 2**32 - 1),
)


def resampled(units: Units, rng: np.random.Generator) -> Workload:
    """One draw of the trace's units."""
    return units.made(drawn_anew(units, units.whole, rng))


def hit_rate(workload: Workload) -> float:
    return float(workload.ideal_hits.sum() / workload.prompt_tokens.sum())


@given(workloads)
def test_a_draw_is_a_workload_made_of_the_trace_s_own_requests(
    drawn_from: tuple[Workload, np.random.Generator],
) -> None:
    workload, rng = drawn_from
    drawn = resampled(units_of(workload), rng)
    assert len(drawn) >= 1
    assert set(drawn.prompt_tokens) <= set(workload.prompt_tokens)
    assert drawn.arrival_s[-1] <= workload.arrival_s[-1] + 60.0


def test_the_same_draw_gives_the_same_workload_and_another_another() -> None:
    units = units_of(poisson())
    first, again, other = (resampled(units, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert np.array_equal(first.arrival_s, again.arrival_s)
    assert not np.array_equal(first.prompt_tokens[:50], other.prompt_tokens[:50])


def test_the_rate_stays_on_average() -> None:
    units = units_of(poisson(requests=4000))
    counts = [len(resampled(units, np.random.default_rng(seed))) for seed in range(40)]
    assert abs(np.mean(counts) / 4000 - 1.0) < 0.02


def test_the_next_traffic_scatters_by_the_trace_s_own_chance_as_well() -> None:
    # The count of Poisson traffic, foretold from one count of it, is off by twice the variance of a count.
    units = units_of(poisson(requests=1000))
    once, twice = (
        np.var([len(draw(units, np.random.default_rng(seed))) for seed in range(400)])
        for draw in (resampled, next_like)
    )
    assert 1.5 < twice / once < 2.7


def test_the_shape_of_the_day_stays() -> None:
    # Ten times as busy in the second half: a bootstrap of any block to any place would flatten it.
    arrival_s = np.concatenate((np.linspace(0, 5000, 500, endpoint=False), np.linspace(5000, 10000, 5000)))
    workload = Workload(arrival_s, np.full(5500, 10), np.full(5500, 10))
    for seed in range(5):
        drawn = resampled(units_of(workload), np.random.default_rng(seed))
        early = (drawn.arrival_s < 3500).sum() / 3500
        late = (drawn.arrival_s > 6500).sum() / 3500
        assert 8.0 < late / early < 12.0


def test_one_request_or_one_instant_comes_back_as_it_is() -> None:
    together = Workload(np.zeros(3), np.full(3, 5), np.full(3, 5))
    assert resampled(units_of(together), np.random.default_rng(0)) is together


@given(st.integers(0, 200), st.booleans(), st.booleans())
def test_a_draw_keeps_sessions_whole(seed: int, waits: bool, together: bool) -> None:
    workload = talks(seed % 5, 12, waits=waits, together=together)
    turns = {tuple(t) for t in told_turns(workload)}
    for draw in (resampled, next_like):
        drawn = draw(units_of(workload), np.random.default_rng(seed))
        assert drawn.sessions is not None
        assert {tuple(t) for t in told_turns(drawn)} <= turns
        owner = np.repeat(np.arange(len(drawn)), np.diff(drawn.sessions.offsets))
        session = drawn.sessions.session
        assert (session[owner] == session[drawn.sessions.before]).all()
        # Each turn waits for the one just before it in its session, as in the trace.
        waiting = np.diff(drawn.sessions.offsets) > 0
        assert waiting.sum() == (len(drawn) - len(set(session)) if waits else 0)


def told_turns(workload: Workload) -> list[list[tuple[float, int, int]]]:
    """Of each session its turns: seconds since its start, and lengths."""
    assert workload.sessions is not None
    found: dict[int, list[tuple[float, int, int]]] = {}
    first: dict[int, float] = {}
    for i, session in enumerate(workload.sessions.session.tolist()):
        first.setdefault(session, float(workload.arrival_s[i]))
        since = round(float(workload.arrival_s[i]) - first[session], 3)
        turn = (since, int(workload.prompt_tokens[i]), int(workload.output_tokens[i]))
        found.setdefault(session, []).append(turn)
    return list(found.values())


@pytest.mark.parametrize("together", [False, True])
def test_two_copies_of_a_session_share_what_sessions_of_the_trace_share_and_nothing_else(
    together: bool,
) -> None:
    workload = talks(3, together=together)
    for seed in range(10):
        drawn = next_like(units_of(workload), np.random.default_rng(seed))
        assert drawn.prefixes is not None
        assert drawn.sessions is not None
        sessions_of: dict[int, set[int]] = {}
        for i, session in enumerate(drawn.sessions.session.tolist()):
            for block in drawn.prefixes.of(i).tolist():
                sessions_of.setdefault(block, set()).add(session)
        assert {block for block, of in sessions_of.items() if len(of) > 1} == set(range(SYSTEM))


@pytest.mark.parametrize("told", [True, False])
def test_a_draw_hits_as_much_as_the_trace_does_on_average(told: bool) -> None:
    workload = talks(1, 150, told=told)
    units = units_of(workload)
    rates = [hit_rate(next_like(units, np.random.default_rng(seed))) for seed in range(60)]
    assert np.mean(rates) == pytest.approx(hit_rate(workload), abs=3 * np.std(rates) / np.sqrt(60) + 0.004)
    torn = Workload(workload.arrival_s, workload.prompt_tokens, workload.output_tokens)
    assert hit_rate(torn) == 0.0


@pytest.mark.parametrize("scale", [0.5, 1.0, 1.5, 2.0, 3.25])
@pytest.mark.parametrize("together", [False, True])
def test_busier_traffic_has_more_sessions_and_no_faster_ones(scale: float, together: bool) -> None:
    workload = talks(2, 80, together=together)
    more = busier(workload, scale)
    assert more.sessions is not None
    assert len(set(more.sessions.session.tolist())) == pytest.approx(80 * scale, abs=1)
    assert more.prompt_tokens.sum() == pytest.approx(workload.prompt_tokens.sum() * scale, rel=0.04)
    assert {tuple(t) for t in told_turns(more)} <= {tuple(t) for t in told_turns(workload)}
    assert more.duration_s == pytest.approx(workload.duration_s, rel=0.2)
    assert hit_rate(more) == pytest.approx(hit_rate(workload), abs=0.03)


@given(st.floats(0.1, 4.0), st.floats(0.1, 4.0))
def test_what_a_smaller_growth_adds_a_larger_one_adds_too(one: float, other: float) -> None:
    less, more = (busier(talks(4, 30), scale) for scale in sorted((one, other)))
    turns = [sorted(map(tuple, told_turns(workload))) for workload in (less, more)]
    for talk in set(turns[0]):
        assert turns[0].count(talk) <= turns[1].count(talk)


def test_the_same_traffic_is_the_workload_itself() -> None:
    workload = talks(2, 20)
    assert busier(workload, 1.0) is workload
    with pytest.raises(BadInput, match="rate scale: must be positive"):
        busier(workload, 0.0)


def test_traffic_that_shares_nothing_comes_faster() -> None:
    workload = poisson()
    assert np.array_equal(busier(workload, 2.0).arrival_s, workload.arrival_s / 2.0)


def test_talks_are_found_by_what_they_repeat() -> None:
    told, untold = talks(5, 60), talks(5, 60, told=False)
    assert told.sessions is not None
    first = {int(s): i for i, s in reversed(list(enumerate(told.sessions.session)))}
    assert families(untold).tolist() == [first[int(s)] for s in told.sessions.session]


def test_a_template_that_many_repeat_joins_nobody() -> None:
    n = TEMPLATE + 3
    lists = [[0]] + [[0, i] for i in range(1, n)]
    lengths = np.array([BLOCK] + [2 * BLOCK] * (n - 1))
    workload = Workload(
        np.arange(n),
        lengths,
        np.ones(n, np.int64),
        prefixes=Prefixes(BLOCK, offsets(lists), np.concatenate(lists)),
    )
    assert families(workload).tolist() == list(range(n))
    assert families(workload.take(slice(0, TEMPLATE))).tolist() == [0] * TEMPLATE


@given(st.integers(0, 2**32 - 1), st.booleans())
def test_a_block_is_a_unit_s_own_where_no_other_unit_has_it(seed: int, told: bool) -> None:
    workload = talks(5, 30, waits=told)
    rows = np.sort(np.random.default_rng(seed).integers(0, len(workload), 20))
    workload = resampled(units_of(workload), np.random.default_rng(seed)) if told else workload.take(rows)
    units, prefixes = units_of(workload), workload.prefixes
    assert units.own is not None
    assert units.counts is not None
    assert prefixes is not None
    blocks = [
        {int(i) for r in units.rows[a:b] for i in prefixes.of(r)}
        for a, b in zip(units.offsets[:-1], units.offsets[1:], strict=True)
    ]
    for u, mine in enumerate(blocks):
        alone = mine - set().union(*(blocks[:u] + blocks[u + 1 :]))
        assert {i for i in mine if units.own[i] >= 0} == alone
        assert units.counts[u] == len(alone)
        assert sorted(units.own[list(alone)]) == list(range(len(alone)))


def test_a_turn_that_waits_for_another_session_is_refused() -> None:
    sessions = Sessions(np.array([0, 1]), np.array([0, 0, 1]), np.array([0]), np.zeros(2))
    workload = Workload(np.zeros(2), np.ones(2), np.ones(2), sessions=sessions)
    with pytest.raises(BadInput, match="request 1 waits for a request of another session"):
        units_of(workload)


@given(st.floats(0.2, 5.0), st.integers(0, 20))
def test_longer_prompts_share_as_much_longer_prefixes(factor: float, seed: int) -> None:
    workload = talks(seed, 10)
    assert workload.prefixes is not None
    longer = workload.longer(factor, factor)
    assert longer.prefixes is not None
    for i in range(len(workload)):
        for j in range(i):
            shared = [
                common(prefixes.of(i).tolist(), prefixes.of(j).tolist())
                for prefixes in (workload.prefixes, longer.prefixes)
            ]
            assert shared[1] == int(np.ceil(shared[0] * factor))


def common(one: list[int], other: list[int]) -> int:
    """Blocks that two lists begin with, after which they have none in common."""
    same = sum(a == b for a, b in zip(one, other, strict=False))
    assert len(set(one) & set(other)) == same
    return same
