"""The command line as a whole: verbs, exit codes, one line per error."""

import importlib
import re
import subprocess
import sys
from collections.abc import Callable

import pytest

from controlplane.errors import BadInput, Infeasible, ProfileMissing
from tokenfleet.cli import main as cli


def verb_that(monkeypatch: pytest.MonkeyPatch, does: Callable[[], None]) -> None:
    def verb(times: int = 1) -> None:
        does()

    monkeypatch.setattr(cli, "VERBS", {"verb": cli.Verb("tokenfleet", "verb", "")})
    monkeypatch.setattr("tokenfleet.verb", verb, raising=False)


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Infeasible("no fleet"), 1),
        (BadInput("t.csv: row 3: wrong"), 2),
        (ProfileMissing("h1000"), 2),
        (OSError(28, "No space left on device", "out"), 2),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_end_has_its_code_and_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    def fail() -> None:
        raise error

    verb_that(monkeypatch, fail)
    assert cli.main(["verb"]) == code
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.strip().startswith("error: ")
    assert said.err.strip().count("\n") == 0


def test_a_fault_of_ours_is_not_taken_for_an_answer(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verb_that(monkeypatch, lambda: [][0])
    assert cli.main(["verb"]) == 70
    assert "internal error (IndexError)" in capsys.readouterr().err


def test_an_option_of_the_group_given_to_its_command_is_told_where_it_goes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["fleet", "status", "--control", "http://127.0.0.1:1"]) == 2
    assert "before the command: tokenfleet fleet --control … status" in capsys.readouterr().err
    assert cli.main(["fleet", "status", "--contrl", "http://127.0.0.1:1"]) == 2
    assert "before the command" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [["verb", "--time", "3"], ["verb", "--times", "x"], ["verb", "extra"], ["vreb"]]
)
def test_a_wrong_line_exits_2_with_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    verb_that(monkeypatch, lambda: None)
    assert cli.main(words) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize(("flag", "value"), [("--port", "99999"), ("--workers", "two"), ("--tp", "0")])
def test_a_refused_value_is_repeated(flag: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["serve", "--model", "m", flag, value]) == 2
    said = capsys.readouterr().err
    assert f"'{flag}'" in said
    assert said.endswith(f", got '{value}'\n")


def test_version_and_help_exit_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert cli.main(["--help"]) == 0
    said = capsys.readouterr().out
    assert "tokenfleet 0.1" in said
    assert all(verb in said for verb in cli.VERBS)


@pytest.mark.parametrize("verb", sorted(cli.VERBS))
def test_every_verb_is_there_and_explains_itself(verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    at = cli.VERBS[verb]
    assert hasattr(importlib.import_module(at.module, "tokenfleet.cli"), at.attribute)
    assert cli.main([*verb.split(), "--help-all"]) == 0
    assert "Usage" in capsys.readouterr().out


@pytest.mark.parametrize("verb", [*cli.VERBS, "fleet evacuate", "trace synth"])
def test_help_names_every_option_whole_in_eighty_columns(
    verb: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    words = verb.split()
    name = " ".join(words[:2]) if " ".join(words[:2]) in cli.VERBS else words[0]
    command = cli.command_of(cli.VERBS[name])
    for word in words[len(name.split()) :]:
        command = command.commands[word]
    assert cli.main([*words, "--help-all"]) == 0
    said = capsys.readouterr().out
    assert not re.findall(r"--\S*…|\w,?\.\.\.$", said, re.MULTILINE)
    assert all(re.search(rf"{option}\b", said) for p in command.params for option in p.opts if "--" in option)


def test_a_choice_that_is_none_is_refused_in_plain_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["fleet", "status", "--format", "xml"]) == 2
    assert (
        capsys.readouterr().err
        == "error: Invalid value for '--format': 'xml' is not one of 'table', 'json'\n"
    )


@pytest.mark.parametrize(("option", "wanted"), [("--users", "an integer"), ("--growth", "a number")])
def test_a_number_that_is_none_is_refused_in_plain_words(
    option: str, wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["plan", option, "20%"]) == 2
    said = capsys.readouterr().err
    assert said == f"error: Invalid value for '{option}': expected {wanted}, got '20%'\n"


@pytest.mark.parametrize("group", ["data", "fleet", "trace"])
def test_a_group_without_a_command_lists_its_commands(group: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([group]) == 2
    said = capsys.readouterr()
    assert said.out.startswith(f"Usage: tokenfleet {group} [OPTIONS] COMMAND")
    assert said.err == ""


@pytest.mark.parametrize("words", [["plan", "-h"], ["help", "plan"]])
def test_help_is_found_by_other_ways_of_asking(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(words) == 0
    assert capsys.readouterr().out.startswith("Usage: tokenfleet plan")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["fleet", "nonsense"], "No such command 'nonsense'; see `tokenfleet fleet --help`"),
        (["plan"], "Missing option '--slo'; see `tokenfleet plan --help`"),
        (["export"], "Missing argument 'kind'; see `tokenfleet export --help`"),
    ],
)
def test_what_is_missing_is_named_with_its_help(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    assert capsys.readouterr().err == f"error: {said}\n"


def test_help_imports_nothing_heavy() -> None:
    script = (
        "import sys; from tokenfleet.cli.main import main; main(['--help']);"
        "sys.exit(any(m in sys.modules for m in ('numba', 'numpy', 'polars', 'plotly', 'pulp')))"
    )
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, check=False).returncode == 0


def test_the_list_of_verbs_loads_nothing_that_reads_flags_or_plans():
    program = "import sys; from tokenfleet.cli.main import main; main(['--help']); print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("Usage: tokenfleet VERB")
    assert not {"typer", "pydantic", "numpy", "numba", "polars"} & set(done.stdout.splitlines()[-1].split())


def test_a_profiles_name_is_no_model_to_serve(capsys):
    assert cli.main(["serve", "--model", "llama-3.1-8b", "--engine", "emulated"]) == 2
    assert "expected a folder or a Hugging Face name" in capsys.readouterr().err
