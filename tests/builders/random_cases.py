"""Random small workers and workloads: block sizes, hinges, KV short enough to preempt, priorities."""

from dataclasses import replace

import numpy as np
import pytest
from made_profiles import made_profile
from numpy.typing import NDArray

from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.step import Hinge, PrefillModel, StepModel
from controlplane.prefixes import Prefixes
from controlplane.types import EngineMode, Slo
from controlplane.workload import Workload

NEVER_MET = Slo(1e-6, 1e-6)


def by_day_and_night(by_day: int, all_cases: int) -> pytest.MarkDecorator:
    """The numbers of random cases as `cases`: the first of them in each run, the others in nightly ones."""
    night = pytest.param(range(by_day, all_cases), id="night", marks=pytest.mark.nightly)
    return pytest.mark.parametrize("cases", [pytest.param(range(by_day), id="day"), night])


def random_profile(rng: np.random.Generator, mode: EngineMode) -> Profile:
    block = int(rng.choice([1, 1, 4, 16]))
    seqs = int(rng.integers(1, 9))
    return made_profile(
        step=StepModel(
            base_s=rng.uniform(0.001, 0.03),
            per_prefill_token_s=rng.uniform(0, 2e-4),
            per_sequence_s=rng.uniform(0, 1e-3),
            per_context_token_s=float(rng.choice([0.0, rng.uniform(1e-7, 2e-5)])),
            per_prefill_sum_sq_s=float(rng.choice([0.0, rng.uniform(0, 1e-7)])),
            hinges=(
                Hinge("sequences", 3, rng.uniform(0, 1e-3)),
                Hinge("prefill_tokens", 20, rng.uniform(0, 1e-4)),
                *([Hinge("experts", 2.0 * seqs, 1e-3)] if block == 4 else []),
            ),
            per_prefill_step_s=float(rng.choice([0.0, rng.uniform(0, 0.01)])),
            per_prefill_sequence_s=float(rng.choice([0.0, rng.uniform(0, 1e-3)])),
        ),
        prefill=PrefillModel(
            rng.uniform(0, 0.02), rng.uniform(1e-6, 2e-4), 1e-8, (Hinge("prefill_tokens", 30, 1e-5),)
        ),
        kv=KvModel(
            capacity_tokens=int(rng.integers(3, 40)) * 16,
            block_tokens=block,
            request_tokens=int(rng.choice([0, 0, 30, 70])),
            window_tokens=int(rng.choice([0, 1, 50])),
        ),
        engine=EngineLimits(mode=mode, max_batched_tokens=int(rng.integers(seqs, 160)), max_seqs=seqs),
    )


def random_workload(rng: np.random.Generator) -> Workload:
    n = int(rng.integers(1, 40))
    arrival_s = np.sort(rng.uniform(0, rng.choice([0.01, 1.0, 10.0]), n))
    if rng.random() < 0.2:
        arrival_s[: n // 2] = arrival_s[0]
    return Workload(
        arrival_s,
        rng.integers(1, rng.choice([20, 120]), n),
        rng.integers(1, rng.choice([3, 30, 150]), n),
        priority=(rng.random(n) < rng.choice([0.0, 0.3])).astype(np.int64),
    )


def shared_texts(rng: np.random.Generator, block: int, most: int) -> list[tuple[NDArray[np.int64], int]]:
    """Conversations as (a request's tokens, how many of them are its prompt), up to `most` tokens long.

    They begin with one of two system prompts, and a turn sends the whole conversation before it. Some go two
    ways after a turn, and some prompts are sent more than once.
    """
    systems = [rng.integers(1, 1000, int(rng.integers(0, 6 * block))) for _ in range(2)]
    texts: list[tuple[NDArray[np.int64], int]] = []
    for _ in range(int(rng.integers(1, 8))):
        said = systems[int(rng.integers(2))]
        for _ in range(int(rng.integers(1, 6))):
            prompt = np.concatenate([said, rng.integers(1, 1000, int(rng.integers(1, 4 * block)))])
            if rng.random() < 0.2:  # a whole number of blocks
                prompt = prompt[: max(len(prompt) // block * block, 1)]
            output = int(rng.integers(1, 5 * block))
            if len(prompt) + output > most:
                break
            for _ in range(int(rng.choice([1, 1, 1, 2, 4]))):
                texts.append((np.concatenate([prompt, rng.integers(1, 1000, output)]), len(prompt)))
            said = texts[-1][0]
    return texts or [(rng.integers(1, 1000, 3), 2)]


def prefixes_of(texts: list[tuple[NDArray[np.int64], int]], block: int) -> Prefixes:
    """The ids of all full blocks of the texts, generated tokens included."""
    known: dict[tuple[int, bytes], int] = {}
    lists = []
    for tokens, _ in texts:
        ids: list[int] = []
        for at in range(0, len(tokens) // block * block, block):
            key = (ids[-1] if ids else -1, tokens[at : at + block].tobytes())
            ids.append(known.setdefault(key, len(known)))
        lists.append(ids)
    return Prefixes(
        block, np.cumsum([0, *map(len, lists)]), np.array([i for ids in lists for i in ids], np.int64)
    )


def random_sharing(
    rng: np.random.Generator, block: int, most: int
) -> tuple[Workload, list[NDArray[np.int64]]]:
    """Requests that share prefixes, and the tokens of each: its prompt, then its answer.

    A conversation's next turn may come before its last one is answered.
    """
    texts = shared_texts(rng, block, most)
    # Turns stay in order or not, and come close together or not.
    order = np.arange(len(texts)) if rng.random() < 0.5 else rng.permutation(len(texts))
    texts = [texts[i] for i in order]
    n = len(texts)
    workload = Workload(
        np.sort(rng.uniform(0, rng.choice([0.01, 1.0, 10.0]), n)),
        np.array([prompt for _, prompt in texts]),
        np.array([len(tokens) - prompt for tokens, prompt in texts]),
        prefixes=prefixes_of(texts, block),
    )
    return workload, [tokens for tokens, _ in texts]


def without_own(prefixes: Prefixes) -> Prefixes:
    """The lists cut short of the blocks at their ends that no other request has."""
    counts = np.bincount(prefixes.ids) if len(prefixes.ids) else np.zeros(0, np.int64)
    lists = [prefixes.of(r) for r in range(len(prefixes))]
    kept = [ids[: int((counts[ids] > 1).nonzero()[0].max(initial=-1)) + 1] for ids in lists]
    return Prefixes(prefixes.block_tokens, np.cumsum([0, *map(len, kept)]), np.concatenate(kept))


def tight_profile(rng: np.random.Generator, longest: int, block: int) -> Profile:
    """A chunked worker on which requests of up to `longest` tokens fit, but few at a time."""
    profile = random_profile(rng, EngineMode.CHUNKED)
    tokens = int(longest * rng.choice([1.0, 1.3, 2.0, 4.0])) // block * block + block
    return replace(profile, kv=KvModel(capacity_tokens=tokens, block_tokens=block))
