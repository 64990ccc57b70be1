"""A rank's KV cache as blocks of opaque bytes.

A layer's cache is a tensor whose first dimension counts blocks. The inside of a block (heads, positions, how
keys are packed for the CPU's tiles) belongs to the kernel. A block is moved as opaque bytes, so both ends
must run the same model, dtype, block size and instruction set. No value is ever converted.

`DirectMemory` sends from and receives into the cache itself; it needs host tensors whose blocks lie in one
piece. `StagedMemory` gathers and scatters through host buffers, layer by layer, and takes any device and
layout. On CUDA it works on a stream of its own: a layer is sent while the next is copied. Its buffers are two
rings of pinned slots, made at the start: pinning takes the driver's lock, and the engine's launches would
wait. So blocks are moved in pieces that fit a slot. One is put onto the GPU while the next is received.

**What may be read when, on a stream of its own.** The engine launches a step's kernels and goes on; the step
after the next may be planned before they have run. Three rules keep the two streams apart:

1. Before a step offers, withdraws or loads blocks, and before its kernels are launched, `step_begins`
   records an event on the engine's stream. The blocks offered are those that earlier steps write. Whatever
   this module launches from then on waits for that event, so it reads what those steps have written. Nothing
   newer than that step's start may be read: its own kernels come after the event.
2. A reader asks whether its grant still holds only after its copies are done on the host (`wait`). If it
   does, no step that could reuse the blocks had been begun, so none of its kernels had been launched.
3. Blocks that are loaded belong to no step until `finish` has returned, which waits for the stream. Kernels
   of steps begun before, which may still write for the blocks' last owner, are before the event of rule 1.

Who reads the cache without this module (nixl.py) has no stream: it waits for that event on the host
(`settle`).

**Block tables** of running segments are shared between the engine's thread and the transfer threads.
The engine's thread learns the tables at the start of each step, before anything is written in it. A reader
takes a `Grant`, reads the blocks, and then asks whether the grant still holds. A grant ends when the segment
is preempted or freed. The tables learn that before the step that could hand its blocks to another request
writes. So a grant that still holds after the read means that the bytes are the segment's own.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, count
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

SLOTS, SLOT_BYTES = 4, 1 << 26  # of each ring; torch rounds pinned buffers up to powers of two
SLOT_S = 10.0  # that a copy waits for a slot
ALIGNED = 64  # bytes to which a layer's part is rounded up, so that each begins as its dtype wants it
INDEX_BYTES = 8  # of a block's number, which goes to the device in the slot
REMEMBERED_ENDS = 1024  # segments known to be gone, so that a late reader learns it at once
Views = list[memoryview]


@dataclass(frozen=True, slots=True)
class Grant:
    """Blocks [first, last) of a segment, good for as long as `BlockTables.holds` says so."""

    segment: str
    blocks: tuple[int, ...]
    generation: int


class BlockTables:
    """Block tables of the segments that may be read; safe to use from several threads."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._tables: dict[str, tuple[Sequence[int], int]] = {}
        self._ended: deque[str] = deque(maxlen=REMEMBERED_ENDS)
        self._generations = count()

    def update(self, offered: Mapping[str, Sequence[int]], withdrawn: Iterable[str]) -> None:
        """Withdraw segments, then offer others; an offer for a known segment extends its table."""
        with self._changed:
            for segment in withdrawn:
                self._tables.pop(segment, None)
                self._ended.append(segment)
            for segment, blocks in offered.items():
                current = self._tables.get(segment)
                generation = next(self._generations) if current is None else current[1]
                self._tables[segment] = (blocks, generation)
            self._changed.notify_all()

    def grant(self, segment: str, first: int, last: int, wait_s: float) -> Grant | None:
        """Blocks [first, last) of a segment, waiting up to `wait_s` for it to be offered; None if it is not.

        A segment may be asked for a moment before its engine's next step offers it. One that has ended is
        refused at once.
        """

        def ready() -> bool:
            table = self._tables.get(segment)
            return (table is not None and len(table[0]) >= last) or (table is None and segment in self._ended)

        with self._changed:
            if not self._changed.wait_for(ready, wait_s):
                return None
            table = self._tables.get(segment)
            if table is None:
                return None
            blocks, generation = table
            return Grant(segment, tuple(blocks[first:last]), generation)

    def holds(self, grant: Grant) -> bool:
        """Whether the blocks of a grant have been the segment's own all along."""
        with self._changed:
            table = self._tables.get(grant.segment)
            return table is not None and table[1] == grant.generation


