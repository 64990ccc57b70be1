"""First tokens of requests that a load generator sends together: the more there are, the later all are.

A process that takes SERIAL_S for each request, and shares its time among those it has, explains most of it.
The sweeps of short prompts alone have requests together. The two of development agree on that time. They do
not tell load generator and API server apart, nor requests and their tokens.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments.lib.ladders import ladder
from tokenfleet.profiles.accuracy import Ladder
from tokenfleet.profiles.fit_log import replay

TOGETHER_S = 0.02
SERIAL_S = 0.009
TRIED_S = (0.0, 0.007, SERIAL_S, 0.011)


def waits_s(arrival_s: np.ndarray, takes_s: float) -> np.ndarray:
    """Seconds that each request, by rising arrival, waits for others in a process that they share equally."""
    leaves_s, until_s = arrival_s.copy(), arrival_s.copy()
    # `given_s`: what a request that is always there has been given by `now_s`; `until_s`: when one leaves.
    first, now_s, given_s = 0, 0.0, 0.0
    for r, at_s in enumerate([*arrival_s.tolist(), np.inf]):
        while first < r:
            ends_s = now_s + (until_s[first] - given_s) * (r - first)
            if ends_s > at_s:
                break
            leaves_s[first], now_s, given_s = ends_s, ends_s, until_s[first]
            first += 1
        if r < len(arrival_s):
            given_s += (at_s - now_s) / max(r - first, 1)
            now_s, until_s[r] = at_s, given_s + takes_s
    return np.maximum(leaves_s - arrival_s - takes_s, 0.0)


def served(runs: Ladder, serial_s: float, at: int) -> np.ndarray:
    """TTFT of each request, if it waits before the engine."""
    log = runs.runs[at].log
    sent_s = log.workload.arrival_s
    moved = replace(log.workload, arrival_s=sent_s + waits_s(sent_s, serial_s))
    return replay(replace(log, workload=moved), runs.worker()).first_token_s - sent_s


def sizes(sent_s: np.ndarray) -> np.ndarray:
    """How many come together with each."""
    group = np.concatenate([[0], np.cumsum(np.diff(sent_s) > TOGETHER_S)])
    return np.bincount(group)[group]


@pytest.mark.parametrize(
    ("name", "pair_s", "six_s"), [("apr29-root-short", 0.004, 0.042), ("apr29-llmd-short", 0.010, 0.072)]
)
def test_the_more_are_sent_at_once_the_later_all_of_them_are(
    bench_data: Path, name: str, pair_s: float, six_s: float
) -> None:
    runs = ladder(bench_data, name)
    run = runs.runs[-1]
    late_s, rest_s = ((run.log.ttft_s - served(runs, of_s, -1))[run.measured] for of_s in (0.0, SERIAL_S))
    size = sizes(run.log.workload.arrival_s[run.measured])
    alone_s = np.median(late_s[size == 1])
    assert np.median(late_s[size == 2]) - alone_s == pytest.approx(pair_s, abs=0.003)
    is_six = (size >= 6) & (size <= 8)
    assert np.median(late_s[is_six]) - alone_s == pytest.approx(six_s, abs=0.008)
    assert abs(np.median(rest_s[is_six])) < 0.5 * np.median(late_s[is_six])
    slowest = np.argsort(-run.log.ttft_s[run.measured])[: len(late_s) // 100 + 1]
    assert np.mean(size[slowest] >= 6) > 0.85
    assert np.mean(size >= 6) < 0.05
    # A launch is stamped before the generator builds its request, so that stamps tell what building takes.
    sent_s = run.log.workload.arrival_s[run.measured]
    assert np.median(np.diff(sent_s)[np.diff(sent_s) <= TOGETHER_S]) == pytest.approx(0.0016, abs=0.0003)


@pytest.mark.parametrize(("name", "before", "after"), [("root", 0.22, 0.14), ("llmd", 0.26, 0.10)])
def test_one_process_that_they_share_explains_it(
    bench_data: Path, name: str, before: float, after: float
) -> None:
    """Means over requests of |log(predicted / measured TTFT)|, and over rates of the error of its p99."""
    runs = ladder(bench_data, f"apr29-{name}-short")
    each, tail = np.zeros(len(TRIED_S)), np.zeros(len(TRIED_S))
    for place, serial_s in enumerate(TRIED_S):
        off, p99 = [], []
        for at, run in enumerate(runs.runs):
            said_s, seen_s = served(runs, serial_s, at)[run.measured], run.log.ttft_s[run.measured]
            off.append(np.abs(np.log(said_s / seen_s)))
            p99.append(abs(np.quantile(said_s, 0.99) / np.quantile(seen_s, 0.99) - 1))
        each[place], tail[place] = np.concatenate(off).mean(), np.mean(p99)
    assert TRIED_S[int(each.argmin())] == SERIAL_S
    assert each.min() < 0.82 * each[0]
    assert tail[[0, 2]] == pytest.approx((before, after), abs=0.01)


@pytest.mark.parametrize(("name", "told"), [("root", (0.711, 0.708)), ("llmd", (0.859, 0.871))])
def test_requests_and_their_tokens_are_not_told_apart(
    bench_data: Path, name: str, told: tuple[float, float]
) -> None:
    """Correlations of how late requests are with the others that come together, and with their prompts."""
    runs = ladder(bench_data, f"apr29-{name}-short")
    late_s, others, tokens = [], [], []
    for at, run in enumerate(runs.runs):
        m, work = run.measured, run.log.workload
        size = sizes(work.arrival_s[m])
        group = np.concatenate([[0], np.cumsum(np.diff(work.arrival_s[m]) > TOGETHER_S)])
        sums = np.bincount(group, work.prompt_tokens[m])[group] - work.prompt_tokens[m]
        late_s.append((run.log.ttft_s - served(runs, 0.0, at))[m])
        others.append(size - 1.0)
        tokens.append(sums)
    late, by_count, by_tokens = (np.concatenate(of) for of in (late_s, others, tokens))
    assert [np.corrcoef(late, of)[0, 1] for of in (by_count, by_tokens)] == pytest.approx(told, abs=0.002)
