"""Sessions in a closed loop: a turn is sent a time to think after the answers it waits for, never else."""

from dataclasses import replace

import numpy as np
import pytest
from by_day import examples
from hypothesis import given
from hypothesis import strategies as st
from invariants import check
from made_profiles import made_profile

from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.profile import Frontend
from controlplane.perfmodel.step import PrefillModel, StepModel
from controlplane.placement.policies import PlacementSettings
from controlplane.placement.queue import QueueSettings
from controlplane.prefixes import Sessions
from controlplane.types import EngineMode, Slo
from controlplane.workload import Workload
from dataplane.simulated.cluster import advance
from dataplane.simulated.control_loop import ControlSettings
from dataplane.simulated.elastic import ElasticSettings
from dataplane.simulated.elastic_run import simulate_elastic
from dataplane.simulated.simulate import Outcome, WorkerSpec, prepare, simulate

SLO = Slo(0.6, 0.03)


def profile(kv_tokens: int = 3000, seqs: int = 8):
    return made_profile(
        StepModel(0.0187, 9e-5, 7e-4, 5e-7),
        KvModel(kv_tokens, 16),
        EngineLimits(mode=EngineMode.CHUNKED, max_batched_tokens=256, max_seqs=seqs),
        PrefillModel(0.0115, 9e-5),
    )


def sessions_of(session: list[int], before: list[list[int]], think_s: list[float]) -> Sessions:
    offsets = np.concatenate([[0], np.cumsum([len(each) for each in before])])
    return Sessions(
        np.array(session), offsets, np.array([q for each in before for q in each], int), np.array(think_s)
    )


def waits(sessions: Sessions) -> list[list[int]]:
    return [each.tolist() for each in np.split(sessions.before, sessions.offsets[1:-1])]


@st.composite
def loads(draw: st.DrawFn, most: int = 10) -> Workload:
    """A few sessions with turns after each other, side by side, and joined again; some requests of none."""
    n = draw(st.integers(1, most))
    session = draw(st.lists(st.integers(-1, 2), min_size=n, max_size=n))
    before = []
    for r in range(n):
        earlier = [q for q in range(r) if session[q] == session[r] >= 0]
        before.append(draw(st.lists(st.sampled_from(earlier), unique=True, max_size=3)) if earlier else [])
    # Never an instant at which a step ends: there, arrivals that were known before come first.
    seconds = st.integers(1, 2000).map(lambda k: k / 997)
    think_s = draw(st.lists(seconds, min_size=n, max_size=n))
    arrival_s = np.cumsum(draw(st.lists(seconds, min_size=n, max_size=n)))
    tokens = st.lists(st.integers(1, 300), min_size=n, max_size=n)
    return Workload(
        arrival_s,
        np.array(draw(tokens)),
        np.array(draw(tokens)),
        sessions=sessions_of(session, before, think_s),
    )


def played(load: Workload, rows: list[int], sent_s: list[float], workers: int) -> np.ndarray:
    """When the answers to some requests are complete, were they and no others sent, at these times."""
    order = sorted(range(len(rows)), key=lambda i: (sent_s[i], rows[i]))
    which = np.array([rows[i] for i in order])
    alone = Workload(
        np.array([sent_s[i] for i in order]), load.prompt_tokens[which], load.output_tokens[which]
    )
    outcome = simulate(
        alone, [WorkerSpec(profile())] * workers, SLO, "jsq",
        predicted_tokens=np.full(len(which), 50),
    )  # fmt: skip
    finish_s = np.empty(len(rows))
    finish_s[order] = outcome.finish_s
    return finish_s


def reference(load: Workload, workers: int) -> dict[int, float]:
    """When each request is sent, one after the other: the next is the earliest whose answers are complete.

    Requests sent later change nothing before, so an open replay of those known so far is exact until then.
    """
    before, think_s = waits(load.sessions), load.sessions.think_s
    sent = {r: float(load.arrival_s[r]) for r, earlier in enumerate(before) if not earlier}
    while len(sent) < len(load):
        rows = list(sent)
        finish_s = dict(zip(rows, played(load, rows, [sent[r] for r in rows], workers), strict=True))
        ready = {
            r: max(finish_s[q] for q in earlier) + think_s[r]
            for r, earlier in enumerate(before)
            if r not in sent and all(q in sent for q in earlier)
        }
        first = min(ready, key=lambda r: (ready[r], r))
        sent[first] = ready[first]
    return sent