class KvMemory:
    """Reads and writes blocks of `layers`, the caches themselves, of shape [blocks, ...].

    Views are flat byte views: layer by layer, blocks in the order asked. What does nothing here is for
    memory in which something is computed late.
    """

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self.layers = layers

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        raise NotImplementedError

    @property
    def piece_blocks(self) -> int:
        """The number of blocks that is best read or written at once."""
        return len(self.layers[0])

    def enter_thread(self) -> None:
        """Called by a thread before it copies: on GPUs it works on its rank's own."""

    def step_begins(self) -> None:
        """Called by the engine's thread before it launches a step, and before the step's orders are known."""

    def settle(self) -> None:
        """Return once all that was launched before the last step began has been computed."""

    def read(self, blocks: Sequence[int]) -> tuple[Views, Callable[[int], None]]:
        """Views whose concatenation is the blocks' bytes, and what waits until one of them is filled."""
        raise NotImplementedError

    def write(self, blocks: Sequence[int]) -> tuple[Views, Callable[[], None]]:
        """Writable views to fill, and what to call when they are full; `finish` waits for the blocks."""
        raise NotImplementedError

    def finish(self) -> None:
        """Return once all that was written is in its blocks."""

    def beside_steps(self) -> AbstractContextManager[None]:
        """A context whose copies write after all steps begun so far, and are done when it ends."""
        return nullcontext()


def kv_memory(caches: Sequence[torch.Tensor]) -> KvMemory:
    """The best fit for these caches, each of shape [blocks, ...]; layers that share a cache count once.

    Caches are taken as bytes: no kernel need know their dtype (FP8) to gather and scatter them.
    """
    places = {(t.data_ptr(), t.stride()): t for t in caches}
    layers = [t.view(torch.uint8) for t in places.values()]
    if all(t.device.type == "cpu" and t[0].is_contiguous() and t.stride(0) == t[0].numel() for t in layers):
        return DirectMemory(layers)
    return StagedMemory(layers)


