"""States that the control API sends, as the controller reads them: arrivals, errors, queues, profiles."""

from dataclasses import replace

import msgspec
import numpy as np
import pytest
from made_states import PROFILE, counted, request, state, state_of, worker

from controlplane.control import State, tick
from controlplane.errors import BadInput
from controlplane.migration.move import Price, price_of
from controlplane.perfmodel.coefficients import coefficient_row
from controlplane.placement.batch import enqueue, leave_queue
from controlplane.placement.ledger import new_ledger
from controlplane.placement.lengths import LengthTable
from controlplane.placement.policies import Policy
from controlplane.port import run_round
from controlplane.scaler.bounds import Autoscale
from controlplane.snapshot import Cached, Migrate, Pace, Reassign, Scale, WorkerLoad
from controlplane.types import ClassArrivals, Slo, SloClass, WorkerId
from controlplane.worker_type import WorkerType
from dataplane.history.fleet_log import FleetLog, read_fleet_log
from dataplane.live.control.controller import LivePlane
from dataplane.live.control.controller_process import CONTROLLER_SETTINGS, ControllerSettings
from dataplane.live.control.fleet_state import Observer, RequestRow, WorkerRow, since


def test_arrivals_are_what_came_between_two_looks():
    observer = Observer({"a": PROFILE})
    assert observer.snapshot(state(worker("a"), arrivals=[counted(7)]), 0.0).arrivals is None
    now = observer.snapshot(state(worker("a"), arrivals=[counted(9), counted(1, 2.0)]), 0.5)
    assert now.arrivals == 3
    assert now.by_class == (
        ClassArrivals(Slo(1.0, 0.1), 2, 100, 200),
        ClassArrivals(Slo(2.0, 0.1), 1, 50, 100),
    )
    assert observer.snapshot(state(worker("a"), arrivals=[counted(9), counted(1, 2.0)]), 1.0).arrivals == 0


def test_counters_that_began_anew_are_no_silence():
    assert since(None, [counted(5)]) is None
    assert since([counted(5)], [counted(3)]) is None
    assert since([counted(5)], []) is None
    assert since([counted(5)], [counted(5)]) == ()


def test_a_fixed_number_and_those_who_wait_are_state():
    requests = [request("r", None, 0), request("s", None, 0)]
    now = Observer({}).snapshot(state(worker("a"), requests=requests, auto=False), 0.0)
    assert (now.fixed, now.waiting_requests, now.waiting_tokens) == (2, 2, 100)
    assert (now.cold_start_s, now.drain_s) == (30.0, 4.0)


def test_what_other_workers_have_cached_is_seen_as_not_shared():
    known = request("r", cached={"b": 48})
    (now,) = Observer({}).snapshot(state(worker("a"), requests=[known]), 0.0).workers
    [r] = now.requests
    assert (r.cached(WorkerId("b")), r.cached(WorkerId("c"))) == (Cached(48, 0), Cached())
    assert (r.to_send(WorkerId("b")), r.new_at(WorkerId("b"))) == (12, 60)


def test_a_workers_queue_and_load_are_the_ledgers():
    there = [request("old", "a", 0), request("new", "a", 0), request("runs")]
    now, starting = (
        Observer({}).snapshot(state(worker("a"), worker("b", state="starting"), requests=there), 0.0).workers
    )
    assert [r.request for r in now.waiting] == ["old", "new"]
    assert [r.request for r in now.requests] == ["runs"]
    assert (now.load.waiting_tokens, now.load.held_tokens) == (100, 60)
    assert (now.capacity_tokens, now.max_seqs, now.kv_bytes_per_token) == (16_000, 32, 1000.0)
    assert (starting.capacity_tokens, len(starting.requests), starting.load) == (0, 0, None)


def test_a_state_is_a_copy_that_no_later_step_changes():
    led = new_ledger(
        np.array([coefficient_row(PROFILE)]), np.zeros(1, np.int64), 1, 1, LengthTable.constant(5)
    )
    led.requests["prompt"], led.requests["predicted"] = 100, 10
    led.workers["status"] = 1
    enqueue(led, 0, 0, False)
    sent = state_of(led, [WorkerRow("w", "a", "serving", 0)], [RequestRow("r", 0)])
    led.requests["prompt"] = 5_000
    leave_queue(led, 0, 0)
    (now,) = Observer({}).snapshot(sent, 0.0).workers
    assert [(r.request, r.tokens) for r in now.waiting] == [("r", 100)]


def test_moves_pursue_targets_where_every_speed_is_told_and_balance_elsewhere():
    told = ControllerSettings("", None, False, 0, (WorkerType.of(PROFILE),))
    assert told.tick(told.profiles).moves is None
    for other in (
        replace(told, policy=Policy.JSQ),
        replace(told, worker_types=(*told.worker_types, WorkerType("b", 1))),
    ):
        assert other.tick({}).moves is not None
    assert told.tick({}).shed is None  # no worker's speed is known yet


def test_who_is_held_and_the_pace_of_moves_are_in_the_snapshot():
    told = state(
        worker("a"),
        requests=[request("r", None, 0), request("s", None, 0)],
        held=[(0, 0.7)],
        pace=Pace(1e8, 0.02, 12),
        paces=[("a", "b", Pace(3e7, 0.05, 9))],
    )
    snapshot = Observer({}).snapshot(told, 0.0)
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
            return msgspec.msgpack.encode(state())
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
    monkeypatch.setattr(LivePlane, "ask", lambda self, method, path, body=None: msgspec.msgpack.encode(
        state(*workers, arrivals=[counted(next(arrivals))])
    ) if method == "GET" else b"")  # fmt: skip
    chat = SloClass("chat", Slo(0.4, 0.03), 0.95)
    scaled = Autoscale(1, 6, (0.5, 0.25), hold_s=60.0)
    told = ControllerSettings("", None, False, 0, (kind,), scaled, attainment=0.9, classes=(chat,))
    log, before, plane = FleetLog(tmp_path), State(), LivePlane(told)
    for n in range(6):
        monkeypatch.setattr("time.monotonic", lambda n=n: 10.0 * n)
        before = run_round(plane, lambda *seen: tick(plane.settings, *seen), before)
        plane.log(log, before.scaling, 1e9 + 10.0 * n)
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


def test_a_workers_step_times_are_those_that_its_refit_has_come_to():
    observer, slower = Observer({"a": PROFILE}), PROFILE.step.scaled(1.3, 1.3)
    for steps, expected in (({}, PROFILE.step), ({"a": slower}, slower)):
        assert observer.snapshot(state(worker("a"), steps=steps), 0.0).workers[0].step == expected
    assert observer.profiles["a"] == PROFILE


def test_a_profile_that_was_measured_later_comes_with_the_state():
    observer = Observer({})
    assert observer.snapshot(state(worker("a")), 0.0).workers[0].step is None
    assert observer.snapshot(state(worker("a"), profiles={"a": PROFILE}), 0.5).workers[0].step == PROFILE.step
    assert (
        ControllerSettings("", None, False, 0, (WorkerType("a", 1),)).tick(observer.profiles).shed is not None
    )
