"""Rules that no fleet of one to three types breaks, under steps, bursts, silences and lost counts.

The fleet is fluid: a worker serves its type's requests a second once its cold start is over, and what it
cannot serve waits. The whole of `tick` decides, each second.
"""

from dataclasses import dataclass, field, replace

import pytest
from by_day import examples
from hypothesis import Phase, example, given
from hypothesis import strategies as st
from made_types import BIG, SLO, SMALL, made_type, profile_of, seen

from controlplane.control import Settings, State, tick
from controlplane.perfmodel.step import StepModel
from controlplane.scaler.line import capacity_rps
from controlplane.scaler.load import LoadSettings
from controlplane.scaler.state import ScalingSettings
from controlplane.scaler.target import StabilizationWindow, TargetSettings
from controlplane.snapshot import STARTING, Load, Scale, Snapshot, WorkerLoad
from controlplane.types import ClassArrivals, WorkerId

COLD_S, DRAIN_S, HOLD_S = 6.0, 2.0, 30.0
MIDDLE = profile_of(StepModel(0.02, 1e-4, 1.2e-3, 7e-7), 40_000, 96)
TYPES = made_type("small", 1.0), made_type("big", 2.4, BIG), made_type("middle", 1.5, MIDDLE)
OF = {"small TP1": SMALL, "big TP1": BIG, "middle TP1": MIDDLE}


@dataclass
class Change:
    """Counts before and after a change, at what time, and how many requests waited then."""

    at_s: float
    before: dict[str, int]
    after: dict[str, int]
    waiting: int
    reason: str
    is_known: bool

    @property
    def falls(self):
        return any(n > self.after.get(kind, 0) for kind, n in self.before.items())

    @property
    def grows(self):
        return any(n > self.before.get(kind, 0) for kind, n in self.after.items())


@dataclass
class FluidFleet:
    """A fleet of some types that `tick` scales."""

    types: tuple
    there: dict[str, int]
    high: int = 8
    budget: float | None = None
    changes: list[Change] = field(default_factory=list)

    def __post_init__(self):
        scaling = ScalingSettings(
            TargetSettings(None, None, 1, self.high),
            StabilizationWindow(0.0, HOLD_S),
            bin_s=5.0,
            worker_types=self.types,
        )
        load = LoadSettings(1, self.high, hold_s=HOLD_S)
        self.settings = Settings(None, None, load, scaling)
        self.state, self.now_s, self.backlog = State(), 0.0, 0.0
        self.ready_s = [(kind, 0.0) for kind, n in self.there.items() for _ in range(n)]

    def tell(self, arrivals, prompt, output, is_known=True):
        """One second with this many arrivals of these lengths."""
        traffic = ClassArrivals(SLO, max(arrivals, 1), prompt * max(arrivals, 1), output * max(arrivals, 1))
        serving = [kind for kind, ready_s in self.ready_s if ready_s <= self.now_s]
        carried = sum(capacity_rps(OF[kind], traffic) for kind in serving)
        self.backlog = max(self.backlog + arrivals - carried, 0.0)
        waiting = round(self.backlog)
        share = min(1.0, (arrivals + self.backlog) / max(carried, 1e-9))
        workers = tuple(
            WorkerLoad(
                WorkerId(f"{kind}{i}"),
                "serving" if ready_s <= self.now_s else STARTING,
                OF[kind].kv.capacity_tokens if ready_s <= self.now_s else 0,
                kind=kind,
                max_seqs=OF[kind].engine.max_seqs,
                load=Load(held_tokens=int(0.2 * share * OF[kind].kv.capacity_tokens)),
            )
            for i, (kind, ready_s) in enumerate(self.ready_s)
        )
        by_class = (ClassArrivals(SLO, arrivals, prompt * arrivals, output * arrivals),) if arrivals else ()
        snapshot = Snapshot(
            self.now_s, workers, sum(self.there.values()), arrivals=arrivals if is_known else None,
            by_class=by_class if is_known else (), wanted_kinds=self.there if len(self.types) > 1 else {},
            waiting_requests=waiting, waiting_tokens=int(waiting * prompt), cold_start_s=COLD_S,
            drain_s=DRAIN_S,
        )  # fmt: skip
        self.state, actions = tick(self.settings, self.state, snapshot)
        for action in actions:
            if isinstance(action, Scale):
                self._follow(action, waiting, is_known)
        self.now_s += 1.0

    def _follow(self, action, waiting, is_known):
        after = dict(action.kinds) or {self.types[0].name: action.workers}
        change = Change(self.now_s, self.there, after, waiting, action.reason, is_known)
        self.changes.append(change)
        for kind in {*self.there, *after}:
            more = after.get(kind, 0) - self.there.get(kind, 0)
            self.ready_s += [(kind, self.now_s + COLD_S)] * more
            for _ in range(-more):
                self.ready_s.remove(max(one for one in self.ready_s if one[0] == kind))
        self.there = after


