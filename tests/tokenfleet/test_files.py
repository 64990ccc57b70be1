"""Files appear whole, together, or not at all."""

import os
from pathlib import Path

import pytest

from controlplane.errors import BadInput
from tokenfleet.field_errors import load_yaml, read_text
from tokenfleet.files import write_files


def test_files_and_their_folders_are_made(tmp_path: Path) -> None:
    write_files({tmp_path / "a/b/one.txt": "1", tmp_path / "two.txt": "2"})
    assert (tmp_path / "a/b/one.txt").read_text() == "1"
    assert (tmp_path / "two.txt").read_text() == "2"


@pytest.mark.parametrize("fault", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_fault_on_the_way_leaves_old_files_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: BaseException
) -> None:
    (tmp_path / "one.txt").write_text("old")
    synced = 0

    def full(_: int) -> None:
        nonlocal synced
        synced += 1
        if synced == 2:
            raise fault

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises((BadInput, KeyboardInterrupt)) as raised:
        write_files({tmp_path / "one.txt": "new", tmp_path / "a/b/two.txt": "new"})
    if isinstance(fault, OSError):
        assert "a/b/two.txt: cannot be written: No space left on device" in str(raised.value)
    assert [p.name for p in tmp_path.iterdir()] == ["one.txt"]
    assert (tmp_path / "one.txt").read_text() == "old"


def test_a_failed_write_keeps_a_folder_that_was_there_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "out").mkdir()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(BadInput, match="No space left on device"):
        write_files({tmp_path / "out/new/plan.json": "x"})
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == ["out"]


def test_a_folder_in_the_way_is_named(tmp_path: Path) -> None:
    (tmp_path / "report.html").mkdir()
    with pytest.raises(BadInput, match=r"report\.html: is a folder"):
        write_files({tmp_path / "report.html": "x"})


def test_a_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(BadInput, match="pipe: not a regular file"):
        write_files({tmp_path / "pipe": "x"})
    assert (tmp_path / "pipe").is_fifo()


@pytest.mark.parametrize("nested", ["- " * 4500, "[" * 4500, "{a: " * 2400])
def test_a_file_that_nests_too_deep_is_refused_in_one_line(tmp_path: Path, nested: str) -> None:
    (tmp_path / "prices.yaml").write_text(f"schema: tokenfleet.prices/1\nprices:\n  - {nested}\n")
    with pytest.raises(BadInput, match=r"prices.yaml: is not YAML: [^\n]*$"):
        load_yaml(read_text(tmp_path / "prices.yaml"), str(tmp_path / "prices.yaml"))
