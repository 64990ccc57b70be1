"""What the controller makes of the control API's answers: arrivals, surprises, queues, a worker's profile."""

from dataclasses import replace

import msgspec
import pytest
from made_replies import PROFILE, counted, fleet, request, seen, worker

from controlplane.control import State, tick
from controlplane.errors import BadInput
from controlplane.migration.move import Price, price_of
from controlplane.perfmodel.step import coefficients
from controlplane.placement.policies import Policy
from controlplane.placement.rebalance import Error
from controlplane.port import run_round
from controlplane.snapshot import Cached, Migrate, Pace, Reassign, Scale, WorkerLoad
from controlplane.types import ClassArrivals, Slo, SloClass, WorkerId
from controlplane.worker_type import WorkerType
from dataplane.history.fleet_log import FleetLog, read_fleet_log
from dataplane.live.control.changes import HeldRow, PaceRow, RefitRow
from dataplane.live.control.controller import LivePlane
from dataplane.live.control.settings import CONTROLLER_SETTINGS, Autoscale, ControllerSettings
from dataplane.live.control.snapshot_builder import SnapshotBuilder, TypeProfiles
from dataplane.live.gateway.demand_count import since


def test_arrivals_are_what_came_between_two_looks():
    builder = SnapshotBuilder({"a": PROFILE})
    assert builder.snapshot(seen(worker("a"), arrivals=[counted(7)]), 0.0).arrivals is None
    now = builder.snapshot(seen(worker("a"), arrivals=[counted(9), counted(1, 2.0)]), 0.5)
    assert now.arrivals == 3
    assert now.by_class == (
        ClassArrivals(Slo(1.0, 0.1), 2, 100, 200),
        ClassArrivals(Slo(2.0, 0.1), 1, 50, 100),
    )
    assert builder.snapshot(seen(worker("a"), arrivals=[counted(9), counted(1, 2.0)]), 1.0).arrivals == 0


def test_counters_that_began_anew_are_no_silence():
    assert since(None, [counted(5)]) is None
    assert since([counted(5)], [counted(3)]) is None
    assert since([counted(5)], []) is None
    assert since([counted(5)], [counted(5)]) == ()


def test_a_fixed_number_and_those_who_wait_are_seen():
    requests = [request("r", None, 0), request("s", None, 0)]
    now = SnapshotBuilder().snapshot(seen(worker("a"), requests=requests, auto=False), 0.0)
    assert (now.fixed, now.waiting_requests, now.waiting_tokens) == (2, 2, 100)
    assert (now.cold_start_s, now.drain_s) == (30.0, 4.0)


def test_what_other_workers_have_cached_is_seen_as_not_shared():
    row, *counts = request("r")
    known = (msgspec.structs.replace(row, cached={"b": 48}), *counts)
    (now,) = SnapshotBuilder().snapshot(seen(worker("a"), requests=[known]), 0.0).workers
    [r] = now.requests
    assert (r.cached(WorkerId("b")), r.cached(WorkerId("c"))) == (Cached(48, 0), Cached())
    assert (r.to_send(WorkerId("b")), r.new_at(WorkerId("b"))) == (12, 60)


def test_the_youngest_without_a_token_are_an_engines_queue():
    there = [request("old", "a", 0, number=1), request("new", "a", 0, number=2), request("runs", number=3)]
    (now,) = SnapshotBuilder().snapshot(seen(worker("a", waiting=1), requests=there), 0.0).workers
    assert [r.request for r in now.waiting] == ["new"]
    assert [r.request for r in now.requests] == ["old", "runs"]


def test_requests_that_end_early_or_outlive_their_prediction_are_errors():
    builder = SnapshotBuilder()
    here = [request("r"), request("s", "b")]
    assert not builder.snapshot(seen(worker("a"), worker("b"), requests=here), 0.0).errors
    # 20 steps on: r is gone 70 steps before its end; s made what was expected, and 50 more are now.
    later = [request("s", "b", output=100, expected=150)]
    now = builder.snapshot(seen(worker("a", 120), worker("b", 190), requests=later), 1.0)
    assert now.errors == {"a": Error(-70, -1), "b": Error(50, 1)}
    assert not builder.snapshot(
        seen(worker("a", 200), worker("b", 250)), 2.0
    ).errors  # the weights have faded, and s is over


