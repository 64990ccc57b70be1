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
def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    shutil.copyfile(ROOT / "mkdocs.yml", tmp_path / "mkdocs.yml")
    copy_pages(tmp_path / "build" / "pages")
    done = mkdocs(tmp_path)
    assert done.returncode == 0, done.stderr
    assert "WARNING" not in done.stderr
    assert (tmp_path / "build" / "site" / "docs" / "serving" / "index.html").is_file()
    assert len(documents()) > 30


@pytest.mark.skipif(find_spec("mkdocs") is None, reason="mkdocs is not installed")
def test_a_dead_link_ends_the_build(tmp_path: Path) -> None:
    """A site of two pages, by the settings of ours."""
    settings, menu, _ = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")
    assert menu
    (tmp_path / "mkdocs.yml").write_text(settings, encoding="utf-8")
    (pages := tmp_path / "build" / "pages").mkdir(parents=True)
    (pages / "serving.md").write_text("# Serving\n\n## A heading\n")
    links = "[there](serving.md#a-heading) [gone](gone.md) [no heading](serving.md#no-such-heading)"
    (pages / "index.md").write_text(f"# Start\n\n{links}\n")
    done = mkdocs(tmp_path)
    assert done.returncode != 0
    assert "gone.md" in done.stderr
    assert "#no-such-heading" in done.stderr
    assert done.stderr.count("WARNING") == 2, done.stderr  # and nothing else ended it
