"""The cause of a failed start: what the log of the failed process says, else what is known of its end."""

import pickle

import pytest

from dataplane.live.worker.failures import StartFailure, start_failure

POINTS_ELSEWHERE = RuntimeError(
    "Engine core initialization failed. See root cause above. Failed core proc(s): {'EngineCore_DP0': 1}"
)
AT = "(EngineCore pid=71) ERROR 11-22 10:45:00 [core.py:1110] "


def test_the_engines_own_error_is_the_cause():
    log = f"{AT}EngineCore failed to start.\n{AT}Traceback (most recent call last):\n{AT}  File 'core.py'\n"
    log += f"{AT}ValueError: No available memory for the cache blocks.\n"
    log += "RuntimeError: Engine core initialization failed. See root cause above.\n"
    failure = start_failure(POINTS_ELSEWHERE, log)
    assert str(failure) == "ValueError: No available memory for the cache blocks."
    assert failure.log == log


def test_a_rank_that_failed_is_behind_the_engine_that_waited_for_it():
    log = "(Worker_TP1 pid=9) ERROR 11-22 10:45:00 [executor.py:7] torch.OutOfMemoryError: CUDA oom\n"
    log += f"{AT}Exception: WorkerProc initialization failed due to an exception in a background process."
    log += " See stack trace for root cause.\n"
    assert str(start_failure(POINTS_ELSEWHERE, log)) == "torch.OutOfMemoryError: CUDA oom"


def test_an_engine_that_dies_in_its_warm_up_points_to_its_cause_too():
    error = RuntimeError("EngineCore encountered an issue. See stack trace (above) for the root cause.")
    log = (
        f"{AT}IndexError: index 9 is out of bounds\n{AT}vllm.v1.engine.exceptions.EngineDeadError: {error}\n"
    )
    assert str(start_failure(error, log)) == "IndexError: index 9 is out of bounds"


def test_a_killed_engine_is_named_by_its_signal():
    error = RuntimeError("See root cause above. Failed core proc(s): {'EngineCore_DP0': -9}")
    assert "SIGKILL, as the kernel does when memory runs out" in str(start_failure(error, "loading\n"))


@pytest.mark.parametrize("log", ["", "no error here\nWARNING: Error: none\n"])
def test_without_a_word_from_the_engine_its_client_says_what_it_knows(log):
    assert str(start_failure(RuntimeError("it broke"), log)) == "it broke"


def test_it_travels_between_processes():
    again = pickle.loads(pickle.dumps(StartFailure("cause", "log")))
    assert (str(again), again.log) == ("cause", "log")