class DirectMemory(KvMemory):
    """Blocks of host tensors, without a copy: all is computed when the next step begins."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        super().__init__(layers)
        self._views_of: list[memoryview] = []
        self._strides: list[int] = []
        for tensor in layers:
            flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
            self._views_of.append(memoryview(flat).cast("B"))
            self._strides.append(tensor[0].numel() * tensor.element_size())

    @property
    def block_bytes(self) -> int:
        return sum(self._strides)

    def read(self, blocks: Sequence[int]) -> tuple[Views, Callable[[int], None]]:
        return self._views(blocks), lambda view: None

    def write(self, blocks: Sequence[int]) -> tuple[Views, Callable[[], None]]:
        return self._views(blocks), lambda: None

    def _views(self, blocks: Sequence[int]) -> Views:
        views = []
        for layer, stride in zip(self._views_of, self._strides, strict=True):
            views += [layer[start * stride : end * stride] for start, end in _runs(blocks)]
        return views


class StagedMemory(KvMemory):
    """Blocks of any tensors, through host buffers; `cuda`: torch.cuda's streams and events, or another's."""

    def __init__(self, layers: Sequence[torch.Tensor], cuda: Any = None) -> None:
        super().__init__(layers)
        self._words = [as_words(t) for t in layers]
        self._device = layers[0].device
        is_pinned = self._device.type == "cuda"
        self._row_bytes = [t[0].numel() * t.element_size() for t in self._words]
        slack = ALIGNED * (len(layers) + 1)
        a_slot = SLOT_BYTES - slack
        self._piece_blocks = min(len(layers[0]), max(1, a_slot // (self.block_bytes + INDEX_BYTES)))
        slot = min(SLOT_BYTES, self._piece_blocks * (self.block_bytes + INDEX_BYTES) + slack)
        # Two, for a reader that waits for its holder's slot has one itself.
        self._read, self._written = HostRing(SLOTS, slot, is_pinned), HostRing(SLOTS, slot, is_pinned)
        self._cuda = torch.cuda if is_pinned else cuda
        self._stream: Any = self._cuda.Stream(self._device) if self._cuda else None
        self._launched: Any = None  # an event after all that the engine had launched when its step began

    @property
    def block_bytes(self) -> int:
        return sum(self._row_bytes)

    @property
    def piece_blocks(self) -> int:
        return self._piece_blocks

    def enter_thread(self) -> None:
        # A thread begins on the first GPU, and its first call there would take half a GB of it.
        if self._cuda:
            self._cuda.set_device(self._device)

    def step_begins(self) -> None:
        if self._cuda:
            launched = self._cuda.Event()
            launched.record(self._cuda.current_stream(self._device))
            self._launched = launched

    def settle(self) -> None:
        if self._launched is not None:
            self._launched.synchronize()

    def read(self, blocks: Sequence[int]) -> tuple[Views, Callable[[int], None]]:
        (*host, numbers), copied = self._parts(self._read, blocks), []
        with self._side_stream(), self._read.used(numbers, self._event):
            index = numbers.to(self._device, non_blocking=True)
            for tensor, part in zip(self._words, host, strict=True):
                if self._cuda:
                    part.copy_(tensor.index_select(0, index), non_blocking=True)
                    copied.append(self._event())
                else:
                    torch.index_select(tensor, 0, index, out=part)

        def wait(layer: int) -> None:
            if copied:
                copied[layer].synchronize()

        return [_bytes_of(t) for t in host], wait

    def write(self, blocks: Sequence[int]) -> tuple[Views, Callable[[], None]]:
        *host, numbers = self._parts(self._written, blocks)

        def commit() -> None:
            with self._side_stream(), self._written.used(numbers, self._event):
                index = numbers.to(self._device, non_blocking=True)
                for tensor, part in zip(self._words, host, strict=True):
                    tensor.index_copy_(0, index, part.to(self._device, non_blocking=True))

        return [_bytes_of(t) for t in host], commit

    def finish(self) -> None:
        if self._cuda:
            self._stream.synchronize()

    @contextmanager
    def beside_steps(self) -> Iterator[None]:
        with self._side_stream():
            yield
        self.finish()

    def _event(self) -> Any:
        """An event after all that was launched on this module's stream, where there is one."""
        if not self._cuda:
            return None
        event = self._cuda.Event()
        event.record(self._stream)
        return event

    def _parts(self, ring: HostRing, blocks: Sequence[int]) -> list[torch.Tensor]:
        """A buffer for each layer of a slot, which a GPU fills or empties, and last the blocks' numbers."""
        count = len(blocks)
        sizes = [count * row for row in (*self._row_bytes, INDEX_BYTES)]
        begins = list(accumulate((-(-size // ALIGNED) * ALIGNED for size in sizes), initial=0))
        taken = torch.from_numpy(ring.take(begins.pop()))
        parts = [taken[begin : begin + size] for begin, size in zip(begins, sizes, strict=True)]
        numbers = parts.pop().view(torch.int64)
        numbers.copy_(torch.tensor(list(blocks), dtype=torch.int64))
        shaped = zip(parts, self._words, strict=True)
        return [*(part.view(t.dtype).view(count, *t.shape[1:]) for part, t in shaped), numbers]

    @contextmanager
    def _side_stream(self) -> Iterator[None]:
        """A context whose copies run during the engine's steps, but after what its last one waits for."""
        if not self._cuda:
            yield
            return
        with self._cuda.stream(self._stream):
            if self._launched is not None:
                self._stream.wait_event(self._launched)
            yield


class HostRing:
    """Slots of host memory for copies, made once: pinning, and a page fault every few KiB, take time.

    A slot is free again once nothing refers to the array that `take` returned. It is handed out again once
    the last copy out of it or into it has passed. If a reader gives up, that copy goes on by itself.
    """

    def __init__(self, slots: int, slot_bytes: int, is_pinned: bool) -> None:
        self._slot_bytes, self._is_pinned = slot_bytes, is_pinned
        # A finalizer may run in the middle of anything: this queue's `put` may be called there.
        self._free: SimpleQueue[torch.Tensor] = SimpleQueue()
        self._last: dict[int, Any] = {}  # by address of a slot: the event after the last copy
        for _ in range(slots):
            slot = host_buffer(slot_bytes, is_pinned)
            self._last[slot.data_ptr()] = None
            self._free.put(slot)

    def take(self, size: int) -> NDArray[np.uint8]:
        """An array of `size` bytes, contents undefined. Raises OSError where no slot has or gets room."""
        if size > self._slot_bytes:
            if self._is_pinned:
                raise OSError(f"{size:,} bytes asked at once, at most {self._slot_bytes:,}")
            made: NDArray[np.uint8] = host_buffer(size, False).numpy()
            return made
        try:
            slot = self._free.get(timeout=SLOT_S)
        except Empty:
            raise TimeoutError(f"no host buffer within {SLOT_S:g} s") from None
        array: Any = slot.numpy()
        weakref.finalize(array, self._free.put, slot)
        if (last := self._last[slot.data_ptr()]) is not None:
            self._last[slot.data_ptr()] = None
            last.synchronize()
        taken: NDArray[np.uint8] = array[:size]
        return taken

    @contextmanager
    def used(self, part: torch.Tensor, event: Callable[[], Any]) -> Iterator[None]:
        """A context whose copies read or fill the slot of this part, until `event` has passed."""
        try:
            yield
        finally:
            at = part.untyped_storage().data_ptr()
            if at in self._last:
                self._last[at] = event()


def host_buffer(size: int, is_pinned: bool) -> torch.Tensor:
    """Fresh host memory."""
    return torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)


def as_words(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor as words of eight bytes where they fit, since a copy of single bytes takes longer."""
    fits = tensor.stride(-1) == 1 and tensor.shape[-1] % 8 == 0 and tensor.storage_offset() % 8 == 0
    return tensor.view(torch.int64) if fits and all(s % 8 == 0 for s in tensor.stride()[:-1]) else tensor


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
    return memoryview(flat).cast("B")


def _runs(blocks: Sequence[int]) -> list[tuple[int, int]]:
    """Adjacent blocks as [start, end) runs: fewer, longer views."""
    runs: list[tuple[int, int]] = []
    for block in blocks:
        if runs and runs[-1][1] == block:
            runs[-1] = (runs[-1][0], block + 1)
        else:
            runs.append((block, block + 1))
    return runs
