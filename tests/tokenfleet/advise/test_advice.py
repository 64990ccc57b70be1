"""The advice, look after look: when there is one, what holds it, and how sure it is."""

from dataclasses import replace
from datetime import datetime

import numpy as np
import pytest
from by_day import examples
from counted_servers import OUTPUT, PROMPT, CountedServer
from hypothesis import given
from hypothesis import strategies as st

from controlplane.scaler.autoscale import scale
from controlplane.scaler.bounds import Autoscale
from controlplane.scaler.line import line_of
from controlplane.scaler.state import Scaling
from controlplane.scaler.traffic import Traffic as Lengths
from controlplane.snapshot import Snapshot
from controlplane.types import ClassArrivals, Slo
from controlplane.worker_type import WorkerType
from tokenfleet.advise.advice import AdviceSettings, AdviceState
from tokenfleet.advise.bottleneck import bottleneck, hopeless
from tokenfleet.advise.decide import ORIGIN_S, WITHDRAWN_S, advise
from tokenfleet.advise.look import NoCounts, Watched, look
from tokenfleet.advise.view import lines, verdict
from tokenfleet.profiles.library import find_profiles

SLO = Slo(1.0, 0.05)
PROFILE = find_profiles("llama-3.1-8b", ["h100"], [1])[0]
EVERY_S = 5.0


def asked(cold_start_s=60.0, slo=SLO, low=1, high=1000, profile=PROFILE):
    worker_type = WorkerType.of(profile, 2.69)
    scaling = Autoscale(low, high).settings((worker_type,))
    return AdviceSettings(slo, 0.99, scaling, cold_start_s)


class Fleet:
    """Some servers under traffic, and the advice for them."""

    def __init__(self, count, settings=None, seed=0):
        self.servers = {f"s{i}": CountedServer() for i in range(count)}
        self.settings = settings or asked()
        self.watched, self.state = Watched(), AdviceState()
        self.at_s, self.rng, self.silent = ORIGIN_S, np.random.default_rng(seed), ()

    def look(self, rps=0.0, **latency):
        """Traffic until the next look, and its advice; requests end one look after they came."""
        for one in self.servers.values():
            one.end(one.running, **latency)
            one.arrive(int(self.rng.poisson(rps * EVERY_S / len(self.servers))))
        pages = {
            name: NoCounts("does not answer: refused") if name in self.silent else one.page(self.at_s)
            for name, one in self.servers.items()
        }
        self.watched, traffic = look(self.watched, pages, self.at_s)
        self.state, advice = advise(self.settings, self.state, traffic)
        self.at_s += EVERY_S
        return advice

    def looks(self, rps, count, **latency):
        return [self.look(rps, **latency) for _ in range(count)]


def line():
    return line_of(PROFILE, Lengths((ClassArrivals(SLO, 100.0, 100.0 * PROMPT, 100.0 * OUTPUT),)))


def test_the_first_advice_comes_within_half_a_minute_and_says_how_sure_it_is():
    fleet = Fleet(8)
    rps = 4.5 / line().workers_per_rps  # some 5 replicas
    advices = fleet.looks(rps, 7)
    assert [advice.wanted is not None for advice in advices] == [False] * 5 + [True] * 2
    first = advices[5]
    assert first.likely[0] <= 5 <= first.likely[1]
    assert first.likely[0] <= first.wanted <= first.likely[1]
    later = fleet.looks(rps, 60)[-1]
    assert later.wanted in (5, 6)
    assert later.likely[1] - later.likely[0] <= first.likely[1] - first.likely[0]


def test_a_fleet_with_few_requests_gets_no_advice_and_is_told_what_is_missing():
    fleet = Fleet(2)
    idle = fleet.looks(0.0, 20)[-1]
    fleet.servers["s0"].arrive(3)
    few = fleet.looks(0.0, 100)[-1]
    for one, arrivals in ((idle, 0), (few, 3)):
        assert (one.wanted, one.published, one.arrivals) == (None, None, arrivals)
        told = verdict(fleet.settings, one)
        assert told == "None yet, since fewer than 5 requests ended lately; 2 replicas now"
    fleet.servers["s0"].arrive(5)
    assert fleet.looks(0.0, 2)[-1].wanted == 1


def test_a_server_that_is_silent_is_not_said_to_answer():
    fleet = Fleet(4)
    fleet.looks(30.0, 30)
    fleet.silent = ("s2",)
    told = dict(lines(fleet.settings, fleet.looks(30.0, 6)[-1], datetime.fromtimestamp))
    assert told["Replicas"].startswith("4 at the last count; requests: ")


def test_a_fleet_that_follows_by_itself_does_not_shrink_on_the_first_counts():
    fleet = Fleet(8)
    advices = [advice for advice in fleet.looks(2.0, 40) if advice.wanted is not None]
    early = [a for a in advices if a.at_s - ORIGIN_S < fleet.settings.settled_s]
    assert all(a.wanted < 8 for a in advices)
    assert len(early) > 5
    assert {a.published for a in early} == {8}
    assert advices[-1].published == advices[-1].wanted


def test_a_fleet_that_still_starts_does_not_shrink_on_the_first_counts():
    fleet = Fleet(6)
    fleet.silent = ("s4", "s5")
    advices = [advice for advice in fleet.looks(2.0, 8) if advice.wanted is not None]
    assert {(a.has, a.starting, a.published) for a in advices} == {(4, 2, 6)}
    assert all(a.wanted < 4 for a in advices)


