"""The progress bar of a plan says which fleet it has found before it looks for reasons."""

from __future__ import annotations

from tests.builders.made_types import made_type
from tokenfleet.planning.fleet import of_one_kind
from tokenfleet.report.progress import progress_bar


def test_a_person_who_waits_is_told_the_fleet_before_its_reasons(capsys):
    kind = made_type("made", 2.69)
    with progress_bar(is_shown=True) as watch:
        watch.found(of_one_kind(kind, 3, 0.5))
    assert "3x made TP1, $8.07/h, meets the target." in capsys.readouterr().err
    with progress_bar(is_shown=False) as watch:
        watch.found(of_one_kind(kind, 3, 0.5))
    assert "meets" not in capsys.readouterr().err
