"""Every experiment and benchmark starts from the checkout's root, and says in one line what it misses."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT

FOLDERS = ("planning", "serving", "scaling", "profiling")
EXPERIMENTS = sorted(
    str(path.relative_to(ROOT))
    for folder in FOLDERS
    for path in (ROOT / "experiments" / folder).glob("*.py")
    if path.name != "__init__.py"
)
BENCHMARKS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "benchmarks").glob("*.py"))


def answered(script: str, capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[object, str, str]:
    """Exit code, standard output and standard error of a script, run in this process."""
    before = sys.argv, list(sys.path)
    sys.argv = [script, *flags]
    try:
        with pytest.raises(SystemExit) as ended:
            runpy.run_path(str(ROOT / script), run_name="__main__")
    finally:
        sys.argv, sys.path[:] = before
    return ended.value.code, *capsys.readouterr()


@pytest.mark.filterwarnings("ignore::DeprecationWarning:torch.*")  # of vLLM's imports: not ours to fail on
@pytest.mark.parametrize("script", EXPERIMENTS + BENCHMARKS)
def test_it_answers_help_and_then_misses_its_data_in_one_line(
    script: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = answered(script, capsys, "--help")
    assert (code, err) == (0, "")
    if "--data DATA" in out:
        code, out, err = answered(script, capsys, "--data", str(tmp_path))
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert str(tmp_path) in err
        assert "docs/data.md" in err


def test_there_are_experiments_in_every_folder() -> None:
    assert {Path(script).parent.name for script in EXPERIMENTS} == set(FOLDERS)


def test_held_out_errors_are_as_the_readme_says_and_the_command_is_that_of_the_shell(
    bench_data: Path,
) -> None:
    asked = ("--quick", "--format", "json", "--data", str(bench_data))
    done = subprocess.run(
        [sys.executable, "experiments/profiling/perf_models.py", *asked],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        check=False,
    )
    answer = json.loads(done.stdout)
    assert answer["experiment"] == "perf_models"
    assert answer["seed"] == 0
    assert answer["command"].startswith("python experiments/profiling/perf_models.py --quick")
    assert len(answer["bars"]) == 8
    assert all(one["value"] < 0.038 and one["ok"] for one in answer["bars"].values())
