"""The line's correction: a right line is left alone, a wrong one mended, and nothing winds up."""

import json
import math

import numpy as np
import pytest

from controlplane.scaler.correction import FACTORS, Correction, look, refitted, resumed, to_keep
from controlplane.scaler.line import Line
from controlplane.types import ClassOutcomes, Slo, SloClass

LINE = Line(0.9, 0.5)
TARGET = 0.99
SLO = Slo(1.0, 0.1)
LASTS_S = 15.0  # a request, from its arrival to its end


def share_late(load, steep, hopeless):
    odds = TARGET / (1 - TARGET) * load**-steep
    return hopeless + (1 - hopeless) / (1 + odds)


class Story:
    """A fleet that follows the corrected line, with cold starts and slow drains, under Poisson traffic.

    `wrong`: how many times the line's slope a true one is. `clustered`: late ones come in bursts. `most`:
    workers. A heartbeat every 5 s.
    """

    def __init__(
        self, seed, wrong=1.0, steep=6.0, hopeless=0.0, rate=12.0, most=1000, clustered=True, power=1.0
    ):
        self.rng = np.random.default_rng(seed)
        self.wrong, self.steep, self.hopeless, self.rate, self.most = wrong, steep, hopeless, rate, most
        self.clustered, self.power = clustered, power
        self.state, self.notes, self.refit = Correction(), [], 1.0
        self.now_s, self.ended, self.met = 0.0, 0, 0
        self.wanted = [self.asked()] * 20

    def line(self, factor):
        return Line(LINE.workers_per_rps * self.refit * factor**self.power, LINE.intercept)

    def asked(self):
        line = self.line(self.state.factor)
        return min(math.ceil(line.workers_per_rps * self.rate + line.intercept), self.most)

    @property
    def workers(self):
        """A rise is there after a minute; a fall must have lasted 80 s."""
        ready = self.wanted[-12]
        return max(ready, max(self.wanted[-16:])) if ready >= self.wanted[-1] else ready

    def run(self, minutes):
        for _ in range(round(minutes * 12)):
            self.now_s += 5.0
            self.wanted = [*self.wanted, self.asked()][-20:]
            slope = LINE.workers_per_rps * self.wrong**self.power
            load = slope * self.rate / (self.workers - LINE.intercept)
            share = share_late(load, self.steep * self.workers**0.5, self.hopeless)
            if self.clustered:  # one 5 s in four brings four times as many
                share = min(share * (4.0 if self.rng.random() < 0.2 else 0.25), 1.0)
            new = self.rng.poisson(self.rate * 5.0)
            self.ended, self.met = self.ended + new, self.met + self.rng.binomial(new, 1.0 - share)
            counted = ClassOutcomes(SLO, self.ended, self.met, self.ended, self.met)
            inside = self.rate * LASTS_S
            self.state, note = look(
                self.state,
                self.now_s,
                (counted,),
                self.line,
                self.rate,
                self.workers,
                inside,
                TARGET,
                self.refit,
            )
            self.notes += [] if note is None else [note]
        return self.state.factor


def stories(count, minutes=60, **more):
    draws = np.random.default_rng(7)
    found = []
    for seed in range(count):
        told = {
            "steep": draws.choice([2.0, 4.0, 6.0, 7.5]),
            "rate": draws.choice([3.0, 8.0, 20.0, 60.0]),
            "power": draws.choice([1.0, 3.0]),
        }
        found.append(Story(seed, **(told | more)))
        found[-1].run(minutes)
    return found


@pytest.mark.parametrize("many", [80, pytest.param(200, marks=pytest.mark.nightly)])
def test_a_right_line_is_left_alone_in_19_stories_of_20(many):
    told = stories(many)
    changed = [s for s in told if s.notes]
    assert len(changed) <= 0.05 * len(told), [(s.steep, s.rate, s.state.factor) for s in changed]
    assert all(0.9 < s.state.factor < 1.1 for s in changed)


@pytest.mark.parametrize("steep", [2.5, 5.0, 7.5])
@pytest.mark.parametrize("power", [1.0, 3.0])
def test_a_line_of_steps_taken_for_too_short_is_mended_within_ten_minutes(steep, power):
    story = Story(1, wrong=1.3, steep=steep, power=power)
    needed = math.ceil(1.3**power * LINE.workers_per_rps * story.rate + LINE.intercept)
    assert story.asked() < 0.85 * needed
    story.run(10)
    assert 0.9 * needed <= story.asked() <= 1.15 * needed
    assert story.ended <= 12 * 600 * 1.05
    before, ended = story.met, story.ended
    story.run(30)
    assert (story.met - before) / (story.ended - ended) >= TARGET - 0.008
    assert all("the scaling rule expected" in note.reason for note in story.notes)


