"""Capacity bounds: the fewest workers that could carry a load, and the most tokens a second of a GPU.

**Fluid bound.** No policy can use fewer workers. Over a long time a worker of rate λ spends, each second,

    λ·(Q + X) + s·c3 <= 1          s = steps a second

on prefill work Q and decode work X = c2·D + k2·K of a mean request (D decode steps, K the context summed
over them), and a base c3 on each step. Few steps mean large batches, so s is bounded below by

* KV: a step's context fits in memory, s >= λ·K / M; and likewise by max_seqs and the token budget;
* TPOT: request i needs its D_i steps within D_i·T. Let z_i = c2 + k2·(prompt_i + 1) be the least it adds
  to any of its steps and z_k their sum in step k; a step lasts at least c3 + z_k. Weighting each request's
  Σ_k t_k <= D_i·T by z_i gives Σ_k z_k·(c3 + z_k) <= T·Z with Z = Σ z_i·D_i, and by Cauchy-Schwarz
  s >= λ·Z / (T - c3).

In a chunked engine prefill rides on the same steps and lengthens them. The cheapest way to fit P tokens in is
n_p = P / budget full steps. In these z is smaller by half the chunk's time a (or 0). Minimising over z gives
s >= (Z + n_p·a)² / ((T - c3)·Z + n_p·a²), or n_p + Z / (T - c3) where a > T - c3.

**Prefix caches** save at most what some request before had computed. Each block is counted once, for the
first request of the trace that has it: its prefill work (attention at its place included) and its memory in
that request's steps. In whatever order they come, it is computed once at least; so the sums over any
requests hold for caches of any size. Decode steps read the whole context, cached or not.

**Several classes** have a TPOT target each. The loosest bounds the steps of all requests, and each class's
own bounds the steps of that class alone. Of all together, as many may miss as each class may, summed.

TTFT, the wait that a prefill step imposes on running requests, integer batches and bursts are left out: each
only adds workers. Up to a share 1 - attainment of the requests may miss; the heaviest are left out.

**Decode throughput** ranks tensor-parallel degrees:

    Eq 6   T_N = b/(N·t(b))       tokens per second and GPU, at the largest batch that KV and TPOT allow

b_kv = KV capacity / mean KV of a request; where t(b_kv) > TPOT the batch is the one with t(b) = TPOT. Prefill
is left out, as in the paper: Eq 6 ranks degrees and sizes nothing (the fluid bound bounds, the simulator
sizes).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from controlplane.errors import BadInput, Infeasible
from controlplane.perfmodel.profile import Profile, rank_of
from controlplane.perfmodel.step import Hinge
from controlplane.types import EngineMode, Slo
from controlplane.workload import Workload


def fluid_workers_of_classes(
    workload: Workload, profile: Profile, slos: Sequence[Slo], attainments: Sequence[float]
) -> int:
    """The same where each of the workload's SLO classes has targets of its own."""
    loosest = Slo(max(s.ttft_s for s in slos), max(s.tpot_s for s in slos))
    counts = np.bincount(workload.slo_class, minlength=len(slos))
    together = float((counts * np.array(attainments)).sum() / max(len(workload), 1))
    bound = fluid_workers_of(workload, profile, loosest, together)
    for c, (slo, attainment) in enumerate(zip(slos, attainments, strict=True)):
        rows = np.flatnonzero(workload.slo_class == c)
        if 0 < len(rows) < len(workload):
            # A turn may wait for another class's answer.
            waits = slo if workload.sessions is None else loosest
            bound = max(bound, fluid_workers_of(workload, profile, slo, attainment, rows, waits))
    return bound


def fluid_workers_of(
    workload: Workload,
    profile: Profile,
    slo: Slo,
    attainment: float = 1.0,
    rows: NDArray[np.int64] | None = None,
    waits: Slo | None = None,
) -> int:
    """Workers below which no policy can serve this very trace; at least 1.

    `rows`: these of its requests alone, which wait for others no longer than `waits` says.

    A request within its targets is done by its deadline, so the work must fit between the first arrival and
    the last deadline. A turn of a session is sent, at the latest, when those it waits for have used up their
    targets. Raises BadInput as `worker_seconds`, and for a load that no number of workers can serve.
    """
    if len(workload) == 0:
        return 1
    of: Any = slice(None) if rows is None else rows
    prompts, outputs, cached = workload.prompt_tokens[of], workload.output_tokens[of], workload.ideal_hits[of]
    work = worker_seconds(prompts, outputs, rank_of(profile), slo, attainment, cached)
    latest = waits or slo
    due_s = answered_s(workload, np.asarray(latest.ttft_s + latest.tpot_s * (workload.output_tokens - 1)))
    horizon_s = float(due_s[of].max() - workload.arrival_s[of][0])
    if not math.isfinite(work):
        raise BadInput(f"{profile.label}: no number of workers reaches a TPOT of {slo.tpot_s:g} s")
    # The subtracted crumb keeps rounding in the sums from adding a worker.
    each = workload.requests / len(workload)  # of a thinned trace each request tells of several
    # Ranks that step together take as long as the slowest, so no less than their mean.
    ranks = 1 if profile.ranks is None else profile.ranks.count
    return max(1, math.ceil(work * len(prompts) * each / horizon_s / ranks - 1e-9))


