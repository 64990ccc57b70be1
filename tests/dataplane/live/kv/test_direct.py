"""Bytes read out of another process: exact, or an error that says why."""

import ctypes
import errno
import gc
import multiprocessing
import os
import signal
import socket
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("torch", reason="torch is not installed (requirements/live-cpu.txt)")

from dataplane.live.engine_api.kv_messages import UNBOUND, CopyRate
from dataplane.live.kv import direct as kv_direct
from dataplane.live.kv.direct import Copy, NotAllowed, Pacer, ProcessMemory, Share

MIB = 1 << 20


@pytest.fixture(scope="module")
def four():
    with ThreadPoolExecutor(4) as pool:
        yield pool


@pytest.fixture
def calls(monkeypatch):
    """The thread and the bytes of each call of the kernel; `refuse` maps the number of a call to an error."""
    seen = SimpleNamespace(made=[], refuse={}, lock=threading.Lock())
    readv = kv_direct._readv

    def call(pid, ours, theirs):
        with seen.lock:
            number = len(seen.made)
            seen.made.append((threading.get_ident(), int(ours[:, 1].sum())))
        if number in seen.refuse:
            ctypes.set_errno(seen.refuse[number])
            return -1
        return readv(pid, ours, theirs)

    monkeypatch.setattr(kv_direct, "_readv", call)
    return seen


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


@given(st.data(), st.integers(1, 5000), st.integers(1, 300), st.integers(1, 700), st.integers(1, 4))
def test_four_threads_bring_the_same_bytes_of_any_runs(four, data, total, piece, size, runs):
    source = np.random.default_rng(total).integers(0, 256, total).astype(np.uint8)
    target = np.zeros(total, np.uint8)
    theirs = cut(source, data.draw(sizes_that_sum_to(total)))
    ours = cut(target, data.draw(sizes_that_sum_to(total)))
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"PIECE": piece, "SLICE": size, "MAX_RUNS": runs}.items():
            patch.setattr(kv_direct, name, value)
        kv_direct.read(os.getpid(), kv_direct.places(theirs), ours, Pacer(UNBOUND, Share()), four)
    assert b"".join(ours) == b"".join(theirs)


def read_here(size, *given):
    """Read this many bytes of this process. Return what was read, and what it should be."""
    source = np.random.default_rng(size).integers(0, 256, size).astype(np.uint8)
    target = np.zeros(size, np.uint8)
    kv_direct.read(os.getpid(), kv_direct.places([memoryview(source)]), [memoryview(target)], *given)
    return target, source


def test_a_large_read_goes_to_the_threads_after_its_first_call(four, calls):
    target, source = read_here(33 * MIB + 5, None, four)
    assert (target == source).all()
    (first, size), *rest = calls.made
    assert (first, size) == (threading.get_ident(), MIB)
    assert threading.get_ident() not in {thread for thread, _ in rest}
    assert sorted(size for _, size in rest) == [5] + 8 * [4 * MIB]


@pytest.mark.parametrize("pace", [UNBOUND, CopyRate(1e12), CopyRate(share=0.99), CopyRate(1e12, 0.99, 1e12)])
def test_small_reads_and_those_with_a_bound_stay_on_their_thread(four, calls, pace):
    size = 4 * MIB - 1 if pace == UNBOUND else 8 * MIB
    target, source = read_here(size, Pacer(pace, Share()), four)
    assert (target == source).all()
    assert {thread for thread, _ in calls.made} == {threading.get_ident()}


def test_a_bound_holds_for_all_of_a_large_read(four):
    began_s = time.monotonic()
    read_here(16 * MIB, Pacer(CopyRate(80e6), Share()), four)
    assert time.monotonic() - began_s >= 16 * MIB / 80e6


@pytest.mark.parametrize("error", [errno.EPERM, errno.EACCES, errno.ENOSYS, errno.EFAULT])
def test_a_refused_first_call_is_not_allowed_and_nothing_is_written(four, calls, error):
    calls.refuse = {0: error}
    target = np.zeros(16 * MIB, np.uint8)
    with pytest.raises(NotAllowed):
        kv_direct.read(os.getpid(), kv_direct.places([memoryview(target)]), [memoryview(target)], None, four)
    assert len(calls.made) == 1
    assert not target.any()


@pytest.mark.parametrize("failing", range(1, 5))
def test_a_slice_that_fails_fails_the_read_once_no_thread_writes_and_its_buffer_is_free(four, calls, failing):
    calls.refuse = {failing: errno.EFAULT}
    source, target = np.ones(17 * MIB, np.uint8), np.zeros(17 * MIB, np.uint8)
    gone = weakref.ref(target)
    gc.disable()
    try:
        with pytest.raises(OSError, match="Bad address") as failed:
            kv_direct.read(
                os.getpid(), kv_direct.places([memoryview(source)]), [memoryview(target)], None, four
            )
        assert not isinstance(failed.value, NotAllowed)
        assert int(target.sum()) == 13 * MIB  # all others have ended
        del target, failed
        assert gone() is None
    finally:
        gc.enable()


def test_only_what_goes_to_a_gpu_is_read_by_threads_which_end_with_the_bypass(monkeypatch, calls):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(16))
    source = np.random.default_rng(1).integers(0, 256, 17 * MIB).astype(np.uint8)
    ours, theirs = socket.socketpair()
    offer = kv_direct.places([memoryview(source)]).tobytes()
    before = set(threading.enumerate())
    with ours, theirs:
        for device, least in (("cpu", 0), ("cuda", 1)):
            target, bypass = np.zeros(17 * MIB, np.uint8), ProcessMemory()
            calls.made.clear()
            memory = SimpleNamespace(
                layers=[SimpleNamespace(device=SimpleNamespace(type=device))],
                write=lambda blocks, into=target: ([memoryview(into)], lambda: None),
            )
            assert bypass.take(ours, offer, Copy(memory, [0], Pacer(UNBOUND, Share()), 1.0))
            assert (target == source).all()
            threads = set(threading.enumerate()) - before
            assert least <= len(threads) <= 4 * least
            apart = [thread != threading.get_ident() for thread, _ in calls.made]
            assert not apart[0]
            assert set(apart[1:]) == {device == "cuda"}
    del bypass
    for thread in threads:
        thread.join(10)
        assert not thread.is_alive()


@pytest.mark.parametrize(("cores", "threads"), [(2, 0), (7, 0), (8, 2), (12, 3), (16, 4), (128, 4)])
def test_threads_are_a_quarter_of_the_cores_and_four_at_most(monkeypatch, cores, threads):
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(cores))
    pool = ProcessMemory()._pool
    assert (0 if pool is None else pool._max_workers) == threads


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


def test_a_process_that_dies_while_threads_read_it_is_an_error(four, monkeypatch):
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=hold, args=(theirs,))
    process.start()
    places, target = np.array(ours.recv(), np.uint64), np.zeros(12_000_000, np.uint8)
    readv = kv_direct._readv
    caller, slices, dies = threading.get_ident(), [], threading.Lock()

    def call(*given):
        if threading.get_ident() != caller:
            with dies:
                slices.append(given)
                if len(slices) == 2:
                    process.kill()
                    process.join()
        return readv(*given)

    monkeypatch.setattr(kv_direct, "_readv", call)
    with pytest.raises(OSError, match=r"No such process|could be read") as failed:
        kv_direct.read(process.pid, places, [memoryview(target)], None, four)
    assert not isinstance(failed.value, NotAllowed)
    assert process.exitcode == -signal.SIGKILL
    assert len(slices) == 3


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
