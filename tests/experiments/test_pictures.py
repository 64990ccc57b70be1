"""The pictures of the documentation: there, small, linked, and drawn from the figures that they show."""

from __future__ import annotations

import csv
import importlib
import json
import re
from pathlib import Path

import pytest
from checkout import ROOT

from experiments.planning.six_cases import CASES

FOLDER = ROOT / "docs/pictures"
SCRIPTS = ROOT / "examples/pictures"
TAKEN = ("console-live.png", "console-plan.png", "report.png")
DRAWN = ("architecture.svg", "move-timeline.svg", "planned-needed.svg")
GUIDES = sorted(ROOT.glob("docs/guides/*.md"))
OTHERS = [
    ROOT / f"docs/{name}.md" for name in ("advise", "first-plan", "planning", "python", "scorecard", "traces")
]
PICTURE = re.compile(r"!\[([^\]]*)\]\(([^)\s]+)\)")
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")]
LINK = re.compile(r"(?:\]\(|src(?:set)?=\")([^)\"\s]+)")
MOST_BYTES = {".png": 300_000, ".svg": 60_000}


@pytest.fixture(autouse=True)
def scripts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(SCRIPTS))


def made() -> list[str]:
    """The names of all pictures that the scripts make."""
    recorded = [f"terminal-{name}.svg" for name in importlib.import_module("terminal").TAKES]
    return [*TAKEN, *DRAWN, *recorded, *importlib.import_module("guides").GUIDES]


def linked() -> set[Path]:
    """Every file that a page of the documentation links to."""
    return {
        (page.parent / target.split("#")[0]).resolve()
        for page in PAGES
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if "://" not in target
    }


def test_every_picture_is_made_by_a_script_shown_on_a_page_and_small() -> None:
    shown = linked()
    names = sorted(path.name for path in FOLDER.iterdir() if path.suffix in MOST_BYTES)
    assert names == sorted(made())
    for name in names:
        path = FOLDER / name
        assert path in shown, f"no page shows {name}"
        assert 1_500 < path.stat().st_size <= MOST_BYTES[path.suffix]
    for name in re.findall(r"def take_(\w+)", (SCRIPTS / "take.py").read_text(encoding="utf-8")):
        assert any(name in taken for taken in TAKEN)
    for script in ("take.py", "draw.py", "terminal.py"):
        assert f"pictures/{script}" in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("page", [*GUIDES, *OTHERS], ids=lambda page: page.stem)
def test_a_guide_has_a_picture_that_is_there(page: Path) -> None:
    pictures = PICTURE.findall(page.read_text(encoding="utf-8"))
    assert pictures
    for _, target in pictures:
        assert (page.parent / target).resolve().is_file()


def test_pictures_have_words_for_people_who_cannot_see_them() -> None:
    short = [
        (page.name, words)
        for page in PAGES
        for words, _ in PICTURE.findall(page.read_text(encoding="utf-8"))
        if len(words.split()) < 5
    ]
    assert short == []


@pytest.mark.parametrize("name", DRAWN)
def test_a_drawing_is_what_its_data_give(name: str) -> None:
    draw = importlib.import_module("draw")
    assert draw.drawings()[name] == (FOLDER / name).read_text(encoding="utf-8"), "make pictures draws another"


def test_a_guides_drawing_is_what_its_script_draws() -> None:
    for name, drawn in importlib.import_module("guides").GUIDES.items():
        assert drawn() == (FOLDER / name).read_text(encoding="utf-8"), "draw.py draws another"


def test_a_recording_is_of_real_output_and_its_picture_shows_its_last_screen() -> None:
    terminal = importlib.import_module("terminal")
    casts = sorted(path.stem for path in FOLDER.glob("*.cast"))
    assert casts == sorted(f"terminal-{name}" for name in terminal.TAKES)
    for name in casts:
        header, *lines = (FOLDER / f"{name}.cast").read_text(encoding="utf-8").splitlines()
        head, events = json.loads(header), [json.loads(line) for line in lines]
        assert (head["version"], head["width"]) == (2, terminal.COLUMNS)
        assert [at for at, _, _ in events] == sorted(at for at, _, _ in events)
        screen = terminal.Screen()
        for _, kind, output in events:
            assert kind == "o"
            screen.write(output)
        assert terminal.svg(screen, head["title"]) == (FOLDER / f"{name}.svg").read_text(encoding="utf-8")


def test_a_screen_follows_what_a_program_overwrites() -> None:
    screen = importlib.import_module("screen").Screen()
    screen.write("one\r\ntwo\r\x1b[2K\x1b[1A\x1b[2Kthree\r\n\x1b[1;32mfour\x1b[0m five\r\n$ ")
    lines = screen.lines()
    assert ["".join(char for char, _ in line) for line in lines] == ["three", "four five"]
    assert lines[1][0][1] != lines[1][-1][1]


def test_the_planned_and_needed_gpus_are_those_of_the_experiment() -> None:
    with (FOLDER / "six_plans.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    figures = [(int(r["planned_gpus"]), float(r["planned_attained"]), int(r["needed_gpus"])) for r in rows]
    assert sorted(figures) == sorted((c.their_gpus, c.their_attainment, c.needed_there) for c in CASES)
    (total,) = re.findall(
        r"six plans\]\(#six-plans\).*?\| (\d+) \|", (ROOT / "docs/figures/plans.md").read_text()
    )
    assert sum(int(r["sure_gpus"]) for r in rows) == int(total)
