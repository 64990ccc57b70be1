"""What a scheduled step carries, seen from inside the scheduler: the exact regressors of the step model.

vLLM's own iteration details count requests and tokens but not the context they hold, and context is what a
decode step's time grows with. The connector sees every scheduled step, and its stats travel with the step's
outputs; so they carry this.
"""

from __future__ import annotations

from typing import Any

KEYS = (
    "prefill_tokens",
    "prefill_sequences",
    "prefill_sum_sq",
    "sequences",
    "context_tokens",
    "preemptions",
)


def step_load(scheduler_output: Any) -> dict[str, int]:
    """Counts of one step (module `perfmodel.step`): context and Σ(end² - start²) are as of the step's start.

    A request that computes one token and has produced one before decodes; all else is prefill, the
    recomputation after a preemption included.
    """
    scheduled: dict[str, int] = scheduler_output.num_scheduled_tokens
    counts = dict.fromkeys(KEYS, 0)

    def prefill(start: int, tokens: int) -> None:
        counts["prefill_tokens"] += tokens
        counts["prefill_sequences"] += 1
        counts["prefill_sum_sq"] += (start + tokens) ** 2 - start**2

    for new in scheduler_output.scheduled_new_reqs:
        prefill(new.num_computed_tokens, scheduled[new.req_id])
    cached = scheduler_output.scheduled_cached_reqs
    rows = zip(cached.req_ids, cached.num_computed_tokens, cached.num_output_tokens, strict=True)
    for segment, start, produced in rows:
        if produced and scheduled[segment] == 1:
            counts["sequences"] += 1
            counts["context_tokens"] += start
        else:
            prefill(start, scheduled[segment])
    counts["preemptions"] = len(scheduler_output.preempted_req_ids or ())
    return counts
