"""The short design of a fleet's start: it fits the engine, and tells every coefficient of the step model."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controlplane.perfmodel.fit import fit_step
from controlplane.perfmodel.samples import DECODE_STEPS, Burst, EngineRoom, StepSamples, by_point, design
from controlplane.perfmodel.step import StepModel

ROOM = EngineRoom(kv_tokens=131_072, max_seqs=128, max_batched_tokens=2048, max_context_tokens=4096)
IDENTIFYING = 6  # bursts, as `design` promises
TRUTHS = {
    "plain": StepModel(0.005, 8e-5, 1.2e-4, 3e-7),
    "length²": StepModel(0.005, 8e-5, 1.2e-4, 3e-7, per_prefill_sum_sq_s=4e-8),
    "a large model": StepModel(0.0067, 2.1e-5, 1.9e-5, 5.6e-8, 1e-9),
    "prefilling": StepModel(0.005, 8e-5, 1.2e-4, 3e-7, per_prefill_step_s=0.002),
}


def executed(burst: Burst, room: EngineRoom) -> list[tuple[int, int, int, int]]:
    """The steps of a burst on an engine that mixes the phases: (P, b, C, S) each."""
    steps = []
    waiting = [burst.context_tokens] * burst.decoding
    decoding: list[int] = []
    lasts = DECODE_STEPS

    def prefill(prompts: list[int]) -> None:
        done = [0] * len(prompts)
        while any(d < n for d, n in zip(done, prompts, strict=True)):
            budget, p, sum_sq = room.max_batched_tokens - len(decoding), 0, 0
            ready = []
            for i, n in enumerate(prompts):
                chunk = min(n - done[i], budget)
                if chunk > 0:
                    sum_sq += (done[i] + chunk) ** 2 - done[i] ** 2
                    done[i], budget, p = done[i] + chunk, budget - chunk, p + chunk
                    if done[i] == n:
                        ready.append(n)
            steps.append((p, len(decoding), sum(decoding), sum_sq))
            decoding[:] = [c + 1 for c in decoding] + (ready if prompts is waiting else [])

    prefill(waiting)
    for turn in range(lasts if burst.decoding else 0):
        if turn == lasts // 2 and burst.prefills:
            prefill([burst.prefill_tokens] * burst.prefills)
        steps.append((0, len(decoding), sum(decoding), 0))
        decoding = [c + 1 for c in decoding]
    if not burst.decoding:
        prefill([burst.prefill_tokens] * burst.prefills)
    return steps


def measured(bursts: list[Burst], truth: StepModel, noise: float, visits: int = 3) -> StepSamples:
    rng = np.random.default_rng(0)
    rows = [(b.name, str(v), *s) for b in bursts for v in range(visits) for s in executed(b, ROOM)]
    prefill, sequences, context, sum_sq = np.array([row[2:] for row in rows], float).T
    step_s = truth.step_s(prefill, sequences, context, sum_sq) * np.exp(
        noise * rng.standard_normal(len(rows))
    )
    samples = StepSamples(prefill, sequences, context, step_s, sum_sq)
    return by_point(samples, [row[0] for row in rows], [row[1] for row in rows])


rooms = st.builds(
    EngineRoom,
    kv_tokens=st.integers(512, 500_000),
    max_seqs=st.integers(1, 512),
    max_batched_tokens=st.integers(16, 8192),
    max_context_tokens=st.integers(64, 32_768),
)


@given(rooms)
def test_every_burst_of_the_design_fits_the_engine_and_stands_in_it_once(room: EngineRoom) -> None:
    bursts = design(room)
    assert len({b.name for b in bursts}) == len(bursts)
    for b in bursts:
        assert b.tokens <= room.kv_tokens
        assert b.decoding + b.prefills <= room.max_seqs
        assert max(b.prefill_tokens, b.context_tokens) + DECODE_STEPS <= room.max_context_tokens


@pytest.mark.parametrize("name", TRUTHS)
def test_the_design_tells_every_coefficient(name: str) -> None:
    """Exactly without noise, and within a few percent of served steps with it."""
    truth = TRUTHS[name]
    exact = fit_step(measured(design(ROOM), truth, 0.0), quick=True).model
    served = np.array(
        [[0, 1, 300, 0], [0, 20, 8000, 0], [200, 12, 5000, 200**2], [1500, 40, 20_000, 1500**2]]
    )
    assert exact.step_s(*served.T) == pytest.approx(truth.step_s(*served.T), rel=1e-6)
    noisy = fit_step(measured(design(ROOM), truth, 0.1), robust=True, quick=True).model
    assert noisy.step_s(*served.T) == pytest.approx(truth.step_s(*served.T), rel=0.08)


@pytest.mark.parametrize("name", TRUTHS)
def test_a_design_cut_short_still_tells_them(name: str) -> None:
    truth = TRUTHS[name]
    fit = fit_step(measured(design(ROOM)[:IDENTIFYING], truth, 0.0, visits=1), robust=True, quick=True).model
    served = np.array([[0, 1, 300, 0], [0, 8, 2000, 0], [200, 6, 1500, 200**2]])
    assert fit.step_s(*served.T) == pytest.approx(truth.step_s(*served.T), rel=0.05)
