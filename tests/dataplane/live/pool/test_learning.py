"""A fleet without profiles measures its workers as they start, and places its first request by targets."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
from front import Front, pool_on, profile

from controlplane.errors import BadInput
from controlplane.types import Slo

KIND = "TP1"
SERVED = np.array([[0, 1, 300, 0], [0, 20, 8000, 0], [200, 12, 5000, 200**2], [1500, 40, 20_000, 1500**2]])


class Kept:
    """A cache in memory."""

    def __init__(self):
        self.profiles, self.keys = {}, []

    def read(self, key):
        self.keys.append(key)
        return self.profiles.get(repr(key))

    def keep(self, key, made):
        self.profiles[repr(key)] = made


def tells_exact_times(link):
    """Let a link's telemetry say what each step takes by the profile, whatever this machine made of it."""
    receive, step = link.receive, profile().step

    async def exact():
        event = await receive()
        if not hasattr(event, "executed"):
            return event
        times = [step.step_s(*e[:3], e.prefill_sum_sq) for e in event.executed]
        told = tuple(e._replace(step_s=float(t)) for e, t in zip(event.executed, times, strict=True))
        return replace(event, executed=told)

    link.receive = exact


@pytest.fixture
def play():
    from controlplane.placement.queue import QueueSettings
    from controlplane.worker_type import WorkerGroup, WorkerType
    from dataplane.live.control.step_times import StepTimes
    from dataplane.live.pool import learning as learning_module

    def run(story, workers=3, kept=None, measure_s=20.0, spoil=None):
        async def scene():
            front = Front((), profile(), QueueSettings())
            front.fabric.speed = 20.0
            worker_type = WorkerType(None)
            learning = learning_module.Learning(
                {KIND: worker_type},
                ("made", "digest"),
                {"dtype": "float32"},
                2000,
                front.events,
                kept,
                measure_s,
            )
            step_times = StepTimes({}, front.events)
            learning.on_learnt.append(front.core.placement.kinds.know)
            learning.on_learnt.append(step_times.know)
            learning.on_measured.append(step_times.pass_over)
            spoiled = learning.measure if spoil is None else spoil(learning.measure)

            async def measure(link, kind, serves):
                tells_exact_times(link)
                await spoiled(link, kind)

            async with pool_on(front, [WorkerGroup(worker_type, workers)], 8, measure=measure) as fleet:
                await asyncio.wait_for(story(front, fleet, learning), 60)

        asyncio.run(scene())

    return run


def events_of(front, kind):
    return [event for event in front.events if event.kind == kind]


def test_the_workers_of_a_kind_learn_its_step_times_together_before_the_first_request(play):
    kept = Kept()

    async def story(front, fleet, learning):
        learnt = learning.learnt[KIND].step.step_s(*SERVED.T)
        assert learnt == pytest.approx(profile().step.step_s(*SERVED.T), rel=0.02)
        assert learning.learnt[KIND].kv.capacity_tokens == 4096 * 16  # the engine's own
        (event,) = events_of(front, "learned")
        assert "of 3 workers" in event.reason
        executed = [engine.steps()[0] for engine in front.engines.values()]
        assert all(executed), executed  # every worker had its part
        assert max(executed) < 2 * sum(executed) / 3
        # By targets from the first request on: a worker keeps this one's for one at a time, so that of four
        # the last is held back.
        assert front.core.placement.goes_by_targets
        from dataplane.live.ledger.request import Ticket

        for i in range(4):
            slo = Slo(10.0, 0.002015)
            await front.send(f"r{i}", [1] * 30, ticket=Ticket(f"r{i}", "t", slo, 0), max_tokens=2000)
        *placed, last = [t.worker for t in front.core.requests]
        assert (set(placed), last) == ({"w0", "w1", "w2"}, None)
        # One that no worker keeps even for a request alone is lost, and holds nothing back.
        await front.send("lost", [1] * 30, ticket=Ticket("lost", "t", Slo(10.0, 0.0001), 0), max_tokens=5)
        await front.ended("lost")

    play(story, kept=kept)
    assert len(kept.profiles) == 1


