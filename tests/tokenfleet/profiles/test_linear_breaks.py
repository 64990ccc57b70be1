"""Breaks of a linear fit, and samples from the steps of a designed grid."""

import json
from pathlib import Path

import numpy as np
import pytest

from controlplane.perfmodel.samples import StepSamples
from controlplane.perfmodel.step import Hinge, StepModel
from tokenfleet.cli.main import main
from tokenfleet.profiles.diagnostics import form_of, linear_breaks
from tokenfleet.profiles.measurements import read_measurements

LINEAR = StepModel(0.01, 4e-5, 3e-5, 8e-8)
KNEE = StepModel(0.01, 4e-5, 3e-5, 8e-8, 0.0, (Hinge("sequences", 64, 5e-4),))


def grid(model: StepModel) -> StepSamples:
    rows = [
        (p, b, b * c, p * p)
        for p in (0, 128, 512, 2048)
        for b in (0, 1, 4, 16, 32, 64, 96, 128, 192)
        for c in (256, 1024, 4096)
        if p + b
    ]
    p, b, c, s = np.array(rows, float).T
    return StepSamples(p, b, c, model.step_s(p, b, c, s), s)


def test_a_straight_line_breaks_nowhere() -> None:
    assert linear_breaks(grid(LINEAR), robust=True) == []
    assert form_of(LINEAR) == []


def test_a_knee_is_told_by_phase_size_and_direction() -> None:
    found = linear_breaks(grid(KNEE), robust=True)
    assert found[0].phase == "decode"
    # One line through a knee: too slow at its bend, too fast at its end.
    ways = {cell.low >= 96: cell.text for cell in found if cell.phase == "decode" and cell.low >= 32}
    assert "too slow" in ways[False]
    assert "too fast" in ways[True]
    assert "sequences" in ways[True]
    assert form_of(KNEE) == ["hinge at 64 sequences"]


def test_one_point_counts_once_whatever_its_steps(tmp_path: Path) -> None:
    path = tmp_path / "m.csv"
    rows = ["prefill_tokens,sequences,context_tokens,step_s,prefill_sum_sq,prefill_sequences,point,repeat"]
    for repeat, late in ((1, 0), (2, 0), (3, 1)):
        rows.append(f"{400 - 100 * late},0,0,0.0{repeat},40000,4,4x100,{repeat}")
        rows += [f"0,4,{400 + 4 * i},0.00{i + 1},0,0,4x100,{repeat}" for i in range(5)]
    path.write_text("\n".join(rows) + "\n")
    samples = read_measurements(path)
    assert samples.sequences.tolist() == [4, 0]  # decode, and the prefill that two of three repeats had
    assert samples.context_tokens.tolist() == [408, 0]
    assert samples.step_s.tolist() == pytest.approx([0.003, 0.015])


def test_fit_says_the_form_and_where_the_linear_one_breaks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    samples = grid(KNEE)
    path = tmp_path / "m.csv"
    table = np.column_stack(
        [samples.prefill_tokens, samples.sequences, samples.context_tokens, samples.step_s]
    )
    header = "prefill_tokens,sequences,context_tokens,step_s"
    np.savetxt(path, table, delimiter=",", header=header, comments="", fmt="%.9g")
    words = ["fit", "--measurements", str(path), "--model", "m", "--gpu", "g", "--kv-tokens", "900000"]
    words += ["--output", str(tmp_path / "p.yaml")]
    assert main([*words, "--format", "json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["form"] == ["hinge at 64 sequences"]
    assert answer["breaks"][0]["phase"] == "decode"
    assert main(words) == 0
    assert "The linear terms alone do not fit decode steps" in capsys.readouterr().out


def test_a_running_fleets_own_steps_are_fitted(tmp_path: Path) -> None:
    samples = grid(LINEAR)
    rows = ["prefill_tokens,sequences,context_tokens,step_s,prefill_sum_sq,worker"]
    columns = (samples.prefill_tokens, samples.sequences, samples.context_tokens, samples.step_s)
    assert samples.prefill_sum_sq is not None
    for i, (p, b, c, t, s) in enumerate(zip(*columns, samples.prefill_sum_sq, strict=True)):
        rows.append(f"{p:g},{b:g},{c:g},{t:.9g},{s:g},w{i % 2}")
    path = tmp_path / "steps.csv"
    path.write_text("\n".join(rows) + "\n")
    words = ["fit", "--measurements", str(path), "--model", "m", "--gpu", "g", "--kv-tokens", "900000"]
    assert main([*words, "--output", str(tmp_path / "p.yaml"), "--format", "json"]) == 0
