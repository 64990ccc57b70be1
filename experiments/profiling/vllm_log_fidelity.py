"""A real vLLM 0.19 run against the simulator: how far apart are the requests' latencies?

    python experiments/profiling/vllm_log_fidelity.py [--format table|json]

All 300 requests of the log (one RTX PRO 6000, Llama-3.1-8B, chunked prefill, 2048 tokens and 128 sequences a
step) are simulated together; the four coefficients are fitted on even requests and judged on odd ones, and
the other way round. Beside it what the log's own publishers state for their simulator, LLMServingSim 2.0.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from experiments.lib.measured_profiles import rtx_profile
from experiments.lib.public_data import REQUEST_LOG
from experiments.lib.results import bar, flags, show
from harness.log_errors import log_errors
from tokenfleet.profiles.fit_log import fit_log, replay
from tokenfleet.profiles.measurements import read_request_log

LATENCY_BAR, TAIL_BAR = 0.01, 0.02


def main() -> int:
    asked = flags(__doc__, REQUEST_LOG).parse_args()
    log = read_request_log(asked.data / REQUEST_LOG / "requests.jsonl")
    even = np.arange(len(log.workload)) % 2 == 0
    profile = rtx_profile(asked.data, learn_even=True, seed=asked.seed)
    rows: list[dict[str, Any]] = []
    learned = [("even", even, profile)]
    if not asked.quick:
        learned.append(("odd", ~even, fit_log(log, profile, ~even, asked.seed)))
    for name, rows_learned, fitted in learned:
        outcome = replay(log, fitted)
        for judged, mask in (("held out", ~rows_learned), ("learned from", rows_learned)):
            e = log_errors(log, outcome, mask)
            rows.append(
                {
                    "learned": name,
                    "judged": judged,
                    "requests": e.requests,
                    "e2e_mape": e.e2e_mape,
                    "tpot_mape": e.tpot_mape,
                    "ttft_mean": e.ttft_mean,
                    "ttft_p99": e.ttft_p99,
                }
            )
    published = {"learned": "LLMServingSim 2.0, as published", "judged": "all", "requests": 300}
    rows.append(published | {"e2e_mape": None, "tpot_mape": None, "ttft_mean": -0.040, "ttft_p99": -0.020})
    held = rows[0]
    bars = {
        "mean E2E error": bar(held["e2e_mape"], LATENCY_BAR),
        "mean TPOT error": bar(held["tpot_mape"], LATENCY_BAR),
        "TTFT p99 error": bar(abs(held["ttft_p99"]), TAIL_BAR),
    }
    return show("vllm_log_fidelity", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
