"""Learned profiles on disk: found by their key alone, whole, and measured again where a file is no use."""

import json
import logging
from pathlib import Path

import pytest
from made_profiles import made_profile

from controlplane.perfmodel.engine import KvModel
from controlplane.perfmodel.step import StepModel
from tokenfleet.files import cache_folder
from tokenfleet.profiles.library import LearnedProfiles

PROFILE = made_profile(StepModel(0.007, 2e-5, 2e-5, 5e-8), KvModel(400_000))
KEY = {"engine": "vllm", "version": "0.32.0", "model": "m", "device": "a", "flags": {"dtype": "'float32'"}}


def test_a_profile_is_found_by_every_part_of_its_key(tmp_path: Path) -> None:
    kept = LearnedProfiles(tmp_path / "learned")
    assert kept.read(KEY) is None
    kept.keep(KEY, PROFILE)
    assert LearnedProfiles(tmp_path / "learned").read(dict(reversed(KEY.items()))) == PROFILE
    for part in KEY:
        assert kept.read(KEY | {part: "another"}) is None, part
    kept.keep(KEY | {"model": "n"}, PROFILE)
    assert len(list((tmp_path / "learned").iterdir())) == 2


@pytest.mark.parametrize(
    "spoil",
    [
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: "[" * 100_000,
        lambda text: json.dumps(json.loads(text) | {"schema": "tokenfleet.learned/0"}),
        lambda text: json.dumps(json.loads(text) | {"key": {}}),
        lambda text: json.dumps(json.loads(text) | {"profile": "step: [1]"}),
        lambda text: json.dumps(json.loads(text) | {"profile": None}),
    ],
)
def test_a_spoilt_file_is_ignored_with_one_line_and_written_anew(tmp_path, spoil, caplog) -> None:
    kept = LearnedProfiles(tmp_path)
    kept.keep(KEY, PROFILE)
    (path,) = tmp_path.iterdir()
    path.write_text(spoil(path.read_text()))
    with caplog.at_level(logging.WARNING):
        assert kept.read(KEY) is None
    (record,) = caplog.records
    assert str(path) in record.getMessage()
    assert "\n" not in record.getMessage()
    kept.keep(KEY, PROFILE)
    assert kept.read(KEY) == PROFILE


def test_a_folder_that_cannot_be_written_costs_a_line_and_no_more(tmp_path: Path, caplog) -> None:
    (tmp_path / "learned").write_text("a file in the way")
    LearnedProfiles(tmp_path / "learned").keep(KEY, PROFILE)
    assert "measured again" in caplog.text


def test_the_cache_is_in_the_users_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder("learned") == tmp_path / "tokenfleet" / "learned"
