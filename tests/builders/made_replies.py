"""The control API's replies, made up: a worker, a request and the fleet of both."""

from made_types import profile_of

from controlplane.perfmodel.step import Hinge, PrefillModel, StepModel
from controlplane.types import EngineMode

STEP = StepModel(0.01, 1e-4, 1e-3, 1e-6, hinges=(Hinge("sequences", 8.0, 1e-4),))


PROFILE = profile_of(STEP, 16_000, 32, prefill=PrefillModel(0.01, 1e-4), mode=EngineMode.PREFILL_FIRST)


def worker(name, steps=100, waiting=0, state="serving", kind="a", **load):
    telemetry = {"steps": steps, "waiting": waiting, "step_s": 0.02, "prefill_tokens": 0, "sequences": 2}
    telemetry |= {"context_tokens": 500, **load}
    return {
        "worker": name, "kind": kind, "state": state, "kv_blocks": 1000, "block_tokens": 16, "max_seqs": 32,
        "kv_bytes_per_token": 1000,
        "telemetry": telemetry,
    }  # fmt: skip


def request(name, at="a", output=10, expected=100, age_s=1.0, prompt=50):
    state = "waiting" if at is None else "decoding" if output else "prefilling"
    return {
        "request_id": name, "worker": at, "state": state, "prompt_tokens": prompt, "output_tokens": output,
        "expected_tokens": expected, "priority": "normal", "age_s": age_s,
        "slo": {"ttft_s": 1.0, "tpot_s": 0.1},
    }  # fmt: skip


def counted(requests, ttft_s=1.0):
    sums = {"requests": requests, "prompt_tokens": 50 * requests, "expected_tokens": 100 * requests}
    return {"ttft_s": ttft_s, "tpot_s": 0.1, **sums}


def fleet(*workers, arrivals=(), wanted=2, auto=True):
    return {
        "workers": list(workers), "wanted_workers": wanted, "wanted_kinds": {"a": wanted}, "auto": auto,
        "moving": [], "arrivals": list(arrivals), "cold_start_s": 30.0, "drain_s": 4.0,
    }  # fmt: skip
