"""The list of coefficients: whatever stands in it is fitted, refitted, written, read and compiled."""

import os
import shutil
import subprocess
import sys
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import controlplane
from controlplane.errors import BadInput
from controlplane.migration.overload import ShedSettings, forecast
from controlplane.perfmodel.coefficients import coefficient_row, mixed_s, prefill_s
from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.fit import fit_step
from controlplane.perfmodel.profile import Profile, Residuals, Source
from controlplane.perfmodel.refit import Refit
from controlplane.perfmodel.samples import StepSamples
from controlplane.perfmodel.step import (
    PREFILL_TERMS,
    STEP_TERMS,
    Batch,
    Hinge,
    PrefillModel,
    StepModel,
    Term,
    coefficients,
)
from controlplane.placement.outlook import prefill_lasts_s
from controlplane.snapshot import RunningRequest, WorkerLoad
from controlplane.types import RequestId, WorkerId
from tokenfleet.profiles.form import parse_profile, profile_text

SIZES = dict(zip((t.name for t in STEP_TERMS), (0.01, 4e-5, 3e-5, 8e-8, 4e-9, 0.006, 2e-4), strict=False))
PLAIN = StepModel(**{t.name: SIZES[t.name] for t in STEP_TERMS if not t.words})
each_term = pytest.mark.parametrize("term", STEP_TERMS, ids=lambda term: term.name)


def grid() -> Batch:
    """Prefill alone, decode alone and both; sizes that no two terms share."""
    rows = [
        (p, b, b * c, p * p)
        for p in (0, 128, 512, 1024, 2048)
        for b in (0, 1, 8, 32, 64, 128, 192)
        for c in (256, 1024, 4096)
        if p + b
    ]
    return Batch(*np.array(rows, float).T)


def with_size(term: Term, factor: float = 1.0) -> StepModel:
    return replace(PLAIN, **{term.name: factor * SIZES.get(term.name, 1e-6)})


def profile(step: StepModel) -> Profile:
    limits, source = EngineLimits(), Source("measured", "made", "CC0", "2026-01-01")
    return Profile(
        "m", "g", 1, step, KvModel(400_000), limits, Residuals(0, 0, 0, 9), source, PrefillModel(0, 0)
    )


def test_every_coefficient_of_a_model_is_in_its_list() -> None:
    for model, terms in ((StepModel, STEP_TERMS), (PrefillModel, PREFILL_TERMS)):
        assert {f.name for f in fields(model)} - {"hinges"} == {t.name for t in terms}


@each_term
def test_the_compiled_row_counts_each_coefficient_as_the_model_does(term: Term) -> None:
    alone = StepModel(**dict.fromkeys(coefficients(PLAIN), 0.0) | {term.name: 0.25})
    row = coefficient_row(profile(alone))
    for batch in zip(*grid(), strict=True):
        assert mixed_s(row, *batch) == pytest.approx(float(alone.step_s(*batch)), rel=1e-12)


@each_term
def test_placement_and_migration_count_each_coefficient_as_the_model_does(term: Term) -> None:
    alone = StepModel(**dict.fromkeys(coefficients(PLAIN), 0.0) | {term.name: 0.25})
    lasts_s = prefill_lasts_s(coefficient_row(profile(alone)), 300.0, 300.0, 0.0, 8, 1000.0)
    assert lasts_s == pytest.approx(float(alone.step_s(300, 8, 1000, 300**2)), rel=1e-12)
    running = tuple(RunningRequest(RequestId(f"r{i}"), 125, 0, 5, 0, 0.05) for i in range(8))
    busy = WorkerLoad(WorkerId("w"), "serving", 400_000, running, (), alone)
    ahead = forecast(busy.counted(), running, 400_000, alone, ShedSettings())
    assert 0.05 * ahead.step == pytest.approx(float(alone.step_s(0, 8, 1000)), rel=1e-12)


@pytest.mark.parametrize("term", PREFILL_TERMS, ids=lambda term: term.name)
def test_the_compiled_row_counts_each_coefficient_of_prefill_as_the_model_does(term: Term) -> None:
    alone = PrefillModel(**dict.fromkeys((t.name for t in PREFILL_TERMS), 0.0) | {term.name: 0.25})
    row = coefficient_row(replace(profile(PLAIN), prefill=alone))
    assert prefill_s(row, 300.0, 7000.0) == pytest.approx(float(alone.prefill_s(300.0, 7000.0)), rel=1e-12)


