"""A mix changes within its limits, which count workers that start and those that leave."""

from collections import Counter
from dataclasses import dataclass, field

from by_day import examples
from hypothesis import assume, given
from hypothesis import strategies as st

from controlplane.scaler.line import Weights
from controlplane.scaler.mix import MixNeed, MixSettings, choose, present
from controlplane.scaler.mix_changes import bridged
from controlplane.scaler.reconcile import Drain, Launch, Standing, Stop, Undrain, steps_to
from controlplane.types import WorkerId
from controlplane.worker_type import WorkerType

COLD, LEAVES = 3, 4  # beats


@dataclass
class Fleet:
    """Workers that start and drain as the planes' do. A worker is [kind, state, beats in it]."""

    need: MixNeed
    workers: list[list] = field(default_factory=list)

    def held(self):
        return Counter(kind for kind, _, _ in self.workers)

    def serving(self):
        return Counter(kind for kind, state, _ in self.workers if state == "serving")

    def beat(self, wanted):
        for worker in self.workers:
            worker[2] += 1
            if worker[1:] == ["starting", COLD]:
                worker[1:] = ["serving", 0]
        for t in self.need.worker_types:
            for step in steps_to(wanted.get(t.name, 0), self._standing(t.name), 0.0, 1e9, "asked"):
                match step:
                    case Launch():
                        for _ in range(step.workers):
                            more = self.held() + Counter([t.name])
                            if self.need.settings.beyond(self.need.worker_types, more) is None:
                                self.workers.append([t.name, "starting", 0])
                    case Drain() | Undrain():
                        is_drain = isinstance(step, Drain)
                        self.workers[int(step.worker)][1:] = ["draining" if is_drain else "serving", 0]
                    case Stop():
                        self.workers[int(step.worker)][1] = "gone"
        self.workers = [w for w in self.workers if w[1] != "gone"]

    def _standing(self, kind):
        return [
            Standing(WorkerId(str(i)), state, 0.0, int(state != "draining" or beats < LEAVES))
            for i, (of, state, beats) in enumerate(self.workers)
            if of == kind
        ]


types = st.tuples(st.sampled_from([1, 2, 4]), st.sampled_from([0.7, 1.0, 2.0]), st.sampled_from([1, 1.3, 3]))


@examples(300)
@given(
    st.lists(types, min_size=2, max_size=3),
    st.lists(st.integers(0, 4), min_size=3, max_size=3),
    st.integers(0, 5),
    st.sampled_from([None, 0, 2]),
    st.floats(0.3, 1.5),
)
def test_limits_count_all_workers_capacity_stays_and_the_mix_is_reached(parts, counts, room, usd_room, load):
    worker_types = tuple(WorkerType(f"t{i}", tp, usd_per_h=usd * tp) for i, (tp, usd, _) in enumerate(parts))
    there = present(dict(zip((t.name for t in worker_types), counts, strict=False)))
    weights = Weights(
        "t0", {t.name: float(weight) for t, (_, _, weight) in zip(worker_types, parts, strict=True)}
    )
    gpus = sum(t.gpus * there.get(t.name, 0) for t in worker_types)
    usd = sum((t.usd_per_h or 0.0) * there.get(t.name, 0) for t in worker_types)
    settings = MixSettings(
        max_gpus=gpus + room, budget_usd_per_h=None if usd_room is None else usd + usd_room
    )
    need = MixNeed(worker_types, weights, 0.0, settings, there)
    need = MixNeed(worker_types, weights, load * need.carries(there), settings, there)
    assume(need.demand > 0)
    chosen = choose(need)
    fleet, wanted = Fleet(need, [[kind, "serving", 0] for kind, n in there.items() for _ in range(n)]), there
    for _ in range(150):
        now = MixNeed(worker_types, weights, need.demand, settings, wanted)
        wanted = bridged(now, chosen, fleet.serving())
        fleet.beat(wanted)
        assert settings.beyond(worker_types, fleet.held()) is None
        assert load > 1 or now.is_enough(fleet.serving())
    assert present(fleet.held()) == present(fleet.serving()) == wanted
    assert need.carries(wanted) >= min(need.demand, need.carries(chosen)) - 1e-9
    if wanted == present(chosen):
        return
    # No worker that is to come fits, and none goes without leaving too few.
    missing = Counter(chosen) - Counter(wanted)
    assert missing
    for kind in missing:
        assert settings.beyond(worker_types, Counter(wanted) + Counter([kind])) is not None
    for kind in Counter(wanted) - Counter(chosen):
        assert not need.is_enough(Counter(wanted) - Counter([kind]))
