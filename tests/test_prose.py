"""The prose of the code: module docstrings are plain sentences, and no path leads out of the repository."""

from __future__ import annotations

import ast
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PRODUCT = sorted(
    path for room in ("controlplane", "dataplane", "tokenfleet") for path in (ROOT / room).rglob("*.py")
)
FIRST_SENTENCE = re.compile(r".+?[.:](?=\s|$)", re.DOTALL)
INDIRECT = ("What", "How", "Which", "Who", "Whose", "Whoever", "Whether", "Where", "When", "Why")
PERSONS = re.compile(r"\b(nobody|whoever|somebody|fate)\b", re.IGNORECASE)
NAMED = re.compile(r"(?<![\w./-])((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)\b")
OUTSIDE = "../" + "shared"
SEARCHED = (
    "controlplane", "dataplane", "tokenfleet", "tests", "experiments", "benchmarks", "docs", "deploy",
    "examples", "profiles", "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile",
)  # fmt: skip


@pytest.mark.parametrize("path", PRODUCT, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_module_says_in_a_plain_sentence_what_it_is(path: Path) -> None:
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert docstring, "there is no module docstring"
    sentence = FIRST_SENTENCE.match(docstring)
    assert sentence, "its first sentence ends neither with a full stop nor with a colon"
    assert "\n\n" not in sentence.group(), "its first sentence does not end within the first paragraph"
    assert sentence.group().split()[0].strip(":.,") not in INDIRECT, "it begins like a question"
    assert "?" not in sentence.group(), "it is a question"
    persons = PERSONS.search(docstring)
    assert not persons, f"it has a person for a thing: {persons and persons.group()}"


def test_no_file_looks_for_data_outside_of_the_repository() -> None:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *SEARCHED], cwd=ROOT, capture_output=True, text=True, check=True
    )
    paths = [ROOT / name for name in listed.stdout.split("\0") if name]
    assert paths
    texts = ((path, path.read_text(encoding="utf-8", errors="ignore")) for path in paths if path.is_file())
    found = [str(path.relative_to(ROOT)) for path, text in texts if OUTSIDE in text]
    assert found == []


def test_a_module_that_the_prose_names_is_there() -> None:
    """Also in documents: `placement/ledger.py`, `docs/engine.md`."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    names = [name for name in listed.stdout.split("\0") if name]
    there = {"/".join(parts[i:]) for parts in (name.split("/") for name in names) for i in range(len(parts))}
    documents = [ROOT / name for name in names if name.endswith(".md")]
    missing = [
        f"{path.relative_to(ROOT)}: {named}"
        for path in [*PRODUCT, *documents]
        for named in NAMED.findall(path.read_text(encoding="utf-8"))
        if named not in there
    ]
    assert missing == []