def test_a_request_that_moved_is_no_surprise():
    builder = SnapshotBuilder()
    builder.snapshot(seen(worker("a"), worker("b", 500), requests=[request("r")]), 0.0)
    there = [request("r", "b", output=20)]
    assert not builder.snapshot(seen(worker("a", 110), worker("b", 510), requests=there), 0.5).errors
    gone = builder.snapshot(seen(worker("a", 110), worker("b", 520)), 1.0)
    assert gone.errors == {"a": Error(0, 0), "b": Error(-70, -1)}


def test_errors_make_algorithm_2_act_on_what_waits():
    builder = SnapshotBuilder({"a": PROFILE})
    running = [request(f"a{i}", "a") for i in range(3)] + [request(f"b{i}", "b") for i in range(3)]
    builder.snapshot(seen(worker("a"), worker("b"), requests=running), 0.0)
    outlived = [request(f"a{i}", "a", output=100, expected=9_000) for i in range(3)]  # more than fits
    there = [*outlived, request("q", "a", 0, expected=20)]
    now = builder.snapshot(seen(worker("a", 190, waiting=1), worker("b", 120), requests=there), 1.0)
    settings = ControllerSettings("", None, False, 0, ()).tick(builder.profiles)
    _, actions = tick(settings, State(), now)
    assert [(a.request, a.source, a.target) for a in actions if isinstance(a, Reassign)] == [("q", "a", "b")]


def test_a_profile_is_learned_from_steps_unless_it_was_given():
    builder = SnapshotBuilder()
    for n in range(1, 81):
        b = 1 + n % 16
        load = worker("a", n, sequences=b, context_tokens=b * 100, step_s=0.01 + b * 1e-3)
        builder.snapshot(seen(load), n / 2)
    assert builder.profiles.of("a").step.step_s(0, 8, 800) == pytest.approx(0.018, rel=0.05)
    assert builder.profiles.of("a").engine.max_seqs == 32
    assert SnapshotBuilder({"a": PROFILE}).profiles.of("a") is PROFILE


def test_moves_pursue_targets_where_every_speed_is_told_and_balance_elsewhere():
    told = ControllerSettings("", None, False, 0, (WorkerType.of(PROFILE),))
    assert told.tick(TypeProfiles(told.profiles)).moves is None
    for other in (
        replace(told, policy=Policy.JSQ),
        replace(told, worker_types=(*told.worker_types, WorkerType("b", 1))),
    ):
        assert other.tick(TypeProfiles({})).moves is not None
    assert told.tick(TypeProfiles({})).shed is None  # no worker's speed is known yet


def test_who_is_held_and_the_pace_of_moves_are_in_the_snapshot():
    told = seen(
        worker("a"),
        requests=[request("r", None, 0), request("s", None, 0)],
        held=[HeldRow(ord("r"), 0.7)],
        usual=PaceRow(1e8, 0.02, 12),
        paces=[PaceRow(3e7, 0.05, 9, "a", "b")],
    )
    snapshot = SnapshotBuilder().snapshot(told, 0.0)
    [held] = snapshot.held
    assert (held.request.request, held.request.tokens, held.left_s) == ("r", 50, 0.7)
    assert snapshot.transport.between(WorkerId("a"), WorkerId("b")) == Pace(3e7, 0.05, 9)
    assert snapshot.transport.between(WorkerId("b"), WorkerId("a")) == Pace(1e8, 0.02, 12)
    b = WorkerLoad(WorkerId("b"), "serving", 1)
    assert price_of(snapshot.transport, snapshot.workers[0], b) == Price(1000.0, 3e7, 0.05)


def test_settings_cross_the_pipe_unchanged():
    told = ControllerSettings(
        "http://x",
        "k",
        True,
        7,
        (WorkerType.of(PROFILE, 2.5, "made"), WorkerType("h100-sxm", 2, limit=4, reclaims_per_h=0.1)),
        Autoscale(0, 4, (0.5, 0.2), 60.0, (900.0, 80.0), 16, 40.0),
        "data",
    )
    bare = ControllerSettings("http://x", None, False, 7, ())
    for sent in (told, bare):
        assert CONTROLLER_SETTINGS.validate_json(CONTROLLER_SETTINGS.dump_json(sent)) == sent


