"""The prose of code, pages and help texts: plain, short sentences in the field's words; paths that exist."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from harness.prose import (
    BANNED_TURNS,
    BARS,
    OLD_WORDS,
    Prose,
    class_of,
    comments,
    documents,
    markdown_prose,
    missed,
    printed_texts,
    prose_of,
    shown_texts,
)
from harness.site import navigation
from tokenfleet.cli.main import VERBS, command_of

ROOT = Path(__file__).parents[1]
ROOMS = ("controlplane", "dataplane", "tokenfleet")
TESTS = ("harness", "tests")
PRODUCT = sorted(path for room in ROOMS for path in (ROOT / room).rglob("*.py"))
COMMENTED = [*PRODUCT, *sorted((ROOT / "harness").rglob("*.py"))]
FIRST_SENTENCE = re.compile(r".+?[.:](?=\s|$)", re.DOTALL)
INDIRECT = ("What", "How", "Which", "Who", "Whose", "Whoever", "Whether", "Where", "When", "Why")
PERSONS = re.compile(r"\b(nobody|whoever|somebody|fate)\b", re.IGNORECASE)
NAMED = re.compile(r"(?<![\w./-])((?:[a-z_0-9]+/)*[a-z_0-9]+\.py)\b")
OUTSIDE = "../" + "shared"
PERCENT_FORMAT = re.compile(r"\{[^{}]*:\.\d%\}")
LITERAL = "    "  # begins a line of an equation, a drawing or an example
DOCSTRING_WORDS = 14.5
SEARCHED = (
    "controlplane", "dataplane", "tokenfleet", "tests", "experiments", "benchmarks", "docs", "deploy",
    "examples", "profiles", "README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile",
)  # fmt: skip


def at(path: Path, faults: Iterable[str]) -> list[str]:
    return [f"{path.relative_to(ROOT)}: {fault}" for fault in faults]


def opening_faults(path: Path) -> Iterator[str]:
    """What is wrong with the first sentence of a module's docstring."""
    docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    sentence = FIRST_SENTENCE.match(docstring)
    if not sentence:
        yield "there is no module docstring, or no full stop or colon ends its first sentence"
        return
    if "\n\n" in sentence.group():
        yield "its first sentence does not end within the first paragraph"
    if sentence.group().split()[0].strip(":.,") in INDIRECT:
        yield "it begins like a question"
    if "?" in sentence.group():
        yield "it is a question"
    if persons := PERSONS.search(docstring):
        yield f"it has a person for a thing: {persons.group()}"


@pytest.mark.parametrize("room", [*ROOMS, *TESTS])
def test_a_module_says_in_a_plain_sentence_what_it_is(room: str) -> None:
    assert [fault for path in (ROOT / room).rglob("*.py") for fault in at(path, opening_faults(path))] == []


def test_a_module_that_does_not_is_found(tmp_path: Path) -> None:
    faults = {
        '"""It counts blocks."""': 0,
        "": 1,
        '"""no end"""': 1,
        '"""What\n\ndoes it do? It counts."""': 3,
        '"""How blocks are counted."""': 1,
        '"""It counts. Nobody looks."""': 1,
    }
    for text, number in faults.items():
        (tmp_path / "made.py").write_text(text)
        assert len(list(opening_faults(tmp_path / "made.py"))) == number, text


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


def commands() -> Iterator[Any]:
    """Every verb and sub-command."""
    left = [command_of(verb) for verb in VERBS.values()]
    while left:
        yield (command := left.pop())
        left += getattr(command, "commands", {}).values()


def options() -> set[str]:
    """Every flag of the command line."""
    return {flag for command in commands() for option in command.params for flag in option.opts}


def help_texts() -> Iterator[str]:
    """The help of every verb, sub-command and option, its examples left out."""
    yield from (verb.help for verb in VERBS.values())
    for command in commands():
        assert command.help, f"{command.name} has no help"
        for paragraph in command.help.replace("\b\n", "").split("\n\n"):
            if not paragraph.startswith(("tokenfleet ", "Examples:")):
                yield paragraph
        yield from (option.help for option in command.params if getattr(option, "help", None))


def test_help_texts_are_short_and_plain() -> None:
    prose = prose_of(dict.fromkeys(help_texts()))
    assert len(prose.paragraphs) > 200
    reads_plainly(prose, sentence=11, paragraph=45)


SHOWN = sorted(
    path
    for end in ("js", "html")
    for path in (ROOT / "tokenfleet").rglob(f"*.{end}")
    if "vendor" not in path.parts
)


@pytest.mark.parametrize("room", ROOMS)
def test_texts_that_people_are_shown_are_plain(room: str) -> None:
    """Answers, errors, events, logs, help of metrics, and the console's and the report's texts."""
    faults: list[str] = []
    for path in [*PRODUCT, *SHOWN]:
        if path.is_relative_to(ROOT / room):
            text = path.read_text(encoding="utf-8")
            texts = list((printed_texts if path.suffix == ".py" else shown_texts)(text))
            faults += at(path, turned(texts))
            faults += at(path, long_sentences(texts) if path.suffix == ".py" else ())
            # A percentage has a space before its sign: 99 %.
            faults += at(path, PERCENT_FORMAT.findall(text))
    assert faults == []


def test_comments_have_no_banned_turns() -> None:
    faults = (at(path, turned(comments(path.read_text(encoding="utf-8")))) for path in COMMENTED)
    assert [one for some in faults for one in some] == []


def long_sentences(texts: Iterable[tuple[int, str]]) -> list[str]:
    """Printed sentences of more than 30 words; a database's tables are none."""
    return [
        f"line {line}: {sentence}"
        for line, text in texts
        if "CREATE TABLE" not in text
        for sentence in prose_of(text.split("\n\n")).long_sentences
    ]


