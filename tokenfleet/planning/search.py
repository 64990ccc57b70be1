"""The search for the smallest worker count that passes: gallop away from a guess, then bisect."""

from __future__ import annotations

from collections.abc import Callable


def smallest(passes: Callable[[int], bool], low: int, guess: int, cap: int) -> int | None:
    """The smallest n in [low, cap] with `passes(n)`, taking `passes` as monotone; None if even cap fails.

    `low` is a bound from below, so that nothing under it is tried. Near the guess it takes two trials;
    a guess wrong by d costs about 2·log2(d).
    """
    if cap < low:
        return None
    n = min(max(guess, low), cap)
    failed, passed = low - 1, cap + 1  # the bracket; both ends exclusive
    step = 1
    if passes(n):
        passed = n
        while passed - 1 > failed:
            n = max(passed - step, low)
            if not passes(n):
                failed = n
                break
            passed, step = n, step * 2
    else:
        failed = n
        while failed < cap:
            n = min(failed + step, cap)
            if passes(n):
                passed = n
                break
            failed, step = n, step * 2
    while passed - failed > 1:
        n = (passed + failed) // 2
        if passes(n):
            passed = n
        else:
            failed = n
    return passed if passed <= cap else None
