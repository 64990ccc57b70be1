"""Designed measurements: the grid, the file that grows by a point at a time, and what goes wrong with it."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.errors import BadInput
from controlplane.perfmodel.samples import DECODE_STEPS, EngineRoom, grid
from dataplane.live.engine_api.link import Step
from tokenfleet.cli.main import main
from tokenfleet.cli.profile import is_outlying
from tokenfleet.profiles.measurements import MeasurementFile, beside, read_measurements

HERE = {"vllm": "0.32.0", "device": "a", "clock": "wall"}


def step(step_s: float = 0.01, sequences: int = 4, prefill: int = 0) -> Step:
    return Step(prefill, sequences, 100 * sequences, step_s, prefill**2, int(prefill > 0))


rooms = st.builds(
    EngineRoom,
    kv_tokens=st.integers(512, 500_000),
    max_seqs=st.integers(1, 512),
    max_batched_tokens=st.integers(512, 8192),
    max_context_tokens=st.integers(64, 32_768),
)


@given(rooms, st.integers(0, 5))
def test_every_grid_point_fits_the_engine_and_has_a_name_of_its_own(room: EngineRoom, seed: int) -> None:
    bursts = grid(room, np.random.default_rng(seed))
    assert len({b.name for b in bursts}) == len(bursts)
    for b in bursts:
        assert b.tokens <= room.kv_tokens
        assert b.decoding + b.prefills <= room.max_seqs
        assert max(b.prefill_tokens, b.context_tokens) + DECODE_STEPS <= room.max_context_tokens


def test_the_grid_has_prefill_whole_and_chunked_decode_and_both() -> None:
    bursts = grid(EngineRoom(100_000, 64, 2048, 8192), np.random.default_rng(0))
    alone = [b for b in bursts if not b.decoding]
    assert any(b.prefill_tokens > 2048 for b in alone)
    assert any(b.prefill_tokens < 2048 for b in alone)
    assert any(b.prefills > 1 for b in alone)
    assert any(b.decoding and b.prefills for b in bursts)
    assert len({b.decoding for b in bursts if not b.prefills}) >= 6


def test_points_are_appended_and_a_second_run_knows_them(tmp_path: Path) -> None:
    out = tmp_path / "new" / "m.csv"
    file = MeasurementFile(out, HERE)
    file.add("4x100", [step(), step(0.02)], 0.0)
    file.add("4x100", [step(0.011)], 0.0)
    again = MeasurementFile(out, HERE)
    assert again.visits == {"4x100": 2}
    again.add("8x100", [step(0.015, 8)], 0.0)
    samples = read_measurements(out)
    assert samples.step_s.tolist() == [0.011, 0.015]  # one step for each point: the median of its steps
    assert out.read_text().count("prefill_tokens") == 1


@given(st.binary(max_size=60))
def test_what_a_killed_process_left_half_written_is_cut_off(tail: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "m.csv"
        MeasurementFile(out, HERE).add("a", [step()], 0.0)
        whole = out.read_bytes()
        out.write_bytes(whole + tail)
        assert MeasurementFile(out, HERE).visits == {"a": 1}
        assert out.read_bytes() == whole


def test_another_environment_is_refused_and_nothing_is_touched(tmp_path: Path) -> None:
    out = tmp_path / "m.csv"
    MeasurementFile(out, HERE).add("a", [step()], 0.0)
    before = out.read_bytes(), beside(out).read_bytes()
    with pytest.raises(BadInput, match=r"vllm: was measured with '0.32.0', this engine has '0.33.0'"):
        MeasurementFile(out, HERE | {"vllm": "0.33.0"})
    with pytest.raises(BadInput, match="torch"):
        MeasurementFile(out, HERE | {"torch": "2"})
    assert (out.read_bytes(), beside(out).read_bytes()) == before


def test_files_that_do_not_belong_together_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "m.csv"
    out.write_text("prefill_tokens,sequences\n")
    with pytest.raises(BadInput, match="exists already"):
        MeasurementFile(out, HERE)
    out.unlink()
    MeasurementFile(out, HERE).add("a", [step()], 0.0)
    out.write_text("short")
    with pytest.raises(BadInput, match="has 5 bytes"):
        MeasurementFile(out, HERE)
    for content in ("nonsense", json.dumps({"schema": "other"}), "[]"):
        beside(out).write_text(content)
        with pytest.raises(BadInput, match=r"m\.csv\.json"):
            MeasurementFile(out, HERE)


def test_a_repeat_is_outlying_when_one_of_its_steps_took_much_longer_than_its_like() -> None:
    calm = [[step(0.010), step(0.02, prefill=64)] for _ in range(2)]
    assert not any(is_outlying([*calm, [step(0.012), step(0.021, prefill=64)]], i) for i in range(3))
    hit = [*calm, [step(0.010), step(0.040, prefill=64)]]
    assert [is_outlying(hit, i) for i in range(3)] == [False, False, True]


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--model", "./nowhere", "--output", "m.csv"], "--model: ./nowhere: no such folder"),
        (["--model", "x", "--output", "m.csv", "--clock", "sun"], "--clock: wall or cpu"),
        (["--model", "x", "--output", "m.csv", "--budget", "soon"], "--budget"),
        (["--model", "x", "--output", "."], "is a folder"),
    ],
)
def test_bad_flags_are_told_before_anything_starts(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", *flags]) == 2
    assert says in capsys.readouterr().err
