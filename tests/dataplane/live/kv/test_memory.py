"""Staged KV beside an engine that computes on a stream of its own, which a stub of CUDA carries out late."""

import pytest

torch = pytest.importorskip("torch", reason="vLLM is not installed (requirements/live-cpu.txt)")

from late_cuda import Cuda  # noqa: E402

from dataplane.live.kv.holds import StepOrders  # noqa: E402
from dataplane.live.kv.loads import KvLoads  # noqa: E402
from dataplane.live.kv.memory import KEPT_BYTES, BlockTables, HostBuffers, StagedMemory  # noqa: E402
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
    assert len(records) == 3
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
    assert bytes_of(tensors, [5]) == bytes(range(32)) * 3
    assert cuda.launched == []
    assert cuda.log[-1] == ("synchronize", "side")  # before anybody is told that they are there


def test_a_step_s_orders_are_known_only_after_its_event(cuda, monkeypatch):
    from dataplane.live.kv import loads

    monkeypatch.setattr(loads, "kv_memory", lambda layers: StagedMemory(layers, cuda))
    update = BlockTables.update
    monkeypatch.setattr(
        BlockTables, "update", lambda *a: (cuda.log.append(("tables", "updated")), update(*a))[1]
    )
    (address,), release = reserve_addresses("127.0.0.1", 1)
    one = KvLoads(caches(), SocketTransport("secret"), address, 0)
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


def test_a_buffer_is_taken_again_only_when_nothing_refers_to_it():
    buffers = HostBuffers(is_pinned=False)
    first = buffers.take(1000)
    place, view = first.ctypes.data, memoryview(first)[10:20]
    del first
    assert buffers.take(1000).ctypes.data != place  # the view is still read
    del view
    assert place in {array.ctypes.data for array in (buffers.take(900), buffers.take(900))}


def test_buffers_much_too_large_are_left_and_those_that_pile_up_are_let_go():
    buffers = HostBuffers(is_pinned=False)
    large = buffers.take(1 << 20)
    place = large.ctypes.data
    del large
    assert buffers.take(1000).ctypes.data != place
    kept = [buffers.take(KEPT_BYTES // 2 + 1) for _ in range(3)]
    del kept
    buffers.take(1)
    assert sum(map(len, buffers._free)) <= KEPT_BYTES


def test_a_buffer_that_is_still_being_filled_is_not_given_back_however_many_pile_up():
    class Event:
        passed = False

        def query(self):
            return self.passed

    buffers, event = HostBuffers(is_pinned=False), Event()
    given_up = buffers.take(KEPT_BYTES + 1)
    place = given_up.ctypes.data
    buffers.fills(torch.from_numpy(given_up), event)
    del given_up
    buffers.take(1)
    assert place in {buffer.data_ptr() for buffer in buffers._free}
    event.passed = True
    buffers.take(1)
    assert sum(map(len, buffers._free)) <= KEPT_BYTES


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
