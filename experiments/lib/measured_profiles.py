"""Profiles from other people's measurements: Splitwise's of 2023, a real vLLM log, and Aladdin's cases."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from controlplane.perfmodel.engine import EngineLimits, KvModel, steps_ahead_of
from controlplane.perfmodel.fit import fit_phases, pooled
from controlplane.perfmodel.profile import Profile, Residuals, Source
from controlplane.perfmodel.samples import StepSamples
from controlplane.perfmodel.step import PrefillModel, StepModel
from controlplane.types import EngineMode
from experiments.lib.public_data import REQUEST_LOG, SPLITWISE_TABLE
from experiments.lib.published_models import (
    GIB,
    MEMORY_UTILIZATION,
    MODELS,
    OTHER_BYTES,
    capacity_tokens,
    kv_capacity_tokens,
    table_rows,
)
from tokenfleet.profiles.fit_log import fit_log
from tokenfleet.profiles.measurements import read_request_log

# Splitwise's published measurements of vLLM. Left out: TP 2 rows from batch 32 on, which overflow the KV
# memory; the power-capped rows, which are scaled copies; and batches of prompts that were not one step: those
# past 2048 tokens, which that engine cut up, and those that took as long as their prompts one by one (all on
# the A100 at TP 2 and 4).
#
# Three sweeps share one batch, a single sequence after 512 tokens: over prompts and over batch sizes with
# outputs of 128 tokens, and over longer outputs. That over prompts ran apart: on the A100 at TP 2 the shared
# batch took 54.9 ms there, 60.0 ms in the others. Its steps are put at their level (`sweeps_apart`).
SPLITWISE = {"llama-2-70b": ("llama2-70b", (2, 4, 8)), "bloom-176b": ("bloom-176b", (8,))}
SPLITWISE_GPUS = ("a100-80gb", "h100-80gb")
PROMPT_BATCH = 2048
ONE_BY_ONE = 0.98  # of the time of the prompts alone


def splitwise_samples(data: Path, model: str, gpu: str, tp_degree: int) -> StepSamples:
    """One (model, GPU, degree) of the 2023 measurements: prefill steps, and decode steps at mid-output.

    Each distinct batch counts once, with the median of its repeats: prompts of one size, and outputs whose
    length lies between the same powers of two.
    """
    mine = splitwise_rows(data, model, gpu, tp_degree)
    times: dict[tuple[int, int], list[float]] = {}
    decodes: dict[tuple[int, int, int], list[tuple[float, float]]] = {}
    apart = sweeps_apart(mine)
    for row in mine:
        prompt, batch = int(row["prompt_size"]), int(row["batch_size"])
        times.setdefault((prompt, batch), []).append(float(row["prompt_time"]))
        if tp_degree > 2 or batch < 32:
            output, token_ms = output_tokens(row), float(row["token_time"])
            level = apart if _of_prompt_sweep(row) else 1.0
            cell = prompt, batch, (output - 1).bit_length()
            decodes.setdefault(cell, []).append((batch * (prompt + output / 2), token_ms * level))
    rows = [
        (0, batch, *np.median(cell, axis=0), 0)  # context and time
        for (_, batch, _), cell in decodes.items()
    ]
    for (prompt, batch), repeats in times.items():
        one_by_one = batch * float(np.median(times[prompt, 1]))
        if batch > 1 and (prompt * batch > PROMPT_BATCH or np.median(repeats) > ONE_BY_ONE * one_by_one):
            continue
        rows.append((prompt * batch, 0, 0, float(np.median(repeats)), batch * prompt**2))
    table = np.array(rows, float)
    samples = StepSamples(table[:, 0], table[:, 1], table[:, 2], table[:, 3] / 1e3, table[:, 4])
    return without_repeats(samples)


def without_repeats(samples: StepSamples) -> StepSamples:
    """Each distinct batch once, with the median of its times: a grid's points then weigh alike."""
    point = samples.points
    first = np.unique(point, return_index=True)[1]
    median = np.array([np.median(samples.step_s[point == k]) for k in range(len(first))])
    return replace(samples.take(first), step_s=median)


def splitwise_rows(data: Path, model: str, gpu: str, tp_degree: int) -> list[dict[str, str]]:
    """The measured rows of one (model, GPU, degree)."""
    wanted = SPLITWISE[model][0], gpu, tp_degree
    return [
        row
        for row in table_rows(data / SPLITWISE_TABLE)
        if (row["model"], row["hardware"], int(row["tensor_parallel"])) == wanted
    ]


def output_tokens(row: dict[str, str]) -> int:
    """Tokens that came out of a run: fewer than asked for (`token_size`) where the model ended its text."""
    decoded_ms = float(row["e2e_time"]) - float(row["prompt_time"])
    return min(int(row["token_size"]), round(decoded_ms / float(row["token_time"])) + 1)


def sweeps_apart(rows: list[dict[str, str]]) -> float:
    """How much longer the batch that all sweeps share took in that over outputs than in that over prompts."""
    shared = [row for row in rows if (row["prompt_size"], row["batch_size"]) == ("512", "1")]
    over_prompts = [float(row["token_time"]) for row in shared if _of_prompt_sweep(row)]
    over_outputs = [float(row["token_time"]) for row in shared if not _of_prompt_sweep(row)]
    return float(np.median(over_outputs) / np.median(over_prompts))


