"""Long tests in parts of equal time. A run takes one part: `pytest --part 2`.

`tests/seconds.json` holds how long tests took when all of them last ran. `pytest --keep-seconds` writes it.
"""

import json
from collections.abc import Iterable
from pathlib import Path

PARTS = 5
LONG_S = 1.0
ROOT = Path(__file__).parents[2]
SECONDS = ROOT / "tests" / "seconds.json"
# One start of a fleet serves a file of them, so a short one goes with its file.
FLEETS = "tests/live/"


def others(tests: Iterable[str], part: int) -> set[str]:
    """Long tests that other parts run.

    Tests in the order of their files are cut into pieces, so that what shares fixtures stays together.
    A part has two pieces, one for each of two processes.
    """
    took_s = json.loads(SECONDS.read_text())
    long = {name: took_s.get(name, 0.1) for name in tests if name in took_s or name.startswith(FLEETS)}
    all_s = sum(long.values())
    before_s = 0.0
    found = set()
    for name in sorted(long, key=lambda name: name.partition("::")[0]):
        piece = int(2 * PARTS * (before_s + long[name] / 2) / all_s) if all_s else 0
        before_s += long[name]
        if piece % PARTS != part - 1:
            found.add(name)
    return found


def keep(took_s: dict[str, float]) -> None:
    """Write down what took long. What is known of tests that did not run stays."""
    known = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    long = {name: round(s, 1) for name, s in took_s.items() if s >= LONG_S or name.startswith(FLEETS)}
    rest = {
        name: s
        for name, s in known.items()
        if name not in took_s and (ROOT / name.partition("::")[0]).exists()
    }
    SECONDS.write_text(json.dumps(dict(sorted((rest | long).items())), indent=0) + "\n")
