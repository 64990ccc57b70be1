"""Requests that calibrate a profile in a minute: lone prompts, lone decodes and small batches.

A lone prompt shows prefill and what a first token takes outside steps, a lone decode the base of a step, a
batch what sequences and context add. Each group is sent once the one before should be over.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import Profile
from controlplane.workload import Workload

WARM_UP = 2  # requests that load what an engine loads late; they are not judged
PROMPTS = (128, 512, 1024, 2048, 4096)
BATCH, BATCH_PROMPT, BATCH_OUTPUT = 16, 256, 48
LONE_PROMPT, LONE_OUTPUT = 64, 64
SLOWER, PAUSE_S = 2.0, 0.2  # an engine may be so much slower than the profile before groups meet


def probes(profile: Profile, workers: int = 1) -> tuple[Workload, NDArray[np.bool_]]:
    """The requests to send to `workers` idle engines, and which of them are judged; shape [requests].

    Raises BadInput where the model's context or the KV memory has no room for them.
    """
    arrival_s, prompts, outputs, now_s = [], [], [], 0.0
    for count, prompt, output in _groups(profile, workers):
        arrival_s += [now_s] * count
        prompts += [prompt] * count
        outputs += [output] * count
        now_s += SLOWER * _lasts_s(profile, count, prompt, output) + PAUSE_S
    judged = np.arange(len(prompts)) >= WARM_UP * workers
    return Workload(np.array(arrival_s), np.array(prompts), np.array(outputs)), judged


def _groups(profile: Profile, workers: int) -> Iterator[tuple[int, int, int]]:
    """Groups of like requests in order: how many, their prompt and output tokens."""
    most = min(profile.context_limit_tokens or PROMPTS[-1] + LONE_OUTPUT, profile.kv.capacity_tokens)
    if most < LONE_PROMPT + LONE_OUTPUT:
        raise BadInput(f"{profile.label}: a request of {LONE_PROMPT + LONE_OUTPUT} tokens does not fit")
    batch = min(BATCH, profile.engine.max_seqs, profile.kv.capacity_tokens // (BATCH_PROMPT + BATCH_OUTPUT))
    for _ in range(WARM_UP):
        yield workers, LONE_PROMPT, 8
    for _ in range(2):
        for prompt in PROMPTS:
            yield 1, min(prompt, most - 1), 1
        yield 1, LONE_PROMPT, LONE_OUTPUT
        yield 1, LONE_PROMPT, LONE_OUTPUT
        if batch > 1 and most >= BATCH_PROMPT + BATCH_OUTPUT:
            yield batch * workers, BATCH_PROMPT, BATCH_OUTPUT


def _lasts_s(profile: Profile, count: int, prompt: int, output: int) -> float:
    """Seconds that a group takes on one idle engine, by the profile."""
    prefill_s = float(profile.step.step_s(count * prompt, 0, 0, count * prompt**2))
    return prefill_s + output * float(profile.step.step_s(0, count, count * (prompt + output)))
