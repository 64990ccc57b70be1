"""What the planner imports is what `pip install .` brings: `make demo` works with that alone."""

import ast
import re
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

from checkout import ROOT

OURS = {"controlplane", "dataplane", "tokenfleet", "experiments"}
PLANNER = ("controlplane", "tokenfleet", "dataplane/simulated", "dataplane/history", "dataplane/http")


def installed_with_the_planner() -> set[str]:
    """Names of distributions that the project depends on, and those that these depend on."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found, open_ = set(), list(project["dependencies"])
    while open_:
        asked = open_.pop()
        name = re.split(r"[^\w.-]", asked, maxsplit=1)[0].lower().replace("_", "-")
        if "extra ==" in asked or name in found:
            continue
        found.add(name)
        try:
            open_ += requires(name) or ()
        except PackageNotFoundError:  # of another platform
            continue
    return found


def test_the_planner_imports_nothing_at_its_start_that_is_not_installed_with_it():
    there, of_module, missing = installed_with_the_planner(), packages_distributions(), []
    for folder in PLANNER:
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.parse(path.read_text(encoding="utf-8")).body:
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                for name in {name.partition(".")[0] for name in names} - OURS - set(sys.stdlib_module_names):
                    brought_by = {d.lower().replace("_", "-") for d in of_module.get(name, ())}
                    if not brought_by & there:
                        missing.append(f"{path.relative_to(ROOT)}: {name}")
    assert not missing
