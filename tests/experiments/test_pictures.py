"""The pictures of the documentation: there, small, linked, and drawn from the figures that they show."""

from __future__ import annotations

import csv
import importlib.util
import re
from pathlib import Path

import pytest
from checkout import ROOT

from experiments.planning.six_cases import CASES

FOLDER = ROOT / "docs/pictures"
PICTURES = (
    "architecture.svg", "console-live.png", "console-plan.png", "move-timeline.svg", "planned-needed.svg",
    "report.png",
)  # fmt: skip
DRAWN = [name for name in PICTURES if name.endswith(".svg")]
PAGES = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")]
LINK = re.compile(r"(?:\]\(|src(?:set)?=\")([^)\"\s]+)")
MOST_BYTES = 300_000


def linked() -> set[Path]:
    """Every file that a page of the documentation links to."""
    return {
        (page.parent / target.split("#")[0]).resolve()
        for page in PAGES
        for target in LINK.findall(page.read_text(encoding="utf-8"))
        if "://" not in target
    }


def test_every_picture_is_shown_on_a_page_and_small() -> None:
    shown = linked()
    assert sorted(p.name for p in FOLDER.iterdir() if p.suffix in (".svg", ".png")) == sorted(PICTURES)
    for name in PICTURES:
        assert FOLDER / name in shown, f"no page shows {name}"
        assert 2_000 < (FOLDER / name).stat().st_size <= MOST_BYTES


@pytest.mark.parametrize("name", DRAWN)
def test_a_drawing_is_what_its_data_give(name: str) -> None:
    spec = importlib.util.spec_from_file_location("draw", ROOT / "examples/pictures/draw.py")
    assert spec is not None
    assert spec.loader is not None
    draw = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(draw)
    assert draw.drawings()[name] == (FOLDER / name).read_text(encoding="utf-8"), "make pictures draws another"


def test_the_planned_and_needed_gpus_are_those_of_the_experiment() -> None:
    with (FOLDER / "six_plans.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    figures = [(int(r["planned_gpus"]), float(r["planned_attained"]), int(r["needed_gpus"])) for r in rows]
    assert sorted(figures) == sorted((c.their_gpus, c.their_attainment, c.needed_there) for c in CASES)
    (total,) = re.findall(r"six plans\]\(#six-plans\).*?\| (\d+) \|", (ROOT / "docs/figures.md").read_text())
    assert sum(int(r["sure_gpus"]) for r in rows) == int(total)
