"""The planner imports only packages that `pip install .` brings: `make demo` works with those alone."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

from checkout import ROOT

OURS = {"controlplane", "dataplane", "tokenfleet", "experiments", "harness"}
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


def test_tests_import_no_experiment_but_those_of_experiments():
    found = []
    for path in (ROOT / "tests").rglob("*.py"):
        if "experiments" not in path.relative_to(ROOT / "tests").parts:
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                found += [
                    f"{path.relative_to(ROOT)}: {name}" for name in names if name.startswith("experiments")
                ]
    assert not found


NEEDS_NO_ENGINE = (
    "dataplane.live.gateway.fleet_core",
    "dataplane.live.gateways.core_server",
    "dataplane.live.gateways.keeper",
    "dataplane.live.gateways.remote_core",
    "dataplane.live.pool.rollout",
    "dataplane.live.pool.emulated_host",
    "dataplane.live.control.api",
    "dataplane.live.control.controller",
    "dataplane.live.worker.link",
)


def test_what_places_and_moves_requests_loads_no_engine():
    program = f"import sys, {', '.join(NEEDS_NO_ENGINE)}; print(*sys.modules)"
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"vllm", "torch", "ray"} & set(done.stdout.split())


def test_every_verb_starts_without_the_packages_of_the_live_plane():
    """So that `serve` can name what is missing."""
    missing = dict.fromkeys(("vllm", "torch", "ray", "psutil", "zmq"))
    program = (
        f"import sys; sys.modules.update({missing}); from tokenfleet.cli.main import VERBS, command_of;"
        " print(*(command_of(verb).name for verb in VERBS.values()))"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_vllm_that_cannot_be_loaded_is_not_said_to_be_missing(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('libcudnn.so.9: cannot open')")
    program = "import dataplane.live.engine_api.vllm_surface"
    environment = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert "vllm: cannot be loaded (libcudnn.so.9: cannot open); the live plane needs" in done.stderr


def test_the_image_copies_all_that_the_wheel_is_built_from():
    built = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    wheel = built["tool"]["hatch"]["build"]["targets"]["wheel"]
    needed = {"pyproject.toml", "hatch_build.py", built["project"]["readme"]}
    needed |= {*wheel["packages"], *wheel["force-include"]}
    lines = (ROOT / "deploy" / "Containerfile").read_text(encoding="utf-8").splitlines()
    copied = {word for line in lines if line.startswith("COPY ") for word in line.split()[1:-1]}
    assert needed <= copied, f"deploy/Containerfile: copy {', '.join(sorted(needed - copied))}, too"