def test_the_same_advice_is_given_once_and_decisions_always(monkeypatch):
    said = []
    monkeypatch.setattr(LivePlane, "ask", lambda self, method, path, body: said.append(body))
    for advisory, times in ((True, 1), (False, 3)):
        plane = LivePlane(ControllerSettings("", None, advisory, 0, ()))
        for _ in range(3):
            plane.scale(Scale(4, "a test", {"cost": {"workers": 2.0}}))
        assert len(said) == times
        assert said[0]["facts"] == {"cost": {"workers": 2.0}}
        said.clear()
    advised = LivePlane(ControllerSettings("", None, True, 0, ()))
    for workers in (4, 5, 4):
        advised.scale(Scale(workers, "a test"))
    assert [order["workers"] for order in said] == [4, 5, 4]


def test_an_api_that_falls_silent_is_not_asked_again_before_the_next_look(monkeypatch, capsys):
    tried = []

    def ask(self, method, path, body=None):
        if method == "GET":
            return msgspec.json.encode(fleet())
        tried.append(path)
        raise OSError("timed out")

    monkeypatch.setattr(LivePlane, "ask", ask)
    plane = LivePlane(ControllerSettings("", None, False, 0, ()))
    actions = [Reassign("r", "a", "b", "a test"), Migrate("s", "a", "b", "a test"), Scale(4, "a test")]
    for _ in range(2):
        assert run_round(plane, lambda state, seen: (state, actions), State()) == State()
    assert tried == ["/v1/decisions/migrate"] * 2
    assert capsys.readouterr().err.count("does not answer: timed out") == 6


def test_the_fleets_log_is_told_of_the_workers_and_of_the_rule_that_decided(monkeypatch, tmp_path):
    kind = WorkerType.of(PROFILE)
    workers = [worker(name, state=state, kind=kind.name) for name, state in
               (("a", "serving"), ("b", "serving"), ("c", "starting"), ("d", "draining"))]  # fmt: skip
    arrivals = iter(range(0, 400, 40))
    monkeypatch.setattr(LivePlane, "ask", lambda self, method, path, body=None: msgspec.json.encode(
        fleet(*workers, arrivals=[counted(next(arrivals))])
    ) if method == "GET" else b"")  # fmt: skip
    chat = SloClass("chat", Slo(0.4, 0.03), 0.95)
    scaled = Autoscale(1, 6, (0.5, 0.25), hold_s=60.0)
    told = ControllerSettings("", None, False, 0, (kind,), scaled, attainment=0.9, classes=(chat,))
    log, state, plane = FleetLog(tmp_path), State(), LivePlane(told)
    for n in range(6):
        monkeypatch.setattr("time.monotonic", lambda n=n: 10.0 * n)
        state = run_round(plane, lambda *seen: tick(plane.settings, *seen), state)
        plane.log(log, state.scaling, 1e9 + 10.0 * n)
    log.close()
    looks, fleets = read_fleet_log(tmp_path, 0.0, 1e10)
    assert all(one.workers == {kind.name: (1, 2, 1)} and not one.fixed for one in looks)
    rule = looks[-1].rule
    assert (rule.slope, rule.intercept, rule.low, rule.high) == (0.5, 0.25, 1, 6)
    assert rule.workers >= 3  # four requests a second
    assert (fleets[-1].attainment, fleets[-1].classes) == (0.9, (chat,))
    assert fleets[-1].types[0].profile == PROFILE


@pytest.mark.parametrize("bounds", [(2, 1), (0, 0), (-1, 3)])
def test_bounds_that_cannot_be_are_refused(bounds):
    with pytest.raises(BadInput, match="autoscale"):
        Autoscale(*bounds)


def test_a_workers_step_times_are_those_of_the_gateways_refit_once_it_has_seen_enough():
    builder = SnapshotBuilder({"a": PROFILE})
    slower = PROFILE.step.scaled(1.3, 1.3)
    hinges = [{"of": h.of, "from": h.start, "per_unit_s": h.per_unit_s} for h in slower.hinges]
    told = {**coefficients(slower), "hinges": hinges}
    for steps, expected in ((50, PROFILE.step), (5000, slower)):
        here = builder.snapshot(seen(worker("a"), refits=[RefitRow("a", steps, told)]), 0.0)
        assert here.workers[0].step == expected
    assert builder.profiles.of("a") == PROFILE
