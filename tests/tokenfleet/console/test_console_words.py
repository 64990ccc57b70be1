"""The words of the console's pages, as they stand in its files."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from checkout import ROOT

from harness.prose import BANNED_TURNS, OLD_WORDS, prose_of

FOLDER = ROOT / "tokenfleet/console/static"
COMMENT = re.compile(r"/\*.*?\*/|(?<![:\"'])//[^\n]*", re.DOTALL)
LITERAL = re.compile(r'"((?:[^"\\\n]|\\.)*)"|`((?:[^`\\]|\\.)*)`')
VALUE = re.compile(r"\$\{[^{}]*\}")
TAG = re.compile(r"<!--.*?-->|<[^>]+>", re.DOTALL)
FILES = sorted(path for path in FOLDER.iterdir() if path.suffix in (".js", ".html"))


def texts(path: Path) -> list[str]:
    """What a person may read of a file: the text of a page, the strings of several words of a script."""
    content = path.read_text(encoding="utf-8")
    if path.suffix == ".html":
        return [line for line in TAG.sub("\n", content).split("\n") if " " in line.strip()]
    found = ["".join(groups) for groups in LITERAL.findall(COMMENT.sub("", content))]
    whole = [VALUE.sub("5", VALUE.sub("5", text)) for text in found]
    return [text for text in whole if re.search(r"[a-z]+ [a-z]+", text)]


def test_texts_are_found_where_there_are_some() -> None:
    told = {path.name: texts(path) for path in FILES}
    assert "Autoscaling stops." in " ".join(told["live.html"])
    assert "5 is more than this API takes, 5; cut it, or plan on a terminal" in " ".join(told["plan_form.js"])
    assert any("Choose the traffic and the targets" in text for text in told["plan.html"])


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_a_page_has_the_words_of_the_field(path: Path) -> None:
    prose = prose_of(texts(path))
    assert prose.matches(BANNED_TURNS) == []
    assert prose.matches(OLD_WORDS) == []
    assert prose.long_sentences == []
