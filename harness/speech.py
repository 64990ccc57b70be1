"""The table of plain speech: each figure of how the product speaks, with its bar.

python -m harness.speech             prints it; exit code 1 where a bar is missed. A minute, for the site

The terms are those that the field's words replaced; the glossary lists each. Words of plain English
among them ("kind", "share", "line", "text") cannot be counted apart from their plain use, and are left out.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.prose import (
    BANNED_TURNS,
    BARS,
    OLD_WORDS,
    ROOT,
    Prose,
    class_of,
    documents,
    markdown_prose,
    printed_texts,
    prose_of,
    shown_texts,
)
from harness.reference import AREAS, FOLDER
from harness.site import copy_pages, mkdocs
from tokenfleet.cli.main import VERBS, command_of

ROOMS = ("controlplane", "dataplane", "tokenfleet")
TERMS = re.compile(
    r"(?<![-\w])(reclaim(ed|ing)?|on the trace as it is|what binds|worker lines?|demand lines?"
    r"|composed profiles?|carried doubt|variants? of workers?|wanted workers|heard from|silent workers?"
    r"|mirrors?(?! the packages)|hand-?overs?|seats?|attained (here|there)|passed over|circumstances?"
    r"|frontends?(?! overhead|:))(?![-\w])",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Row:
    """A figure and the most (or fewest) that it may be."""

    name: str
    value: float
    bar: float
    least: bool = False

    @property
    def is_met(self) -> bool:
        return self.value >= self.bar if self.least else self.value <= self.bar


def pages() -> dict[str, str]:
    """Every document by its path."""
    return {name: (ROOT / name).read_text(encoding="utf-8") for name in documents()}


def rows_of_prose(texts: dict[str, str]) -> Iterator[Row]:
    """Sentences, paragraphs and banned turns, by class."""
    for name, bars in BARS.items():
        prose = markdown_prose("\n\n".join(text for path, text in texts.items() if class_of(path) == name))
        banned = 1000 * len(prose.matches(BANNED_TURNS)) / prose.words
        yield Row(f"{name}: mean words a sentence", prose.words_a_sentence, bars.words_a_sentence)
        yield Row(f"{name}: sentences over 30 words, %", 100 * prose.long_share, 100 * bars.long_share)
        yield Row(f"{name}: words a paragraph", prose.words_a_paragraph, bars.words_a_paragraph)
        yield Row(f"{name}: banned turns a thousand words", banned, bars.banned_a_thousand_words)
    paragraphs = (markdown_prose(text).words_a_paragraph for text in texts.values())
    yield Row("words a paragraph, the page with most", max(paragraphs), 50)


def spoken(texts: dict[str, str]) -> Prose:
    """All that people read: pages, what is printed, the console's pages."""
    read = [paragraph for text in texts.values() for paragraph in markdown_prose(text).paragraphs]
    for room in ROOMS:
        for path in sorted((ROOT / room).rglob("*")):
            if path.suffix in (".py", ".js", ".html") and "vendor" not in path.parts:
                find = printed_texts if path.suffix == ".py" else shown_texts
                read += [text for _, text in find(path.read_text(encoding="utf-8"))]
    return prose_of(read)


def shown_options(verb: str) -> int:
    """The options that `--help` of a verb shows."""
    command: Any = command_of(VERBS[verb])
    with command.make_context(verb, [], resilient_parsing=True) as context:
        text = str(command.get_help(context))
    return len(re.findall(r"^  (--[a-z-]+) (?=<| {2,})", text, re.MULTILINE))


def without_a_line() -> int:
    """Options, metrics and fields without a meaning, and pages that are not what the code says."""
    made = {area: make() for area, make in AREAS.items()}
    texts = {name: text for pages in made.values() for name, text in pages.items()}
    old = sum((FOLDER / name).read_text(encoding="utf-8") != text for name, text in texts.items())
    empty = 0
    for area, pages in made.items():
        rows = [line for text in pages.values() for line in text.splitlines() if line.startswith("| `")]
        if area in ("metrics", "cli"):
            empty += sum(row.rstrip("| ").endswith("`") for row in rows)
        else:
            cells = (row.split("|") for row in rows)
            empty += sum(not row[3].strip() for row in cells if len(row) == 6)
    return old + empty


def site_faults() -> int:
    """Warnings of the site's strict build, which has dead links among them."""
    with tempfile.TemporaryDirectory() as folder:
        copy_pages(Path(folder) / "build" / "pages")
        (Path(folder) / "mkdocs.yml").write_bytes((ROOT / "mkdocs.yml").read_bytes())
        done = mkdocs(Path(folder))
    return done.stderr.count("WARNING") + done.stderr.count("ERROR") + (done.returncode != 0)


def table() -> Iterator[Row]:
    """Every row of the table."""
    texts = pages()
    readme, speech = texts["README.md"], spoken(texts)
    yield from rows_of_prose(texts)
    yield Row(
        "README: words before the first command", len(readme.partition("\n    make demo")[0].split()), 90
    )
    yield Row("README: words", len(readme.split()), 900)
    yield Row("README: pictures", len(re.findall(r"!\[[^\]]+\]\(", readme)), 2, least=True)
    tracked = subprocess.run(["git", "ls-files", "docs/pictures"], cwd=ROOT, capture_output=True, text=True)
    pictures = [name for name in tracked.stdout.split() if name.endswith((".svg", ".png"))]
    yield Row("pictures", len(pictures), 8, least=True)
    terms = {*speech.matches(TERMS), *speech.matches(OLD_WORDS)}
    yield Row("terms outside the glossary or the field's", len(terms), 0)
    yield Row("options shown by plan --help", shown_options("plan"), 15)
    yield Row("public names without a line in the reference", without_a_line(), 0)
    yield Row("words of the longest page", max(len(text.split()) for name, text in texts.items()), 1500)
    yield Row("site: warnings and dead links", site_faults(), 0)


def main() -> int:
    """Print the table; 1 where a bar is missed."""
    rows = list(table())
    for row in rows:
        sign = ">=" if row.least else "<="
        print(f"{row.name:58} {row.value:8.1f}  {sign} {row.bar:g}{'' if row.is_met else '  MISSED'}")
    return 0 if all(row.is_met for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
