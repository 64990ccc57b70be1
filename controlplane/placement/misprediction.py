"""Algorithm 2's errors: how far outputs were from their predictions, fed into the predictions that follow.

    l_e = Σ (real - predicted)         over requests with a prediction of one size (an octave), output tokens
    f   = 1 + s·l_e / Σ predicted      where l_e < 0, else 1;    predicted' = f·predicted
    s   = max(0, 1 - Z²·Σ (real - predicted)² / l_e²)

The paper keeps l_e by worker, and moves new requests from workers with much of it to those with little. Here
it corrects the predictions. So it is in all that reads one: the constraints (b) and (e) of every worker, the
forecasts of moves, the exact heartbeat. s is 0 while chance alone explains the error, within Z standard
deviations. A size with few requests is corrected as all sizes together are.

**Only answers shorter than predicted correct.** A prediction that is too long keeps requests waiting for room
that is there, and nothing mends that. One that is too short is predicted again once outlived, and moves mend
what comes of it. To lengthen it makes more requests late (docs/decisions/placement.md).

**Requests that run count as well.** Short answers end first. Without the others every error would begin below
0. One that has made g tokens counts as the length table t, stretched to its prediction P, expects of it:
(P / t(0))·t(g·t(0) / P). That is P in the mean where predictions are right. A request weighs the less the
more have begun since: exp(-begun / MEMORY).
"""

from __future__ import annotations

import numpy as np

from controlplane.compiled import compiled
from controlplane.placement import ledger as state
from controlplane.placement.ledger import Floats, Ledger
from controlplane.placement.lengths import (
    CROSS,
    ERROR,
    ERROR_SQ,
    PREDICTED,
    PREDICTED_SQ,
    SIZES,
    expected_output,
)

Z2 = 16.0
MEMORY = 1000.0  # requests
LEAST = 64  # requests that end between two looks at the errors
SHORTEST = 1.0 / 64.0  # of a prediction: the least that it becomes
BEGUN, WEIGHED, ENDED, DECODING = 0, 1, 2, 3


@compiled
def size_of(guess: int) -> int:
    """The octave of a prediction."""
    size = 0
    while guess > 1 and size < SIZES - 1:
        guess >>= 1
        size += 1
    return size


@compiled
def corrected(ledger: Ledger, r: int) -> int:
    """The output tokens to expect of a request that has made none."""
    guess = ledger.requests[r].guess
    return max(int(np.rint(guess * ledger.errors.factor[size_of(guess)])), 1)


@compiled
def renew(ledger: Ledger, r: int) -> bool:
    """Correct the prediction of a request without tokens; whether it is another than before."""
    request = ledger.requests[r]
    if request.key > 0:
        return False
    before, request.predicted = request.predicted, corrected(ledger, r)
    return bool(request.predicted != before)


@compiled
def expected_still(ledger: Ledger, r: int, tokens: int) -> float:
    """The output to expect of a request that has outlived its prediction with `tokens`.

    E[output | prompt, output > tokens] of the length table, stretched by the request's factor.
    """
    factor = ledger.errors.factor[size_of(ledger.requests[r].guess)]
    return factor * of_table(ledger, r, tokens / factor)


@compiled
def of_table(ledger: Ledger, r: int, tokens: float) -> float:
    """The length table's expectation of a request that has made `tokens`."""
    return expected_output(
        ledger.length_edges, ledger.length_grid, ledger.length_expected, ledger.requests[r].prompt, tokens
    )


@compiled
def begin(ledger: Ledger, r: int) -> None:
    """A request comes to its first worker."""
    if ledger.requests[r].turn == 0:
        ledger.errors.counts[BEGUN] += 1
        ledger.requests[r].turn = ledger.errors.counts[BEGUN]


@compiled
def note_end(ledger: Ledger, r: int, tokens: int) -> None:
    """Count a request that has ended with `tokens`. `keep_up` follows when its worker's step is booked."""
    if ledger.requests[r].turn > 0:
        add(ledger, ledger.errors.sums, r, float(tokens))
        ledger.errors.counts[ENDED] += 1


@compiled
def keep_up(ledger: Ledger, now_s: float) -> None:
    """Weigh the errors again once as many requests have ended since as decode, so that it costs little."""
    counts = ledger.errors.counts
    if counts[ENDED] >= max(LEAST, counts[DECODING]):
        weigh(ledger, now_s)


@compiled
def add(ledger: Ledger, sums: Floats, r: int, tokens: float) -> None:
    """Add a request's error to the sums of its prediction's size."""
    guess, begun_since = ledger.requests[r].guess, ledger.errors.counts[WEIGHED] - ledger.requests[r].turn
    size, weight = size_of(guess), np.exp(-begun_since / MEMORY)
    error, predicted = (tokens - guess) * weight, guess * weight
    sums[size, ERROR] += error
    sums[size, PREDICTED] += predicted
    sums[size, ERROR_SQ] += error * error
    sums[size, CROSS] += error * predicted
    sums[size, PREDICTED_SQ] += predicted * predicted


@compiled
def weigh(ledger: Ledger, now_s: float) -> None:
    """Bring the factors up to now, with the requests that decode."""
    errors, counts = ledger.errors, ledger.errors.counts
    fade = np.exp((counts[WEIGHED] - counts[BEGUN]) / MEMORY)
    errors.sums[:, :ERROR_SQ] *= fade
    errors.sums[:, ERROR_SQ:] *= fade * fade
    counts[WEIGHED], counts[ENDED], counts[DECODING] = counts[BEGUN], 0, 0
    sums = errors.sums.copy()
    state.view_workers(ledger, now_s)
    for w in range(len(ledger.workers)):
        for i in range(ledger.workers[w].running_n):
            r = ledger.running[w, i]
            if ledger.requests[r].phase == state.DECODING and ledger.requests[r].turn > 0:
                counts[DECODING] += 1
                add(ledger, sums, r, imputed(ledger, r))
    usual = factor_of(sums.sum(axis=0), 1.0)
    for size in range(SIZES):
        errors.factor[size] = factor_of(sums[size], usual)


@compiled
def imputed(ledger: Ledger, r: int) -> float:
    """The output to expect of a decoding request, were its corrected prediction right in the mean."""
    mean, first = float(corrected(ledger, r)), of_table(ledger, r, 0.0)
    return mean / first * of_table(ledger, r, state.generated(ledger, r) * first / mean)


@compiled
def factor_of(sums: Floats, usual: float) -> float:
    """The factor f of predictions with these sums; `usual` where chance explains the rest of the error."""
    apart = 1.0 - usual
    error = sums[ERROR] + apart * sums[PREDICTED]
    if error == 0.0 or sums[PREDICTED] == 0.0:
        return usual
    squares = sums[ERROR_SQ] + 2.0 * apart * sums[CROSS] + apart * apart * sums[PREDICTED_SQ]
    share = max(1.0 - Z2 * squares / (error * error), 0.0)
    return min(max(usual + share * error / sums[PREDICTED], SHORTEST), 1.0)
