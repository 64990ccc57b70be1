"""The part of a trace that a prefix cache could serve, against a cache that is really kept."""

from collections import OrderedDict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import BadInput
from controlplane.prefixes import Prefixes, Sessions
from controlplane.workload import Workload
from tokenfleet.traces.reuse import reuse_of
from tokenfleet.traces.synth import SessionLaws, synthesise_sessions

UNIT = 16


@st.composite
def trees(draw: st.DrawFn) -> Workload:
    """Requests along the paths of a small tree of blocks, each with a tail of its own."""
    parents = draw(st.lists(st.integers(-1, 7), min_size=1, max_size=8))
    paths: list[list[int]] = []
    for block, parent in enumerate(parents):
        paths.append([*(paths[parent] if 0 <= parent < block else []), block])
    lists = draw(st.lists(st.sampled_from([[], *paths]), min_size=1, max_size=12))
    n = len(lists)
    tails = draw(st.lists(st.integers(0, 40), min_size=n, max_size=n))
    outputs = np.array(draw(st.lists(st.integers(1, 40), min_size=n, max_size=n)))
    prompts = np.maximum([len(ids) * UNIT + tail for ids, tail in zip(lists, tails, strict=True)], 1)
    session = draw(st.lists(st.integers(-1, 2), min_size=n, max_size=n))
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids in lists])])
    ids = np.array([each for one in lists for each in one], np.int64)
    return Workload(
        np.arange(n, dtype=float), prompts, outputs,
        prefixes=Prefixes(UNIT, offsets, ids),
        sessions=Sessions(np.array(session), np.zeros(n + 1, int), np.zeros(0, int), np.zeros(n)),
    )  # fmt: skip


def blocks(load: Workload, r: int) -> list[object]:
    """All of a request's full blocks: those with ids, then its own."""
    total = int(load.prompt_tokens[r] + load.output_tokens[r]) // UNIT
    ids = load.prefixes.of(r).tolist()
    return [*ids, *((r, k) for k in range(len(ids), total))]


@given(trees())
def test_hits_distances_and_unique_tokens_are_those_of_a_list_that_is_really_kept(load: Workload) -> None:
    reuse = reuse_of(load)
    kept: OrderedDict[object, int] = OrderedDict()  # by the request that had them last
    had: dict[int, set[object]] = {}
    hits = within = 0
    reuses = []
    for r in range(len(load)):
        session = int(load.sessions.session[r])
        usable = load.prefixes.of(r)[: (load.prompt_tokens[r] - 1) // UNIT].tolist()
        known = next((k for k, block in enumerate(usable) if block not in kept), len(usable))
        hits += known * UNIT
        for block in usable[:known]:
            reuses.append(sum(kept[other] > kept[block] for other in kept) * UNIT)
        if session >= 0:
            own = had.setdefault(session, set())
            within += UNIT * next((k for k, block in enumerate(usable) if block not in own), len(usable))
            own.update(blocks(load, r))
        kept.update((block, r) for block in blocks(load, r))
    assert reuse.hit_tokens == hits
    assert reuse.within_tokens == within
    assert reuse.unique_tokens == len(kept) * UNIT
    counted = np.repeat(reuse.distances, reuse.hits // UNIT)
    assert counted.tolist() == sorted(reuses)
    assert reuse.kept(10**9) == reuse.ideal
    if reuses:
        assert reuse.kept(-1) == 0
        assert np.mean(counted <= reuse.distance(0.5)) >= 0.5


def test_a_trace_that_does_not_say_what_it_shares_has_no_reuse() -> None:
    assert reuse_of(Workload(np.zeros(1), np.ones(1), np.ones(1))) is None


def test_made_up_chats_share_their_history_and_a_system_prompt() -> None:
    laws = SessionLaws("fixed:4", "fixed:30", system_tokens=1000)
    load, systems = synthesise_sessions("poisson:1", "fixed:200:100", 40, laws)
    assert systems is not None
    assert len(load) == 40
    first = load.sessions.offsets[:-1] == load.sessions.offsets[1:]
    assert sorted(load.prompt_tokens[first]) == [1200] * 10
    assert sorted(set(load.prompt_tokens)) == [1200, 1500, 1800, 2100]
    assert (load.sessions.think_s[~first] == 30.0).all()
    reuse = reuse_of(load)
    # Each turn but the first hits all before its message, the first the system prompt, in whole blocks.
    turns = 10 * sum((1000 + 300 * k) // 16 * 16 for k in (1, 2, 3))
    assert reuse.within_tokens == turns
    assert reuse.hit_tokens == turns + 9 * (1000 // 16 * 16)
    before = load.sessions.before
    assert np.allclose(load.arrival_s[~first] - load.arrival_s[before], 32.0)


def test_long_times_to_think_are_kept_and_impossible_ones_named() -> None:
    load, _ = synthesise_sessions(
        "poisson:1", "fixed:9:9", 20_000, SessionLaws("fixed:9", "lognormal:90:1.5")
    )
    assert load.sessions is not None
    think_s = load.sessions.think_s[np.diff(load.sessions.offsets) > 0]
    assert think_s.mean() == pytest.approx(90, rel=0.05)
    assert think_s.max() > 500
    for laws, flag in (
        (SessionLaws("fixed:0"), "--turns: 'fixed:0', expected at least 1, at most 100000"),
        (SessionLaws("fixed:3", "fixed:-1"), "--think: 'fixed:-1', expected at least 0.001, at"),
        (SessionLaws("fixed:3", "lognormal:1:0"), "--think: 'lognormal:1:0', expected .* CV above 0"),
    ):
        with pytest.raises(BadInput, match=f"^{flag}"):
            synthesise_sessions("poisson:1", "fixed:9:9", 9, laws)


def test_a_made_up_session_ends_before_its_context_is_too_long() -> None:
    laws = SessionLaws("lognormal:20:1", "uniform:1:9", context_tokens=2000)
    load, _ = synthesise_sessions("gamma:2:2", "lognormal:100:1-fixed:50", 500, laws)
    assert (load.prompt_tokens + load.output_tokens <= 2000).all()
    assert 100 < len(load) < 500
    again, _ = synthesise_sessions("gamma:2:2", "lognormal:100:1-fixed:50", 500, laws)
    assert np.array_equal(load.arrival_s, again.arrival_s)


@pytest.mark.parametrize(
    ("laws", "said"),
    [
        (SessionLaws("S"), "--turns: 'S', expected one of fixed:TOKENS"),
        (SessionLaws("fixed:0"), "expected at least 1"),
        (SessionLaws("fixed:2", "lognormal:3"), "--think: 'lognormal:3', expected lognormal:MEAN:CV"),
        (SessionLaws("fixed:2", context_tokens=10), "--context-tokens: 10, expected room for a turn"),
    ],
)
def test_sessions_that_cannot_be_made_up_are_refused(laws: SessionLaws, said: str) -> None:
    with pytest.raises(BadInput, match=said) as refused:
        synthesise_sessions("poisson:1", "fixed:200:100", 10, laws)
    assert "\n" not in str(refused.value)
