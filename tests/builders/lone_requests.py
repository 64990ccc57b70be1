"""Requests of a load sweep that run alone."""

import numpy as np

from tokenfleet.profiles.accuracy import Run


def are_alone(run: Run) -> np.ndarray:
    """Whether no other request runs from 20 ms before a request until its first token; shape [requests]."""
    arrival_s, ends_s = run.log.workload.arrival_s, run.log.last_token_s
    alone = run.measured.copy()
    for k in np.flatnonzero(alone):
        others = (arrival_s < arrival_s[k] + run.log.ttft_s[k]) & ~(ends_s < arrival_s[k] - 0.02)
        alone[k] = others[np.arange(len(others)) != k].sum() == (others & ~run.measured).sum()
    return alone
