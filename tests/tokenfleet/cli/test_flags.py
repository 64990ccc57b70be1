"""`--config`: a file of flags, checked against the verb's own."""

from pathlib import Path
from typing import Annotated

import pytest
import typer

from controlplane.errors import BadInput
from tokenfleet.cli.flags import take_option, with_config


@pytest.fixture
def command() -> object:
    app = typer.Typer(add_completion=False)

    @app.command()
    def verb(
        trace: Annotated[list[str], typer.Option()], slo: str = "x", max_gpus: int = 1, drop: bool = False
    ) -> None:
        pass

    return typer.main.get_command(app)


def written(tmp_path: Path, text: str) -> str:
    path = tmp_path / "flags.yaml"
    path.write_text(text)
    return str(path)


def test_lists_mappings_and_switches_become_words(command: object, tmp_path: Path) -> None:
    text = "trace: [a, b]\nslo: {ttft: 1s, tpot: 30ms}\nmax_gpus: 4\ndrop: true\n"
    words = with_config(command, written(tmp_path, text), [])
    assert " ".join(words) == "--trace a --trace b --slo ttft=1s,tpot=30ms --max-gpus 4 --drop"


def test_the_line_wins_over_the_file(command: object, tmp_path: Path) -> None:
    words = with_config(command, written(tmp_path, "max-gpus: 4\nslo: y"), ["--max-gpus=8"])
    assert words == ["--slo", "y", "--max-gpus=8"]


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("max_gpu: 4", "max_gpu: no such setting .did you mean max-gpus"),
        ("- a\n- b", "expected a mapping"),
        ("a: [", "is not YAML"),
        ("slo:", "slo: has no value"),
        ("[" * 5000, "is not YAML"),
    ],
)
def test_a_wrong_file_is_refused_in_one_line(command: object, tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(BadInput, match=why):
        with_config(command, written(tmp_path, text), [])


def test_a_missing_file_is_named(command: object) -> None:
    with pytest.raises(BadInput, match=r"nowhere\.yaml: cannot be read"):
        with_config(command, "nowhere.yaml", [])


def test_what_follows_two_dashes_is_not_ours() -> None:
    assert take_option(["--config=a", "--", "--config", "b"], "--config") == ("a", ["--", "--config", "b"])


@pytest.mark.parametrize("words", [["--config"], ["--config", "a", "--config=b"]])
def test_one_file_and_one_only(words: list[str]) -> None:
    with pytest.raises(BadInput, match="--config"):
        take_option(words, "--config")
