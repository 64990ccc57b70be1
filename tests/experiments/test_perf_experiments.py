"""The experiments on performance models run, and their figures hold on a small part."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT


def run(script: str, *flags: str) -> tuple[int, str, str]:
    done = subprocess.run(
        [sys.executable, str(ROOT / "experiments" / script), *flags],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    return done.returncode, done.stdout, done.stderr


@pytest.mark.slow
def test_held_out_errors_are_as_the_readme_says(bench_data: Path) -> None:
    _, out, _ = run("perf_models.py", "--quick", "--format", "json", "--data", str(bench_data))
    answer = json.loads(out)
    assert answer["experiment"] == "perf_models"
    assert answer["seed"] == 0
    assert answer["command"].startswith("python experiments/perf_models.py")
    assert len(answer["bars"]) == 8
    assert all(one["value"] < 0.038 and one["ok"] for one in answer["bars"].values())


def test_a_missing_data_folder_is_said_in_one_line(tmp_path: Path) -> None:
    for script in ("perf_models.py", "vllm_log_fidelity.py", "compose_profiles.py"):
        code, out, err = run(script, "--data", str(tmp_path))
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert "--data" in err