@pytest.mark.parametrize("outage", [6, 200])
def test_missing_metrics_hold_the_advice_and_never_look_like_an_idle_fleet(outage):
    fleet = Fleet(6)
    before = fleet.looks(30.0, 60)[-1]
    fleet.silent = ("s3",)
    out = fleet.looks(0.0, outage)
    assert {a.wanted for a in out} == {before.wanted}
    assert {a.held for a in out} == {"s3: does not answer: refused"}
    assert {a.held_since_s for a in out} == {before.at_s}
    withdrawn = [a.published is None for a in out]
    assert withdrawn == [a.at_s - before.at_s > WITHDRAWN_S for a in out]
    fleet.silent = ()
    after = fleet.looks(30.0, 60)
    assert after[0].held == "s3: answers again"
    assert after[-1].published == after[-1].wanted
    assert abs(after[-1].wanted - before.wanted) <= 1


@examples(25)
@given(st.lists(st.tuples(st.booleans(), st.floats(0.0, 60.0)), min_size=10, max_size=60), st.integers(1, 9))
def test_only_a_look_that_counted_changes_the_advice_and_never_past_the_bounds(story, high):
    fleet = Fleet(3, asked(high=high))
    last = None
    for is_silent, rps in story:
        fleet.silent = ("s1",) if is_silent else ()
        advice = fleet.look(rps)
        if advice.held:
            assert advice.wanted == last
        if advice.wanted is not None:
            assert 1 <= advice.wanted <= high
            assert advice.likely[0] <= advice.wanted <= advice.likely[1] <= high
        last = advice.wanted


def test_a_rise_is_followed_at_once_and_a_fall_after_its_window():
    fleet = Fleet(4)
    low = fleet.looks(10.0, 60)[-1].wanted
    rise = [a.wanted for a in fleet.looks(60.0, 12)]
    assert max(rise[:3]) > 2 * low
    fall = [a.wanted for a in fleet.looks(10.0, 60)]
    assert fall[12] == fall[0] >= max(rise)  # a minute on
    assert fall[-1] <= low + 1


def test_it_is_the_advice_of_a_scaler_that_sees_every_request():
    """The same arrivals, by the second: each minute at most one replica apart, and mostly none."""
    fleet, state, wanted = Fleet(4), Scaling(), 4
    apart, rng = [], np.random.default_rng(3)
    for minute in range(30):
        for _ in range(12):
            advice = fleet.look(30.0 + 20.0 * np.sin(minute / 5.0))
            parts = rng.multinomial(sum(one.running for one in fleet.servers.values()), [0.2] * 5)
            for beat, part in enumerate(parts.tolist(), 1):
                now_s = advice.at_s - EVERY_S + beat
                lengths = (ClassArrivals(SLO, part, part * PROMPT, part * OUTPUT),) if part else ()
                cold_s = fleet.settings.cold_start_s
                seen = Snapshot(now_s, (), wanted, arrivals=part, by_class=lengths, cold_start_s=cold_s)
                state, change = scale(fleet.settings.scaling, state, seen)
                wanted = wanted if change is None else change.workers
        if minute >= 3:
            apart.append(abs(advice.wanted - wanted))
    assert max(apart) <= 1
    assert np.mean(np.array(apart) == 0) > 0.8


def test_requests_late_for_sure_ask_for_more_replicas_where_histograms_count_the_targets():
    rps = 4.5 / line().workers_per_rps

    def after(slo, **latency):
        fleet = Fleet(6, asked(slo=slo))
        return fleet.looks(rps, 200, **latency)[-1]

    in_time, late = after(SLO), after(SLO, tpot_s=0.07)
    assert in_time.shares == {"ttft": (1.0, 1.0), "tpot": (1.0, 1.0)}
    assert late.shares["tpot"] == (0.0, 0.0)
    assert late.wanted > in_time.wanted
    between = after(Slo(1.0, 0.06), tpot_s=0.07)
    assert between.shares["tpot"] == (0.0, 1.0)
    assert between.edges["tpot"] == (0.05, 0.075)


def test_what_binds_a_replica_is_what_relief_helps_most():
    tight = bottleneck(PROFILE, Slo(1.0, 0.012), 500.0, 200.0)
    assert tight.name == "TPOT target"
    small = replace(PROFILE, kv=replace(PROFILE.kv, capacity_tokens=5000))
    assert bottleneck(small, Slo(1.0, 1.0), 500.0, 200.0).name == "KV memory"
    few = PROFILE.with_engine(max_seqs=4)
    seats = bottleneck(few, Slo(1.0, 1.0), 500.0, 200.0)
    assert seats.name == "max_num_seqs"
    assert 0.1 < seats.spares < 0.2  # a quarter more: a fifth fewer, less what larger batches take


def test_a_target_that_a_lone_request_misses_is_said_to_be_hopeless():
    assert hopeless(PROFILE, SLO, 500.0, 200.0) == ""
    assert "a token, the target is 1 ms" in hopeless(PROFILE, Slo(1.0, 0.001), 500.0, 200.0)
    assert "to its first token" in hopeless(PROFILE, Slo(0.01, 0.05), 5000.0, 200.0)
