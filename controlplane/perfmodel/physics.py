"""Rules that the step times of no profile may break: the bytes that a step reads, and the memory's bandwidth.

A decode step of a full batch reads all weights, and all KV that its requests hold:

    t(max_seqs, capacity) ≥ LEAST · (weights + KV) / bandwidth         per GPU, of its data sheet
    t(1, 0)               ≤ MOST · weights / bandwidth + HOST_S
    t rises with sequences and with context

Weights are what KV and OTHER_BYTES leave of the engine's share of memory. Where the GPU's bandwidth or the
share is not known only the last line is checked.
"""

from __future__ import annotations

from controlplane.perfmodel.profile import Profile

BANDWIDTH = {  # bytes a second, of data sheets
    "a100-sxm": 2.039e12,
    "h100-sxm": 3.35e12,
    "h200-sxm": 4.8e12,
    "b200-sxm": 8.0e12,
    "gb200": 8.0e12,
    "l40s": 0.864e12,
    "rtx-pro-6000": 1.792e12,
    "a100-80gb": 2.039e12,
    "h100-80gb": 3.35e12,
}
OTHER_BYTES = 2.5 * 1024**3  # of a GPU: activations, graphs, NCCL
LEAST = 0.9  # a bound that no rounding of memory sizes breaks
MOST = 20.0
HOST_S = 0.1  # a step that waits for the slowest host


def weight_bytes(profile: Profile) -> float:
    """Bytes of weights on each GPU of a worker; 0 where its profile does not tell."""
    kv = profile.kv
    if not (kv.gpu_memory_bytes and kv.gpu_memory_utilization and kv.bytes_per_token):
        return 0.0
    share = kv.gpu_memory_utilization * kv.gpu_memory_bytes - OTHER_BYTES
    return max(share - kv.capacity_tokens * kv.bytes_per_token / profile.gpus, 0.0)


def broken_rule(profile: Profile) -> str | None:
    """The rule that a profile's decode steps break, in words; None where they break none."""
    step, kv, most = profile.step, profile.kv, profile.engine.max_seqs
    if float(step.step_s(0, most, 0)) < float(step.step_s(0, 1, 0)):
        return f"a decode step of {most} sequences is shorter than one of a single sequence"
    if step.per_context_token_s < 0.0:
        return "a decode step grows shorter with more context"
    bandwidth, weights = BANDWIDTH.get(profile.gpu), weight_bytes(profile)
    if bandwidth is None or weights == 0.0 or profile.workers_per_gpu > 1 or profile.speculation is not None:
        return None
    full_s = float(step.step_s(0, most, kv.capacity_tokens))
    least_s = (weights + kv.capacity_tokens * kv.bytes_per_token / profile.gpus) / bandwidth
    if full_s < LEAST * least_s:
        return (
            f"a decode step of a full batch takes {full_s * 1e3:.1f} ms, but to read its weights and KV takes"
            f" {least_s * 1e3:.1f} ms at {bandwidth / 1e12:.2f} TB/s"
        )
    one_s, most_s = float(step.step_s(0, 1, 0)), MOST * weights / bandwidth + HOST_S
    if one_s > most_s:
        return (
            f"a decode step of one sequence takes {one_s * 1e3:.1f} ms, more than {MOST:g} times the time"
            f" to read its weights plus {HOST_S * 1e3:.0f} ms"
        )
    return None