def check(fleet):
    grown_s = -HOLD_S
    for change in fleet.changes:
        if change.falls:
            assert change.waiting == 0, f"scaled in while {change.waiting} wait: {change}"
            assert change.is_known, f"scaled in without news: {change}"
            assert "no news" not in change.reason
            assert change.at_s - grown_s >= HOLD_S, f"a rise was undone within the window: {change}"
        if change.grows:
            grown_s = change.at_s


# Seconds, arrivals a second in shares of what the first fleet carries, prompt and output tokens, and whether
# the counts come through.
spells = st.tuples(
    st.integers(5, 60),
    st.sampled_from([0.0, 0.0, 0.1, 0.4, 0.8, 1.0, 1.5, 3.0]),
    st.sampled_from([(200, 100), (30, 300), (1000, 20)]),
    st.sampled_from([True, True, True, True, False]),
)


# Shrinking a failure would take minutes.
@examples(20, phases=(Phase.explicit, Phase.generate))
@given(st.integers(1, 3), st.integers(1, 2), st.lists(spells, min_size=2, max_size=6))
@example(2, 1, [(8, 3.0, (200, 100), True), (40, 0.4, (30, 300), True), (60, 0.1, (1000, 20), True)])
def test_nothing_scales_in_while_requests_wait_without_news_or_within_the_window(kinds, each, load):
    types = TYPES[:kinds]
    fleet = FluidFleet(types, {t.name: each for t in types})
    (usual,) = seen().classes
    carried = each * sum(capacity_rps(OF[t.name], usual) for t in types)
    for seconds, share, (prompt, output), is_known in load:
        for n in range(seconds):
            arrivals = int((n + 1) * share * carried) - int(n * share * carried)
            fleet.tell(arrivals, prompt, output, is_known)
    check(fleet)
    assert sum(fleet.there.values()) <= fleet.high


def test_a_fleet_of_two_types_gives_back_what_a_silence_does_not_need():
    fleet = FluidFleet(TYPES[:2], {"small TP1": 2, "big TP1": 2})
    (usual,) = seen().classes
    rate = capacity_rps(SMALL, usual) * 0.3
    for n in range(240):
        fleet.tell(int((n + 1) * rate) - int(n * rate), 200, 100)
    check(fleet)
    assert sum(fleet.there.values()) == 1


@pytest.mark.parametrize("kinds", [1, 2, 3])
def test_a_floor_that_rises_is_kept_without_news_of_the_demand_and_left_after_the_window(kinds):
    types = tuple(replace(t, limit=2) for t in TYPES[:kinds])
    fleet = FluidFleet(types, {types[0].name: 1})
    high = min(3, 2 * kinds)

    def floor(low):
        scaling = fleet.settings.scaling
        target = replace(scaling.target, low=low)
        fleet.settings = replace(fleet.settings, scaling=replace(scaling, target=target))

    def pass_by(seconds, is_known=True):
        for n in range(seconds):
            fleet.tell(int(n % 10 == 0), 200, 100, is_known)

    pass_by(60)
    assert sum(fleet.there.values()) == 1
    floor(high)
    pass_by(90, is_known=False)
    assert sum(fleet.there.values()) == high
    assert all(n <= 2 for n in fleet.there.values())
    floor(1)
    pass_by(150)
    assert sum(fleet.there.values()) == 1
    check(fleet)
