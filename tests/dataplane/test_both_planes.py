"""The same story in both planes: the same code keeps and decides the same."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from made_gateways import made_request, worker_info
from made_profiles import made_profile
from made_states import state_of

from controlplane.migration.drain import DRAIN_LOOK_S
from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.step import PrefillModel, StepModel
from controlplane.placement.ledger import DECODING, DONE, HELD, generated
from controlplane.placement.lengths import LengthTable
from controlplane.placement.policies import PlacementSettings
from controlplane.placement.queue import QueueSettings
from controlplane.types import EngineMode, Slo, WorkerId
from controlplane.workload import Workload
from dataplane.live.control.fleet_state import DemandCount, Observer, RequestRow, WorkerRow
from dataplane.live.ledger.admission import Admission
from dataplane.live.ledger.placement import Placement
from dataplane.live.ledger.request import Ticket, Tracked
from dataplane.simulated.changes import change_worker
from dataplane.simulated.cluster import advance
from dataplane.simulated.control_loop import SimulatedPlane
from dataplane.simulated.elastic_run import OutcomeCount
from dataplane.simulated.migration import Moves
from dataplane.simulated.records import DRAIN
from dataplane.simulated.simulate import ControlSettings, WorkerSpec, prepare

PROFILE = made_profile(
    StepModel(0.02, 1e-4, 1e-3, 1e-5),
    KvModel(1_000_000, 16, 1),  # room for all: nobody is preempted
    EngineLimits(mode=EngineMode.PREFILL_FIRST, max_batched_tokens=512, max_seqs=256),
    PrefillModel(0.01, 2e-4),
)


def as_sent(led, **told):
    """The fleet of a ledger as the control API would send it."""
    workers = [WorkerRow(str(w), "", "serving", w) for w in range(len(led.workers))]
    there = np.flatnonzero(led.requests["phase"] != DONE).tolist()
    return state_of(led, workers, [RequestRow(f"r{r}", r) for r in there], **told)


SEAT = replace(
    PROFILE,
    step=StepModel(0.05, 0.0, 0.0, 0.0),
    prefill=PrefillModel(0.01, 1e-4),
    engine=EngineLimits(mode=EngineMode.PREFILL_FIRST, max_batched_tokens=8192, max_seqs=1),
)
EASY, STRICT = Slo(8.0, 1.0), Slo(0.3, 1.0)
QUEUE = QueueSettings(max_requests=4, max_wait_s=5.0)
LOST_S, BACK_S = 2.33, 4.35  # worker 0

# Arrival, prompt, output, SLO, priority. Two fill the fleet; six that not even an idle worker could serve in
# time come before anybody else, more than a round's refusals; those behind them have time, one is urgent.
STORY = [
    (0.001, 100, 40, EASY, 0),
    (0.013, 100, 44, EASY, 0),
    *[(0.113 + 0.01 * i, 4000, 8, STRICT, 0) for i in range(6)],
    (0.317, 300, 12, EASY, 0),
    (0.351, 200, 20, EASY, 1),
    (0.407, 100, 9, EASY, 0),
    (0.503, 100, 9, EASY, 0),  # the queue is full, but not for those who yield to the strict
    (0.511, 100, 9, EASY, 0),
    (5.003, 100, 10, EASY, 0),
    (5.009, 100, 6, EASY, 1),
    (6.001, 4000, 8, STRICT, 0),
]


def simulated_story():
    """Who was placed where, in order: (seconds, request, worker); and who was turned away, with the time."""
    classes = [EASY, STRICT]
    load = Workload(
        np.array([row[0] for row in STORY]),
        np.array([row[1] for row in STORY]),
        np.array([row[2] for row in STORY]),
        slo_class=np.array([classes.index(row[3]) for row in STORY]),
        priority=np.array([row[4] for row in STORY]),
    )
    workers = [WorkerSpec(SEAT, fails_s=((LOST_S, BACK_S),)), WorkerSpec(SEAT)]
    run = prepare(
        load, workers, classes, "spread", settings=PlacementSettings(queue=QUEUE),
        predictor=LengthTable.constant(20), predicted_tokens=None, seed=0, patience=4.0,
        max_misses=None,
    )  # fmt: skip
    placed, away, at = [], {}, np.full(len(STORY), -1)
    rows, finish_s = run.ledger.requests, run.engines.requests["finish_s"]
    for tick in range(1, 20_000):
        now_s = tick * 1e-3
        advance(run.ledger, run.engines, run.cluster, run.rules, now_s)
        there = np.where(rows["phase"] == HELD, -1, rows["worker"])
        for r in np.flatnonzero((there != at) & (there >= 0) & (load.arrival_s <= now_s)):
            placed.append((now_s, int(r), int(there[r])))
        for r in np.flatnonzero(np.isinf(finish_s)):
            away.setdefault(int(r), now_s)
        at = there
    assert run.outcome().complete
    return placed, away


class Gateway:
    """The gateway's admission and placement, by a made-up clock, before engines of one seat each."""

    def __init__(self):
        self.now_s, self.placed, self.away, self.seats = 0.0, [], {}, {}
        self.placement = Placement({"": SEAT}, 2, LengthTable.constant(20), np.random.default_rng(0))
        self.placement.slos = (EASY, STRICT)
        self.admission = Admission(
            QUEUE, self.placement, self.begin, self.turn_away, clock=lambda: self.now_s
        )
        for w in "01":
            self.attach(WorkerId(w))

    def attach(self, worker):
        self.seats[worker] = None
        self.placement.attach(worker_info(worker, 1), "")
        self.admission.look()

    async def begin(self, tracked, worker):
        """As FleetCore begins a segment; the engine's tokens come when the profile says."""
        r, made = int(tracked.id), len(tracked.output_token_ids)
        self.placed.append((self.now_s, r, int(worker)))
        self.placement.put(tracked, worker, has_kv=False, now_s=self.now_s)
        tracked.worker = worker
        first_s = self.now_s + 0.01 + 1e-4 * (STORY[r][1] + made)
        self.seats[worker] = (tracked, [first_s + 0.05 * i for i in range(STORY[r][2] - made)])

    def turn_away(self, tracked, why):
        self.away[int(tracked.id)] = self.now_s
        self.end(tracked)

    def end(self, tracked):
        """As FleetCore._end."""
        self.admission.discard(tracked)
        self.placement.forget(tracked)

    def lose(self, worker):
        """As FleetCore._forget_worker, and its replays."""
        self.placement.detach(worker)
        tracked, _ = self.seats.pop(worker)
        self.placement.take(tracked)
        tracked.worker = None
        self.admission.take_back(tracked)

    def make_tokens(self):
        for at, seat in list(self.seats.items()):
            while seat is not None and seat[1] and seat[1][0] <= self.now_s:
                (tracked, _), token_s = seat, seat[1].pop(0)
                self.placement.advance(at, [(tracked, 1)], token_s)
                tracked.output_token_ids.append(7)
                if not seat[1]:
                    self.seats[at] = None
                    self.end(tracked)
                self.placement.begin_step(at, token_s)

    async def play(self):
        coming = [
            Tracked(
                made_request(r, prompt),
                Ticket(str(r), "", slo, priority), arrival_s, 20,
            )
            for r, (arrival_s, prompt, _, slo, priority) in enumerate(STORY)
        ]  # fmt: skip
        for tick in range(1, 20_000):
            self.now_s = tick * 1e-3
            if tick == round(LOST_S * 1e3):
                self.lose(WorkerId("0"))
            if tick == round(BACK_S * 1e3):
                self.attach(WorkerId("0"))
            self.make_tokens()
            while coming and coming[0].arrival_s <= self.now_s:
                await self.admission.take_in(coming.pop(0))
            self.admission.look()
            for _ in range(4):  # let the dispatcher offer whom it holds
                await asyncio.sleep(0)
        self.admission.close()
        return self.placed, self.away


