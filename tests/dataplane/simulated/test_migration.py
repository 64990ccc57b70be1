"""Moves in the simulated plane: no request is lost, nothing leaks, and the times are as stated."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from made_moves import check, profile
from random_cases import by_day_and_night, prefixes_of, shared_texts

from controlplane.control import Settings, tick
from controlplane.errors import BadInput
from controlplane.migration.balance import MoveSettings
from controlplane.migration.move import Stage
from controlplane.migration.overload import ShedSettings, peak_tokens
from controlplane.placement.ledger import DECODING, QUEUED
from controlplane.placement.memory import free_blocks, take
from controlplane.placement.policies import PlacementSettings
from controlplane.placement.table import find
from controlplane.prefixes import Prefixes
from controlplane.snapshot import Cached, Migrate, Reassign
from controlplane.types import EngineMode, RequestId, Slo, WorkerId
from controlplane.workload import Workload
from dataplane.simulated.cluster import advance, view_all
from dataplane.simulated.control_loop import Bringing, ControlSettings, SimulatedPlane, drive, settings_of
from dataplane.simulated.kv import blocks_of
from dataplane.simulated.migration import Moves
from dataplane.simulated.observe import observe
from dataplane.simulated.simulate import WorkerSpec, prepare, simulate

SLO = Slo(1.0, 0.1)
EAGER = ControlSettings(Settings(MoveSettings(out_below=30, in_above=40, rest_s=0.5)), beat_s=0.1)


def begun(workload, workers, policy="round-robin+migrate", **more):
    given = dict.fromkeys(("settings", "predictor", "predicted_tokens", "max_misses"))
    return prepare(workload, workers, SLO, policy, **(given | more), seed=0, patience=4.0)


def driven(run, control):
    """The moves of a run to its end."""
    plane = SimulatedPlane(run, control)
    drive(plane)
    return plane.moves


def bursty(rng, n=60, high=0.2):
    return Workload(
        np.sort(rng.uniform(0, 4.0, n)),
        rng.integers(1, 300, n),
        rng.integers(1, 120, n),
        priority=(rng.random(n) < high).astype(np.int64),
    )


@pytest.mark.parametrize("mode", [EngineMode.PREFILL_FIRST, EngineMode.CHUNKED])
def test_every_request_is_in_one_place_at_every_heartbeat(mode, monkeypatch):
    seen = []
    act = Moves.act

    def checked(self, now_s):
        act(self, now_s)
        view_all(self._run.ledger, self._run.engines, now_s)
        check(self._run, self)
        seen.append(now_s)

    monkeypatch.setattr(Moves, "act", checked)
    done = dict.fromkeys((Stage.DONE, Stage.ABORTED, Stage.LOST), 0)
    for case in range(25):
        rng = np.random.default_rng([case, 3])
        workload = bursty(rng)
        workers = [WorkerSpec(profile(mode, capacity=int(rng.integers(28, 80)) * 16))] * 3
        if case % 3 == 0:
            fails_s = float(rng.uniform(0.5, 4.0))
            workers[1] = replace(workers[1], fails_s=((fails_s, fails_s + 1.0),))
        if case % 4 == 0:
            workers[2] = replace(workers[2], drain_s=float(rng.uniform(0.5, 3.0)))
        run = begun(workload, workers)
        moves = driven(run, EAGER)
        view_all(run.ledger, run.engines, 1e9)
        check(run, moves)
        outcome = run.outcome()
        assert np.isfinite(outcome.finish_s).all()
        assert (outcome.finish_s >= outcome.first_token_s).all()
        assert int(outcome.migrations.sum()) == moves.outcomes[Stage.DONE] + moves.requeued
        assert not moves.open
        assert (run.engines.workers["slowdown"] == 0).all()
        for stage, count in moves.outcomes.items():
            done[stage] += count
    assert len(seen) > 250
    assert done[Stage.DONE] > 50
    assert done[Stage.ABORTED] > 5


def one_mover(output=200, prompt=160, kv_bytes=1_000_000, target_busy=False, slowdown=0.0):
    """One request decoding on worker 0, moved to worker 1 at 1 s; the run, and its moves."""
    arrivals = np.array([0.0, 0.0] if target_busy else [0.0])
    n = len(arrivals)
    workload = Workload(arrivals, np.full(n, prompt), np.full(n, output))
    run = begun(workload, [WorkerSpec(profile(kv_bytes=kv_bytes))] * 2)
    moves = Moves(
        run, [ControlSettings(bytes_per_s=1e9, slowdown=slowdown).price(profile(kv_bytes=kv_bytes))]
    )
    advance(run.ledger, run.engines, run.cluster, run.rules, 1.0)
    moves.migrate(Migrate(RequestId("0"), WorkerId("0"), WorkerId("1"), "asked"), 1.0)
    return run, moves


def finish(run, moves):
    while moves.open:
        at_s = moves.next_s
        advance(run.ledger, run.engines, run.cluster, run.rules, np.nextafter(at_s, -np.inf))
        moves.act(at_s)
    advance(run.ledger, run.engines, run.cluster, run.rules, np.inf)
    return run.outcome()


def test_a_move_costs_its_request_a_pause_and_a_wait_for_the_boundary_and_nothing_else():
    run, moves = one_mover()
    outcome = finish(run, moves)
    stays = simulate(run.workload, [WorkerSpec(profile())], SLO, "round-robin")
    [pause_s] = moves.pauses_s
    assert outcome.worker[0] == 1
    assert outcome.finish_s[0] - stays.finish_s[0] == pytest.approx(pause_s)
    # 10 ms, and what the request made during the copy of about 0.2 s (some ten tokens) with its last block.
    assert 0.01 < pause_s < 0.01 + (16 + 16) * 1e-3


def warm_target(cached_tokens):
    """As `one_mover`, on a target that has computed so much of the request before; when its copy ends."""
    sizes, blocks = np.array([160, 160]), cached_tokens // 16
    ids = np.concatenate([np.arange(10), np.arange(10) + np.where(np.arange(10) < blocks, 0, 100)])
    workload = Workload(
        np.array([0.0, 0.1]), sizes, np.array([200, 200]), prefixes=Prefixes(16, np.array([0, 10, 20]), ids)
    )
    run = begun(workload, [WorkerSpec(profile())] * 2)
    moves = Moves(run, [ControlSettings(bytes_per_s=1e9, slowdown=0.0).price(profile())])
    advance(run.ledger, run.engines, run.cluster, run.rules, 1.0)
    view_all(run.ledger, run.engines, 1.0)
    row = observe(run.ledger, run.profiles, 1.0, frozenset(), frozenset()).workers[1].requests[0]
    assert row.cached(WorkerId("0")) == Cached(cached_tokens, cached_tokens)  # its other still decodes
    assert row.to_send(WorkerId("0")) == row.new_at(WorkerId("0")) == row.tokens - cached_tokens
    assert moves.migrate(Migrate(RequestId("1"), WorkerId("1"), WorkerId("0"), "asked"), 1.0) is None
    return run, moves, row.tokens


@pytest.mark.parametrize("cached", [0, 16, 96, 160])
def test_a_move_copies_and_reserves_what_the_target_has_not_cached(cached):
    run, moves, tokens = warm_target(cached)
    full = (tokens - 1) // 16 * 16
    assert moves.next_s - 1.0 == pytest.approx((full - cached) * 1e-3)  # 1 MB a token, 1 GB a second
    assert run.engines.workers["reserved_blocks"][0] == blocks_of(tokens + 1, 16) - cached // 16
    outcome = finish(run, moves)
    assert (outcome.worker[1], moves.outcomes[Stage.DONE]) == (0, 1)
    assert moves.pauses_s[0] < 0.01 + (16 + 16) * 1e-3 + 0.05
    assert (run.ledger.caches.copies["users"] == 0).all()


def test_what_a_move_was_promised_is_not_evicted_until_it_is_there():
    run, moves, _ = warm_target(160)
    kept = [find(run.ledger.caches, 0, i) for i in range(10)]
    take(run.ledger.caches, 0, free_blocks(run.ledger.caches, 0, 1), 1)  # as if others took all there is
    assert [find(run.ledger.caches, 0, i) for i in range(10)] == kept
    assert (run.ledger.caches.copies["users"][0, kept] == 2).all()
    assert moves.open


def test_nothing_is_pinned_or_promised_when_conversations_have_moved_and_workers_failed():
    moved = 0
    for case in range(30):
        rng = np.random.default_rng([case, 17])
        texts = shared_texts(rng, 16, 400)
        n, prompts = len(texts), np.array([prompt for _, prompt in texts])
        workload = Workload(
            np.sort(rng.uniform(0, 1.0, n)),
            prompts,
            np.array([len(tokens) - prompt for tokens, prompt in texts]),
            prefixes=prefixes_of(texts, 16),
        )
        mode = EngineMode.CHUNKED if case % 2 else EngineMode.PREFILL_FIRST
        workers = [WorkerSpec(profile(mode, capacity=int(rng.integers(28, 80)) * 16, kv_bytes=100_000))] * 3
        if case % 3 == 0:
            fails_s = float(rng.uniform(0.2, 2.0))
            workers[1] = replace(workers[1], fails_s=((fails_s, fails_s + 0.02),))
        if case % 4 == 0:
            workers[2] = replace(workers[2], drain_s=float(rng.uniform(0.2, 2.0)))
        run = begun(workload, workers)
        moves = driven(run, EAGER)
        caches, outcome = run.ledger.caches, run.outcome()
        assert np.isfinite(outcome.finish_s).all()
        assert (run.engines.workers["reserved_blocks"] == 0).all()
        assert (caches.copies["users"] == 0).all()
        assert (caches.workers["shared"] == 0).all()
        kv = run.profiles[0].kv
        assert [free_blocks(caches, w, 1) for w in range(3)] == [kv.capacity_tokens // kv.block_tokens] * 3
        moved += moves.outcomes[Stage.DONE]
    assert moved > 20


def test_the_pause_does_not_grow_with_the_context():
    pauses = []
    for prompt in (100, 800):
        run, moves = one_mover(prompt=prompt, kv_bytes=100_000)
        finish(run, moves)
        pauses += moves.pauses_s
    assert pauses[1] < 1.5 * pauses[0]


def test_steps_are_longer_by_the_slowdown_while_copying_and_only_then():
    plain = finish(*one_mover(target_busy=True))
    slow = finish(*one_mover(target_busy=True, slowdown=0.1))
    # 160-odd tokens at 1 MB each take some 0.2 s: a tenth of that, give or take a step.
    assert 0.01 < slow.finish_s[1] - plain.finish_s[1] < 0.04


def test_a_move_whose_request_ends_first_is_aborted_and_leaves_nothing_behind():
    run, moves = one_mover(output=45)
    outcome = finish(run, moves)
    assert moves.outcomes == {Stage.DONE: 0, Stage.ABORTED: 1, Stage.LOST: 0}
    assert outcome.migrations[0] == 0
    assert (run.engines.workers["reserved_blocks"] == 0).all()


def test_a_target_without_room_refuses_and_nothing_changes():
    workload = Workload(np.zeros(2), np.array([160, 900]), np.array([200, 100]))
    run = begun(workload, [WorkerSpec(profile())] * 2)
    moves = Moves(run, [ControlSettings().price(profile())])
    advance(run.ledger, run.engines, run.cluster, run.rules, 1.0)
    moves.migrate(Migrate(RequestId("0"), WorkerId("0"), WorkerId("1"), "asked"), 1.0)
    assert not moves.open
    assert moves.outcomes[Stage.ABORTED] == 1
    stays = simulate(workload, [WorkerSpec(profile())] * 2, SLO, "round-robin")
    np.testing.assert_allclose(finish(run, moves).finish_s, stays.finish_s)


def test_a_target_that_fails_before_the_stop_changes_nothing_for_the_request():
    workload = Workload(np.zeros(1), np.array([160]), np.array([200]))
    run = begun(workload, [WorkerSpec(profile()), WorkerSpec(profile(), fails_s=((1.1, 9.0),))])
    moves = Moves(run, [ControlSettings(bytes_per_s=1e9, slowdown=0.0).price(profile())])
    advance(run.ledger, run.engines, run.cluster, run.rules, 1.0)
    moves.migrate(Migrate(RequestId("0"), WorkerId("0"), WorkerId("1"), "asked"), 1.0)
    stays = simulate(workload, [WorkerSpec(profile())], SLO, "round-robin")
    np.testing.assert_allclose(finish(run, moves).finish_s, stays.finish_s)
    assert moves.outcomes[Stage.ABORTED] == 1


def test_a_target_that_fails_after_the_stop_loses_the_kv_but_not_the_request():
    run, moves = one_mover()
    while moves.open[0].stage is not Stage.CUTTING_OVER:
        at_s = moves.next_s
        advance(run.ledger, run.engines, run.cluster, run.rules, np.nextafter(at_s, -np.inf))
        moves.act(at_s)
    run.ledger.workers["status"][1] = 0
    outcome = finish(run, moves)
    assert moves.outcomes[Stage.LOST] == 1
    assert outcome.worker[0] == 0
    assert np.isfinite(outcome.finish_s).all()


def test_a_waiting_request_is_requeued_ahead_of_those_that_came_later():
    workload = Workload(np.array([0.0, 0.0, 0.1, 0.2]), np.array([900, 900, 600, 500]), np.full(4, 100))
    run = begun(workload, [WorkerSpec(profile())] * 2, policy="round-robin+migrate")
    moves = Moves(run, [ControlSettings().price(profile())])
    advance(run.ledger, run.engines, run.cluster, run.rules, 1.0)
    assert list(run.ledger.requests["phase"]) == [DECODING, DECODING, QUEUED, QUEUED]
    moves.reassign(Reassign(RequestId("2"), WorkerId("0"), WorkerId("1"), "asked"), 1.0)
    assert int(run.ledger.queue_head[0, 1]) == 2
    assert int(run.ledger.requests["next"][2]) == 3
    outcome = finish(run, moves)
    assert outcome.first_token_s[2] <= outcome.first_token_s[3]
    assert moves.requeued == 1


def test_a_blocked_head_of_line_is_served_sooner_with_moves():
    # Worker 0 fills up with long answers; a long prompt waits there although worker 1 is long empty.
    prompts = np.array([400, 100, 400, 100, 600])
    outputs = np.array([900, 30, 900, 30, 50])
    workload = Workload(np.array([0.0, 0.01, 0.02, 0.03, 2.5]), prompts, outputs)
    without = simulate(workload, [WorkerSpec(profile(capacity=1536))] * 2, SLO, "round-robin")
    control = ControlSettings(Settings(MoveSettings(out_below=60, in_above=60), shed=None), bytes_per_s=1e9)
    assert without.ttft_s[4] > 3.0
    moved = simulate(
        workload, [WorkerSpec(profile(capacity=1536))] * 2, SLO, "round-robin+migrate", control=control
    )
    assert moved.ttft_s[4] < 0.5
    assert moved.migrations.sum() >= 1


def test_a_draining_worker_is_emptied_by_moves():
    workload = Workload(np.linspace(0, 0.2, 8), np.full(8, 50), np.full(8, 400))
    workers = [WorkerSpec(profile(), drain_s=1.0), WorkerSpec(profile(capacity=8192))]
    run = begun(workload, workers)
    drive(SimulatedPlane(run, ControlSettings(bytes_per_s=1e10, beat_s=0.1)))
    outcome = run.outcome()
    assert np.isfinite(outcome.finish_s).all()
    assert (outcome.worker == 1).all()
    assert outcome.busy_s[0] < 4.0


def test_the_same_seed_gives_the_same_run():
    workload = bursty(np.random.default_rng(5))
    runs = [
        simulate(workload, [WorkerSpec(profile())] * 3, SLO, "p2c+migrate", seed=4, control=EAGER)
        for _ in range(2)
    ]
    assert runs[0].finish_s.tobytes() == runs[1].finish_s.tobytes()
    assert runs[0].migrations.sum() == runs[1].migrations.sum() > 0


def test_a_tick_that_moves_nothing_changes_nothing():
    workload = bursty(np.random.default_rng(6))
    still = ControlSettings(Settings(moves=None, shed=None))
    for policy in ("spread", "jsq", "freeness"):
        plain = simulate(workload, [WorkerSpec(profile())] * 3, SLO, policy)
        ticked = simulate(workload, [WorkerSpec(profile())] * 3, SLO, f"{policy}+migrate", control=still)
        np.testing.assert_allclose(ticked.finish_s, plain.finish_s, rtol=0, atol=1e-9)


@by_day_and_night(15, 40)
def test_heartbeats_passed_in_compiled_code_change_nothing(cases):
    """`drive` with its own tick passes them, with one that it is given it runs each."""
    moved = waited = 0
    for seed in cases:
        rng = np.random.default_rng(seed)
        n = int(rng.integers(20, 90))
        workload = Workload(
            np.sort(rng.uniform(0, rng.uniform(1.0, 8.0), n)),
            rng.integers(1, 400, n),
            rng.integers(1, 300, n),
            priority=(rng.random(n) < 0.2).astype(np.int64),
        )
        tokens = np.maximum(workload.output_tokens * rng.choice([0.3, 1.0, 3.0]), 1).astype(np.int64)
        workers = [WorkerSpec(profile(capacity=int(rng.choice([640, 1024, 2048]))))] * int(rng.integers(2, 5))
        policy = str(rng.choice(["spread+migrate", "best-fit+migrate"]))
        runs = []
        for passes in (True, False):
            run = begun(workload, workers, policy, predicted_tokens=tokens)
            control = ControlSettings()
            plane = SimulatedPlane(run, control)
            drive(plane, None if passes else partial(tick, settings_of(run, control)))
            runs.append((run.outcome(), plane.moves.outcomes, plane.moves.requeued, dict(plane.refusals)))
        (fast, *told), (slow, *expected) = runs
        assert fast.finish_s.tobytes() == slow.finish_s.tobytes(), seed
        assert fast.first_token_s.tobytes() == slow.first_token_s.tobytes()
        assert told == expected
        moved += int(fast.migrations.sum())
        waited += int(fast.preemptions.sum())
    assert moved > len(cases) // 2
    assert waited > len(cases) // 2


def test_the_exact_policy_can_move_too():
    workload = bursty(np.random.default_rng(7), n=12, high=0.0)
    outcome = simulate(workload, [WorkerSpec(profile())] * 2, SLO, "exact+migrate", control=EAGER)
    assert np.isfinite(outcome.finish_s).all()


def test_a_run_is_stopped_when_too_many_have_missed():
    workload = bursty(np.random.default_rng(8))
    outcome = simulate(
        workload, [WorkerSpec(profile())] * 2, Slo(1e-6, 1e-6), "jsq+migrate", max_misses=3, control=EAGER
    )
    assert not outcome.complete


def test_longer_answers_than_predicted_are_shed_to_where_there_is_slack():
    n = 10
    workload = Workload(np.zeros(n), np.full(n, 60), np.where(np.arange(n) % 2 == 0, 250, 10))
    shedding = ControlSettings(Settings(moves=None, shed=ShedSettings()), beat_s=0.1, bytes_per_s=1e10)
    predicted = np.full(n, 10)
    workers = [WorkerSpec(profile(capacity=1200))] * 2
    runs = {
        policy: simulate(workload, workers, SLO, policy, predicted_tokens=predicted, control=shedding)
        for policy in ("round-robin", "round-robin+migrate")
    }
    assert runs["round-robin"].preemptions.sum() > 0
    assert runs["round-robin+migrate"].preemptions.sum() == 0
    assert runs["round-robin+migrate"].migrations.sum() > 0


def test_policies_that_cannot_be_moved_or_do_not_exist_are_refused():
    workload = bursty(np.random.default_rng(9), n=3)
    split = profile(EngineMode.SPLIT)
    with pytest.raises(BadInput, match="no split mode"):
        simulate(workload, [WorkerSpec(split, "prefill"), WorkerSpec(split, "decode")], SLO, "jsq+migrate")
    with pytest.raises(BadInput, match=r"each also with \+migrate"):
        simulate(workload, [WorkerSpec(profile())], SLO, "jsq+fly")
    with pytest.raises(BadInput, match="beat_s"):
        ControlSettings(beat_s=0.0)


def test_the_counted_loads_are_those_of_the_lists():
    workload = bursty(np.random.default_rng(10))
    run = begun(workload, [WorkerSpec(profile(EngineMode.CHUNKED))] * 2)
    listed = 0
    for now_s in np.arange(0.5, 8.0, 0.25):
        advance(run.ledger, run.engines, run.cluster, run.rules, now_s)
        view_all(run.ledger, run.engines, now_s)
        for seen in observe(run.ledger, run.profiles, now_s, frozenset(), frozenset()).workers:
            if seen.load.running == len(seen.requests):  # nobody in prefill, whom the lists leave out
                everyone = [*seen.requests, *seen.waiting]
                assert replace(seen.load, peak_tokens=-1) == replace(seen, load=None).counted()
                assert seen.load.peak_tokens == peak_tokens(everyone)
                listed += len(everyone)
    assert listed > 100


@pytest.mark.parametrize("policy", ["freeness", "spread"])
def test_under_headroom_the_high_keep_together_and_normal_ones_keep_off(policy):
    n = 6
    workload = Workload(
        np.linspace(0, 0.5, n), np.full(n, 100), np.full(n, 300), np.array([1, 0, 0, 1, 0, 0])
    )
    outcome = simulate(
        workload,
        [WorkerSpec(profile())] * 2,
        SLO,
        policy,
        settings=PlacementSettings(headroom=0.6),
    )
    # Under `spread` the others' worker has no room for the fifth by then, and headroom holds nobody back.
    looked_at = 6 if policy == "freeness" else 4
    assert list(outcome.worker)[:looked_at] == [0, 1, 1, 0, 1, 1][:looked_at]


@pytest.mark.parametrize("policy", ["freeness", "freeness+migrate"])
def test_high_priority_requests_are_late_beside_a_crowd_and_in_time_with_headroom(policy):
    n = 40
    high = np.zeros(n, np.int64)
    high[::10] = 1
    load = Workload(np.linspace(0, 2, n), np.full(n, 60), np.full(n, 200), high)
    # A token takes some 46 ms beside nine others, and 30 ms beside three.
    fleet = [WorkerSpec(profile(capacity=8192))] * 4

    def late(headroom):
        kept = PlacementSettings(headroom=headroom)
        return ~simulate(load, fleet, Slo(9.0, 0.038), policy, settings=kept).met

    assert late(0.0)[high == 1].all()
    assert not late(0.9)[high == 1].any()


def talks(seed, count=24, turns=6):
    """Conversations of growing context, which no two share."""
    rng, rows = np.random.default_rng(seed), []
    for c in range(count):
        at_s, said = float(rng.uniform(0.0, 10.0)), 0
        for turn in range(turns):
            prompt = said + (1500 if turn == 0 else int(rng.integers(50, 100)))
            rows.append((at_s, prompt, 10, np.arange(c * 1000, c * 1000 + (prompt + 10) // 16)))
            said, at_s = prompt + 10, at_s + 2.0 + float(rng.exponential(2.0))
    rows.sort(key=lambda row: row[0])
    lists = [row[3] for row in rows]
    return Workload(
        *(np.array([row[i] for row in rows]) for i in range(3)),
        prefixes=Prefixes(16, np.cumsum([0, *map(len, lists)]), np.concatenate(lists)),
    )


def hits_after(workload, workers, at_s):
    run = begun(workload, workers, "spread+migrate")
    moves = driven(run, ControlSettings())
    outcome, caches = run.outcome(), run.ledger.caches
    assert np.isfinite(outcome.finish_s).all()
    assert not moves.open
    assert (caches.copies["users"] == 0).all()
    assert (caches.workers["shared"] == 0).all()
    soon = (workload.arrival_s > at_s + 1.0) & (workload.arrival_s < at_s + 8.0)
    return outcome.cached_tokens[soon].sum() / workload.prompt_tokens[soon].sum(), outcome.worker[soon]


@pytest.mark.parametrize("mode", [EngineMode.PREFILL_FIRST, EngineMode.CHUNKED])
def test_a_drain_takes_its_cache_along_and_next_turns_hit_it_elsewhere(mode, monkeypatch):
    roomy = WorkerSpec(profile(mode, capacity=64 * 1024, kv_bytes=100_000))
    fleet, said = [roomy, roomy, replace(roomy, drain_s=12.0)], talks(1, count=9)
    brought, there = hits_after(said, fleet, 12.0)
    undrained, _ = hits_after(said, [roomy] * 3, 12.0)
    monkeypatch.setattr(Bringing, "look", lambda *_: None)
    left, _ = hits_after(said, fleet, 12.0)
    assert 2 not in there
    assert 1 - left > 1.5 * (1 - undrained)
    assert 1 - brought < 1.1 * (1 - undrained)


def test_a_worker_that_comes_is_given_conversations_that_go_on_there(monkeypatch):
    roomy = WorkerSpec(profile(capacity=64 * 1024, kv_bytes=100_000))
    fleet, said = [roomy, roomy, replace(roomy, ready_s=12.0)], talks(1, count=12)
    brought, there = hits_after(said, fleet, 12.0)
    monkeypatch.setattr(Bringing, "look", lambda *_: None)
    alone, then = hits_after(said, fleet, 12.0)
    assert brought >= alone
    assert (there == 2).mean() > (then == 2).mean()
