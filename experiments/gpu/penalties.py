"""Penalties of moved requests on the device: the CPU's values, their time, and whether a step waits."""

from __future__ import annotations

import statistics

import torch

from dataplane.live.engine_api.slot_penalty import charge_row, slot_penalty
from experiments.gpu.bench import Bench, Result, seconds, verdict

VOCABULARY, ROWS, PRIOR, NEW, ROUNDS = 128_256, 64, 1000, (10, 100, 1000), 20


def measure(bench: Bench) -> Result:
    made, rows, alike = torch.Generator().manual_seed(0), [], True
    vocabulary, waits = bench.pick(VOCABULARY, 512), ""
    prior = torch.randint(vocabulary, (PRIOR,), generator=made).tolist()
    logits = torch.randn(bench.pick(ROWS, 4), vocabulary, generator=made)
    for tokens in NEW:
        new = torch.randint(vocabulary, (tokens,), dtype=torch.int32, generator=made)
        carried, there = slot_penalty(prior, 0.7, 0.3, bench.device), logits.to(bench.device, copy=True)
        on_device, own = new.to(bench.device), logits.clone()
        charge_row(own[0], slot_penalty(prior, 0.7, 0.3, "cpu"), new)
        if bench.is_gpu:
            torch.cuda.set_sync_debug_mode("error")
        try:
            charge_row(there[0], carried, on_device)
        except RuntimeError as error:
            waits = str(error)
        finally:
            if bench.is_gpu:
                torch.cuda.set_sync_debug_mode("default")
        alike &= bool(torch.allclose(there.cpu(), own, atol=1e-5))
        taken = seconds(
            bench, lambda row=there[0], on=carried, new=on_device: charge_row(row, on, new), ROUNDS
        )
        rows.append({"new_tokens": tokens, "us_per_row": 1e6 * statistics.median(taken), "waits": waits})
    checks = {
        "the same logits as on a CPU": verdict(True, alike),
        "no step waits for them": verdict(bench.is_gpu, not waits),
    }
    return Result("penalties of moved requests", rows, checks)