def test_the_compiled_row_counts_touched_experts_as_the_model_does() -> None:
    mixture = replace(PLAIN, hinges=(Hinge("experts", 16.0, 3e-4),))
    row = coefficient_row(profile(mixture))
    for batch in zip(*grid(), strict=True):
        assert mixed_s(row, *batch) == pytest.approx(float(mixture.step_s(*batch)), rel=1e-12)
    assert parse_profile(profile_text(profile(mixture)), "made") == profile(mixture)
    with pytest.raises(BadInput, match="at most 1 of experts"):
        coefficient_row(profile(replace(mixture, hinges=2 * mixture.hinges)))
    with pytest.raises(BadInput, match="more than 0 tokens"):
        Hinge("experts", 0.0, 1e-4)


@given(st.integers(2, 512), st.data())
def test_a_hinge_of_experts_is_the_share_that_tokens_touch(experts: int, data: st.DataObject) -> None:
    taken = data.draw(st.integers(1, experts - 1))
    tokens = np.arange(0, 300)
    scale = -1 / np.log1p(-taken / experts)
    touched = Hinge("experts", scale, 1 / scale).regressor(Batch(0, tokens, 0)) / scale
    assert touched == pytest.approx(1 - (1 - taken / experts) ** tokens, abs=1e-9)


@each_term
def test_a_fit_finds_each_coefficient(term: Term) -> None:
    made, batch = with_size(term, 1.5), grid()
    found = fit_step(StepSamples(*batch[:3], made.step_s(*batch), batch.prefill_sum_sq)).model
    assert coefficients(found) == pytest.approx(coefficients(made), rel=1e-3, abs=1e-12)


@each_term
def test_a_refit_follows_a_change_of_each_coefficient(term: Term) -> None:
    refit, changed = Refit(profile(with_size(term))), with_size(term, 1.3)
    rows = np.column_stack(grid())
    for batch in np.random.default_rng(0).permutation(np.repeat(rows, 10, axis=0)):
        refit.take(*batch[:3], float(changed.step_s(*batch)), batch[3])
    before, after = coefficients(with_size(term)), coefficients(refit.model)
    moved = {name: after[name] / before[name] for name in before if before[name]}
    assert moved[term.name] == max(moved.values()) > 1.1


@each_term
def test_a_profile_file_keeps_each_coefficient(term: Term) -> None:
    made = profile(with_size(term))
    text = profile_text(made)
    assert f"{term.name}:" in text
    assert parse_profile(text, "made") == made


EDITS = [
    (
        "step.py",
        "    hinges: tuple[Hinge, ...] = ()\n",
        """    hinges: tuple[Hinge, ...] = ()
    per_sequence_sq_s: float = field(
        default=0.0, metadata=_term("decode", lambda batch: batch.sequences**2, words="sequences²")
    )
""",
    ),
    ("coefficients.py", "PREFILL_STEP, BESIDE = range(", "SEQUENCE_SQ, PREFILL_STEP, BESIDE = range("),
    (
        "coefficients.py",
        "    t = k[BASE] + k[PER_SEQUENCE] * sequences\n",
        "    t = k[BASE] + k[PER_SEQUENCE] * sequences + k[SEQUENCE_SQ] * sequences * sequences\n",
    ),
    (
        "../migration/overload.py",
        "    t = step.base_s + step.per_sequence_s * sequences",
        "    t = step.base_s + (step.per_sequence_s + step.per_sequence_sq_s * sequences) * sequences",
    ),
]


def test_one_more_coefficient_takes_the_list_and_the_kernel(tmp_path: Path) -> None:
    """These tests pass for a seventh coefficient on a copy of the product that is edited in three files."""
    product = Path(controlplane.__file__).parent.parent
    for name in ("controlplane", "tokenfleet", "dataplane"):
        shutil.copytree(
            product / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__", "static")
        )
    for name, old, new in EDITS:
        path = tmp_path / "controlplane/perfmodel" / name
        assert old in path.read_text()
        path.write_text(path.read_text().replace(old, new, 1))
    copy = shutil.copy(__file__, tmp_path)
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-c",
            os.devnull,
            copy,
            "-k",
            "each_coefficient and sequence_sq",
        ],
        # A folder of kernels of its own: those of unedited files have the old places of coefficients in them.
        env={**os.environ, "PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "kernels")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert "5 passed" in ran.stdout, ran.stdout + ran.stderr
