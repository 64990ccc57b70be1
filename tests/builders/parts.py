"""Long tests in parts of equal time. A run takes one part: `pytest --part 2`.

`tests/seconds.json` holds how long tests took when all of them last ran. `pytest --keep-seconds` writes it.
"""

import json
from collections import defaultdict
from collections.abc import Iterable
from itertools import groupby
from operator import itemgetter
from pathlib import Path

PARTS = 10
LONG_S = 1.0
SHORT_S = 0.05  # what a test takes that is not long
ROOT = Path(__file__).parents[2]
SECONDS = ROOT / "tests" / "seconds.json"
# One start of a fleet serves a file of them, so a short one goes with its file.
FLEETS = "tests/live/"
ENGINES = (FLEETS, "tests/rehearsal/")


def file_of(test: str) -> str:
    return test.partition("::")[0]


def others(tests: Iterable[str], part: int) -> set[str]:
    """Long tests that other parts run.

    Tests of a file share fixtures, so a file goes to one part, unless it takes longer than a part should.
    `make quick` leaves out tests that need engines, so the others are dealt by themselves.
    """
    took_s = json.loads(SECONDS.read_text())
    long = [name for name in tests if name in took_s or name.startswith(FLEETS)]
    with_engines = [name for name in long if name.startswith(ENGINES)]
    without = [name for name in long if not name.startswith(ENGINES)]
    return {
        name
        for some in (with_engines, without)  # lists: each process of a run must deal alike
        for name in _others({name: took_s.get(name, 0.1) for name in sorted(some, key=file_of)}, part)
    }


def _others(long_s: dict[str, float], part: int) -> set[str]:
    most_s = sum(long_s.values()) / PARTS
    pieces: list[tuple[float, list[str]]] = []
    for _, names in groupby(long_s, file_of):
        pieces.append((0.0, []))
        for name in names:
            piece_s, piece = pieces[-1]
            if piece and piece_s + long_s[name] > most_s:
                piece_s, piece = 0.0, []
                pieces.append((piece_s, piece))
            piece.append(name)
            pieces[-1] = (piece_s + long_s[name], piece)
    filled_s, found = [0.0] * PARTS, set()
    for piece_s, piece in sorted(pieces, key=itemgetter(0), reverse=True):
        emptiest = filled_s.index(min(filled_s))
        filled_s[emptiest] += piece_s
        if emptiest != part - 1:
            found.update(piece)
    return found


def files_s(tests: Iterable[str]) -> dict[str, float]:
    """What each file of these tests takes, about: a file that begins last keeps one core alone at the end."""
    took_s = json.loads(SECONDS.read_text())
    files: defaultdict[str, float] = defaultdict(float)
    for name in tests:
        files[file_of(name)] += took_s.get(name, SHORT_S)
    return files


def keep(took_s: dict[str, float]) -> None:
    """Write down what took long. What is known of tests that did not run stays."""
    known = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    long = {name: round(s, 1) for name, s in took_s.items() if s >= LONG_S or name.startswith(FLEETS)}
    rest = {name: s for name, s in known.items() if name not in took_s and (ROOT / file_of(name)).exists()}
    SECONDS.write_text(json.dumps(dict(sorted((rest | long).items())), indent=0) + "\n")
