"""From a worker's steps to its fleet's steps.csv: every step once, whatever came between."""

from pathlib import Path

import numpy as np
import pytest
from made_profiles import made_profile

from controlplane.errors import BadInput
from controlplane.perfmodel.engine import KvModel
from controlplane.perfmodel.profile import Residuals
from controlplane.perfmodel.step import StepModel
from controlplane.types import WorkerId
from dataplane.live.control.step_times import StepTimes
from dataplane.live.engine_api import wire
from dataplane.live.engine_api.link import Step, Telemetry
from dataplane.live.engine_api.step_trace import MOST_TOLD, StepTrace
from dataplane.live.gateway.events import EventLog
from dataplane.live.gateway.history import History
from tokenfleet.profiles.measurements import read_measurements

EVERY_S = 0.05


def load(sequences: int) -> dict[str, int]:
    return {
        "prefill_tokens": 0, "sequences": sequences, "context_tokens": 100 * sequences,
        "prefill_sum_sq": 0, "prefill_sequences": 0, "kv_blocks": 7 * sequences,
    }  # fmt: skip


def test_steps_of_any_length_are_all_written_once_and_their_mean_is_the_true_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    lasts_s = 0.008 * rng.choice([0.5, 1.0, 2.5], 2000)
    trace, history = StepTrace(WorkerId("w0"), 100), History(64.0, tmp_path)
    now_s = told_s = 0.0
    trace.add(load(4), 0.008, now_s, 4, 0, 0.1)  # the first has no step before it to begin at
    sampled = []
    for i, step_s in enumerate(lasts_s):
        now_s += step_s
        trace.add(load(4), step_s, now_s, 4, 0, 0.1)
        if now_s - told_s > EVERY_S:
            told_s = now_s
            message = trace.telemetry(now_s)
            sampled.append(message.step_s)
            history.add_step(message)
            history.add_step(message)
        if i % 37 == 0:
            trace.telemetry(now_s)  # another asks, and what it is told is not lost to the first
    history.add_step(trace.telemetry(now_s))
    history.close()
    steps = read_measurements(tmp_path / "steps.csv")
    assert len(steps) == 2001
    assert steps.kv_blocks == pytest.approx(np.full(2001, 28))
    assert steps.step_s[1:] == pytest.approx(lasts_s, abs=1e-6)
    assert np.mean(sampled) > 1.2 * lasts_s.mean()  # why the last step of each message would not do


