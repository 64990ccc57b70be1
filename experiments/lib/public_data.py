"""The public data (docs/data.md): where it lies, and the files that several experiments read."""

from __future__ import annotations

import os
from pathlib import Path

from controlplane.workload import Workload
from tokenfleet.traces import read_trace

ROOT = Path(__file__).resolve().parents[2]
DATA = Path(os.environ.get("TOKENFLEET_BENCH_DATA") or ROOT / "data")
AZURE_HOUR = "azure/AzureLLMInferenceTrace_conv_2023.csv"
SHAREGPT = "lengths/sharegpt_8k_filtered_stats_llama2_tokenizer.csv"
SERVEGEN = {name: f"servegen/language_{name}_rate_600s.csv" for name in ("m-mid", "m-small")}
REQUEST_LOG = "vllm_logs/rtx_pro_6000_llama-3.1-8b"
SPLITWISE_TABLE = "splitwise/perf_model.csv"


def azure_hour(data: Path) -> Workload:
    """The hour of Azure's conversation trace."""
    return read_trace(data / AZURE_HOUR).workload
