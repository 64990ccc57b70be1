"""Measures of how texts read: sentences and their words, paragraphs, banned turns and old words.

Of a Markdown page only prose counts: code, tables, headings, pictures and comments are left out. An item of a
list is a paragraph of its own. A link counts as its text, and code within a sentence as its words.

Of code, literals with a space count: what a program may print. Docstrings and keys of mappings are left out.

python -m harness.prose              prints the figures of every document, and of each class
"""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tokenize import COMMENT, generate_tokens

ROOT = Path(__file__).parents[1]
LONG_SENTENCE_WORDS = 30
BANNED_TURNS = re.compile(
    r"\b((is|are|was|were) (told|said)|says? of|what of (it|them)|by turns|so many|but for|(as|than) it is"
    r"|go(es)? by|of which|might have been|nobody|whoever|besides?|shall|anew|have a place"
    r"|of late(?!\s+\w))\b",
    re.IGNORECASE,
)
# Given up for the field's words, which docs/glossary.md has. JSON, metrics and flags keep some, in code font.
OLD_WORDS = re.compile(
    r"\b(worlds?|replicates?|doubts?|knees?|clairvoyants?|regimes?|freeness|ladders?|reliefs?|spares?)\b",
    re.IGNORECASE,
)

_LEFT_OUT = re.compile(r"<!--.*?-->|^```.*?^```", re.DOTALL | re.MULTILINE)
_COMMENT = re.compile(r"/\*.*?\*/|<!--.*?-->|(?:(?<=\s)|^)//[^\n]*", re.DOTALL | re.MULTILINE)
_PICTURE = re.compile(r"!\[[^\]]*\]\([^)]*\)")
_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_ITEM = re.compile(r"\s*(?:[-*]|\d+\.)\s+")
_SENTENCE_END = re.compile(r"[.!?][)\"'*_`]*(?=\s|$)")
_CODE = re.compile(r"`[^`]*`")
_WORD = re.compile(r"\S*[^\W_]\S*")


@dataclass(frozen=True, slots=True)
class Prose:
    """What was counted in the paragraphs of a text."""

    paragraphs: tuple[str, ...]
    sentences: tuple[str, ...]

    @property
    def words_a_sentence(self) -> float:
        return self.words / max(len(self.sentences), 1)

    @property
    def words_a_paragraph(self) -> float:
        return self.words / max(len(self.paragraphs), 1)

    @property
    def long_sentences(self) -> list[str]:
        return [s for s in self.sentences if words_of(s) > LONG_SENTENCE_WORDS]

    @property
    def long_share(self) -> float:
        return len(self.long_sentences) / max(len(self.sentences), 1)

    def matches(self, pattern: re.Pattern[str]) -> list[str]:
        """The sentences in which a pattern matches, code left out."""
        return [s for s in self.sentences if pattern.search(_CODE.sub("", s))]

    @property
    def words(self) -> int:
        return sum(words_of(sentence) for sentence in self.sentences)


def prose_of(paragraphs: Iterable[str]) -> Prose:
    """Paragraphs, and their sentences: each ends with a full stop, `!`, `?`, or its paragraph."""
    kept = tuple(" ".join(p.split()) for p in paragraphs if _WORD.search(p))
    sentences = (s for p in kept for s in _SENTENCE_END.sub("\\g<0>\n", p).split("\n"))
    return Prose(kept, tuple(s.strip() for s in sentences if _WORD.search(s)))


def markdown_prose(text: str) -> Prose:
    """The prose of a Markdown page."""
    paragraphs: list[str] = []
    lines: list[str] = []
    in_list = False
    for line in [*_LEFT_OUT.sub("", text).split("\n"), ""]:
        is_item = bool(_ITEM.match(line))
        is_code = line.startswith("    ") and not lines and not in_list
        if not line.strip() or is_item or is_code or line.startswith(("#", "|")):
            paragraphs.append(" ".join(lines))
            lines = []
        if is_item:
            in_list = True
        elif line.strip() and not line.startswith(" ") and not lines:
            in_list = False
        if line.strip() and not is_code and not line.startswith(("#", "|")):
            lines.append(_ITEM.sub("", line, count=1) if is_item else line)
    return prose_of(_LINK.sub(r"\1", _PICTURE.sub("", p)).replace("> ", "") for p in paragraphs)


