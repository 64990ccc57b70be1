"""Rows of a request history, and a folder that holds them."""

from dataplane.history.files import HistoryLimits, HistoryWriter

NOON_S = 1_780_000_000.0


def row(i, **changes):
    return {
        "arrival_s": NOON_S + i,
        "prompt_tokens": 10 + i,
        "output_tokens": 5,
        "priority": "normal",
        "tenant": "key-0",
        "outcome": "finished",
        "queued_s": 0.01,
        "ttft_s": 0.1,
        "tpot_s": 0.02,
        "ttft_target_s": 1.0,
        "tpot_target_s": 0.1,
        "slo_class": None,
        "worker": "w0",
        "moves": 0,
        "replays": 0,
        "model": "m",
        "session": None,
        "hash_ids": None,
        "block_tokens": None,
    } | changes


def written(folder, rows, limits=None):
    writer = HistoryWriter(folder, limits or HistoryLimits())
    for n, one in enumerate(rows):
        writer.add(one)
        if n % 5000 == 0:  # as fast as it writes
            writer._thread.submit(int).result()
    writer.close()
