"""Long tests are dealt into parts: none is left out by all, and none runs twice."""

import json
import os
import subprocess
import sys
from pathlib import Path

import by_day
import parts
import pytest
from hypothesis import settings


@pytest.fixture
def seconds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    file = tmp_path / "seconds.json"
    monkeypatch.setattr(parts, "SECONDS", file)
    return file


def run_by(tests: list[str], part: int) -> set[str]:
    return set(tests) - parts.others(tests, part)


def test_each_long_test_is_in_one_part_and_the_rest_in_all(seconds: Path) -> None:
    took_s = {
        f"tests/test_{file}.py::test_{i}": 1.0 + (7 * i + file) % 5 for file in range(30) for i in range(12)
    }
    seconds.write_text(json.dumps(took_s))
    short = [f"tests/test_{file}.py::test_short" for file in range(30)]
    tests = [*short, *took_s]
    runs = [run_by(tests, part) for part in range(1, parts.PARTS + 1)]
    assert all(set(short) <= one for one in runs)
    assert sorted(name for one in runs for name in one if name in took_s) == sorted(took_s)
    times = [sum(took_s.get(name, 0.0) for name in one) for one in runs]
    assert max(times) - min(times) <= 2 * max(took_s.values())


def test_short_tests_of_a_fleet_go_with_those_that_start_it(seconds: Path) -> None:
    files = [f"tests/live/test_{name}.py" for name in "abcdefghijklmnopqrst"]
    seconds.write_text(json.dumps({f"{file}::test_start": 30.0 for file in files}))
    tests = [f"{file}::test_{name}" for file in files for name in ("start", "another")]
    runs = [run_by(tests, part) for part in range(1, parts.PARTS + 1)]
    assert sorted(name for one in runs for name in one) == sorted(tests)
    for one in runs:
        assert len(one) == 4
        assert len({parts.file_of(name) for name in one}) == 2


def test_a_file_that_takes_longer_than_a_part_is_cut(seconds: Path) -> None:
    took_s = {f"tests/test_long.py::test_{i}": 10.0 for i in range(parts.PARTS)}
    seconds.write_text(json.dumps(took_s))
    assert [len(run_by(list(took_s), part)) for part in range(1, parts.PARTS + 1)] == [1] * parts.PARTS


def test_tests_without_engines_take_as_long_in_each_part(seconds: Path) -> None:
    fleets = {f"tests/live/test_{i}.py::test_start": 100.0 - i for i in range(parts.PARTS // 2)}
    others = {f"tests/test_{i}.py::test_long": 2.0 for i in range(3 * parts.PARTS)}
    seconds.write_text(json.dumps(fleets | others))
    runs = [run_by([*fleets, *others], part) for part in range(1, parts.PARTS + 1)]
    assert [len(one & set(others)) for one in runs] == [3] * parts.PARTS


@pytest.mark.parametrize(("asked", "fewer"), [(100, 20), (60, 12), (41, 9), (12, 5), (3, 3)])
def test_a_fifth_of_random_examples_runs_by_day(asked: int, fewer: int) -> None:
    usual = settings().max_examples
    try:
        by_day.load(all_of_them=False)
        assert by_day.examples(asked).max_examples == fewer
        by_day.load(all_of_them=True)
        assert by_day.examples(asked).max_examples == asked
    finally:
        by_day.load(all_of_them=usual == by_day.ALL)


def test_what_a_file_takes_is_known_of_its_long_tests_and_its_number_of_others(seconds: Path) -> None:
    seconds.write_text(json.dumps({"tests/test_a.py::test_1": 7.0}))
    names = ["tests/test_b.py::test_1", "tests/test_a.py::test_1", "tests/test_a.py::test_2"]
    assert parts.files_s(names) == {"tests/test_b.py": parts.SHORT_S, "tests/test_a.py": 7.0 + parts.SHORT_S}


def test_what_did_not_run_keeps_its_seconds_and_what_is_gone_or_short_loses_them(seconds: Path) -> None:
    here = "tests/test_parts.py::test_"
    seconds.write_text(json.dumps({f"{here}a": 9.0, f"{here}b": 9.0, "tests/test_gone.py::test_a": 9.0}))
    parts.keep({f"{here}b": 0.2, f"{here}c": 2.04, f"{here}d": 0.9, "tests/live/test_x.py::test_a": 0.31})
    assert json.loads(seconds.read_text()) == {
        f"{here}a": 9.0,
        f"{here}c": 2.0,
        "tests/live/test_x.py::test_a": 0.3,
    }


def test_each_process_of_a_run_deals_alike() -> None:
    """Whatever order the hashes of its strings give to sets."""
    deal = "import json, parts; print(sorted(parts.others(json.loads(parts.SECONDS.read_text()), 1)))"
    dealt = {
        subprocess.run(
            [sys.executable, "-c", deal],
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(parts.__file__).parent)},
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(dealt) == 1
