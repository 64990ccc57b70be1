"""The time to an engine and back, from a fleet's steps and the requests of a replay."""

from pathlib import Path

import numpy as np
import pytest

from controlplane.errors import BadInput
from tokenfleet.compare.replay import FleetSteps, learned_overheads_s, read_steps

HEADER = "prefill_tokens,sequences,context_tokens,step_s,prefill_sum_sq,worker,at_s\n"


def steps(*rows: tuple[float, float, int, str]) -> FleetSteps:
    """Rows of (end_s, step_s, prefill_tokens, worker)."""
    end, lasted, tokens, worker = zip(*sorted(rows), strict=True)
    return FleetSteps(np.array(end), np.array(lasted), np.array(tokens, float), np.array(worker))


def learned(ttft_s: float, fleet: FleetSteps, tokens: int = 100) -> list[float]:
    """The hops of one request sent at 10 s."""
    found = learned_overheads_s(np.array([10.0]), np.array([tokens]), np.array([ttft_s]), fleet)
    return [round(float(way_s), 6) for way_s in found]


def test_a_request_that_found_its_worker_idle_tells_of_the_way() -> None:
    assert learned(0.060, steps((10.055, 0.050, 100, "w0"))) == [0.010]


def test_a_request_that_waited_for_another_step_tells_nothing() -> None:
    busy = steps((10.030, 0.040, 0, "w0"), (10.080, 0.050, 100, "w0"))
    assert learned(0.085, busy) == []
    elsewhere = steps((10.030, 0.040, 0, "w1"), (10.055, 0.050, 100, "w0"))
    assert learned(0.060, elsewhere) == [0.010]


def test_a_request_whose_step_others_resemble_tells_nothing() -> None:
    assert learned(0.060, steps((10.055, 0.050, 100, "w0"), (10.050, 0.045, 100, "w1"))) == []
    assert learned(0.060, steps((10.055, 0.050, 101, "w0"))) == []


def test_steps_of_other_times_are_none_of_its_own() -> None:
    assert learned(
        0.060, steps((9.0, 0.05, 100, "w0"), (10.055, 0.05, 100, "w0"), (12.0, 0.05, 100, "w0"))
    ) == [0.01]


def test_clocks_a_little_apart_make_no_way_shorter_than_none() -> None:
    assert learned(0.049, steps((10.052, 0.050, 100, "w0"))) == [0.0]


@pytest.mark.parametrize("seed", range(20))
def test_ways_of_lone_requests_are_found_again_whatever_they_are(seed: int) -> None:
    rng = np.random.default_rng(seed)
    count = 30
    sent = np.array([2.0 * i for i in range(count)])
    ways, lasted = rng.uniform(0.001, 0.03, count), rng.uniform(0.01, 0.5, count)
    prompts = rng.permutation(1000)[:count] + 1
    ends = sent + ways / 2 + lasted
    fleet = steps(*zip(ends, lasted, prompts.tolist(), rng.choice(["w0", "w1"], count), strict=True))
    assert learned_overheads_s(sent, prompts, np.array(ways + lasted), fleet) == pytest.approx(ways)


def test_a_fleets_file_is_read_in_order_of_time(tmp_path: Path) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(HEADER + "5,1,10,0.02,25,w1,12.5\n0,1,11,0.01,0,w0,11.5\n")
    read = read_steps(path)
    assert read.end_s.tolist() == [11.5, 12.5]
    assert read.prefill_tokens.tolist() == [0.0, 5.0]
    assert read.worker.tolist() == ["w0", "w1"]
    path.write_text(HEADER)
    assert len(learned_overheads_s(np.array([1.0]), np.array([5]), np.array([0.1]), read_steps(path))) == 0


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("a,b\n1,2\n", "column at_s is missing"),
        ("", "empty; expected columns at_s"),
        (HEADER + "5,1,10,fast,25,w1,12.5\n", "row 1: step_s"),
        (HEADER + "5,1,10,nan,25,w1,12.5\n", "row 1: step_s"),
        (HEADER + "5,1,10\n", "row 1: at_s"),
    ],
)
def test_another_file_is_refused_in_a_line(tmp_path: Path, content: str, says: str) -> None:
    path = tmp_path / "steps.csv"
    path.write_text(content)
    with pytest.raises(BadInput, match=says) as refused:
        read_steps(path)
    assert str(path) in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_file_that_is_not_there_is_refused_in_a_line(tmp_path: Path) -> None:
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(BadInput, match=str(path)):
            read_steps(path)