@pytest.mark.parametrize("power", [1.0, 3.0])
def test_a_line_of_steps_taken_for_too_long_gives_workers_back_and_stays_in_time(power):
    story = Story(2, wrong=1 / 1.3, power=power)
    needed = math.ceil(1.3**-power * LINE.workers_per_rps * story.rate + LINE.intercept)
    assert story.asked() > 1.2 * needed
    story.run(30)
    before, ended = story.met, story.ended
    story.run(30)
    assert story.asked() <= 1.13 * needed + 1
    assert (story.met - before) / (story.ended - ended) >= TARGET - 0.003


def test_the_backlog_of_an_overload_is_laid_to_the_overload():
    state, ended, met = Correction(), 0.0, 0.0
    right = LINE.workers_per_rps * 12.0 + LINE.intercept
    for now_s in range(5, 605, 5):
        overloaded = now_s <= 120  # then a minute in which what ends has lived through it
        late, lasts_s = (0.15, 60.0) if now_s <= 180 else (0.002, LASTS_S)
        workers = LINE.workers_per_rps * 12.0 / 1.25 + LINE.intercept if overloaded else right
        ended, met = ended + 60.0, met + 60.0 * (1.0 - late)
        counted = ClassOutcomes(SLO, ended, met, ended, met)
        line = lambda factor: Line(LINE.workers_per_rps * factor, LINE.intercept)  # noqa: E731
        state, _ = look(state, float(now_s), (counted,), line, 12.0, workers, 12.0 * lasts_s, TARGET)
        assert state.factor < 1.1
    assert abs(state.factor - 1.0) <= 0.05


def factor_after(factor, share_late, seconds=600):
    """The factor after some seconds. The controller begins with `factor`."""
    state, ended, met = Correction(factor), 0.0, 0.0
    line = lambda factor: Line(LINE.workers_per_rps * factor**3, LINE.intercept)  # noqa: E731
    for now_s in range(5, seconds + 5, 5):
        ended, met = ended + 60.0, met + 60.0 * (1.0 - share_late)
        workers = LINE.workers_per_rps * state.factor**3 * 12.0 + LINE.intercept
        counted = ClassOutcomes(SLO, ended, met, ended, met)
        state, _ = look(state, float(now_s), (counted,), line, 12.0, workers, 180.0, TARGET)
    return state.factor


def test_a_factor_goes_back_to_1_within_minutes_of_requests_that_speak_against_it():
    assert factor_after(1.08, 0.004) < 1.03
    assert factor_after(0.93, 0.02) > 0.97


def test_a_factor_is_kept_where_as_many_are_late_as_it_promises_and_before_there_is_evidence():
    assert factor_after(1.2, 0.01) > 1.1
    assert factor_after(1.2, 0.006, seconds=40) == 1.2


def test_requests_that_no_workers_serve_in_time_do_not_grow_the_fleet_for_ever():
    story = Story(3, hopeless=0.03)
    story.run(120)
    right = math.ceil(LINE.workers_per_rps * story.rate + LINE.intercept)
    assert story.asked() <= 1.3 * right


@pytest.mark.parametrize("wrong", [5.0, 0.1])
def test_the_factor_is_bounded(wrong):
    assert FACTORS[0] <= Story(4, wrong=wrong).run(60) <= FACTORS[-1]


def test_a_fleet_held_down_by_a_limit_winds_nothing_up():
    needed = math.ceil(LINE.workers_per_rps * 12.0 + LINE.intercept)
    for most in (round(0.9 * needed), round(0.6 * needed)):
        story = Story(5, most=most, clustered=False)
        assert story.met == 0
        assert story.run(120) == pytest.approx(1.0, abs=0.07)


def test_silence_and_a_fleet_with_nothing_to_do_change_nothing():
    story = Story(6, wrong=1.3)
    story.run(15)
    factor = story.state.factor
    assert factor > 1.1
    story.rate = 0.001
    story.run(600)
    assert story.state.factor == factor


