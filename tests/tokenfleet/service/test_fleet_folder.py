"""A fleet's folder: one that an operator asked for stays, any other does not."""

import tempfile

import pytest

from controlplane.errors import BadInput
from tokenfleet.service.app import folder_of_fleet


@pytest.fixture(autouse=True)
def host(tmp_path, monkeypatch):
    """A host with a home and room for temporary files, and nothing said of where things go."""
    monkeypatch.delenv("TOKENFLEET_DATA", raising=False)
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "home"))
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))


@pytest.mark.parametrize("keeps", [None, False])
def test_what_nobody_asked_for_goes_with_the_fleet(tmp_path, keeps):
    with folder_of_fleet(None, keeps) as folder:
        (folder / "history").mkdir()
        assert folder.parent == tmp_path / "tmp"
    assert not list((tmp_path / "tmp").iterdir())
    assert not (tmp_path / "home").exists()


@pytest.mark.parametrize("named", ["flag", "environment", "history"])
def test_what_was_asked_for_stays(tmp_path, monkeypatch, named):
    if named == "environment":
        monkeypatch.setenv("TOKENFLEET_DATA", str(tmp_path / "here"))
    with folder_of_fleet(
        tmp_path / "here" if named == "flag" else None, named == "history" or None
    ) as folder:
        (folder / "kept").touch()
    assert folder == (tmp_path / "home" / "tokenfleet" if named == "history" else tmp_path / "here")
    assert (folder / "kept").exists()


def test_a_folder_that_was_asked_for_and_cannot_be_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(BadInput, match=r"--data: .*file/here: cannot be made"),
        folder_of_fleet(tmp_path / "file" / "here", None),
    ):
        pass


def test_a_host_that_cannot_be_written_on_serves_all_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "no" / "such" / "folder"))
    with folder_of_fleet(None, None) as folder:
        assert folder is None
