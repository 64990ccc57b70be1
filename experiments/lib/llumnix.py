"""Workers and loads of Llumnix' testbed (OSDI '24, §6.1) as the simulator has them.

LLaMA-7B on an A10 under vLLM 0.1.7: prefill-first, 256 sequences, KV as the artifact's profile run leaves it
(792 blocks of 16 tokens at 12,000 batched tokens), 1 % of them a watermark. Prefill times fit Figure 10's
recompute curve (within 2 %). A decode step is a + b·sequences + c·tokens with c = KV bytes / the A10's
600 GB/s, and a + 8192·c = 42.6 ms, Figure 10's intercept at 8k tokens.

Lengths are the published ones to the token; gaps come from the same random stream. Seeds other than the
published one redraw the gaps alone.
"""

from __future__ import annotations

import numpy as np

from controlplane.perfmodel.profile import EngineLimits, KvModel, Profile, Residuals, Source
from controlplane.perfmodel.step import PrefillModel, StepModel
from controlplane.types import EngineMode
from controlplane.workload import Workload
from tokenfleet.traces.distributions import LONG, MEDIUM, PUBLISHED_SEED, SHORT, LengthMix, gamma, poisson

WORKERS = 16
REQUESTS = 10_000
BLOCK = 16
KV_BYTES = 524_288
PER_TOKEN_S = KV_BYTES / 600e9
SIDES = {"S": SHORT, "M": MEDIUM, "L": LONG}


def a10(per_sequence_s: float) -> Profile:
    """One LLaMA-7B instance; b of a decode step is not published."""
    return Profile(
        "llama-7b",
        "a10",
        1,
        step=StepModel(0.0426 - 8192 * PER_TOKEN_S, 2.03e-4, per_sequence_s, PER_TOKEN_S),
        prefill=PrefillModel(0.0046, 2.03e-4, 5.1e-9),
        kv=KvModel(int(792 * 0.99) * BLOCK, BLOCK, KV_BYTES),
        engine=EngineLimits(mode=EngineMode.PREFILL_FIRST, max_batched_tokens=12_800, max_seqs=256),
        residuals=Residuals(0.0, 0.0, 0.0, 0),
        source=Source("published", "Llumnix (OSDI '24), Figure 10, and its artifact", "none", "2024-07-10"),
    )


def workload(name: str, rate_rps: float, seed: int, cv: float = 1.0, requests: int = REQUESTS) -> Workload:
    """A generated trace such as `S-L` (prompts short, outputs long); seed 0 is the published one."""
    stream = np.random.RandomState(PUBLISHED_SEED)
    prompt, output = name.split("-")
    prompts, outputs = LengthMix(SIDES[prompt], SIDES[output]).draw(REQUESTS, stream)
    if seed > 0:
        stream = np.random.RandomState([PUBLISHED_SEED, seed])
    arrivals = poisson(rate_rps, REQUESTS, stream) if cv == 1.0 else gamma(rate_rps, cv, REQUESTS, stream)
    return Workload(arrivals, prompts, outputs).take(slice(0, requests))
