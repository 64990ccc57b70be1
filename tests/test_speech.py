"""The table of plain speech, without the site, whose build has a test of its own."""

import pytest

from harness.speech import TERMS, pages, rows_of_prose, shown_options, spoken, without_a_line


@pytest.mark.parametrize("said", ["a worker has a seat", "hand-overs are slow", "it was reclaimed"])
def test_terms_that_gave_way_are_found(said: str) -> None:
    assert TERMS.search(said)


@pytest.mark.parametrize("said", ["--reclaim-notice", "reclaims=0.05", "frontend overhead"])
def test_names_that_stay_are_no_such_terms(said: str) -> None:
    assert not TERMS.search(said)


@pytest.mark.always
def test_no_term_outside_the_glossary_is_read() -> None:
    assert spoken(pages()).matches(TERMS) == []


def test_every_class_of_pages_is_within_its_bars() -> None:
    assert [row for row in rows_of_prose(pages()) if not row.is_met] == []


def test_plan_shows_a_dozen_options_and_the_reference_has_them_all() -> None:
    assert 10 <= shown_options("plan") <= 15
    assert without_a_line() == 0