@examples(60)
@given(loads(), st.integers(1, 3))
def test_turns_are_sent_when_a_literal_reference_sends_them(load: Workload, workers: int) -> None:
    outcome = simulate(
        load, [WorkerSpec(profile())] * workers, SLO, "jsq", predicted_tokens=np.full(len(load), 50)
    )
    sent = reference(load, workers)
    assert outcome.arrival_s.tolist() == [sent[r] for r in range(len(load))]
    rows = list(range(len(load)))
    assert outcome.finish_s.tolist() == played(load, rows, [sent[r] for r in rows], workers).tolist()
    assert np.array_equal(outcome.ttft_s, outcome.first_token_s - outcome.arrival_s)


def many(sessions: int, turns: int, seed: int = 0) -> Workload:
    """Sessions of equally many turns that follow each other."""
    rng = np.random.default_rng(seed)
    n = sessions * turns
    session = np.tile(np.arange(sessions), turns)
    before = [[] if r < sessions else [r - sessions] for r in range(n)]
    arrival_s = np.concatenate([np.sort(rng.uniform(0, 3, sessions)), np.full(n - sessions, 3.0)])
    return Workload(
        arrival_s,
        rng.integers(1, 200, n),
        rng.integers(1, 60, n),
        sessions=sessions_of(session.tolist(), before, rng.exponential(0.5, n).tolist()),
    )


def expected_s(load: Workload, outcome: Outcome) -> np.ndarray:
    """When each turn should have been sent, by the answers that were given."""
    ends = [max((outcome.finish_s[q] for q in each), default=np.nan) for each in waits(load.sessions)]
    return np.where(np.isnan(ends), load.arrival_s, np.array(ends) + load.sessions.think_s)


@pytest.mark.parametrize("policy", ["spread", "jsq", "exact", "spread+migrate"])
def test_a_turn_is_sent_a_time_to_think_after_the_answer_under_any_policy(policy: str) -> None:
    load = many(8, 5)
    outcome = simulate(load, [WorkerSpec(profile())] * 2, SLO, policy)
    assert outcome.complete
    assert outcome.arrival_s.tolist() == expected_s(load, outcome).tolist()
    assert (outcome.first_token_s > outcome.arrival_s).all()
    begun, ended = outcome.arrival_s.reshape(5, 8).min(axis=0), outcome.finish_s.reshape(5, 8).max(axis=0)
    assert outcome.session_s.tolist() == (ended - begun).tolist()


def test_a_fleet_that_scales_serves_a_closed_loop_to_its_end() -> None:
    load = many(8, 5)
    elastic, control = ElasticSettings(), ControlSettings()
    outcome, _ = simulate_elastic(load, [WorkerSpec(profile())] * 3, SLO, elastic, control)
    assert outcome.complete
    assert outcome.arrival_s.tolist() == expected_s(load, outcome).tolist()


def test_nothing_is_lost_at_any_instant_of_a_closed_loop() -> None:
    load = many(10, 4)
    workers = [WorkerSpec(profile(), fails_s=((0.5, 1.5),)), WorkerSpec(profile())]
    usual = {"settings": None, "predictor": None, "predicted_tokens": None, "max_misses": None}
    state = prepare(load, workers, SLO, "spread", seed=0, patience=4.0, **usual)
    now_s, more = 0.0, True
    while more:
        now_s += 0.11
        more = advance(state.ledger, state.engines, state.cluster, state.rules, now_s)
        check(state, now_s)
    assert state.outcome().finish_s.tobytes() == simulate(load, workers, SLO, "spread").finish_s.tobytes()


def test_a_request_turned_away_counts_as_answered_then() -> None:
    load = many(12, 3)
    queue = QueueSettings(max_requests=2, max_wait_s=0.5)
    state = prepare(
        load, [WorkerSpec(profile(seqs=1))], SLO, "spread", settings=PlacementSettings(queue=queue)
    )
    while advance(state.ledger, state.engines, state.cluster, state.rules, np.inf):
        pass
    outcome = state.outcome()
    away = np.isinf(outcome.finish_s)
    assert 0 < away.sum() < len(load)
    assert outcome.complete
    assert np.isfinite(outcome.arrival_s).all()
    assert np.isinf(outcome.session_s).sum() == len(set(np.flatnonzero(away) % 12))