def answered_s(workload: Workload, takes_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """The time [requests] at which each answer is complete, if it takes so long from its request."""
    if (sessions := workload.sessions) is None:
        return np.asarray(workload.arrival_s + takes_s)
    end_s, ends = (workload.arrival_s + takes_s).tolist(), sessions.offsets.tolist()
    for i in np.flatnonzero(np.diff(sessions.offsets)).tolist():
        sent_s = max(end_s[j] for j in sessions.before[ends[i] : ends[i + 1]])
        end_s[i] = sent_s + float(sessions.think_s[i] + takes_s[i])
    return np.array(end_s)


def worker_seconds(
    prompt_tokens: ArrayLike,
    output_tokens: ArrayLike,
    profile: Profile,
    slo: Slo,
    attainment: float = 1.0,
    cached_tokens: ArrayLike = 0,
) -> float:
    """The least time a worker spends on a mean request of the sample; infinite where TPOT is out of reach.

    `prompt_tokens`, `output_tokens`, shape [requests]; `cached_tokens` of each prompt cost nothing. At a
    rate λ no policy can do with fewer workers than λ times as many for long. Raises BadInput for an empty
    sample or an attainment outside (0, 1].
    """
    prompt, output = np.asarray(prompt_tokens, float), np.asarray(output_tokens, float)
    cached = np.broadcast_to(np.asarray(cached_tokens, float), prompt.shape)
    if prompt.ndim != 1 or prompt.shape != output.shape or len(prompt) == 0:
        raise BadInput("lengths: prompt_tokens and output_tokens must be equally long and not empty")
    if not 0 < attainment <= 1:
        raise BadInput(f"attainment: must be in (0, 1], got {attainment:g}")
    step, limits = profile.step, profile.engine
    each = _parts(prompt, output, cached, profile)

    def mean(values: NDArray[np.float64]) -> float:
        """Of the smallest share `attainment` of the values, over all requests: others may be dropped."""
        kept = math.floor(attainment * len(values) + 1e-9)
        return float(np.partition(values, kept - 1)[:kept].sum() / len(values)) if kept else 0.0

    d, held, work, least = mean(each.steps), mean(each.held), mean(each.decode_s), mean(each.least_s)
    slack = _most_step_s(profile, slo.tpot_s) - step.base_s
    if slack <= 0 and d > 0:
        return math.inf
    fewest = max(held / profile.kv.capacity_tokens, d / limits.max_seqs)
    if limits.mode == EngineMode.CHUNKED:
        p = mean(prompt - cached)
        full = p / limits.max_batched_tokens
        fewest = max(fewest, (p + d) / limits.max_batched_tokens)
        if least > 0:
            fewest = max(fewest, _steps_for_tpot(least, slack, full, step.per_prefill_token_s, p))
    else:
        p = 0.0
        fewest = max(fewest, least / slack if least > 0 else 0.0)
    prefill = each.per_token_s * mean(prompt - cached) + each.per_sum_sq_s * mean(prompt**2 - cached**2)
    return prefill + work + _bases(step.base_s, step.hinges, fewest, d, p)


def least_seconds(workload: Workload, profile: Profile, tpot_s: NDArray[np.float64]) -> NDArray[np.float64]:
    """The least time of a worker [requests] that each request takes, if it keeps its TPOT target `tpot_s`.

    The sum over any requests is a bound for these, so loads can be divided among types of worker. It is a
    weaker one than the fluid bound: of what bounds the steps from below it takes one, and leaves out hinges.
    """
    rank = rank_of(profile)
    step, limits = rank.step, rank.engine
    prompt, output = workload.prompt_tokens.astype(float), workload.output_tokens.astype(float)
    cached = np.broadcast_to(np.asarray(workload.ideal_hits, float), prompt.shape)
    each = _parts(prompt, output, cached, rank)
    steps = [each.held / rank.kv.capacity_tokens, each.steps / limits.max_seqs]
    if limits.mode == EngineMode.CHUNKED:
        steps.append((prompt - cached + each.steps) / limits.max_batched_tokens)
    else:
        slack_s = _most_step_s(rank, tpot_s) - step.base_s
        steps.append(np.where(slack_s > 0, each.least_s / np.maximum(slack_s, 1e-12), 0.0))
    fewest = max(steps, key=lambda one: float(one.sum()))
    prefill_s = each.per_token_s * (prompt - cached) + each.per_sum_sq_s * (prompt**2 - cached**2)
    ranks = 1 if profile.ranks is None else profile.ranks.count
    return np.asarray((prefill_s + each.decode_s + step.base_s * fewest) / ranks)


class _Parts(NamedTuple):
    """Of each request [requests]: decode steps, context held over them, its decode work and the least of it
    that counts against TPOT; and the seconds of a prefilled token and of its square."""

    steps: NDArray[np.float64]
    held: NDArray[np.float64]
    decode_s: NDArray[np.float64]
    least_s: NDArray[np.float64]
    per_token_s: float
    per_sum_sq_s: float


def _parts(
    prompt: NDArray[np.float64], output: NDArray[np.float64], cached: NDArray[np.float64], profile: Profile
) -> _Parts:
    step = profile.step
    steps = np.maximum(output - 1, 0)
    context = steps * prompt + steps * (steps + 1) / 2  # at the starts of its decode steps
    # Windows: as the prompt leaves them, the least there is; those of cached tokens may be others' as well.
    beside = profile.kv.held_at_least(prompt, prompt + output) - prompt
    beside = beside * (1.0 - np.minimum(cached / np.maximum(prompt, 1.0), 1.0))
    per_token_s, per_sum_sq_s = step.per_prefill_token_s, step.per_prefill_sum_sq_s
    if profile.engine.mode == EngineMode.PREFILL_FIRST:
        assert profile.prefill is not None  # a profile of this mode cannot be made without
        per_token_s = _per_prefill_token_s(profile, float(prompt.max()))
        per_sum_sq_s = profile.prefill.per_sum_sq_s
    return _Parts(
        steps,
        context + steps * (beside - cached),
        step.per_sequence_s * steps + step.per_context_token_s * context,
        step.sequence_s(prompt + 1) * steps,
        per_token_s,
        per_sum_sq_s,
    )


def _most_step_s(profile: Profile, tpot_s: Any) -> Any:
    """The mean step that a TPOT target allows: with luck every draft is accepted."""
    drafts = profile.speculation
    return tpot_s if drafts is None else tpot_s * (1 + drafts.drafted) / drafts.tokens_per_step


def _steps_for_tpot(least: float, slack: float, full: float, per_token_s: float, tokens: float) -> float:
    if full == 0:
        return least / slack
    half = per_token_s * tokens / full / 2  # half of what a full chunk adds to its step
    if slack <= half:
        return full + least / slack
    return max(full, (least + full * half) ** 2 / (slack * least + full * half**2))


def _bases(base_s: float, hinges: tuple[Hinge, ...], fewest: float, d: float, p: float) -> float:
    """Least time of bases and hinges over at least `fewest` steps that share d sequences and p tokens.

    n steps cost n·base + Σ slope·max(x - n·start, 0) by convexity: piecewise linear in n, so its least
    value is at `fewest` or where a hinge starts.
    """
    rows = [
        (h.start, h.per_unit_s, d if h.of == "sequences" else p)
        for h in hinges
        if h.of != "experts"  # no convex cost: any number of tokens may touch the same ones
    ]
    tried = [fewest, *(x / start for start, _, x in rows if start > 0 and x / start > fewest)]
    return min(n * base_s + sum(slope * max(x - n * start, 0.0) for start, slope, x in rows) for n in tried)


def _per_prefill_token_s(profile: Profile, longest: float) -> float:
    """Least time per token over prefill steps of every size: a convex cost per size is least at a hinge."""
    assert profile.prefill is not None  # a profile of these modes cannot be made without
    largest = max(float(profile.engine.max_batched_tokens), longest)
    sizes = np.array([largest, *(h.start for h in profile.prefill.hinges if 0 < h.start < largest)])
    return float(np.min(profile.prefill.prefill_s(sizes, np.zeros_like(sizes)) / sizes))


def decode_throughput(profile: Profile, tpot_s: float, mean_context_tokens: float) -> float:
    """Eq 6: decode tokens per second and GPU at the largest batch KV, TPOT and max_seqs allow.

    `mean_context_tokens` is what a running request holds on average. The batch is not rounded, as in the
    paper. Steps that take no time decode without limit: infinite. Raises Infeasible when one sequence alone
    is slower than the TPOT.
    """
    if not mean_context_tokens > 0 or not tpot_s > 0:
        raise BadInput("eq 6: tpot and mean context must be positive")
    rank = rank_of(profile)

    def step_s(batch: float) -> float:
        return float(profile.step.step_s(0, batch, batch * mean_context_tokens))

    batch = rank.kv.capacity_tokens / float(rank.kv.held(mean_context_tokens))
    batch = min(batch, float(rank.engine.max_seqs))
    if step_s(batch) > tpot_s:
        if step_s(1.0) > tpot_s:
            raise Infeasible(
                f"{profile.label}: one sequence of {mean_context_tokens:g} tokens takes"
                f" {step_s(1.0) * 1e3:.1f} ms a step, the TPOT is {tpot_s * 1e3:g} ms"
            )
        low, high = 1.0, batch  # t(b) grows with b: bisect rather than invert the hinges
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if step_s(middle) <= tpot_s else (low, middle)
        batch = low
    seconds = step_s(batch)
    return batch / seconds / profile.tp_degree if seconds > 0 else math.inf
