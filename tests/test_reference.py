"""The reference pages are made from the code: what is in it and not on them is missing, or the other way."""

import re
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import BaseModel

from dataplane.http.keys import KeyRing
from dataplane.http.server import Extension
from dataplane.live.control.api import control_app
from harness.reference import AREAS, FOLDER
from tokenfleet.cli.main import VERBS, command_of
from tokenfleet.planning import plan_file
from tokenfleet.service.app import plan_app
from tokenfleet.service.routes import plan_router

ROOT = Path(__file__).parents[1]


@cache
def made(area):
    """The pages of an area as the code makes them now."""
    return AREAS[area]()


def rows_of(area):
    """The rows of its tables that begin with code."""
    return [line for text in made(area).values() for line in text.splitlines() if line.startswith("| `")]


@pytest.mark.parametrize("area", AREAS)
def test_a_page_is_what_the_code_says(area):
    for name, text in made(area).items():
        assert (FOLDER / name).read_text(encoding="utf-8") == text, "make reference writes the page again"
        assert "/root" not in text
        assert "/home/" not in text


def test_every_page_of_the_folder_is_made():
    there = {path.relative_to(FOLDER).as_posix() for path in FOLDER.rglob("*") if path.is_file()}
    assert there == {name for area in AREAS for name in made(area)}


def test_the_first_page_of_an_area_leads_to_its_others():
    for area in AREAS:
        others = {*made(area)} - {f"{area}.md"}
        assert {name for name in others if f"]({name}" not in made(area)[f"{area}.md"]} == set()


def test_every_metric_and_option_has_a_meaning():
    for area in ("metrics", "cli"):
        assert len(rows_of(area)) > 30
        assert [row for row in rows_of(area) if row.rstrip("| ").endswith("`")] == []


@pytest.mark.parametrize("area", ["http", "plan-json"])
def test_every_field_of_a_document_has_a_meaning(area):
    rows = [line.split("|") for line in rows_of(area)]
    fields = [row for row in rows if len(row) == 6]  # name, type, meaning, whether it may be absent
    assert len(fields) > 100
    assert [row[1] for row in fields if not row[3].strip()] == []


def first_cells(area):
    """The code at the beginning of the rows of an area's pages."""
    return {row.split("`")[1] for row in rows_of(area)}


def test_every_public_option_has_a_line():
    listed = {word.strip(",") for cell in first_cells("cli") for word in cell.split()}
    left, missing = [command_of(verb) for verb in VERBS.values()], []
    while left:
        command = left.pop()
        left += getattr(command, "commands", {}).values()
        public = (one for one in command.params if one.name != "help" and not getattr(one, "hidden", False))
        flags = {flag for one in public for flag in one.opts if flag.startswith("--")}
        missing += sorted(flags - listed)
    assert missing == []


def test_every_metric_that_the_code_names_has_a_line():
    """By the names in the sources, so that a collector which the page's maker does not know is found."""
    code = [path for room in ("dataplane", "tokenfleet") for path in (ROOT / room).rglob("*.py")]
    texts = (text for path in code if "prometheus_client" in (text := path.read_text(encoding="utf-8")))
    named = {name for text in texts for name in re.findall(r'"(tokenfleet_[a-z_]+[a-z])"', text)}
    assert len(named) > 30
    plain = {re.sub(r"_(total|bucket|sum|count)$", "", name) for name in named}
    assert sorted(plain - first_cells("metrics")) == []


def test_every_field_of_an_http_body_and_of_the_plan_has_a_line():
    nothing = SimpleNamespace()
    apps = (
        control_app(nothing, KeyRing([])),
        plan_app(KeyRing([]), [Extension(routers=[plan_router(nothing)])]),
    )
    bodies = [body for app in apps for body in app.openapi()["components"]["schemas"].values()]
    fields = {field for body in bodies for field in body.get("properties", ())}
    assert len(fields) > 100
    assert sorted(fields - first_cells("http") - first_cells("plan-json")) == []
    parts = [part for part in vars(plan_file).values() if isinstance(part, type)]
    models = [part.model_fields for part in parts if issubclass(part, BaseModel)]
    known = {field.alias or name for fields in models for name, field in fields.items()}
    assert sorted(known - first_cells("plan-json")) == []


def test_the_page_of_versions_lists_every_document():
    packages = [ROOT / name for name in ("controlplane", "dataplane", "tokenfleet")]
    code = "".join(path.read_text(encoding="utf-8") for at in packages for path in at.rglob("*.py"))
    of_code = set(re.findall(r'"(tokenfleet\.[a-z-]+/\d+)"', code))
    page = (ROOT / "docs/versions.md").read_text(encoding="utf-8")
    assert set(re.findall(r"tokenfleet\.[a-z-]+/\d+", page)) == of_code