def test_a_full_disk_ends_the_record_of_steps_and_not_who_reads_the_worker(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    trace, history = StepTrace(WorkerId("w0"), 100), History(64.0, tmp_path)
    history._steps.close()
    history._steps = Path("/dev/full").open("w", encoding="utf-8", buffering=1)  # noqa: SIM115  # it closes it
    for i in range(3):
        trace.add(load(4), 0.01, 0.01 * i, 4, 0, 0.1)
        history.add_step(trace.telemetry(0.01 * i))
    history.close()
    assert [record.getMessage() for record in caplog.records] == [
        f"step times end here: {tmp_path}: No space left on device"
    ]


@pytest.mark.parametrize("had", [("", ""), (",kv_blocks", ",28")])
def test_steps_of_an_earlier_version_are_kept_aside_and_other_columns_are_refused(
    tmp_path: Path, had: tuple[str, str]
) -> None:
    path, header = tmp_path / "steps.csv", "prefill_tokens,sequences,context_tokens,step_s,prefill_sum_sq"
    earlier = f"{header},worker,at_s{had[0]}\n0,4,400,0.0100000,0,w0,1.000{had[1]}\n"
    path.write_text(earlier)
    History(64.0, tmp_path).close()
    assert (tmp_path / "steps.1.csv").read_text() == earlier
    assert path.read_text() == f"{header},worker,at_s,kv_blocks,kind\n"
    assert (read_measurements(tmp_path / "steps.1.csv").kv_blocks is None) == (had[0] == "")
    path.write_text("mine\n1\n")
    with pytest.raises(BadInput, match=r"--data: .*steps\.csv: has columns 'mine', expected prefill_tokens,"):
        History(64.0, tmp_path)
    assert path.read_text() == "mine\n1\n"


def test_executed_steps_survive_the_wire_and_say_which_are_new() -> None:
    trace = StepTrace(WorkerId("w0"), 100)
    for i in range(5):
        trace.add(load(i + 1), 0.01, 0.01 * i, 4, 0, 0.1)
    message = trace.telemetry(0.05)
    back = wire.noun_from(wire.pack(message), Telemetry)
    assert back == message
    assert [(e.sequences, e.kv_blocks) for e in back.since(3)] == [(4, 28), (5, 35)]
    assert back.since(5) == ()
    assert back.since(9) == ()
    assert len(back.since(0)) == 5
    assert back.executed[-1].age_s == pytest.approx(0.01)


def test_a_message_has_a_bounded_number_of_steps() -> None:
    trace = StepTrace(WorkerId("w0"), 100)
    for i in range(3 * MOST_TOLD):
        trace.add(load(1), 0.001, 0.001 * i, 1, 0, 0.1)
    message = trace.telemetry(1.0)
    assert len(message.executed) == MOST_TOLD
    assert len(message.since(0)) == MOST_TOLD


def test_the_refit_learns_from_the_first_new_step_of_a_message() -> None:
    step = StepModel(0.01, 1e-5, 0.0, 0.0)
    profile = made_profile(step, KvModel(1000), gpu="h100-sxm", residuals=Residuals(0.02, 0.05, 0.1, 100))
    times = StepTimes({"a": profile}, EventLog())
    told = (Step(0, 1, 100, 0.01, 0, 0), Step(0, 1, 100, 0.02, 0, 0))
    times.add(Telemetry(WorkerId("w0"), 2, 1, 0, 1, 100, 0, 0.02, 1, 10, 0, executed=told))
    assert times.kinds["a"].refit.steps == 1
    assert times.as_json()[0]["workers"]["w0"] == pytest.approx(1.0)


def test_an_ordinary_step_is_as_long_as_most_of_its_size_and_no_odd_one_counts() -> None:
    trace = StepTrace(WorkerId("w0"), 100)
    assert trace.ordinary_s == float("inf")
    trace.add(load(4), 3.0, 3.0, 4, 0, 0.1)  # a first step compiles
    assert trace.ordinary_s == 3.0
    trace.add(load(4), 0.01, 3.01, 4, 0, 0.1)
    assert trace.ordinary_s == pytest.approx(0.01)
    trace.add(load(4), 4.6, 7.61, 4, 0, 0.1)  # the host stands still
    trace.add(load(4), 0.01, 7.62, 4, 0, 0.1)
    assert trace.ordinary_s == pytest.approx(0.01)
    trace.add(load(4) | {"prefill_tokens": 2044}, 2.0, 9.62, 4, 0, 0.1)
    for i in range(1000):
        trace.add(load(4), 0.01, 9.63 + 0.01 * i, 4, 0, 0.1)
    assert trace.ordinary_s == pytest.approx(2.0)  # a long prefill, however seldom


def test_a_step_that_was_planned_while_the_last_one_ran_takes_its_own_time_alone() -> None:
    """As vLLM schedules asynchronously: the engine begins a step while the one before still runs."""
    trace, step_s = StepTrace(WorkerId("w0"), 100), 0.01
    for i in range(4):
        began_s, ended_s = (max(i - 1, 0) + 0.1 * (i > 0)) * step_s, (i + 1) * step_s
        left = 0 if i >= 2 else 1  # the third ends the last request, and the fourth had begun by then
        trace.add(load(1), ended_s - began_s, ended_s, left, 0, 0.1)
    trace.add(load(1), step_s, 1.0, 0, 0, 0.1)  # after a pause
    assert [step.step_s for step in trace.steps()[1]] == pytest.approx([step_s] * 5)
