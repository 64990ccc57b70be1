"""No profile decodes faster than its memory is read, and more bytes take no less time."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest

from controlplane.errors import BadInput
from controlplane.perfmodel.physics import BANDWIDTH, broken_rule, weight_bytes
from controlplane.perfmodel.profile import Profile
from tokenfleet.profiles.library import find_profiles, library, read_profile, write_profile

ALIKE = 1.05  # weights are known to half a GiB a GPU, so the larger may seem the smaller


def dense() -> list[Profile]:
    """Those that read the same weights at each batch, and whose weights are known."""
    return [
        profile
        for profile in library()
        if weight_bytes(profile)
        and not profile.kv.request_tokens
        and not any(hinge.of == "experts" for hinge in profile.step.hinges)
        and profile.model.startswith(("llama", "qwen3"))
    ]


def test_no_profile_of_the_library_breaks_physics() -> None:
    assert len(library()) > 200
    assert {profile.label: broken for profile in library() if (broken := broken_rule(profile))} == {}
    assert {profile.gpu for profile in library()} <= BANDWIDTH.keys()


def test_weights_are_what_a_model_of_that_size_has() -> None:
    for model, gib in (("llama-3.1-8b", 15.0), ("llama-3.1-70b", 131.4)):
        for profile in find_profiles(model, ["h100-sxm"]):
            assert profile.gpus * weight_bytes(profile) / 1024**3 == pytest.approx(gib, rel=0.02)


def test_a_model_with_more_to_read_takes_no_less_time_alone() -> None:
    bytes_of: dict[str, float] = {}  # by the H100s of fewest GPUs: of many, half a GiB each is a large part
    for profile in sorted(dense(), key=lambda profile: (profile.gpu != "h100-sxm", profile.gpus)):
        bytes_of.setdefault(profile.model, profile.gpus * weight_bytes(profile))
    wrong = []
    for one, other in combinations(dense(), 2):
        if (one.gpu, one.tp_degree) != (other.gpu, other.tp_degree):
            continue
        if one.model.endswith("fp8") != other.model.endswith("fp8"):
            continue  # other kernels
        less, more = sorted((one, other), key=lambda profile: bytes_of[profile.model])
        is_more = bytes_of[more.model] > ALIKE * bytes_of[less.model]
        if is_more and more.alone_tpot_s(0) < less.alone_tpot_s(0):
            wrong.append((less.model, more.label))
    assert len(bytes_of) > 10
    assert not wrong


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"base_s": 1e-4, "per_context_token_s": 0.0, "per_sequence_s": 0.0, "hinges": ()}, "at 3.35 TB/s"),
        ({"base_s": 0.4}, "more than 20 times the time to read its weights plus 100 ms"),
    ],
)
def test_a_users_profile_that_breaks_it_is_refused_in_one_line(
    tmp_path: Path, change: dict[str, object], says: str
) -> None:
    (right,) = find_profiles("llama-3.1-8b", ["h100-sxm"], [1])
    write_profile(replace(right, step=replace(right.step, **change)), tmp_path / "mine.yaml")
    with pytest.raises(BadInput, match=r"mine.yaml: a decode step .*; check step") as error:
        read_profile(tmp_path / "mine.yaml")
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    write_profile(right, tmp_path / "right.yaml")
    assert read_profile(tmp_path / "right.yaml") == right
