"""Staged KV of an engine that computes on a stream of its own; a stub of CUDA carries the stream out late."""

import pytest

torch = pytest.importorskip("torch", reason="vLLM is not installed (requirements/live-cpu.txt)")

from late_cuda import Cuda  # noqa: E402

from dataplane.live.kv import memory as memory_module  # noqa: E402
from dataplane.live.kv.holds import StepOrders  # noqa: E402
from dataplane.live.kv.loads import KvLoads  # noqa: E402
from dataplane.live.kv.memory import BlockTables, HostRing, StagedMemory  # noqa: E402
from dataplane.live.kv.transport import Fetch, FetchFailed, SocketTransport, reserve_addresses  # noqa: E402


@pytest.fixture
def cuda():
    return Cuda()


def caches(layers=3):
    """Blocks first, of a tensor that has keys and values first: no block lies in one piece."""
    torch.manual_seed(0)
    return [torch.randint(0, 255, (2, 8, 16), dtype=torch.uint8).transpose(0, 1) for _ in range(layers)]


def whole(memory, blocks):
    views, wait = memory.read(blocks)
    for view in range(len(views)):
        wait(view)
    return b"".join(views)


def bytes_of(tensors, blocks):
    return b"".join(bytes(t[blocks].contiguous().numpy()) for t in tensors)


def test_a_read_has_what_was_launched_before_the_step_began_and_nothing_after(cuda):
    tensors = caches()
    memory = StagedMemory(tensors, cuda)
    cuda.launched.append(lambda: tensors[0][2].fill_(7))  # the step before, not yet computed
    memory.step_begins()
    cuda.launched.append(lambda: tensors[0][3].fill_(9))  # this step's own
    before = tensors[0][3].clone()
    read = whole(memory, [2, 3])
    assert read == bytes_of(tensors, [2, 3])
    assert torch.equal(tensors[0][2], torch.full((2, 16), 7, dtype=torch.uint8))
    assert torch.equal(tensors[0][3], before)


def test_each_layer_is_waited_for_by_itself_so_that_it_is_sent_while_the_next_is_copied(cuda):
    memory = StagedMemory(caches(), cuda)
    _, wait = memory.read([1])
    records = [place for place, entry in enumerate(cuda.log) if entry == ("record", "side")]
    assert len(records) == 4  # the last is the slot's
    wait(1)
    assert [entry for entry in cuda.log if entry[0] == "synchronize"] == [("synchronize", records[1])]


def test_what_is_loaded_comes_after_a_late_write_of_whoever_had_the_blocks(cuda):
    tensors = caches()
    memory = StagedMemory(tensors, cuda)
    cuda.launched.append(lambda: tensors[1][5].fill_(1))
    memory.step_begins()
    views, commit = memory.write([5])
    for view in views:
        view[:] = bytes(range(32))
    commit()
    memory.finish()
    assert bytes_of(tensors, [5]) == bytes(range(32)) * 3
    assert cuda.launched == []
    assert cuda.log[-1] == ("synchronize", "side")  # before anybody is told that they are there


def test_a_step_s_orders_are_known_only_after_its_event(cuda, monkeypatch):
    update = BlockTables.update
    monkeypatch.setattr(
        BlockTables, "update", lambda *a: (cuda.log.append(("tables", "updated")), update(*a))[1]
    )
    (address,), release = reserve_addresses("127.0.0.1", 1)
    one = KvLoads(StagedMemory(caches(), cuda), SocketTransport("secret"), address, 0)
    one.take_orders(StepOrders(offered={"s": [1]}))
    one.close()
    release()
    assert cuda.log == [("record", "engine"), ("tables", "updated")]


def test_a_copy_that_fails_fails_the_fetch_and_never_fills_it(cuda):
    (address,), release = reserve_addresses("127.0.0.1", 1)
    source, target, tables = StagedMemory(caches(), cuda), StagedMemory(caches()), BlockTables()
    transport = SocketTransport("secret")
    stop = transport.serve(address, tables, source)
    release()
    tables.update({"s": [1, 2]}, ())
    cuda.fails = RuntimeError("CUDA error: an illegal memory access was encountered")
    with pytest.raises(FetchFailed):
        transport.fetch(address, Fetch("secret", "s", 0, 2), target, [0, 1], 5.0)
    cuda.fails = None
    assert transport.fetch(address, Fetch("secret", "s", 0, 2), target, [0, 1], 5.0)[0] == 2 * 96
    stop()
    transport.close()


def test_words_and_bytes_are_read_alike_whatever_the_layout():
    odd = [torch.randint(0, 255, (2, 8, 15), dtype=torch.uint8).transpose(0, 1), caches(1)[0]]
    assert whole(StagedMemory(odd), [7, 0, 3]) == bytes_of(odd, [7, 0, 3])


