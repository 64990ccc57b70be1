"""The commands of docs/first-plan.md and of the README print what stands there."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT
from tutorial import commands, plain

from harness.prose import BANNED_TURNS, OLD_WORDS
from tokenfleet.cli.main import main


def test_the_commands_of_the_page_print_what_it_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # of whatif's finished plans
    monkeypatch.chdir(tmp_path)
    shutil.copytree(ROOT / "examples", "examples")
    ran: list[str] = []
    for command in commands():
        program, *words = command.words
        if program == "python":
            done = subprocess.run([sys.executable, *words], capture_output=True, text=True, check=True)
            out = done.stdout
        elif program == "tokenfleet" and words[0] not in ("serve", "fleet"):
            assert main(words) == 0
            out = capsys.readouterr().out
        else:
            continue
        ran.append(words[0])
        printed = plain(out)
        assert [line for line in command.prints if line not in printed] == []
        assert command.prints
        assert not BANNED_TURNS.search(printed)
        assert not OLD_WORDS.search(printed)
    assert ran == ["examples/log_to_trace.py", "trace", "plan", "whatif"]
    assert Path("first-plan/report.html").is_file()


@pytest.mark.always
def test_the_demo_prints_the_answer_that_the_readme_explains(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "110")
    monkeypatch.chdir(ROOT)
    make = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    words = make.split("\t$(BIN)/tokenfleet plan ", 1)[1].split("\n")[0].split()
    assert main(["plan", *words[: words.index("--output-dir")]]) == 0
    printed = [plain(line) for line in capsys.readouterr().out.splitlines()]
    shown = (ROOT / "README.md").read_text(encoding="utf-8").split("```\n")[1].splitlines()
    assert printed[: len(shown)] == [plain(line) for line in shown]


def test_the_log_has_the_requests_of_the_command_in_its_readme(tmp_path: Path) -> None:
    readme = (ROOT / "examples" / "README.md").read_text(encoding="utf-8")
    words = readme.split("tokenfleet trace synth ")[2].split("```")[0].replace("\\\n", " ").split()
    words[words.index("--output") + 1] = str(tmp_path / "made.csv")
    assert main(["trace", "synth", *words]) == 0
    script, log = ROOT / "examples" / "log_to_trace.py", ROOT / "examples" / "access.jsonl"
    subprocess.run([sys.executable, script, log, tmp_path / "read.csv"], check=True, capture_output=True)
    assert (tmp_path / "read.csv").read_bytes() == (tmp_path / "made.csv").read_bytes()