def printed_texts(source: str) -> Iterator[tuple[int, str]]:
    """Texts with a space in a Python module, each with its line: no docstring, and no key of a mapping."""
    nodes = list(ast.walk(ast.parse(source)))
    left_out: set[ast.AST] = set()
    for node in nodes:
        if isinstance(node, ast.Expr):
            left_out.add(node.value)
        elif isinstance(node, ast.Dict):
            left_out.update(key for key in node.keys if key is not None)
        elif isinstance(node, ast.Subscript):
            left_out.add(node.slice)
        elif isinstance(node, ast.JoinedStr):
            left_out.update(node.values)
    for node in nodes:
        text = ""
        if isinstance(node, ast.JoinedStr):
            text = "".join(str(p.value) if isinstance(p, ast.Constant) else "…" for p in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node not in left_out:
            text = node.value
        if isinstance(node, ast.expr) and " " in text.strip():
            yield node.lineno, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """The comments of a Python module, each with its line."""
    for token in generate_tokens(StringIO(source).readline):
        if token.type == COMMENT:
            yield token.start[0], token.string.lstrip("# ")


def shown_texts(source: str) -> Iterator[tuple[int, str]]:
    """Lines of a page's script or markup, each with its number; comments left out, templates as texts."""
    without = _COMMENT.sub(lambda found: "\n" * found.group().count("\n"), source.replace("`", "'"))
    yield from ((i, line) for i, line in enumerate(without.split("\n"), 1) if line.strip())


def words_of(text: str) -> int:
    """Words: what has a letter or a digit, between spaces."""
    return len(_WORD.findall(text))


@dataclass(frozen=True, slots=True)
class Bars:
    """The most that a class of documents may have."""

    words_a_sentence: float
    long_share: float
    words_a_paragraph: float = 50
    banned_a_thousand_words: float = 0.5


README, GUIDE, REFERENCE = "README", "guide", "reference and explanation"
BARS = {README: Bars(14, 0.03), GUIDE: Bars(16, 0.04), REFERENCE: Bars(18, 0.06)}
EXPLANATIONS = (
    "ARCHITECTURE.md", "CHANGELOG.md", "docs/accuracy", "docs/data", "docs/decisions", "docs/engine",
    "docs/evidence", "docs/figures", "docs/glossary", "docs/limits", "docs/reference/", "profiles/",
)  # fmt: skip


def class_of(name: str) -> str:
    """The class of a document, by its path in the repository."""
    if name == "README.md":
        return README
    return REFERENCE if name.startswith(EXPLANATIONS) else GUIDE


def documents(root: Path = ROOT) -> list[str]:
    """The Markdown files that git tracks; forms of `.github` are no documents."""
    command = ["git", "ls-files", "*.md"]
    listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True)
    return [name for name in listed.stdout.split() if not name.startswith(".") and (root / name).exists()]


def missed(prose: Prose, bars: Bars) -> list[str]:
    """The bars that a text misses, each with its figure."""
    banned = 1000 * len(prose.matches(BANNED_TURNS)) / max(prose.words, 1)
    figures = (
        ("words a sentence", prose.words_a_sentence, bars.words_a_sentence),
        ("share of sentences over 30 words", prose.long_share, bars.long_share),
        ("words a paragraph", prose.words_a_paragraph, bars.words_a_paragraph),
        ("banned turns a thousand words", banned, bars.banned_a_thousand_words),
        ("old words", len(prose.matches(OLD_WORDS)), 0),
    )
    return [f"{name}: {value:.3g}, at most {bar:g}" for name, value, bar in figures if value > bar]


def row_of(name: str, prose: Prose) -> str:
    """A line of the table."""
    banned = 1000 * len(prose.matches(BANNED_TURNS)) / max(prose.words, 1)
    return (
        f"{name:38} {prose.words:6} {prose.words_a_sentence:9.1f} {100 * prose.long_share:8.1f}"
        f" {prose.words_a_paragraph:10.1f} {banned:7.2f} {len(prose.matches(OLD_WORDS)):6}"
    )


def main() -> None:
    """Print the figures of every document, and of each class."""
    print(f"{'':38}  words  /sentence  > 30 %  /paragraph  banned    old")
    by_class: dict[str, list[str]] = {name: [] for name in BARS}
    for name in documents():
        text = (ROOT / name).read_text(encoding="utf-8")
        by_class[class_of(name)].append(text)
        print(row_of(name, markdown_prose(text)))
    for name, texts in by_class.items():
        print(row_of(name.upper(), markdown_prose("\n\n".join(texts))))


if __name__ == "__main__":
    main()
