"""docs/first-plan.md: what is planned there prints what the page says."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import ROOT
from tutorial import commands, plain

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
    assert ran == ["examples/log_to_trace.py", "trace", "plan", "whatif"]
    assert Path("first-plan/report.html").is_file()
