"""The count of the product's structure, on a made tree."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks/structure.py"


@pytest.fixture
def counted(tmp_path: Path) -> dict[str, int]:
    files = {
        "controlplane/__init__.py": "",
        "controlplane/large.py": "class Large:\n" + 300 * "    x = 1\n" + "class Small:\n    x = 1\n",
        "controlplane/step.py": "import controlplane.fits.fit\nper_prefill_sequence_s: float = 0.0\n",
        "controlplane/fits/__init__.py": "",
        "controlplane/fits/fit.py": (
            "from controlplane import step\nif TYPE_CHECKING:\n    from tokenfleet.faces import cli\n"
        ),
        "tokenfleet/faces/cli.py": (
            "from controlplane.fits import fit\n"
            "def plan(attainment, confidence, max_gpus, *, rate_scale, price_scale): ...\n"
            "def wide(a, b, c, d, e, f, g, h, i, j, k): ...\n"
            "def long():\n" + 60 * "    x = 1\n" + "def branchy(x):\n" + 7 * "    if x and x: ...\n"
            "    return [y for y in x if y]\n"
        ),
        "dataplane/small.py": "class Small:\n    class Large: ...\n    class Small: ...\n",
        "experiments/planning/study.py": "import controlplane\n",
        "benchmarks/speed.py": "import controlplane\n",
        "dataplane/says.py": "print(x.attainment, x.confidence, x.max_gpus, x.rate_scale, x.price_scale)\n",
        "dataplane/keeps.py": "HostKv\n",
    }
    for name, text in files.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    command = [sys.executable, str(SCRIPT), "--tree", str(tmp_path), "--format", "json"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 1  # a folder pair imports each other
    assert {row["figure"] for row in json.loads(ran.stdout)["rows"] if not row["ok"]} == {
        "modules in a circle of imports",
        "folder pairs that import each other",
        "functions over 10 parameters",
        "class names taken twice",
        "classes over 300 lines",
    }
    return {row["figure"]: row["value"] for row in json.loads(ran.stdout)["rows"]}


def test_each_figure_counts_what_it_says(counted: dict[str, int]) -> None:
    assert counted == {
        "product lines": 392,
        "product modules": 7,
        "lines of experiments and benchmarks": 2,
        "modules over 300 lines": 1,
        "modules in the fullest folder": 3,
        "modules in a circle of imports": 3,
        "folder pairs that import each other": 1,
        "packages and their own root that do": 1,
        "modules that name a step coefficient": 1,
        "modules that name an option": 1,
        "modules that declare a plan's options": 1,
        "classes over 300 lines": 1,
        "class names taken twice": 2,
        "functions over 60 lines": 1,
        "functions over 10 parameters": 1,
        "functions over 15 in complexity": 1,
    }
