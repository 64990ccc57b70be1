"""The documentation's site: all pages in its navigation, links that lead somewhere, a list for programs."""

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

from harness.prose import ROOT, documents
from harness.site import copy_pages, llms_txt, mkdocs, navigation


def test_the_list_for_programs_has_every_page_with_a_sentence() -> None:
    lines = [line for line in llms_txt().splitlines() if line.startswith("- [")]
    assert len(lines) == len(navigation())
    assert all(line.partition("): ")[2] for line in lines)


@pytest.mark.always
@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed")
def test_the_site_is_built_without_a_warning_and_a_dead_link_ends_the_build(tmp_path: Path) -> None:
    shutil.copyfile(ROOT / "mkdocs.yml", tmp_path / "mkdocs.yml")
    copy_pages(tmp_path / "build" / "pages")
    done = mkdocs(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert (tmp_path / "build" / "site" / "docs" / "serving" / "index.html").is_file()
    assert len(documents()) > 30

    page = tmp_path / "build" / "pages" / "docs" / "http.md"
    page.write_text(page.read_text() + "\n[gone](gone.md) [no heading](serving.md#no-such-heading)\n")
    done = mkdocs(tmp_path)
    assert done.returncode != 0
    assert "gone.md" in done.stderr
    assert "#no-such-heading" in done.stderr