def test_a_slot_is_taken_again_only_when_nothing_refers_to_it(monkeypatch):
    monkeypatch.setattr(memory_module, "SLOT_S", 0.01)
    ring = HostRing(1, 1000, is_pinned=False)
    first = ring.take(1000)
    place, view = first.ctypes.data, memoryview(first)[10:20]
    del first
    with pytest.raises(TimeoutError, match="no host buffer"):
        ring.take(900)  # the view is still read
    del view
    assert ring.take(900).ctypes.data == place


def test_a_slot_that_is_still_being_filled_is_waited_for_before_it_is_given_again(cuda):
    memory = StagedMemory(caches(), cuda)
    for _ in range(memory_module.SLOTS):
        memory.read([1])  # and given up
    given_up = [place for place, entry in enumerate(cuda.log) if entry == ("record", "side")][3]
    assert not any(entry[0] == "synchronize" for entry in cuda.log)
    memory.read([1])
    assert ("synchronize", given_up) in cuda.log


def test_nothing_is_pinned_in_service_however_much_is_moved(cuda, monkeypatch):
    pinned = cuda.counts_buffers(monkeypatch)
    monkeypatch.setattr(memory_module, "SLOT_BYTES", 1024)  # nine blocks of 96 bytes and their numbers
    (address,), release = reserve_addresses("127.0.0.1", 1)
    large = [torch.randint(0, 255, (2, 40, 16), dtype=torch.uint8).transpose(0, 1) for _ in range(3)]
    source, tables, transport = StagedMemory(large, cuda), BlockTables(), SocketTransport("secret")
    target = StagedMemory([torch.zeros_like(layer) for layer in large], cuda)
    at_start = sum(pinned)
    assert at_start <= 2 * 2 * memory_module.SLOTS * 1024
    stop = transport.serve(address, tables, source)
    release()
    tables.update({"s": range(40)}, ())
    for _ in range(20):
        moved, _ = transport.fetch(address, Fetch("secret", "s", 0, 40), target, range(40), 5.0)
        assert moved == 40 * 96
    assert bytes_of(target.layers, range(40)) == bytes_of(large, range(40))
    assert sum(pinned) == at_start
    stop()
    transport.close()


def test_a_piece_is_put_onto_the_gpu_while_the_next_is_received(cuda, monkeypatch):
    monkeypatch.setattr(memory_module, "SLOT_BYTES", 1024)
    (address,), release = reserve_addresses("127.0.0.1", 1)
    source, tables, transport = StagedMemory(caches()), BlockTables(), SocketTransport("secret")
    stop = transport.serve(address, tables, source)
    release()
    tables.update({"s": [n % 8 for n in range(16)]}, ())
    target = StagedMemory([torch.zeros(32, 2, 16, dtype=torch.uint8).transpose(1, 2) for _ in range(3)], cuda)
    transport.fetch(address, Fetch("secret", "s", 0, 16), target, range(16), 5.0)
    copies = [entry for entry in cuda.log if entry in (("copies", "side"), ("synchronize", "side"))]
    assert copies == [("copies", "side")] * 3 + [("synchronize", "side")]
    stop()
    transport.close()


def test_a_fetch_that_fails_ends_its_copies_before_it_says_so(cuda):
    (address,), release = reserve_addresses("127.0.0.1", 1)
    transport, target = SocketTransport("secret"), StagedMemory(caches(), cuda)
    stop = transport.serve(address, BlockTables(), StagedMemory(caches()))
    release()
    with pytest.raises(FetchFailed, match="no blocks"):
        transport.fetch(address, Fetch("secret", "s", 0, 2, 0.01), target, [0, 1], 5.0)
    assert cuda.log[-1] == ("synchronize", "side")
    stop()
    transport.close()


def test_every_thread_that_copies_works_on_the_rank_s_own_gpu_before_all_else(cuda):
    (address,), release = reserve_addresses("127.0.0.1", 1)
    source, tables, transport = StagedMemory(caches(), cuda), BlockTables(), SocketTransport("secret")
    stop = transport.serve(address, tables, source)
    release()
    tables.update({"s": [1, 2]}, ())
    transport.fetch(address, Fetch("secret", "s", 0, 2), StagedMemory(caches()), [0, 1], 5.0)
    assert cuda.log[0] == ("device", "kv-answer")
    stop()
    transport.close()


def test_layers_of_odd_sizes_share_a_buffer_without_touching_each_other():
    layers = [torch.arange(12 * 3, dtype=torch.uint8).view(3, 12).t(), torch.zeros(12, 16, dtype=torch.uint8)]
    memory = StagedMemory([layers[0], layers[1]])
    views, _ = memory.read([2, 5])
    assert [bytes(view) for view in views] == [bytes([2, 14, 26, 5, 17, 29]), bytes(32)]
