"""The same traffic as it might have come: a local block bootstrap of the arrivals.

The trace is cut into blocks of time and each block is replaced by one that begins nearby, requests with
their lengths and gaps untouched. Blocks keep what makes a fleet miss (bursts, runs of long prompts) whole;
drawing them nearby keeps the shape of the hour or the day (Dowla, Paparoditis and Politis, 2003).

What comes next differs from the trace twice: the trace is itself a draw from its traffic, and so is the next
one. One resampling makes up for the second alone; a plan for other traffic than the trace needs both.
"""

from __future__ import annotations

import numpy as np

from controlplane.workload import Workload

BLOCK_S = 60.0
FEWEST_BLOCKS = 20  # a short trace gets shorter blocks, or every draw would be the trace itself
NEARBY = 0.1  # of the trace's duration, to either side


def next_like(workload: Workload, rng: np.random.Generator) -> Workload:
    """Other traffic like `workload`: a draw from what it might have been, drawn from once more."""
    return resampled(resampled(workload, rng), rng)


def resampled(workload: Workload, rng: np.random.Generator) -> Workload:
    """One draw: a workload of about the same duration and rate as `workload`."""
    duration_s = workload.duration_s
    if duration_s <= 0:
        return workload
    first_s = float(workload.arrival_s[0])
    block_s = min(BLOCK_S, duration_s / FEWEST_BLOCKS)
    places = np.arange(int(np.ceil(duration_s / block_s))) * block_s
    reach_s = max(NEARBY * duration_s, block_s)
    starts = np.clip(places + rng.uniform(-reach_s, reach_s, len(places)), 0.0, duration_s - block_s)
    arrival_s = workload.arrival_s - first_s
    low = np.searchsorted(arrival_s, starts, side="left")
    # The very last request sits on the closing edge of the last block and belongs to it.
    ends = starts + block_s
    high = np.where(ends >= duration_s, len(arrival_s), np.searchsorted(arrival_s, ends, side="left"))
    counts = high - low
    if counts.sum() == 0:
        return workload
    rows = np.repeat(low - np.concatenate(([0], np.cumsum(counts)[:-1])), counts) + np.arange(counts.sum())
    moved_s = arrival_s[rows] - np.repeat(starts, counts) + np.repeat(places, counts)
    # Rounding may put a request a hair before the block's edge, and the next block's first after it.
    order = np.argsort(moved_s, kind="stable")
    rows = rows[order]
    return Workload(
        arrival_s=np.maximum(moved_s[order], 0.0),
        prompt_tokens=workload.prompt_tokens[rows],
        output_tokens=workload.output_tokens[rows],
        priority=workload.priority[rows],
        slo_class=workload.slo_class[rows],
        slo_classes=workload.slo_classes,
    )