def turned(texts: Iterable[tuple[int, str]]) -> list[str]:
    """Texts with a banned turn or a word given up, code within them left out."""
    return [
        f"line {line}: {text}"
        for line, text in texts
        if any(map(prose_of([text]).matches, (BANNED_TURNS, OLD_WORDS)))
    ]


def docstrings(path: Path) -> Iterator[str]:
    """The paragraphs of the docstrings of a module, and of its public classes and functions."""
    left: list[ast.AST] = [ast.parse(path.read_text(encoding="utf-8"))]
    while left:
        node = left.pop()
        left += (inner for inner in ast.iter_child_nodes(node) if not isinstance(inner, ast.expr))
        if str(getattr(node, "name", "")).startswith("_"):
            continue
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (ast.get_docstring(node) or "").split("\n")
            prose = ("" if line.startswith(LITERAL) else line for line in lines)
            yield from "\n".join(prose).split("\n\n")


@pytest.mark.always
@pytest.mark.parametrize("room", [*ROOMS, *TESTS])
def test_public_docstrings_are_short_sentences_in_the_fields_words(room: str) -> None:
    prose = prose_of(p for path in (ROOT / room).rglob("*.py") for p in docstrings(path))
    assert len(prose.sentences) > 250
    assert prose.words_a_sentence <= DOCSTRING_WORDS
    assert prose.long_sentences == []
    assert prose.matches(BANNED_TURNS) == []
    assert prose.matches(OLD_WORDS) == []


def test_texts_are_found_in_code_and_in_scripts() -> None:
    python = '''
"""What of it."""
key = {"as it is": f"by {'turns'}, {1} of which {2} `so many`"}["as it is"]
raise ValueError("computed anew: " f"{key}")
'''
    assert sorted(turned(printed_texts(python))) == [
        "line 3: by …, … of which … `so many`",
        "line 4: computed anew: …",
    ]
    assert turned(comments("a = 1  # what of it\nb = 'anew'\n")) == ["line 1: what of it"]
    assert len(long_sentences(printed_texts(f"print('{'a word ' * 16}.')"))) == 1
    script = "/** by turns\n so many */\nconst a = 'https://a'; // anew\nconst b = `is told ${a}`;\n"
    assert turned(shown_texts(script)) == ["line 4: const b = 'is told ${a}';"]


def reads_plainly(prose: Prose, sentence: float, paragraph: float) -> None:
    """The limits of our prose: words of a sentence and a paragraph, banned turns, words given up."""
    assert prose.matches(BANNED_TURNS) == []
    assert prose.matches(OLD_WORDS) == []
    assert prose.words_a_sentence <= sentence, f"{prose.words_a_sentence:.1f} words a sentence"
    assert prose.words_a_paragraph <= paragraph, f"{prose.words_a_paragraph:.1f} words a paragraph"
    assert prose.long_share <= 0.03, prose.long_sentences


@pytest.mark.parametrize("name", documents())
def test_a_document_reads_within_the_bars_of_its_class(name: str) -> None:
    prose = markdown_prose((ROOT / name).read_text(encoding="utf-8"))
    over = missed(prose, BARS[class_of(name)])
    assert over == [], [*prose.long_sentences, *prose.matches(BANNED_TURNS), *prose.matches(OLD_WORDS)]


def test_a_page_has_at_most_1500_words() -> None:
    """Also the changelog, of a line a change, and one of the reference."""
    words = {name: len((ROOT / name).read_text(encoding="utf-8").split()) for name in documents()}
    assert {name: number for name, number in words.items() if number > 1500} == {}


def test_the_bars_name_what_a_text_misses() -> None:
    over = missed(markdown_prose("It is " + "so " * 60 + "told by turns; regimes go by."), BARS["guide"])
    assert [line.partition(":")[0] for line in over] == [
        "words a sentence",
        "share of sentences over 30 words",
        "words a paragraph",
        "banned turns a thousand words",
        "old words",
    ]


def test_the_readme_is_one_screen_of_prose_with_two_pictures() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.split()) <= 900
    assert len(text.partition("\n    make demo")[0].split()) <= 90
    assert len(re.findall(r"!\[[^\]]+\]\(", text)) == 2


def test_names_that_the_glossary_keeps_are_in_the_code() -> None:
    rows = re.findall(r"^\|.*\|", (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8"), re.MULTILINE)
    kept = {name for row in rows for name in re.findall(r"`([^`]+)`", row.rsplit("|", 2)[1])}
    assert len(kept) > 30
    known = "\n".join(path.read_text(encoding="utf-8") for path in PRODUCT) + "\n".join(options())
    assert sorted(name for name in kept if name.rstrip("…") not in known) == []


def test_links_of_pages_lead_to_pages_and_headings() -> None:
    listed = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
    dead: list[str] = []
    for page in (ROOT / name for name in listed.stdout.split()):
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            name, _, heading = link.partition("#")
            target = page.parent / name if name else page
            if ":" in link or (target.exists() and (not heading or heading in headings(target))):
                continue
            dead.append(f"{page.relative_to(ROOT)}: {link}")
    assert dead == []


def test_every_document_is_in_the_navigation_of_the_site() -> None:
    """Also without mkdocs: a page that mkdocs.yml lacks is in no menu."""
    assert sorted(name for _, _, name in navigation()) == sorted(documents())


def test_every_guide_has_a_picture() -> None:
    guides = [name for section, _, name in navigation() if section.startswith("Guides")]
    assert len(guides) > 30
    assert [name for name in guides if "![" not in (ROOT / name).read_text(encoding="utf-8")] == []


def headings(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title).lower() for title in titles)
    return {re.sub(r"[^\w\- ]", "", title).strip().replace(" ", "-") for title in plain}
