"""A live fleet's step times against its profile: learned once each, and told to whom they concern."""

from collections import Counter
from itertools import count

import pytest
from made_profiles import made_profile
from prometheus_client import CollectorRegistry, generate_latest

from controlplane.perfmodel.engine import KvModel
from controlplane.perfmodel.profile import Residuals
from controlplane.perfmodel.step import StepModel
from controlplane.types import WorkerId
from dataplane.live.control.step_times import FORGET_EVERY, TELL_EVERY, StepTimes
from dataplane.live.engine_api.link import Step, Telemetry
from dataplane.live.gateway.events import EventLog

STEP = StepModel(0.007, 2e-5, 2e-5, 5e-8)
PROFILE = made_profile(STEP, KvModel(400_000), gpu="h100-sxm", residuals=Residuals(0.02, 0.05, 0.1, 100))


def load(steps: int, step_s: float, worker: str = "w0", sequences: int = 8) -> Telemetry:
    step = Step(0, sequences, 1000 * sequences, step_s, 0, 0)
    return Telemetry(WorkerId(worker), steps, 8, 0, *step[1:3], 0, step_s, 1, 10, 0, executed=(step,))


def expected_s(sequences: int) -> float:
    return float(STEP.step_s(0, sequences, 1000 * sequences))


def run(times: StepTimes, factor: float, steps: int, first: int = 0) -> None:
    for i in range(first, first + steps):
        b = 1 + i % 64
        times.kinds["a"].learn(*load(i, factor * expected_s(b), sequences=b).executed)


def test_a_slowdown_reaches_placement_the_log_and_the_operators() -> None:
    events = EventLog()
    times = StepTimes({"a": PROFILE}, events)
    told: list[StepModel] = []
    times.on_refit.append(lambda kind, step: told.append(step))
    run(times, 1.0, 400)
    assert len(told) == 400 // TELL_EVERY
    assert float(told[-1].step_s(0, 32, 32_000)) == pytest.approx(expected_s(32), rel=1e-6)
    run(times, 1.3, 200, first=400)
    assert float(told[-1].step_s(0, 32, 32_000)) == pytest.approx(1.3 * expected_s(32), rel=0.05)
    (event,) = [e for e in events if e.kind == "drift"]
    assert "slower" in event.reason
    assert event.facts["ratio"] == pytest.approx(1.3, rel=0.05)
    (view,) = times.as_json()
    assert view["slowdown"] == pytest.approx(1.3, rel=0.05)
    assert view["refit_error"] < 0.05 < view["profile_error"]
    assert len(view["drifts"]) == 1


def test_metrics_say_how_far_reality_is_from_the_profile() -> None:
    times = StepTimes({"a": PROFILE}, EventLog(), count().__next__)
    for i in range(300):
        times.add(load(i, 1.2 * expected_s(8)))
    run(times, 1.2, 200)
    registry = CollectorRegistry()
    registry.register(times)
    text = generate_latest(registry).decode()
    assert times.kinds["a"].refit.slowdown == pytest.approx(1.2, rel=0.05)
    assert (
        f'tokenfleet_step_profile_ratio{{variant="h100-sxm TP1"}} {times.kinds["a"].refit.slowdown}' in text
    )
    assert 'tokenfleet_worker_step_profile_ratio{worker="w0"} 1.2' in text
    assert "tokenfleet_step_drifts_total" in text
    times.attached = lambda: set()  # the worker is gone
    assert 'worker="w0"' not in generate_latest(registry).decode()


def test_a_step_told_twice_and_an_idle_worker_teach_nothing_more() -> None:
    times = StepTimes({"a": PROFILE}, EventLog(), count().__next__)
    times.add(load(1, 0.01))
    learned = times.kinds["a"].refit.steps
    times.add(load(1, 0.01))  # a heartbeat repeats the last step
    times.add(load(2, 0.01, sequences=0))
    times.add(load(3, 0.0))
    assert times.kinds["a"].refit.steps == learned == 1


def test_workers_take_turns_and_a_large_fleet_costs_the_gateway_no_more_than_a_small_one() -> None:
    learned: dict[int, int] = {}
    for workers in (2, 40):
        now_s = [0.0]
        times = StepTimes({"a": PROFILE}, EventLog(), lambda clock=now_s: clock[0])
        turns: Counter[WorkerId] = Counter()
        for beat in range(1, 401):  # 20 s, all in the same order each time
            now_s[0] = beat * 0.05
            for w in range(workers):
                before = times.kinds["a"].refit.steps
                times.add(load(beat, expected_s(8), f"w{w}"))
                turns[WorkerId(f"w{w}")] += times.kinds["a"].refit.steps - before
        learned[workers] = times.kinds["a"].refit.steps
        assert max(turns.values()) - min(turns.values()) <= 3
    assert 0.7 < learned[40] / learned[2] < 1.4  # twenty times the steps were told


def test_a_fleet_that_nobody_looks_at_forgets_workers_that_have_gone() -> None:
    times = StepTimes({"a": PROFILE}, EventLog(), count().__next__)
    here = {WorkerId("w0")}
    times.attached = lambda: here
    times.add(load(1, 0.01, "gone"))
    for i in range(FORGET_EVERY):
        times.add(load(i + 2, 0.01))
    assert set(times._turn_s) == set(times._steps_taken) == set(times.kinds["a"]._factors) == here