async def gateway_story():
    return await Gateway().play()


def test_both_planes_place_and_turn_away_the_same_requests_in_the_same_order():
    placed, away = simulated_story()
    live_placed, live_away = asyncio.run(gateway_story())
    assert [row[1:] for row in live_placed] == [row[1:] for row in placed]
    # The simulated cluster offers every 10 ms, the gateway at once.
    assert [row[0] for row in live_placed] == pytest.approx([row[0] for row in placed], abs=0.1)
    assert live_away == pytest.approx(away, abs=0.1)
    # The urgent one first and again when it has lost its worker, then those on time, the hopeless behind all:
    # of these two come to a full queue, and two wait as long as any may.
    assert [r for _, r, _ in placed] == [0, 1, 9, 8, 9, 10, 11, 12, 2, 3, 14, 13, 15]
    assert away.keys() == {4, 5, 6, 7}


@pytest.mark.parametrize("seed", range(3))
def test_both_planes_count_the_same_outcomes_of_the_same_requests(seed):
    rng = np.random.default_rng(seed)
    n, classes = 120, [Slo(0.5, 0.06), Slo(3.0, 0.055)]
    load = Workload(
        np.sort(rng.uniform(0, 10, n)), rng.integers(1, 300, n), rng.integers(1, 40, n),
        slo_class=rng.integers(0, 2, n),
    )  # fmt: skip
    crowded = replace(SEAT, step=StepModel(0.05, 0.0, 0.004, 0.0), engine=replace(SEAT.engine, max_seqs=4))
    run = prepare(
        load, [WorkerSpec(crowded)] * 2, classes, "jsq",
        settings=PlacementSettings(queue=QueueSettings(max_requests=20, max_wait_s=2.0)), predictor=None,
        predicted_tokens=None, seed=seed, transfer_s=0.0, patience=4.0, max_misses=None,
    )  # fmt: skip
    simulated, live, told = OutcomeCount(run.slos), DemandCount(), set()
    counted = ()
    for now_s in np.arange(0.1, 60, 0.1):
        advance(run.ledger, run.engines, run.cluster, run.rules, now_s)
        counted = simulated.look(run.ledger, run.engines.requests, load.slo_class, run.arrived)
        for r in run.arrived.tolist():
            finish_s = float(run.engines.requests["finish_s"][r])
            if np.isnan(finish_s) or r in told:
                continue
            told.add(r)
            tracked = Tracked(
                made_request(r, 1),
                Ticket(str(r), "", classes[load.slo_class[r]], 0), float(load.arrival_s[r]), 1,
            )  # fmt: skip
            if np.isinf(finish_s):
                live.end(tracked, "rejected")
                continue
            tracked.output_token_ids = [7] * int(load.output_tokens[r])
            tracked.first_token_s, tracked.last_token_s = float(run.ledger.requests["first_s"][r]), finish_s
            live.end(tracked, "finished")
            early = Tracked(made_request(r, 1), tracked.ticket, 0.0, 1)
            live.end(early, "aborted", 0.0)  # what a client gave up before it was late is no outcome
    there = Observer({}).snapshot(as_sent(run.ledger, outcomes=live.outcomes()), 0.0).outcomes
    assert sorted(there, key=lambda c: c.slo.ttft_s) == list(counted)
    assert sum(c.ended for c in counted) == n
    assert 0 < sum(c.met for c in counted) < sum(c.ttft_met for c in counted) < n
    outcome = run.outcome()
    assert sum(c.met for c in counted) == round(outcome.attainment * n)