def test_what_a_refit_finds_is_not_corrected_twice():
    story = Story(7, wrong=1.3)
    story.run(15)
    before = story.asked()
    story.refit = story.wrong  # the line has it now, but the truth is what it was
    story.run(5 / 60)
    assert story.state.factor == pytest.approx(1.0, abs=0.05)
    assert not story.state.evidence
    assert story.asked() == pytest.approx(before, abs=1)
    assert story.run(30) == pytest.approx(1.0, abs=0.07)


def test_a_change_that_the_refit_saw_first_leaves_the_factor_alone():
    assert refitted(Correction(), 1.5).factor == 1.0
    assert refitted(Correction(1.2), 0.8).factor == 1.2
    assert refitted(Correction(0.8), 0.9).factor == pytest.approx(0.8 / 0.9)
    assert refitted(Correction(1.2), 1.02).refit == 1.0  # a refit that wavers


def test_counters_that_began_anew_are_no_evidence():
    story = Story(8, wrong=1.3)
    story.run(3)
    evidence = story.state.evidence
    story.ended = story.met = 0
    story.run(5 / 60)
    assert story.state.evidence is evidence


def test_the_factor_outlives_its_controller():
    story = Story(9, wrong=1.3)
    story.run(15)
    again = resumed(json.loads(json.dumps(to_keep(story.state))))
    assert again.factor == pytest.approx(story.state.factor, rel=1e-5)
    for spoiled in ({"factor": 9.0}, {"factor": "many"}, {"refit": 0.0}):
        with pytest.raises(ValueError, match=r"correction|convert"):
            resumed(to_keep(story.state) | spoiled)


CHAT, BATCH = SloClass("chat", Slo(0.4, 0.03), 0.99), SloClass("batch", Slo(30.0, 0.2), 0.9)


def of_two_classes(chat_late, batch_late, minutes=60, chat_share=0.04, classes=(CHAT, BATCH)):
    """The correction and its notes after so long under the line's own load: a small class and a large one."""
    state, notes, ended, met = Correction(), [], [0.0, 0.0], [0.0, 0.0]
    line = lambda factor: Line(LINE.workers_per_rps * factor, LINE.intercept)  # noqa: E731
    for now_s in range(5, 60 * minutes + 5, 5):
        for c, (share, late) in enumerate(((chat_share, chat_late), (1.0 - chat_share, batch_late))):
            ended[c] += 60.0 * share
            met[c] += 60.0 * share * (1.0 - late)
        told = [
            ClassOutcomes(one.slo, ended[c], ended[c], met[c], met[c]) for c, one in enumerate((CHAT, BATCH))
        ]
        asked = LINE.workers_per_rps * 12.0 * state.factor + LINE.intercept
        state, note = look(state, float(now_s), told, line, 12.0, asked, 180.0, TARGET, classes=classes)
        notes += [] if note is None else [note]
    return state, notes


def test_a_small_class_that_is_late_by_itself_moves_the_line_where_it_binds():
    state, notes = of_two_classes(chat_late=0.06, batch_late=0.0)  # 0.24 % of all are late
    assert state.factor > 1.1
    assert "of class chat were in time" in notes[0].reason
    blind, _ = of_two_classes(chat_late=0.06, batch_late=0.0, classes=())
    assert blind.factor < 1.0  # taken together they would give workers back


def test_a_class_is_held_to_no_more_than_its_own_attainment():
    state, _ = of_two_classes(chat_late=0.006, batch_late=0.08)
    assert state.factor <= 1.0
    blind, _ = of_two_classes(chat_late=0.006, batch_late=0.08, classes=())
    assert blind.factor > 1.1


def test_a_fall_waits_for_every_class_that_can_show_that_it_is_late():
    both, notes = of_two_classes(chat_late=0.0, batch_late=0.0, chat_share=0.3)
    assert both.factor < 0.9
    assert all("fewer workers" in note.reason for note in notes)
    held, _ = of_two_classes(chat_late=0.009, batch_late=0.0, chat_share=0.3)
    assert held.factor >= 0.95
    few, _ = of_two_classes(chat_late=0.0, batch_late=0.0)  # too few as yet to say that fewer would do
    assert few.factor == 1.0
    rare, _ = of_two_classes(chat_late=0.0, batch_late=0.0, chat_share=0.0005)
    assert rare.factor < 0.9
