"""The reference pages are made from the code: what is in it and not on them is missing, or the other way."""

import pytest

from harness.reference import FOLDER, PAGES


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_says(name):
    made = PAGES[name]()
    assert (FOLDER / name).read_text(encoding="utf-8") == made, "make reference writes the page again"
    assert "/root" not in made
    assert "/home/" not in made


def test_every_page_of_the_folder_is_made():
    assert {path.name for path in FOLDER.iterdir()} == set(PAGES)


def test_every_metric_and_option_has_a_meaning():
    for name in ("metrics.md", "cli.md"):
        rows = [line for line in PAGES[name]().splitlines() if line.startswith("| `")]
        assert len(rows) > 30
        assert [row for row in rows if row.rstrip("| ").endswith("`")] == []
