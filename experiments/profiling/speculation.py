"""Speculation's step times beside a published sweep over drafted tokens and what is accepted of them.

    python experiments/profiling/speculation.py [--format table|json]

github.com/vllm-project/vllm/issues/20780 (2025) has TPOT of Llama-3.1-8B with one sequence on vLLM v1, plain
and with 2 to 7 tokens drafted by EAGLE 1 and EAGLE 3, and the mean acceptance length of each; how often a
position is accepted is what the length grows by. The GPU is not named; 7.07 ms a token is an H100's. What a
draft takes, and a step beside its drafts, is not published: both are learned from the rows of two and three
tokens, and the others are judged. The best number of tokens is where one more stops paying.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from controlplane.perfmodel.profile import speculating
from controlplane.perfmodel.speculation import Speculation
from experiments.lib.results import bar, flags, show
from tokenfleet.profiles.library import find_profiles

PLAIN_MS = 7.07
TOKENS = (2, 3, 4, 5, 6, 7)
LENGTHS = {
    "EAGLE 1": (2.1, 2.29, 2.39, 2.43, 2.45, 2.47),
    "EAGLE 3": (2.36, 2.79, 3.08, 3.32, 3.46, 3.54),
}
TPOT_MS = {"EAGLE 1": (4.37, 4.29, 4.48, 4.71, 4.94, 5.2), "EAGLE 3": (4.32, 4.09, 4.05, 4.13, 4.2, 4.29)}
CONTEXT = 300  # MT-Bench's, about
LEARNED = 2  # rows of each method
MOST, MOST_OFF = 0.10, 1


def acceptance(lengths: tuple[float, ...]) -> tuple[float, ...]:
    """By position; the first two, of which the sum is known, as a constant share of those before would be."""
    both = lengths[0] - 1.0
    first = (np.sqrt(1.0 + 4.0 * both) - 1.0) / 2.0  # a + a² = both
    return (float(min(first, 1.0)), float(both - min(first, 1.0)), *np.diff(lengths).tolist())


def main() -> int:
    asked = flags(__doc__).parse_args()
    (plain,) = find_profiles("llama-3.1-8b", ["h100-sxm"], [1])
    alone_ms = plain.alone_tpot_s(CONTEXT) * 1e3
    rows: list[dict[str, Any]] = [
        {"name": "plain", "published": PLAIN_MS, "value": alone_ms, "error": alone_ms / PLAIN_MS - 1}
    ]
    errors, off = [], []
    for method, lengths in LENGTHS.items():
        shares = acceptance(lengths)

        def tpot_ms(
            drafted: int, draft_s: float, round_s: float, shares: tuple[float, ...] = shares
        ) -> float:
            faster = speculating(plain, Speculation(shares[:drafted], draft_s, round_s))
            return faster.alone_tpot_s(CONTEXT) * 1e3

        published = TPOT_MS[method]
        # Seconds of a step beyond one whose drafts are free, in the rows that are learned from.
        beyond = [(published[n] - tpot_ms(TOKENS[n], 0.0, 0.0)) * lengths[n] / 1e3 for n in range(LEARNED)]
        draft_s = max(beyond[1] - beyond[0], 0.0) / (TOKENS[1] - TOKENS[0])
        round_s = max(beyond[0] - TOKENS[0] * draft_s, 0.0)
        predicted = [tpot_ms(drafted, draft_s, round_s) for drafted in TOKENS]
        rows += [
            {"name": f"{method}: a draft, ms (learned)", "value": draft_s * 1e3},
            {"name": f"{method}: a step beside its drafts, ms (learned)", "value": round_s * 1e3},
        ]
        for drafted, was, said in zip(TOKENS, published, predicted, strict=True):
            error = said / was - 1
            rows.append(
                {"name": f"{method}: {drafted} tokens", "published": was, "value": said, "error": error}
            )
        judged = zip(published[LEARNED:], predicted[LEARNED:], strict=True)
        errors += [abs(said / was - 1) for was, said in judged]
        best = [TOKENS[int(np.argmin(ms))] for ms in (published, predicted)]
        rows.append({"name": f"{method}: best number of tokens", "published": best[0], "value": best[1]})
        off.append(abs(best[1] - best[0]))
    bars = {
        "mean error of TPOT, judged rows": bar(float(np.mean(errors)), MOST),
        "largest error of TPOT, judged rows": bar(float(np.max(errors)), MOST),
        "best number of tokens, off by": bar(float(max(off)), MOST_OFF),
    }
    return show("speculation", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
