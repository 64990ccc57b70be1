"""KV memory as predicted, against published starts of engines."""

from __future__ import annotations

from statistics import median

import pytest

from controlplane.errors import ProfileMissing
from experiments.profiling.kv_memory import DEVELOPMENT, JUDGED, MEDIAN, WORST, law_gib, library_gib
from tokenfleet.profiles.library import find_profiles

# What misses the bar: an engine with little KV, one whose limits are doubtful, one with a KV connector.
MISSED = {"gpt-oss-120b": 0.07, "mistral-small-24b": 0.10, "qwen3-235b-a22b-fp8": 0.25}


def test_the_law_is_within_its_bars_of_engines_that_did_not_make_it() -> None:
    off = {start: law_gib(start) / start.kv_gib - 1 for start in JUDGED}
    assert median(abs(error) for error in off.values()) <= MEDIAN
    for start, error in off.items():
        assert abs(error) <= MISSED.get(start.model, WORST), start
    assert max(abs(law_gib(start) / start.kv_gib - 1) for start in DEVELOPMENT) <= 0.015


def test_shipped_profiles_have_the_kv_of_engines_with_other_limits() -> None:
    shipped = [(start, library_gib(start)) for start in DEVELOPMENT + JUDGED]
    off = [(start, kv / start.kv_gib - 1) for start, kv in shipped if kv is not None]
    assert len(off) >= 8
    assert median(abs(error) for _, error in off) <= MEDIAN
    for start, error in off:  # of little KV a small error of memory is much
        assert abs(error) * start.kv_gib <= 2.0, start


def test_more_sequences_leave_less_kv_and_the_engines_own_figure_stays() -> None:
    (profile,) = find_profiles("llama-3.1-8b", ["h100"], [1])
    many = profile.with_engine(max_seqs=1024)
    old = many.with_engine(version="0.11.0")
    assert old.kv.capacity_tokens < many.kv.capacity_tokens < profile.kv.capacity_tokens
    back = old.with_engine(max_seqs=profile.engine.max_seqs, version=profile.engine.version)
    assert 0 <= profile.kv.capacity_tokens - back.kv.capacity_tokens <= 2 * profile.kv.block_tokens
    assert profile.with_engine(steps_ahead=0.0).kv == profile.kv
    own = profile.with_kv(0.95, 400_000).with_engine(max_seqs=1024)
    assert own.kv.capacity_tokens == 400_000


def test_experts_in_mxfp4_take_what_the_engine_says() -> None:
    pytest.importorskip("aiconfigurator_core")
    from tokenfleet.profiles.kv_memory import GIB, left_out_bytes
    from tokenfleet.profiles.predict import _config

    for model, counted, logged in (("gpt-oss-20b", 11.17, 13.47), ("gpt-oss-120b", 56.28, 64.38)):
        more = left_out_bytes(_config(f"openai/{model}"), 1) / GIB
        assert counted + more == pytest.approx(logged, rel=0.005)
    assert left_out_bytes(_config("Qwen/Qwen3-32B"), 1) == 0.0


def test_a_worker_without_room_for_kv_is_refused() -> None:
    pytest.importorskip("aiconfigurator_core")
    from datetime import date

    from tokenfleet.profiles.predict import PredictedWorker, predicted_profile

    with pytest.raises(ProfileMissing, match="its weights leave room for"):
        predicted_profile(PredictedWorker("gpt-oss-120b", "l40s", 1, 0.001), date(2026, 11, 25))
