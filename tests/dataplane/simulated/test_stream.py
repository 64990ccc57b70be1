"""A stream of requests gives every request what a run of all of them gives it."""

from itertools import pairwise

import numpy as np
import pytest
from by_day import examples
from hypothesis import given
from hypothesis import strategies as st
from made_profiles import made_profile

from controlplane.errors import BadInput
from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.profile import Profile, speculating
from controlplane.perfmodel.speculation import Speculation
from controlplane.perfmodel.step import PrefillModel, StepModel
from controlplane.placement.lengths import LengthTable
from controlplane.prefixes import Prefixes
from controlplane.types import EngineMode, Slo
from controlplane.workload import Workload
from dataplane.simulated.simulate import COLUMNS, WorkerSpec, simulate, simulate_stream

SLO = Slo(0.6, 0.03)
CHUNKED, SPLIT, PREFILL_FIRST = EngineMode.CHUNKED, EngineMode.SPLIT, EngineMode.PREFILL_FIRST


def profile(mode: EngineMode, kv_tokens: int = 12_000) -> Profile:
    return made_profile(
        StepModel(0.0187, 9e-5, 7e-5, 5e-7),
        KvModel(kv_tokens, 16),
        EngineLimits(mode=mode, max_batched_tokens=2048, max_seqs=64),
        PrefillModel(0.0115, 9e-5),
    )


def load(rate_rps: float, requests: int = 600) -> Workload:
    rng = np.random.default_rng(3)
    return Workload(
        np.round(np.cumsum(rng.exponential(1 / rate_rps, requests)), 2),  # some arrive at the same time
        rng.integers(1, 400, requests),
        rng.integers(1, 200, requests),
        priority=(rng.random(requests) < 0.1).astype(np.int64),
        slo_class=(rng.random(requests) < 0.3).astype(np.int64),
        slo_classes=("chat", "batch"),
    )


def fleet(mode: EngineMode) -> list[WorkerSpec]:
    one = profile(mode)
    if mode == SPLIT:
        return [
            WorkerSpec(one, role="prefill"),
            WorkerSpec(one, role="decode"),
            WorkerSpec(one, role="decode"),
        ]
    return [WorkerSpec(one), WorkerSpec(one, fails_s=((9.0, 14.0),)), WorkerSpec(one, ready_s=5.0)]


def parts_of(workload: Workload, cuts: list[int]) -> list[Workload]:
    edges = sorted({0, len(workload), *(cut % len(workload) for cut in cuts)})
    return [workload.take(slice(a, b)) for a, b in pairwise(edges)]


@examples(25)
@given(
    cuts=st.lists(st.integers(1, 599), max_size=9),
    mode=st.sampled_from((CHUNKED, SPLIT, PREFILL_FIRST)),
    policy=st.sampled_from(("spread", "best-fit", "jsq", "p2c", "slack-fit")),
    rate=st.sampled_from((3.0, 12.0, 60.0)),
)
def test_however_a_stream_is_cut_each_request_has_the_outcome_of_the_whole_run(
    cuts: list[int], mode: EngineMode, policy: str, rate: float
) -> None:
    workload, workers, slos = load(rate), fleet(mode), (SLO, Slo(20.0, 0.2))
    options = {"predictor": LengthTable.from_history(workload.prompt_tokens, workload.output_tokens)}
    whole = simulate(workload, workers, slos, policy, **options)
    ended = list(simulate_stream(parts_of(workload, cuts), workers, slos, policy, **options))
    # Requests end out of order, so both are compared as sets of rows.
    rows = np.concatenate([np.column_stack([_known(o), *(getattr(o, c) for c in COLUMNS)]) for o in ended])
    expected = np.column_stack([_known(whole), *(getattr(whole, c) for c in COLUMNS)])
    assert np.array_equal(
        rows[np.lexsort(rows.T[::-1])], expected[np.lexsort(expected.T[::-1])], equal_nan=True
    )
    assert np.array_equal(ended[-1].busy_s, whole.busy_s)
    assert ended[-1].end_s == pytest.approx(whole.end_s)


def _known(outcome) -> np.ndarray:
    workload = outcome.workload
    return np.column_stack([workload.prompt_tokens, workload.output_tokens, workload.slo_class])


def test_where_drafts_are_accepted_by_chance_a_request_keeps_its_share_of_it_from_part_to_part() -> None:
    workload, one = load(12.0), speculating(profile(CHUNKED), Speculation((0.8, 0.6)))
    table = LengthTable.from_history(workload.prompt_tokens, workload.output_tokens)
    parts, workers = parts_of(workload, list(range(50, 600, 50))), [WorkerSpec(one)] * 3
    ended = list(simulate_stream(parts, workers, (SLO, Slo(20.0, 0.2)), predictor=table))
    assert sum(len(outcome.workload) for outcome in ended) == len(workload)
    for outcome in ended:
        asked_s = np.array([0.03, 0.2])[outcome.workload.slo_class]
        assert outcome.tpot_target_s == pytest.approx(asked_s)


def test_an_outcome_keeps_its_columns_and_not_the_records_of_its_run() -> None:
    outcome = simulate(load(12.0), fleet(CHUNKED), (SLO, Slo(20.0, 0.2)))
    for name in (*COLUMNS, "busy_s"):
        column = getattr(outcome, name)
        held = column if column.base is None else column.base
        assert held.nbytes <= len(outcome.workload) * column.itemsize, name


def test_a_stream_that_goes_back_in_time_is_refused() -> None:
    workload = load(5.0)
    parts = [workload.take(slice(300, 600)), workload.take(slice(0, 300))]
    with pytest.raises(BadInput, match="before the last has ended"):
        list(simulate_stream(parts, fleet(CHUNKED), (SLO, SLO), predictor=LengthTable.constant(9)))


def test_what_needs_the_whole_is_refused_as_a_stream() -> None:
    workload, table = load(5.0), LengthTable.constant(9)
    shared = Workload(
        workload.arrival_s[:1],
        workload.prompt_tokens[:1],
        workload.output_tokens[:1],
        prefixes=Prefixes(16, np.array([0, 0]), np.zeros(0, np.int64)),
    )
    for parts, policy in (([shared], "spread"), ([workload], "spread+migrate"), ([workload], "round-robin")):
        with pytest.raises(BadInput, match="no stream"):
            list(simulate_stream(parts, fleet(CHUNKED), (SLO, SLO), policy, predictor=table))
    with pytest.raises(BadInput, match="needs one of all"):
        list(simulate_stream([workload], fleet(CHUNKED), (SLO, SLO)))
