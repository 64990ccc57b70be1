"""The three rules of `dataplane.live.kv.memory` on real streams, with negative controls that must fail.

The engine's stream spins, then writes a round's number into blocks. A round passes if the reader sees what
the rule promises. Each control breaks one rule and must be caught at least once. Where a control is never
caught, the rounds prove nothing.

1. A read sees what was launched before the step began. Control: no event is recorded.
2. A read is complete once it was waited for. Control: it is not waited for.
3. Loaded blocks are there when `finish` returns, and late writes of their last owner come before. Control:
   the stream is not waited for.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Protocol

import torch

from dataplane.live.kv.memory import StagedMemory
from experiments.gpu.bench import TINY, Bench, Result, caches, verdict

ROUNDS, QUICK_ROUNDS, LIMIT_S = 100_000, 50, 45.0
SPIN_CYCLES = 100_000  # about 60 us
BLOCKS, READ = 16, (3, 9, 4)


class EngineStream(Protocol):
    """An engine's stream, which computes later than it is asked to."""

    is_late: bool

    def launch(self, work: Callable[[], Any]) -> None:
        """Do this some time later."""

    def finish(self) -> None:
        """Wait until all that was launched has been computed."""


class DeviceStream:
    """The current stream of a device: a spin before each work makes it late. A CPU computes at once."""

    def __init__(self, bench: Bench) -> None:
        self.is_late, self._sync = bench.is_gpu, bench.sync

    def launch(self, work: Callable[[], Any]) -> None:
        if self.is_late:
            torch.cuda._sleep(SPIN_CYCLES)
        work()

    def finish(self) -> None:
        self._sync()


class NoEvent(StagedMemory):
    """Breaks rule 1."""

    def step_begins(self) -> None:
        """Record nothing."""


class NoWait(StagedMemory):
    """Breaks rule 2."""

    def read(self, blocks: Any) -> Any:
        views, _ = super().read(blocks)
        return views, lambda view: None


def measure(bench: Bench, engine: EngineStream | None = None, cuda: Any = None) -> Result:
    """`engine` and `cuda`: a stub's, to rehearse the controls where there is no stream."""
    engine = engine or DeviceStream(bench)
    stories: dict[str, tuple[type[StagedMemory], Story, bool]] = {
        "rule 1: reads see the steps before": (StagedMemory, read_round, True),
        "rule 2: a read is complete once waited for": (StagedMemory, read_round, True),
        "rule 3: loads come after late writes": (StagedMemory, write_round, True),
        "control of rule 1 is caught": (NoEvent, read_round, False),
        "control of rule 2 is caught": (NoWait, read_round, False),
        "control of rule 3 is caught": (StagedMemory, unfinished_round, False),
    }
    rows, checks = [], {}
    for name, (kind, story, must_hold) in stories.items():
        layers = caches(bench, TINY, "LBNHC", BLOCKS)
        memory, wrong, began_s, done = kind(layers, cuda), 0, time.monotonic(), 0
        while done < bench.pick(ROUNDS, QUICK_ROUNDS) and time.monotonic() - began_s < LIMIT_S:
            wrong += not story(engine, memory, layers, done % 250 + 1)
            done += 1
            if wrong and not must_hold:
                break  # one is enough
        engine.finish()
        rows.append({"story": name, "rounds": done, "wrong": wrong})
        checks[name] = verdict(must_hold or engine.is_late, wrong == 0 if must_hold else wrong > 0)
    return Result("its order against the engine's stream", rows, checks)


Story = Callable[[EngineStream, StagedMemory, list[torch.Tensor], int], bool]


def read_round(engine: EngineStream, memory: StagedMemory, layers: list[torch.Tensor], number: int) -> bool:
    """The engine writes, a step begins, and a reader copies."""
    engine.launch(lambda: [layer.fill_(number) for layer in layers])
    memory.step_begins()
    views, wait = memory.read(READ)
    right = True
    for view, content in enumerate(views):
        wait(view)
        right &= bytes(content[:1]) == bytes(content[-1:]) == bytes([number])
    engine.finish()
    return right


def write_round(engine: EngineStream, memory: StagedMemory, layers: list[torch.Tensor], number: int) -> bool:
    """The blocks' last owner writes late, then a load fills them: the load's bytes must stay."""
    engine.launch(lambda: [layer.fill_(0) for layer in layers])
    memory.step_begins()
    load(memory, number)
    memory.finish()
    right = has(seen(layers), number)
    engine.finish()
    return right and has(layers, number)


def unfinished_round(
    engine: EngineStream, memory: StagedMemory, layers: list[torch.Tensor], number: int
) -> bool:
    """Breaks rule 3: the load is launched, and looked at from a stream that waits for nothing."""
    engine.launch(lambda: [layer.fill_(0) for layer in layers])
    memory.step_begins()
    load(memory, number)
    right = has(seen(layers), number)
    memory.finish()
    engine.finish()
    return right


def load(memory: StagedMemory, number: int) -> None:
    """Put a round's number into the blocks, as a fetch does before it waits."""
    views, commit = memory.write(READ)
    for view in views:
        view[:] = bytes([number]) * view.nbytes
    commit()


def has(layers: list[torch.Tensor], number: int) -> bool:
    return all(bool((layer[list(READ)] == number).all()) for layer in layers)


def seen(layers: list[torch.Tensor]) -> list[torch.Tensor]:
    """The layers as a stream that has nothing to wait for sees them now."""
    if layers[0].device.type == "cpu":
        return layers
    aside = torch.cuda.Stream(layers[0].device)
    with torch.cuda.stream(aside):
        copies = [layer.clone() for layer in layers]
    aside.synchronize()
    return copies
