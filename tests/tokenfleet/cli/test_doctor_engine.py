"""The doctor's trial of two engines: its report on moves, tokens, and engines that do not start."""

import pytest

from controlplane.errors import BadInput
from tokenfleet.cli import doctor
from tokenfleet.cli.doctor import _findings, _margin, _Stream, _way

WORKERS = [{"host": "10.0.0.1", "telemetry": {"step_s": 0.004}}, {"host": "10.0.0.2", "telemetry": None}]
MOVE = {"outcome": "done", "downtime_s": 0.01, "bytes": 3_000_000, "reason": ""}


def states(moved, moves):
    return {f.check: (f.state, f.says) for f in _findings(WORKERS, _Stream([5, 6, 7]), moved, moves)}


def test_equal_tokens_after_moves_are_fine_with_their_figures():
    found = states(_Stream([5, 6, 7]), [MOVE, MOVE | {"downtime_s": 0.03}])
    assert found["engines"] == ("fine", "2 started on 10.0.0.1 and 10.0.0.2, step time 4 ms")
    assert found["moves"] == ("fine", "2, downtime 30 ms, at most 30 ms; 3.0 MB each")
    assert found["tokens"] == ("fine", "all 3 equal those without a move")


@pytest.mark.parametrize(
    ("moved", "says"),
    [
        (_Stream([5, 9, 7]), "token 1 of 3 differs from that without a move"),
        (_Stream([5, 6]), "token 2 of 3 differs from that without a move"),
        (_Stream([5], "the worker is lost"), "the worker is lost"),
    ],
)
def test_tokens_that_differ_stop_a_fleet(moved, says):
    assert states(moved, [MOVE])["tokens"] == ("stops", says)


def test_a_near_tie_is_rounding_and_a_clear_choice_is_not():
    plain = _Stream([5, 6, 7], margins=[3.0, 0.04, 2.0])
    near, clear, gone = _Stream([5, 9, 7]), _Stream([5, 6, 9]), _Stream([5], "the worker is lost")
    found = {f.check: f for f in _findings(WORKERS, plain, near, [MOVE])}["tokens"]
    assert found.state == "fine"
    assert found.says.startswith("token 1 of 3 differs from that without a move, and was a near tie")
    for moved in (clear, gone):
        assert {f.check: f.state for f in _findings(WORKERS, plain, moved, [MOVE])}["tokens"] == "stops"


def test_a_margin_is_the_distance_of_the_likeliest_two():
    assert _margin({"a": -0.5, "b": -0.75, "c": -9.0}) == 0.25
    assert _margin({"a": -0.5}) == _margin({}) == float("inf")


def test_moves_that_fail_stop_a_fleet_with_their_reason():
    failed = MOVE | {"outcome": "failed", "reason": "the target has no room"}
    found = list(_findings(WORKERS, _Stream([5]), _Stream([5]), [MOVE, failed]))
    assert [(f.state, f.says) for f in found if f.check == "moves"] == [
        ("stops", "1 of 2 done: the target has no room"),
        ("fine", "1, downtime 10 ms, at most 10 ms; 3.0 MB each"),
    ]
    assert states(_Stream([5, 6, 7]), [])["moves"] == ("stops", "0 of 0 done: it ended first")


def test_the_way_that_kv_took_is_named_with_its_pace():
    assert _way({"ways": {"TCP": 9}, "bytes_per_s": 2.5e8}).says == "by TCP: 0.25 GB/s"
    assert _way({"ways": {}, "bytes_per_s": 2.4e9}).says == "by nothing yet: 2.40 GB/s"


def test_engines_that_do_not_start_are_one_line_with_serve_s_reason(tmp_path):
    pytest.importorskip("vllm", reason="vLLM is not installed (requirements/live-cpu.txt)")
    with pytest.raises(BadInput, match=r"^--engine: --model: /no/such: no such folder$"):
        doctor.try_engines("/no/such", 1, [])
