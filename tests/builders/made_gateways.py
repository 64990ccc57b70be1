"""Made-up inputs of a gateway: workers, and the fields of requests that queue and placement read."""

from types import SimpleNamespace

from controlplane.types import WorkerId
from dataplane.live.engine_api.link import WorkerInfo


def made_request(number, prompt_tokens):
    """What of vLLM's request the gateway's queue and placement read."""
    return SimpleNamespace(
        request_id=str(number),
        prompt_token_ids=[1] * prompt_tokens,
        sampling_params=None,
        lora_request=None,
    )


def worker_info(name, max_seqs, max_batched_tokens=8192, block_tokens=16, kv_blocks=60_000):
    return WorkerInfo(
        WorkerId(name), "emulated", "m", "", (), block_tokens, kv_blocks, 1, 99_999, max_seqs,
        max_batched_tokens, 1, "", "", 0, caches_prefixes=False,
    )  # fmt: skip
