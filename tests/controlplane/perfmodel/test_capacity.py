"""The fluid bound: no fleet that meets its targets is smaller."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
from by_day import examples
from hypothesis import given
from hypothesis import strategies as st
from made_profiles import made_profile

from controlplane.errors import BadInput, Infeasible
from controlplane.perfmodel.capacity import decode_throughput, fluid_workers_of, worker_seconds
from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.step import Hinge, PrefillModel, StepModel
from controlplane.prefixes import Prefixes, Sessions
from controlplane.types import EngineMode, Slo
from controlplane.workload import Workload
from dataplane.simulated.simulate import WorkerSpec, simulate


def worker(mode: EngineMode, kv_tokens: int = 50_000, hinges: tuple[Hinge, ...] = ()) -> Profile:
    return made_profile(
        StepModel(0.018, 9e-5, 7e-5, 4.6e-7, hinges=hinges),
        KvModel(kv_tokens, 1),
        EngineLimits("vllm", "", mode, 2048, 128),
        PrefillModel(0.011, 9e-5),
    )


@given(
    st.sampled_from([EngineMode.CHUNKED, EngineMode.PREFILL_FIRST]),
    st.integers(0, 10_000),
    st.floats(0.5, 60.0),
    st.integers(1, 12),
    st.sampled_from(["spread", "best-fit", "jsq", "round-robin"]),
)
@examples(60)
def test_no_fleet_that_meets_every_target_is_smaller_than_the_bound(
    mode: EngineMode, seed: int, rate: float, workers: int, policy: str
) -> None:
    rng = np.random.default_rng(seed)
    n = int(rng.integers(20, 200))
    workload = Workload(
        np.cumsum(rng.exponential(1 / rate, n)), rng.integers(1, 1500, n), rng.integers(1, 400, n)
    )
    slo = Slo(float(rng.uniform(0.3, 3)), float(rng.uniform(0.02, 0.06)))
    mixture = (Hinge("experts", 20.0, 3e-4),) if seed % 2 else ()
    profile = worker(mode, int(rng.integers(4_000, 60_000)), mixture)
    outcome = simulate(workload, [WorkerSpec(profile)] * workers, slo, policy)
    met = outcome.attainment
    if met > 0:
        assert workers >= fluid_workers_of(workload, profile, slo, met)


@given(st.integers(0, 1000), st.floats(1.0, 3.0))
@examples(40)
def test_the_bound_grows_with_lengths_and_tighter_targets(seed: int, factor: float) -> None:
    rng = np.random.default_rng(seed)
    prompt, output = rng.integers(1, 2000, 50), rng.integers(1, 500, 50)
    for mode in (EngineMode.CHUNKED, EngineMode.PREFILL_FIRST):
        profile = worker(mode, hinges=(Hinge("sequences", 32, 1e-5), Hinge("prefill_tokens", 256, 1e-5)))
        base = worker_seconds(prompt, output, profile, Slo(1, 0.06))
        assert worker_seconds(prompt, output, profile, Slo(1, 0.06 / factor)) >= base - 1e-12
        assert worker_seconds(np.ceil(prompt * factor), output, profile, Slo(1, 0.06)) >= base - 1e-12
        assert worker_seconds(prompt, np.ceil(output * factor), profile, Slo(1, 0.06)) >= base - 1e-12
        assert worker_seconds(prompt, output, profile, Slo(1, 0.06), 0.9) <= base


@st.composite
def shared(draw: st.DrawFn) -> Workload:
    """A few requests whose lists are paths of one tree of blocks."""
    lists: list[list[int]] = []
    named = 0
    for _ in range(draw(st.integers(1, 5))):
        kept = draw(st.sampled_from(lists)) if lists else []
        kept = kept[: draw(st.integers(0, len(kept)))]
        more = draw(st.integers(0, 4))
        lists.append([*kept, *range(named, named + more)])
        named += more
    lengths = np.array([16 * len(ids) + draw(st.integers(1, 15)) for ids in lists])
    offsets = np.concatenate([[0], np.cumsum([len(ids) for ids in lists])])
    prefixes = Prefixes(16, offsets, np.array([i for ids in lists for i in ids], np.int64))
    return Workload(np.arange(len(lists)), lengths, np.full(len(lists), 20), prefixes=prefixes)


@given(shared(), st.integers(1, 6), st.sampled_from([EngineMode.CHUNKED, EngineMode.PREFILL_FIRST]))
def test_no_order_and_no_choice_of_requests_computes_less_than_the_ideal_cache(
    workload: Workload, kept: int, mode: EngineMode
) -> None:
    assert workload.prefixes is not None
    kept = min(kept, len(workload))
    profile, slo = worker(mode), Slo(1.0, 0.05)
    least = worker_seconds(
        workload.prompt_tokens,
        workload.output_tokens,
        profile,
        slo,
        kept / len(workload),
        workload.ideal_hits,
    )
    for order in itertools.permutations(range(len(workload)), kept):
        had: set[int] = set()
        cached = np.zeros(len(workload))
        for r in order:
            ids = workload.prefixes.of(r).tolist()
            cached[r] = 16 * sum(i in had for i in ids)
            had.update(ids)
        rows = list(order)
        spent = worker_seconds(
            workload.prompt_tokens[rows], workload.output_tokens[rows], profile, slo, 1.0, cached[rows]
        )
        assert least <= spent * kept / len(workload) + 1e-12


def test_the_bound_counts_what_is_shared_once() -> None:
    alone = Workload(np.zeros(50), np.full(50, 1601), np.full(50, 2))
    lists = np.tile(np.arange(100), 50)
    same = replace(alone, prefixes=Prefixes(16, np.arange(0, 5001, 100), lists))
    profile, slo = worker(EngineMode.CHUNKED), Slo(1.0, 0.06)
    assert fluid_workers_of(alone, profile, slo) >= 6
    assert fluid_workers_of(same, profile, slo) == 1


def test_sessions_that_wait_have_the_time_that_their_answers_may_take() -> None:
    n, slo, profile = 40, Slo(1.0, 0.05), worker(EngineMode.CHUNKED)
    at_once = Workload(np.zeros(n), np.full(n, 1000), np.full(n, 100))
    line = Sessions(np.zeros(n), np.r_[0, np.arange(n)], np.arange(n - 1), np.full(n, 10.0))
    one_by_one = replace(at_once, sessions=line)
    assert fluid_workers_of(at_once, profile, slo) > 1
    assert fluid_workers_of(one_by_one, profile, slo) == 1


def test_memory_binds_where_it_is_scarce() -> None:
    prompt, output = np.full(10, 500), np.full(10, 200)
    slo = Slo(1, 0.05)
    for mode in (EngineMode.CHUNKED, EngineMode.PREFILL_FIRST):
        assert worker_seconds(prompt, output, worker(mode, 1_000), slo) > 2 * worker_seconds(
            prompt, output, worker(mode, 100_000), slo
        )


def test_a_target_below_the_step_base_is_out_of_reach_of_any_number() -> None:
    for mode in (EngineMode.CHUNKED, EngineMode.PREFILL_FIRST):
        assert worker_seconds([100], [50], worker(mode), Slo(1, 0.01)) == math.inf
        assert worker_seconds([100], [1], worker(mode), Slo(1, 0.01)) < math.inf
    workload = Workload(np.zeros(1), np.array([100]), np.array([50]))
    with pytest.raises(BadInput, match="no number of workers"):
        fluid_workers_of(workload, worker(EngineMode.CHUNKED), Slo(1, 0.01))


def test_bad_arguments_are_refused() -> None:
    profile, slo = worker(EngineMode.CHUNKED), Slo(1, 0.05)
    with pytest.raises(BadInput, match="lengths"):
        worker_seconds([], [], profile, slo)
    with pytest.raises(BadInput, match="attainment"):
        worker_seconds([1], [1], profile, slo, 0.0)
    assert fluid_workers_of(Workload(np.zeros(0), np.zeros(0), np.zeros(0)), profile, slo) == 1


def test_aladdins_cases_have_the_bound_their_lengths_give() -> None:
    """A plain count by hand of the prefill-first bound, for one request shape."""
    profile = worker(EngineMode.PREFILL_FIRST)
    slo = Slo(1, 0.03)
    steps, context = 99, sum(300 + k for k in range(1, 100))
    least = (7e-5 + 4.6e-7 * 301) * steps
    count = max(least / (0.03 - 0.018), context / 50_000, steps / 128)
    prefill = 300 * (0.011 + 9e-5 * 2048) / 2048
    by_hand = prefill + 7e-5 * steps + 4.6e-7 * context + 0.018 * count
    assert worker_seconds([300], [100], profile, slo) == pytest.approx(by_hand, rel=1e-9)


def profile(tp: int, base_s: float, kv: int, hinges: tuple[Hinge, ...] = ()) -> Profile:
    return made_profile(
        StepModel(base_s, 1e-4, 6.86e-5, 4.631e-7, hinges=hinges),
        KvModel(kv),
        EngineLimits("vllm", "", max_seqs=256),
        tp_degree=tp,
    )


def test_the_slo_bounds_one_batch_and_memory_another() -> None:
    def rate(batch: float) -> float:
        return batch / float(profile(1, 0.0187, 59765).step.step_s(0, batch, 972 * batch))

    small = decode_throughput(profile(1, 0.0187, 59765), 0.030, 972.0)
    assert small * 0.030 == pytest.approx((0.030 - 0.0187) / (6.86e-5 + 4.631e-7 * 972))
    by_memory = decode_throughput(profile(1, 0.0187, 59765), 0.100, 972.0)
    assert by_memory == pytest.approx(rate(59765 / 972))
    assert decode_throughput(profile(1, 0.0187, 10**7), 1.0, 972.0) == pytest.approx(rate(256))
    kneed = decode_throughput(profile(1, 0.0187, 59765, (Hinge("sequences", 10, 1e-4),)), 0.030, 972.0)
    assert kneed < small


def test_a_target_no_degree_reaches_is_infeasible_with_the_reason() -> None:
    with pytest.raises(Infeasible, match="one sequence of 972 tokens takes"):
        decode_throughput(profile(1, 0.0187, 59765), 0.010, 972.0)
    with pytest.raises(BadInput, match="must be positive"):
        decode_throughput(profile(1, 0.0187, 59765), 0.030, 0.0)
