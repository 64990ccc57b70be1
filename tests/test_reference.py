"""The reference pages are made from the code: what is in it and not on them is missing, or the other way."""

import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from pydantic import BaseModel

from dataplane.http.keys import KeyRing
from dataplane.http.server import Extension
from dataplane.live.control.api import control_app
from harness.reference import FOLDER, PAGES
from tokenfleet.cli.main import VERBS, command_of
from tokenfleet.planning import plan_file
from tokenfleet.service.app import plan_app
from tokenfleet.service.routes import plan_router

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("name", PAGES)
def test_a_page_is_what_the_code_says(name):
    made = PAGES[name]()
    assert (FOLDER / name).read_text(encoding="utf-8") == made, "make reference writes the page again"
    assert "/root" not in made
    assert "/home/" not in made


def test_every_page_of_the_folder_is_made():
    assert {path.name for path in FOLDER.iterdir()} == set(PAGES)


def test_every_metric_and_option_has_a_meaning():
    for name in ("metrics.md", "cli.md"):
        rows = [line for line in PAGES[name]().splitlines() if line.startswith("| `")]
        assert len(rows) > 30
        assert [row for row in rows if row.rstrip("| ").endswith("`")] == []


@pytest.mark.parametrize("name", ["http.md", "plan-json.md"])
def test_every_field_of_a_document_has_a_meaning(name):
    rows = [line.split("|") for line in PAGES[name]().splitlines() if line.startswith("| `")]
    fields = [row for row in rows if len(row) == 6]  # name, type, meaning, whether it may be absent
    assert len(fields) > 100
    assert [row[1] for row in fields if not row[3].strip()] == []


def first_cells(name):
    """What stands in code font at the beginning of a row of a page."""
    return set(re.findall(r"^\| `([^`]+)`", (FOLDER / name).read_text(encoding="utf-8"), re.MULTILINE))


def test_every_public_option_has_a_line():
    listed = {word.strip(",") for cell in first_cells("cli.md") for word in cell.split()}
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
    assert sorted(plain - first_cells("metrics.md")) == []


def test_every_field_of_an_http_body_and_of_the_plan_has_a_line():
    nothing = SimpleNamespace()
    apps = (
        control_app(nothing, KeyRing([])),
        plan_app(KeyRing([]), [Extension(routers=[plan_router(nothing)])]),
    )
    bodies = [body for app in apps for body in app.openapi()["components"]["schemas"].values()]
    fields = {field for body in bodies for field in body.get("properties", ())}
    assert len(fields) > 100
    assert sorted(fields - first_cells("http.md") - first_cells("plan-json.md")) == []
    parts = [part for part in vars(plan_file).values() if isinstance(part, type)]
    models = [part.model_fields for part in parts if issubclass(part, BaseModel)]
    known = {field.alias or name for fields in models for name, field in fields.items()}
    assert sorted(known - first_cells("plan-json.md")) == []