def live_twin(run, kinds=None, requests=None):
    """The gateway's placement with the workers and the first decoding requests of a simulated run."""
    led, kinds = run.ledger, kinds or [""] * len(run.ledger.workers)
    profiles = [run.profiles[v] for v in led.workers["variant"]]
    known = dict(zip(kinds, profiles, strict=True))
    placement = Placement(known, len(kinds), LengthTable.constant(20), np.random.default_rng(0))
    for w, (kind, profile) in enumerate(zip(kinds, profiles, strict=True)):
        blocks, limits = profile.kv.capacity_tokens // profile.kv.block_tokens, profile.engine
        placement.attach(
            worker_info(str(w), limits.max_seqs, limits.max_batched_tokens, profile.kv.block_tokens, blocks),
            kind,
        )
    tracked = {}
    for r in np.flatnonzero(led.requests["phase"][:requests] == DECODING).tolist():
        row = led.requests[r]
        slo = Slo(float(row["ttft_s"]), float(row["tpot_s"]))
        t = tracked[r] = Tracked(
            made_request(r, int(row["prompt"])), Ticket(str(r), "", slo, 0), 0.0, int(row["predicted"])
        )
        t.worker = WorkerId(str(row["worker"]))
        placement.put(t, t.worker, has_kv=False, now_s=0.0)
        made = int(generated(led, r))
        placement.advance(t.worker, [(t, made)], 0.0)
        t.output_token_ids = [7] * made
    return placement, tracked


class Drained(Moves):
    """The simulated plane's moves, each held against what the gateway would have done at that instant."""

    def __init__(self, run, kinds):
        super().__init__(run, [ControlSettings().price(profile) for profile in run.profiles])
        self.kinds, self.went, self.begun_s, self.ended_s = kinds, [], [], []

    def migrate(self, move, now_s):
        return self.note(move, now_s, super().migrate)

    def compute_anew(self, move, now_s):
        return self.note(move, now_s, super().compute_anew)

    def act(self, now_s):
        before = len(self.busy())
        super().act(now_s)
        if len(self.busy()) < before:
            self.ended_s.append(now_s)

    def note(self, move, now_s, begin):
        placement, tracked = live_twin(self._run, self.kinds)
        placement.set_open(WorkerId("0"), False)
        here = [t for t in tracked.values() if t.worker == "0"]
        live = placement.next_off(WorkerId("0"), here, {WorkerId(str(w)) for w in self.busy()}, now_s)
        assert live is not None
        assert (live[0].id, live[1]) == (move.request, move.target)
        self.went.append(move)
        self.begun_s.append(now_s)
        return begin(move, now_s)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("is_last_of_kind", [False, True])