def _of_prompt_sweep(row: dict[str, str]) -> bool:
    return (row["batch_size"], row["token_size"]) == ("1", "128")


def measured_2023_profile(data: Path, model: str, gpu: str, tp_degree: int) -> Profile:
    """A 2023 machine: phases apart, as that engine ran them."""
    shape = MODELS[model]
    step, prefill = fit_phases(splitwise_samples(data, model, gpu, tp_degree))
    return Profile(
        model=model,
        gpu=gpu,
        tp_degree=tp_degree,
        step=step.model,
        kv=KvModel(capacity_tokens(model, gpu, tp_degree), 16, shape.kv_bytes_per_token(tp_degree)),
        # max_num_batched_tokens of that vLLM was its model's context, and 2560 at least.
        engine=EngineLimits("vllm", "2023", EngineMode.PREFILL_FIRST, 4096, 256),
        residuals=pooled(step.residuals, prefill.residuals),
        source=Source(
            "measured",
            "Mutinifni/splitwise-sim 8f99e7dc data/perf_model.csv: vLLM on DGX machines, 2023; decode and"
            " prefill steps fitted apart; KV from memory arithmetic, not measured",
            "MIT",
            "2023-11-30",
        ),
        prefill=prefill.model,
        context_limit_tokens=shape.context_limit_tokens,
        fitted=step.fitted,
    )


# What the published sources composed for the models of Aladdin's Table 2, and the key in fits.json.
ALADDIN = {
    ("llama-2-13b", 1): "composed|llama2-13b|a100_sxm|tp1",
    ("llama-2-70b", 2): "composed|llama2-70b|a100_sxm|tp2",
}


def aladdin_profile(data: Path, model: str, tp_degree: int) -> Profile:
    """The plain coefficients (Eq 2, Eq 3) behind the tables that reproduce Aladdin's."""
    fits = json.loads((data / "fits.json").read_text(encoding="utf-8"))
    entry = fits["models"][ALADDIN[model, tp_degree]]
    decode, prefill = entry["decode"]["eq3_relLS_nonneg"], entry["prefill"]["eq2_relLS"]
    context, sequence, base = (ms / 1e3 for ms in decode["coef_k2_c2_c3"])
    token, start = (ms / 1e3 for ms in prefill["coef"])
    return Profile(
        model=model,
        gpu="a100-80gb",
        tp_degree=tp_degree,
        step=StepModel(base, token, sequence, context),
        kv=KvModel(entry["kv_capacity_tokens"], 1, entry["kv_bytes_per_token"]),
        engine=EngineLimits("vllm", "legacy", EngineMode.PREFILL_FIRST, 4096, 256),
        residuals=Residuals(
            mean_relative=max(decode["mean_ape"], prefill["mean_ape"]),
            p95_relative=max(decode["p95_ape"], prefill["p95_ape"]),
            max_relative=max(decode["max_ape"], prefill["max_ape"]),
            samples=decode["n"] + prefill["n"],
            unseen_relative=0.1,  # no host time, no mixed steps in it
        ),
        source=Source(
            "composed",
            "aiconfigurator 095f58a5 operation tables (vLLM 0.14) composed into layers, plain Eq 2 and Eq 3"
            " by relative least squares, no host time: for reproducing Aladdin's tables, not for planning",
            "Apache-2.0",
            "2026-03-10",
        ),
        prefill=PrefillModel(start, token),
        context_limit_tokens=MODELS[model].context_limit_tokens,
    )


# A real run: LLMServingSim's benchmark of vLLM 0.19 on one RTX PRO 6000 (94.97 GiB by the driver's count).
RTX_BYTES = 94.97 * GIB


def rtx_profile(data: Path, learn_even: bool = False, seed: int = 0) -> Profile:
    """The RTX PRO 6000's profile, from all requests of its log or from every second one."""
    log = read_request_log(data / REQUEST_LOG / "requests.jsonl")
    meta = json.loads((data / REQUEST_LOG / "meta.json").read_text(encoding="utf-8"))
    limits = meta["engine_kwargs"]
    shape = MODELS["llama-3.1-8b"]
    capacity = kv_capacity_tokens(shape, RTX_BYTES, 1, MEMORY_UTILIZATION, OTHER_BYTES)
    around = Profile(
        model="llama-3.1-8b",
        gpu="rtx-pro-6000",
        tp_degree=1,
        step=StepModel(0, 0, 0, 0),
        kv=KvModel(capacity, 16, shape.kv_bytes_per_token()),
        engine=EngineLimits(
            "vllm",
            meta["vllm_version"],
            EngineMode.CHUNKED,
            limits["max_num_batched_tokens"],
            limits["max_num_seqs"],
            steps_ahead_of(meta["vllm_version"]),
        ),
        residuals=Residuals(0, 0, 0, 0),
        source=Source(
            "measured",
            "casys-kaist/LLMServingSim 5daddb21: request log of a real vLLM 0.19 run, 300 requests; step"
            " times fitted through the simulator, errors are of TPOT per request; KV from memory arithmetic",
            "MIT",
            meta["started_at"][:10],
        ),
        context_limit_tokens=shape.context_limit_tokens,
    )
    learn = np.arange(len(log.workload)) % 2 == 0  # the log's request ids are in order of arrival
    return fit_log(log, around, learn if learn_even else None, seed)
