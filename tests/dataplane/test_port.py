"""One round, both planes: what the fleet is asked for is the same, whichever plane's adapter shows it."""

from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import pytest
from made_moves import profile
from made_states import state_of

from controlplane.control import Settings, State, tick
from controlplane.migration.balance import MoveSettings
from controlplane.migration.overload import ShedSettings
from controlplane.placement.ledger import DONE
from controlplane.port import ActionOutcome, DataPlane, run_round
from controlplane.scaler.load import LoadSettings
from controlplane.snapshot import Migrate, Pace, Reassign, Scale, Snapshot
from controlplane.types import Slo
from controlplane.worker_type import WorkerType
from controlplane.workload import Workload
from dataplane.live.control import controller
from dataplane.live.control.controller import LivePlane
from dataplane.live.control.controller_process import ControllerSettings
from dataplane.live.control.fleet_state import MoveRow, RequestRow, WorkerRow
from dataplane.simulated.control_loop import ControlSettings, drive
from dataplane.simulated.elastic import Elastic, ElasticSettings
from dataplane.simulated.elastic_run import ElasticPlane
from dataplane.simulated.observe import held_requests
from dataplane.simulated.simulate import WorkerSpec, prepare

SLO = Slo(1.0, 0.1)
PROFILE = profile(capacity=1024, seqs=32)
KIND = PROFILE.type_name
BYTES_PER_S = 1e8
ASKED = Settings(
    MoveSettings(out_below=30, in_above=40, rest_s=0.5),
    ShedSettings(),
    LoadSettings(2, 4, 0.6, 0.2, 0.3, 3.0),
)
BY_TARGETS = replace(ASKED, moves=None)


class Told(DataPlane):
    """A plane that only takes note, with the actions of each round."""

    def __init__(self, snapshot=None):
        self.snapshot, self.begun, self.outcomes = snapshot, [], []

    def observe(self):
        return self.snapshot

    def migrate(self, move):
        self.begun.append(("migrate", move))

    def reassign(self, move):
        self.begun.append(("reassign", move))
        return "it has started"

    def scale(self, change):
        self.begun.append(("scale", change))

    def note(self, note):
        self.begun.append(("note", note))

    def report(self, outcomes):
        self.outcomes.append(outcomes)


def test_a_round_asks_by_a_verb_each_in_their_order_and_reports_what_came_of_them():
    actions = [Scale(2, "a"), Migrate("r", "a", "b", "b"), Reassign("s", "a", "b", "c")]
    plane, after = Told(Snapshot(3.0, (), 1)), State(scaling="after")
    seen = []
    state = run_round(plane, lambda *given: (seen.append(given), (after, actions))[1], State())
    assert state is after
    assert seen == [(State(), plane.snapshot)]
    assert plane.begun == list(zip(("scale", "migrate", "reassign"), actions, strict=True))
    assert plane.outcomes == [
        [ActionOutcome(actions[0]), ActionOutcome(actions[1]), ActionOutcome(actions[2], "it has started")]
    ]


def as_sent(plane, elastic):
    """The simulated fleet as the control API would send it."""
    run, led = plane.run, plane.run.ledger
    phases = led.requests["phase"][: len(run.arrived)]
    return state_of(
        led,
        [
            WorkerRow(f"w{w}", KIND, state, -1 if state == "starting" else w, PROFILE.kv.bytes_per_token)
            for w, state in enumerate(elastic.states())
            if state is not None
        ],
        [RequestRow(f"r{r}", r) for r in np.flatnonzero(phases != DONE).tolist()],
        wanted_kinds={KIND: elastic.wanted},
        moving=[MoveRow(f"r{m.request}", f"w{m.source}", f"w{m.target}") for m in plane.moves.open],
        held=[(int(h.request.request), h.left_s) for h in held_requests(led, run.cluster.queue, plane.now_s)],
        pace=Pace(BYTES_PER_S, 0.01, 3),
    )


def brief(action):
    return action.workers if isinstance(action, Scale) else (f"r{action.request}", f"w{action.target}")


@pytest.mark.parametrize(
    ("policy", "seed"), [*(("jsq+migrate", seed) for seed in range(4)), ("spread+migrate", 0)]
)
def test_both_planes_ask_for_the_same_through_overload_moves_and_changes_of_size(policy, seed, monkeypatch):
    rng = np.random.default_rng(seed)
    n = 150
    load = Workload(np.sort(rng.gamma(2.0, 4.0, n)), rng.integers(20, 250, n), rng.integers(5, 150, n))
    predicted = np.maximum(load.output_tokens * rng.lognormal(-0.3, 0.5, n), 1).astype(np.int64)
    run = prepare(
        load, [WorkerSpec(PROFILE)] * 4, SLO, policy, settings=None, predictor=None,
        predicted_tokens=predicted, seed=seed, patience=4.0, max_misses=None,
    )  # fmt: skip
    elastic = Elastic(run, ElasticSettings(2, cold_start_s=2.0))
    live = LivePlane(ControllerSettings("", None, False, 0, (WorkerType.of(PROFILE),)))
    states, told, posted, done, held = [State()], [], [], [], []
    asked = ASKED if policy.startswith("jsq") else BY_TARGETS
    observe, report = ElasticPlane.observe, ElasticPlane.report

    def ask(self, method, path, body=None):
        if method == "GET":
            return msgspec.msgpack.encode(told.pop())
        posted.append(body["workers"] if path.endswith("scale") else (body["request_id"], body["target"]))
        return b"{}"

    def observed(self):
        """The live plane's round goes first, on the same fleet; what it asks for changes nothing."""
        snapshot = observe(self)
        held.append(snapshot.waiting_tokens)
        told.append(as_sent(self, elastic))
        monkeypatch.setattr(controller.time, "monotonic", lambda: self.now_s)
        states[0] = run_round(live, partial(tick, asked), states[0])
        return snapshot

    def reported(self, outcomes):
        assert posted == [brief(outcome.action) for outcome in outcomes], self.now_s
        posted.clear()
        done.extend(outcomes)
        report(self, outcomes)

    monkeypatch.setattr(LivePlane, "ask", ask)
    monkeypatch.setattr(ElasticPlane, "observe", observed)
    monkeypatch.setattr(ElasticPlane, "report", reported)
    control = ControlSettings(asked, bytes_per_s=BYTES_PER_S)
    drive(ElasticPlane(run, control, elastic))
    begun = {type(outcome.action) for outcome in done if outcome.refused is None}
    if policy.startswith("jsq"):  # which never holds one back
        assert begun == {Migrate, Reassign, Scale}
    else:
        assert max(held) > PROFILE.kv.capacity_tokens
        assert begun >= {Migrate, Scale}