def test_a_run_that_is_stopped_leaves_what_was_not_sent_without_a_time() -> None:
    outcome = simulate(many(30, 6), [WorkerSpec(profile())], Slo(0.02, 0.001), "spread", max_misses=5)
    assert not outcome.complete
    assert np.isnan(outcome.arrival_s).any()
    assert np.isnan(outcome.session_s).any()
    assert not outcome.met[np.isnan(outcome.arrival_s)].any()


def test_sessions_whose_turns_wait_for_nothing_are_sent_at_their_times() -> None:
    load = many(10, 4)
    open_loop = replace(load, sessions=sessions_of(load.sessions.session.tolist(), [[]] * 40, [0.0] * 40))
    told, alone = (
        simulate(each, [WorkerSpec(profile())] * 2, SLO) for each in (open_loop, replace(load, sessions=None))
    )
    assert told.finish_s.tobytes() == alone.finish_s.tobytes()
    assert told.arrival_s.tobytes() == load.arrival_s.tobytes()


@pytest.mark.parametrize("agents", [1, 3, 8, 20])
def test_so_many_agents_take_one_session_after_the_other(agents: int) -> None:
    load = many(8, 4)
    outcome = simulate(load, [WorkerSpec(profile())] * 2, SLO, agents=agents)
    assert outcome.complete
    turns = outcome.arrival_s.reshape(4, 8)
    begins, ends = turns[0], outcome.finish_s.reshape(4, 8).max(axis=0)
    assert turns[1:].tolist() == expected_s(load, outcome).reshape(4, 8)[1:].tolist()
    assert begins[: min(agents, 8)].tolist() == [0.0] * min(agents, 8)
    # Each later one begins as an earlier one ends, in order.
    assert begins[agents:].tolist() == np.sort(ends)[: max(8 - agents, 0)].tolist()


def test_requests_of_no_session_come_at_their_times_beside_agents() -> None:
    load = many(4, 3)
    session = load.sessions.session.copy()
    session[session == 2] = -1
    before = [[] if session[r] < 0 else each for r, each in enumerate(waits(load.sessions))]
    load = replace(load, sessions=sessions_of(session.tolist(), before, load.sessions.think_s.tolist()))
    outcome = simulate(load, [WorkerSpec(profile())], SLO, agents=2)
    assert outcome.arrival_s[session < 0].tolist() == load.arrival_s[session < 0].tolist()
    assert outcome.arrival_s[:2].tolist() == [0.0, 0.0]
    assert outcome.arrival_s[3] == min(outcome.finish_s[[8, 9]])


@given(loads(), st.sampled_from(["spread", "jsq"]))
@examples(40)
def test_a_client_has_every_token_later_by_what_the_frontend_takes(load: Workload, policy: str) -> None:
    frontend = Frontend(0.01, 1e-5)
    plain, behind = profile(), replace(profile(), frontend=frontend)
    at_once = replace(load, sessions=None)
    seen, without = (simulate(at_once, [WorkerSpec(p)], Slo(9e9, 9e9), policy) for p in (behind, plain))
    later_s = frontend.seconds(load.prompt_tokens)
    np.testing.assert_allclose(seen.ttft_s, without.ttft_s + later_s, rtol=0, atol=1e-9)
    np.testing.assert_allclose(seen.finish_s, without.finish_s + later_s, rtol=0, atol=1e-9)
    np.testing.assert_allclose(seen.tpot_s, without.tpot_s, rtol=0, atol=1e-9)
    turns = simulate(load, [WorkerSpec(behind)], SLO, policy)
    np.testing.assert_allclose(turns.arrival_s, expected_s(load, turns), rtol=0, atol=1e-9)


def test_a_first_token_that_only_the_frontend_makes_late_is_late() -> None:
    alone = Workload(np.zeros(1), np.array([100]), np.array([5]))
    ttft_s = profile().alone_ttft_s(100)
    behind = replace(profile(), frontend=Frontend(0.02))
    assert behind.alone_ttft_s(100) == pytest.approx(ttft_s + 0.02)
    for held, slo in ((1.0, Slo(ttft_s + 0.021, 1.0)), (0.0, Slo(ttft_s + 0.019, 1.0))):
        outcome = simulate(alone, [WorkerSpec(behind)], slo, "jsq")
        assert (outcome.attainment, outcome.misses) == (held, 1 - held)