def test_what_was_learned_before_is_not_measured_again(play):
    kept = Kept()

    async def first(front, fleet, learning):
        assert front.core.placement.goes_by_targets

    async def second(front, fleet, learning):
        assert front.core.placement.goes_by_targets
        assert [engine.steps()[0] for engine in front.engines.values()] == [0, 0]
        (event,) = events_of(front, "learned")
        assert "are used again" in event.reason

    play(first, workers=1, kept=kept)
    play(second, workers=2, kept=kept)
    key = kept.keys[0]
    assert {"engine", "version", "model", "model_config", "device", "tp_degree", "max_seqs"} <= set(key)
    assert key["flags"] == {"dtype": "'float32'"}


def test_what_is_learned_says_how_many_steps_the_engine_plans_ahead(play):
    """On a GPU vLLM plans one: a request that comes amid a step waits for two, and placement counts both."""

    def ahead(measure):
        async def told(link, kind):
            link.info = replace(link.info, steps_ahead=1.0)
            await measure(link, kind)

        return told

    async def story(front, fleet, learning):
        assert learning.learnt[KIND].engine.steps_ahead == 1.0
        assert learning.learnt[KIND].engine.first_steps == 2.5

    play(story, workers=1, spoil=ahead)


def test_uncertain_step_times_are_said_to_be_so(play, monkeypatch, caplog):
    from dataplane.live.pool import learning as learning_module

    monkeypatch.setattr(learning_module, "UNSURE", -1.0)

    async def story(front, fleet, learning):
        (event,) = events_of(front, "learned")
        assert "uncertain: --profile FILE" in event.reason
        assert f"{KIND}: step times are" in caplog.text
        assert "% uncertain; --profile FILE is surer" in caplog.text

    play(story, workers=1)


def test_a_worker_that_joins_later_serves_by_what_was_learned(play):
    async def story(front, fleet, learning):
        fleet.scale({KIND: 2}, "a test")
        while fleet.serving < 2:
            await asyncio.sleep(0.005)
        assert len(events_of(front, "learned")) == 1
        assert front.core.placement.goes_by_targets

    play(story, workers=1)


def test_a_worker_that_dies_leaves_its_part_to_the_others(play):
    def spoil(measure):
        async def dying(link, kind):
            if link.info.worker == "w1":
                asyncio.get_running_loop().call_later(0.05, link.kill)
            await measure(link, kind)

        return dying

    async def story(front, fleet, learning):
        learnt = learning.learnt[KIND].step.step_s(*SERVED.T)
        assert learnt == pytest.approx(profile().step.step_s(*SERVED.T), rel=0.02)

    play(story, workers=2, spoil=spoil)


@pytest.mark.parametrize("how", ["no time", "every engine refuses", "the fit fails"])
def test_a_fleet_that_cannot_measure_says_so_and_places_by_load(play, monkeypatch, how):
    from dataplane.live.engine_api.link import SegmentRefused
    from dataplane.live.pool import learning as learning_module

    def refusing(measure):
        async def tried(link, kind):
            add = link.add

            async def refuse(request):
                await link._events.put(SegmentRefused(request.request_id, "its queue is full"))

            link.add = refuse
            await measure(link, kind)
            link.add = add

        return tried

    def failing(*_, **__):
        raise BadInput("measurements: two coefficients cannot be told apart")

    if how == "the fit fails":
        monkeypatch.setattr(learning_module, "fit_step", failing)

    async def story(front, fleet, learning):
        assert not learning.learnt
        assert not front.core.placement.goes_by_targets
        said = {event.reason for event in events_of(front, "unmeasured")}
        assert said == {
            f"{KIND}: step times could not be measured ({learning.why}); placement uses load alone"
        }
        await front.send("r", [1] * 30, max_tokens=20)
        await front.ended("r")
        assert front.finish["r"] == "LENGTH"

    spoil = refusing if how == "every engine refuses" else None
    play(story, workers=2, measure_s=0.0 if how == "no time" else 20.0, spoil=spoil)
