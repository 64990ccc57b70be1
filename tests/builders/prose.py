"""How texts read: sentences and their words, paragraphs, banned turns and old words.

Of a Markdown page only prose counts: code, tables, headings, pictures and comments are left out. An item of a
list is a paragraph of its own. A link counts as its text, and code within a sentence as its words.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

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
        return self._words / len(self.sentences)

    @property
    def words_a_paragraph(self) -> float:
        return self._words / len(self.paragraphs)

    @property
    def long_sentences(self) -> list[str]:
        return [s for s in self.sentences if words_of(s) > LONG_SENTENCE_WORDS]

    @property
    def long_share(self) -> float:
        return len(self.long_sentences) / len(self.sentences)

    def matches(self, pattern: re.Pattern[str]) -> list[str]:
        """The sentences in which a pattern matches, code left out."""
        return [s for s in self.sentences if pattern.search(_CODE.sub("", s))]

    @property
    def _words(self) -> int:
        return sum(words_of(sentence) for sentence in self.sentences)


def prose_of(paragraphs: Iterable[str]) -> Prose:
    """Paragraphs, and their sentences: each ends with a full stop, `!`, `?`, or its paragraph."""
    kept = tuple(" ".join(p.split()) for p in paragraphs if words_of(p))
    sentences = (s for p in kept for s in _SENTENCE_END.sub("\\g<0>\n", p).split("\n"))
    return Prose(kept, tuple(s.strip() for s in sentences if words_of(s)))


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


def words_of(text: str) -> int:
    """Words: what has a letter or a digit, between spaces."""
    return len(_WORD.findall(text))
