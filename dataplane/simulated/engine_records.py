"""What the simulated engines know: their activities, and the records behind them."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from controlplane.placement.ledger import (
    Ints,
    Records,
)

IDLE, WAKING, PREFILL_STEP, DECODE_RUN, MIXED_STEP = 0, 1, 2, 3, 4


ENGINE = np.dtype(
    [
        ("activity", np.int64),
        ("next_s", np.float64),  # when the activity ends; inf for an idle worker
        ("start_s", np.float64),  # when it began
        ("first_step_s", np.float64),  # of a decode run: its first step,
        ("growth_s", np.float64),  # what each step adds to the next,
        ("run_steps", np.int64),  # its planned steps,
        ("start_step", np.int64),  # the worker's step count
        ("start_context", np.int64),  # and context when it began
        ("blocked", np.int64),  # 1 while the head of the queue is known not to fit
        ("busy_s", np.float64),
        ("reserved_blocks", np.int64),  # KV and
        ("reserved_seats", np.int64),  # places in the batch, promised to requests on their way here
        ("slowdown", np.float64),  # by what share steps are longer: KV is being copied
    ],
    align=True,
)
JOB = np.dtype(
    [
        ("output", np.int64),  # how long it really is
        ("computed", np.int64),  # prefill tokens done
        ("chunk", np.int64),  # prefill tokens in the step in progress
        ("finish_s", np.float64),
        ("preemptions", np.int64),
        ("migrations", np.int64),
        ("missed", np.int64),  # 1 once it is known that a target is not met
    ],
    align=True,
)
TOTAL = np.dtype(
    [
        ("misses", np.int64),  # requests known not to meet their targets
        ("handover_n", np.int64),  # entries of `handover`
    ],
    align=True,
)


class Engines(NamedTuple):
    """What the simulated engines know beyond the ledger."""

    workers: Records  # [workers] of ENGINE
    requests: Records  # [requests] of JOB
    total: Records  # [1] of TOTAL
    handover: Ints  # [requests] prefilled elsewhere than they will decode, waiting to be placed


def new_engines(workers: int, output: Ints) -> Engines:
    """Idle engines, and `output` as the requests' true lengths."""
    engines = np.zeros(workers, ENGINE)
    engines["next_s"] = np.inf
    jobs = np.zeros(len(output), JOB)
    jobs["output"] = output
    jobs["finish_s"] = np.nan
    return Engines(engines, jobs, np.zeros(1, TOTAL), np.zeros(len(output), np.int64))
