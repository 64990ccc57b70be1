"""The simulated prefix cache against vLLM's own scheduler, step by step: is every step the same?

    python experiments/profiling/prefix_exactness.py [--windows] [--quick] [--seed N] [--format table|json]

The scheduler, KV cache manager and block pool of the installed vLLM run here in this process, on made-up
conversations, with made-up tokens in place of a model; a step lasts what a random profile says. The compiled
engine gets the same requests, its ids made from the same tokens. Compared at three sizes of KV memory:

* of every request the cached tokens at its first admission, and how often it was preempted;
* of every step the requests in it and the tokens each gets, in order;
* where an activity of the compiled engine begins (a step with prefill, or a run of decode steps) the free
  blocks, the blocks evicted so far, and the cached blocks that sleep, in the order of their eviction.

A size is that of the longest request, times a factor. Full lists of ids, and lists cut short of what no other
request has, in turn.

Two gateways' mirrors follow vLLM's scheduler: one is told its KV events, and after every step it must hold
the blocks that vLLM has cached; the other predicts. `told off`, `predicted off`: by how many tokens what a
prompt was expected to hit, as it was sent, and what it did hit differ, over all tokens of prompts.

`--windows`: models with groups of layers that attend to a window. The most requests that run at once must be
that of vLLM in every case, and off by one at most where the longest request just fits (`tight`). Where
nothing is evicted (`roomy`), every step must be vLLM's as well. `mean at once`, `hits`: ours over vLLM's.
"""

from __future__ import annotations

import argparse
import os
import sys

from experiments.lib.results import bar, flags, show
from harness.driven_vllm import SIZES, UNLIKE, compared, seats

CASES, QUICK = 40, 6  # of each size


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--windows", action="store_true")
    asked = parser.parse_args()
    # Read when vLLM is imported.
    os.environ.update(VLLM_LOGGING_LEVEL="ERROR", VLLM_LOGGING_STREAM="ext://sys.stderr")
    if asked.windows:
        return windows(asked)
    rows = [compared(size, QUICK if asked.quick else CASES, asked.seed) for size in SIZES]
    bars = {what: bar(sum(row[what] for row in rows), 0) for what in UNLIKE}
    for what in ("preemptions", "evicted blocks", "cached tokens"):
        bars[f"{what}, or nothing is compared"] = bar(sum(row[what] for row in rows), 1, at_least=True)
    return show("prefix_exactness", rows, bars, asked)


def windows(asked: argparse.Namespace) -> int:
    rows = [seats(size, 2 if asked.quick else 8, asked.seed) for size in SIZES]
    tight, *larger = rows
    bars = {
        "middle, roomy: most at once otherwise": bar(sum(row["most at once otherwise"] for row in larger), 0),
        "tight: most at once off": bar(tight["most at once off"], 1),
        "roomy: steps planned otherwise": bar(larger[-1]["steps planned otherwise"], 0),
        "preemptions, or nothing is compared": bar(sum(row["preemptions"] for row in rows), 1, at_least=True),
    }
    return show("prefix_exactness_windows", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