def test_both_planes_empty_a_draining_worker_in_the_same_order_and_at_the_same_pace(seed, is_last_of_kind):
    rng = np.random.default_rng(seed)
    load = Workload(
        np.linspace(0, 0.1, 30), rng.integers(20, 400, 30), rng.integers(200, 600, 30),
        slo_class=rng.integers(0, 2, 30),
    )  # fmt: skip
    is_roomy = seed % 2 == 0
    tight = replace(
        PROFILE,
        kv=KvModel(20_000 if is_roomy else 2_400 + 480 * seed, 16, 1000),
        step=StepModel(0.02, 1e-4, 1e-3, 5e-6),
        engine=replace(PROFILE.engine, mode=EngineMode.CHUNKED),
    )
    other = replace(tight, tp_degree=2)
    fleet = [tight] + [other if is_last_of_kind else tight] * 3
    run = prepare(
        load, [WorkerSpec(p) for p in fleet], [Slo(9.0, 0.06), Slo(9.0, 0.09)], "jsq+migrate", settings=None,
        predictor=None, predicted_tokens=load.output_tokens, seed=seed, patience=4.0, max_misses=None,
    )  # fmt: skip
    plane = SimulatedPlane(run, ControlSettings())
    moves = plane.moves = Drained(run, [p.type_name for p in fleet])
    now_s, led = 2.0 + seed, run.ledger
    advance(led, run.engines, run.cluster, run.rules, now_s)
    change_worker(led, run.engines, run.cluster, 0, DRAIN)
    beat_s, open_most = now_s, 0
    while now_s < 40.0 and led.workers["running_n"][0] > 0:
        now_s = min(beat_s, plane.next_s)
        if now_s == plane.next_s:
            advance(led, run.engines, run.cluster, run.rules, np.nextafter(now_s, -np.inf))
            run.cluster.clock["now_s"] = now_s
            plane.act(now_s)
        else:
            advance(led, run.engines, run.cluster, run.rules, now_s)
            run.cluster.clock["now_s"] = now_s
            plane.report(())
            beat_s = now_s + DRAIN_LOOK_S
        open_most = max(open_most, len(moves.open))
    assert open_most == 1
    assert len(moves.went) > (4 if is_roomy else 0)
    if is_last_of_kind:
        assert not moves.pauses_s  # nothing is copied between kinds
        assert all(run.ledger.requests["worker"][int(move.request)] != 0 for move in moves.went)
    elif is_roomy:  # the next leaves in the instant in which the last has come
        assert moves.begun_s[1:] == moves.ended_s[: len(moves.begun_s) - 1]


def test_both_planes_hold_a_request_for_a_tpot_within_reach_and_for_none_out_of_it():
    crowds = replace(SEAT, step=StepModel(0.03, 0.0, 0.02, 0.0), engine=replace(SEAT.engine, max_seqs=8))
    # Beside another a token takes 70 ms, and 50 ms alone.
    classes = [EASY, Slo(8.0, 0.06), Slo(8.0, 0.01)]
    load = Workload(np.array([0.0, 0.5, 1.0]), np.full(3, 100), np.full(3, 400), slo_class=np.arange(3))
    run = prepare(
        load, [WorkerSpec(crowds)], classes, "spread", settings=None, predictor=LengthTable.constant(400),
        predicted_tokens=None, seed=0, patience=4.0, max_misses=None,
    )  # fmt: skip
    advance(run.ledger, run.engines, run.cluster, run.rules, 1.1)  # those that wait are offered again
    placed = [r for r in range(3) if run.ledger.requests["phase"][r] != HELD]
    placement, _ = live_twin(run, requests=1)
    chosen = [
        placement.choose(
            Tracked(made_request(r, 100), Ticket(str(r), "", classes[r], 0), load.arrival_s[r], 400), 1.0
        )
        for r in (1, 2)
    ]
    assert placed == [0, 2]
    assert chosen == [None, "0"]
    outcome = run.outcome()
    assert outcome.tpot_target_s.tolist() == [1.0, 0.06, 0.01]  # it is judged by what was asked


def test_a_tpot_out_of_reach_counts_as_late_and_waits_for_nobody():
    load = Workload(np.array([0.0, 0.1]), np.full(2, 100), np.full(2, 50), slo_class=np.array([0, 1]))
    roomy = replace(SEAT, engine=replace(SEAT.engine, max_seqs=8))
    run = prepare(
        load, [WorkerSpec(roomy)], [EASY, Slo(0.4, 0.01)], "spread", settings=None, predictor=None,
        predicted_tokens=None, seed=0, patience=4.0, max_misses=None,
    )  # fmt: skip
    advance(run.ledger, run.engines, run.cluster, run.rules, 60.0)
    outcome = run.outcome()
    assert outcome.ttft_s[1] < 0.4
    assert outcome.met.tolist() == [True, False]
    assert outcome.misses == 1
