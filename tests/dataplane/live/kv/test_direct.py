"""Bytes read out of another process: exact, or an error that says why."""

import multiprocessing
import os
import socket

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch is not installed (requirements/live-cpu.txt)")

from dataplane.live.kv import direct as kv_direct


def cut(buffer, sizes):
    """Views of these sizes, in reversed order."""
    ends = np.cumsum(sizes)
    return [memoryview(buffer)[end - size : end] for end, size in zip(ends, sizes, strict=True)][::-1]


def sizes_that_sum_to(total):
    return st.lists(st.integers(1, max(1, total - 1)), max_size=12, unique=True).map(
        lambda cuts: np.diff([0, *sorted(c for c in cuts if c < total), total]).tolist()
    )


@given(st.data(), st.integers(1, 5000), st.integers(1, 700), st.integers(1, 4))
def test_any_runs_on_both_sides_and_any_piece_give_the_same_bytes(data, total, piece, runs):
    source = np.random.default_rng(total).integers(0, 256, total).astype(np.uint8)
    target = np.zeros(total, np.uint8)
    theirs = cut(source, data.draw(sizes_that_sum_to(total)))
    ours = cut(target, data.draw(sizes_that_sum_to(total)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kv_direct, "PIECE", piece)
        patch.setattr(kv_direct, "MAX_RUNS", runs)
        kv_direct.read(os.getpid(), kv_direct.places(theirs), ours)
    assert b"".join(ours) == b"".join(theirs)


def hold(pipe):
    cache = np.arange(3_000_000, dtype=np.uint32)
    pipe.send(kv_direct.places([memoryview(cache).cast("B")]).tolist())
    pipe.recv()


def test_the_memory_of_another_process_is_read_while_it_lives_and_not_after():
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(theirs,))
    process.start()
    places = np.array(ours.recv(), np.uint64)
    target = np.zeros(3_000_000, np.uint32)
    kv_direct.read(process.pid, places, [memoryview(target).cast("B")])
    assert (target == np.arange(3_000_000)).all()
    ours.send("end")
    process.join()
    with pytest.raises(OSError, match="No such process"):
        kv_direct.read(process.pid, places, [memoryview(target).cast("B")])


def test_memory_that_is_not_there_is_an_error():
    target = np.zeros(16, np.uint8)
    with pytest.raises(OSError, match="Bad address"):
        kv_direct.read(os.getpid(), np.array([[16, 16]], np.uint64), [memoryview(target)])


def test_both_sides_must_hold_as_many_bytes():
    with pytest.raises(OSError, match="both sides"):
        kv_direct.read(os.getpid(), np.array([[16, 15]], np.uint64), [memoryview(bytearray(16))])


def test_the_kernel_says_who_is_at_the_other_end():
    ours, theirs = socket.socketpair()
    with ours, theirs, socket.socket() as tcp:
        assert kv_direct.peer(ours) == os.getpid()
        assert kv_direct.peer(tcp) == 0
