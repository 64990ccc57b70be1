"""The line's correction: a right line is left alone, a wrong one mended, and nothing winds up."""

import math

import numpy as np

from controlplane.scaler.correction import Correction, look
from controlplane.scaler.line import Line
from controlplane.types import ClassOutcomes, Slo

LINE = Line(0.9, 0.5)
TARGET = 0.99
SLO = Slo(1.0, 0.1)


def share_late(load, steep, hopeless):
    odds = TARGET / (1 - TARGET) * load**-steep
    return hopeless + (1 - hopeless) / (1 + odds)


class Story:
    """A fleet that follows the corrected line, with cold starts and slow drains, under Poisson traffic.

    `wrong`: how many times the line's slope a true one is. `clustered`: late ones come in bursts. `most`:
    workers. A heartbeat every 5 s.
    """

    def __init__(
        self, seed, wrong=1.0, steep=20.0, hopeless=0.0, rate=12.0, most=1000, clustered=True, power=1.0
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
            share = share_late(load, self.steep, self.hopeless)
            if self.clustered:  # one 5 s in four brings four times as many
                share = min(share * (4.0 if self.rng.random() < 0.2 else 0.25), 1.0)
            new = self.rng.poisson(self.rate * 5.0)
            self.ended, self.met = self.ended + new, self.met + self.rng.binomial(new, 1.0 - share)
            counted = ClassOutcomes(SLO, self.ended, self.met, self.ended, self.met)
            self.state, note = look(
                self.state, self.now_s, (counted,), self.line, self.rate, self.workers, TARGET, self.refit
            )
            self.notes += [] if note is None else [note]
        return self.state.factor


def stories(count, minutes=60, **more):
    draws = np.random.default_rng(7)
    found = []
    for seed in range(count):
        told = {"steep": draws.choice([5.0, 10.0, 20.0, 35.0]), "rate": draws.choice([3.0, 8.0, 20.0, 60.0])}
        told["power"] = draws.choice([1.0, 3.0])
        found.append(Story(seed, **(told | more)))
        found[-1].run(minutes)
    return found


def test_a_right_line_is_left_alone_in_19_stories_of_20():
    told = stories(200)
    changed = [s for s in told if s.notes]
    assert len(changed) <= 0.05 * len(told), [(s.steep, s.rate, s.state.factor) for s in changed]
