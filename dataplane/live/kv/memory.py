"""A rank's KV cache as blocks of opaque bytes.

A layer's cache is a tensor whose first dimension counts blocks. The inside of a block (heads, positions, how
keys are packed for the CPU's tiles) belongs to the kernel: a block is moved as the bytes it is, so both ends
must run the same model, dtype, block size and instruction set. No value is ever converted.

`DirectMemory` sends from and receives into the cache itself; it needs host tensors whose blocks lie in one
piece. `StagedMemory` gathers and scatters through host buffers and takes any device and layout; on CUDA it
does so on a stream of its own.

**Block tables** of running segments are shared between the engine's thread and the transfer threads.
The engine's thread learns the tables at the start of each step, before anything is written in it. A reader
takes a `Grant`, reads the blocks, and then asks whether the grant still holds. A grant ends when the segment
is preempted or freed. That is learnt before the step that could hand its blocks to another request writes, so
a grant that still holds after the read means that the bytes are the segment's own.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import count
from typing import Any, Protocol

import torch

REMEMBERED_ENDS = 1024  # segments known to be gone, so that a late reader is told at once
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


class KvMemory(Protocol):
    """Read and write blocks. Views are flat byte views: layer by layer, blocks in the order asked."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""

    def read(self, blocks: Sequence[int]) -> Views:
        """Views whose concatenation is the blocks' bytes."""

    def write(self, blocks: Sequence[int]) -> tuple[Views, Callable[[], None]]:
        """Writable views to fill, and what to call when they are full."""


def kv_memory(caches: Sequence[torch.Tensor]) -> KvMemory:
    """The best fit for these caches, each of shape [blocks, ...]; layers that share a cache count once.

    Caches are taken as bytes: no kernel need know their dtype (FP8) to gather and scatter them.
    """
    places = {(t.data_ptr(), t.stride()): t for t in caches}
    layers = [t.view(torch.uint8) for t in places.values()]
    if all(t.device.type == "cpu" and t[0].is_contiguous() and t.stride(0) == t[0].numel() for t in layers):
        return DirectMemory(layers)
    return StagedMemory(layers)


class DirectMemory:
    """Blocks of host tensors, without a copy."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self._layers: list[memoryview] = []
        self._strides: list[int] = []
        for tensor in layers:
            flat: Any = tensor.reshape(-1).view(torch.uint8).numpy()
            self._layers.append(memoryview(flat).cast("B"))
            self._strides.append(tensor[0].numel() * tensor.element_size())

    @property
    def block_bytes(self) -> int:
        return sum(self._strides)

    def read(self, blocks: Sequence[int]) -> Views:
        views = []
        for layer, stride in zip(self._layers, self._strides, strict=True):
            views += [layer[start * stride : end * stride] for start, end in _runs(blocks)]
        return views

    def write(self, blocks: Sequence[int]) -> tuple[Views, Callable[[], None]]:
        return self.read(blocks), lambda: None


class StagedMemory:
    """Blocks of any tensors, through host buffers."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self._layers = list(layers)
        self._device = layers[0].device
        self._stream: Any = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None

    @property
    def block_bytes(self) -> int:
        return sum(t[0].numel() * t.element_size() for t in self._layers)

    def read(self, blocks: Sequence[int]) -> Views:
        index = torch.tensor(list(blocks), device=self._device)
        with self._side_stream():
            host = [t.index_select(0, index).contiguous().cpu() for t in self._layers]
        return [_bytes_of(t) for t in host]

    def write(self, blocks: Sequence[int]) -> tuple[Views, Callable[[], None]]:
        shape = (len(blocks),)
        host = [torch.empty(shape + tuple(t.shape[1:]), dtype=t.dtype) for t in self._layers]

        def commit() -> None:
            index = torch.tensor(list(blocks), device=self._device)
            with self._side_stream():
                for tensor, part in zip(self._layers, host, strict=True):
                    tensor.index_copy_(0, index, part.to(self._device))
            if self._stream is not None:
                self._stream.synchronize()

        return [_bytes_of(t) for t in host], commit

    def _side_stream(self) -> Any:
        # The engine's own stream must not wait for a transfer, nor a transfer for a step.
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)


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
