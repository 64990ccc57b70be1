"""A long experiment that was stopped goes on with the parts that it has not finished."""

import math

import pytest

from experiments.lib.results import flags
from experiments.lib.resume import Parts


def square(parts, names, stop_at=None):
    """Squares, part by part; `made` are the parts that were computed now."""
    made = []

    def work(n):
        if n == stop_at:
            raise KeyboardInterrupt
        made.append(n)
        return n * n

    found = [parts.part(f"part {n}", lambda n=n: work(n)) for n in names]
    return found, made


def test_a_run_that_was_interrupted_goes_on_where_it_stopped(tmp_path):
    parts = Parts(tmp_path / "folder")
    with pytest.raises(KeyboardInterrupt):
        square(parts, range(5), stop_at=3)
    assert square(parts, range(5)) == ([0, 1, 4, 9, 16], [3, 4])
    assert square(parts, range(5)) == ([0, 1, 4, 9, 16], [])


def test_a_part_that_was_not_written_to_its_end_is_made_again(tmp_path):
    (tmp_path / "part_0.part").write_text('{"half of')
    assert square(Parts(tmp_path), range(1)) == ([0], [0])


def test_without_a_folder_nothing_is_kept():
    assert square(Parts(), range(2)) == ([0, 1], [0, 1])
    assert square(Parts(), range(2)) == ([0, 1], [0, 1])


def test_parts_come_back_as_they_were_written(tmp_path):
    made = {"s": [1.5, math.inf], "name": "a/b c", "none": None}
    parts = Parts(tmp_path)
    assert parts.read("a/b c") is None
    assert parts.write("a/b c", made) == made
    assert parts.read("a/b c") == made


def test_the_flag_names_the_folder(tmp_path):
    parser = flags("says", resumes=True)
    assert parser.parse_args(["--resume", str(tmp_path)]).resume == Parts(tmp_path)
    assert parser.parse_args([]).resume == Parts()
