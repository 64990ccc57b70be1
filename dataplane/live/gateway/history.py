"""The record of served requests and step times, for length prediction and for refitting.

Where a data folder is given, `history/` gets a row for each request that ended; `tokenfleet plan --since 1h`
reads it. `steps.csv` gets a line for each engine step, and can be read as measurements (`tokenfleet fit
--measurements`). Beyond STEP_FILE_BYTES the older half of the steps is deleted. Every step is written: a
sample taken at intervals would hold too many of the long ones.
"""

from __future__ import annotations

import logging
import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TextIO

from controlplane.errors import BadInput
from controlplane.placement.lengths import LengthTable
from controlplane.types import WorkerId
from dataplane.history.files import BLOCK_TOKENS, Digests, HistoryLimits, HistoryWriter, last_lengths
from dataplane.live.engine_api.link import Telemetry
from dataplane.live.gateway.metrics import PRIORITY_NAMES
from dataplane.live.ledger.request import Tracked

log = logging.getLogger(__name__)
REMEMBERED = 20_000
LEARN_FROM = 50  # finished requests before history is believed
LEARN_EVERY = 200
STEP_FILE_BYTES = 64 << 20  # of steps.csv, and again of the steps.1.csv before it
WRITE_EVERY_S = 0.1  # of steps.csv, in one write for all workers; a killed gateway loses so much
STEP_COLUMNS = (
    "prefill_tokens", "sequences", "context_tokens", "step_s", "prefill_sum_sq", "worker", "at_s",
    "kv_blocks", "kind",
)  # fmt: skip


class History:
    """Finished requests and step samples; `lengths` is what they teach about output lengths.

    From the start it remembers the last requests of the same model in the folder, so that a restarted fleet
    predicts as before. Until enough has been seen, every output is expected to have `prior_tokens`. With
    `prefixes`, rows have salted digests of what requests share. Raises BadInput for a folder that cannot be
    written.
    """

    def __init__(
        self,
        prior_tokens: float,
        folder: Path | None = None,
        model: str = "",
        limits: HistoryLimits | None = None,
        prefixes: bool = False,
    ) -> None:
        self.lengths = LengthTable.constant(prior_tokens)
        self._model = model
        self._prompts: deque[int] = deque(maxlen=REMEMBERED)
        self._outputs: deque[int] = deque(maxlen=REMEMBERED)
        self._since_learnt = 0
        self.on_learnt: list[Callable[[LengthTable], None]] = []
        self.kind_of: Callable[[WorkerId], str | None] = lambda worker: None  # the type of a worker
        self._last_step: dict[str, int] = {}
        self._folder = folder
        self._steps = None if folder is None else _open_steps(folder)
        self._requests = None
        self._digests = Digests(folder / "history") if folder is not None and prefixes else None
        if folder is not None:
            self._remember(folder / "history")
            self._requests = HistoryWriter(folder / "history", limits or HistoryLimits())
        self._unwritten: list[str] = []
        self._written_s = 0.0
        self.expected_tokens(1)  # compiled now rather than under the first request

    def expected_tokens(self, prompt_tokens: int, generated: int = 0) -> int:
        """Output tokens to expect in total from a request that has made `generated` of them and goes on."""
        return max(generated + 1, round(float(self.lengths.predict(prompt_tokens, generated))))

    def add(self, tracked: Tracked, outcome: str) -> None:
        """Remember a request that is over; only finished ones teach."""
        if self._requests is not None:
            self._requests.add(self._row(tracked, outcome))
        if outcome != "finished" or not tracked.output_token_ids:
            return
        self._prompts.append(max(1, tracked.prompt_tokens))
        self._outputs.append(len(tracked.output_token_ids))
        self._since_learnt += 1
        if len(self._outputs) == LEARN_FROM or self._since_learnt >= LEARN_EVERY:
            self._learn()
            for tell in self.on_learnt:
                tell(self.lengths)

    def _remember(self, folder: Path) -> None:
        """Take up what earlier lives have served."""
        before = last_lengths(folder, self._model, REMEMBERED)
        self._prompts.extend(before["prompt_tokens"].clip(1).to_list())
        self._outputs.extend(before["output_tokens"].to_list())
        if len(before) >= LEARN_FROM:
            self._learn()

    def _learn(self) -> None:
        self._since_learnt = 0
        self.lengths = LengthTable.from_history(list(self._prompts), list(self._outputs))

    def _row(self, tracked: Tracked, outcome: str) -> dict[str, object]:
        """A request as history.files.SCHEMA has it: numbers and names, without its text."""
        return {
            # The gateway's clock has no date; its distance to now does.
            "arrival_s": round(time.time() - (time.monotonic() - tracked.arrival_s), 6),
            "prompt_tokens": tracked.prompt_tokens,
            "output_tokens": len(tracked.output_token_ids),
            "priority": PRIORITY_NAMES[tracked.ticket.priority],
            "tenant": tracked.ticket.key,
            "outcome": outcome,
            "queued_s": None if tracked.begun_s is None else tracked.begun_s - tracked.arrival_s,
            "ttft_s": tracked.ttft_s(),
            "tpot_s": tracked.tpot_s(),
            "ttft_target_s": tracked.slo.ttft_s,
            "tpot_target_s": tracked.slo.tpot_s,
            "slo_class": tracked.ticket.slo_class or None,
            "worker": tracked.worker,
            "moves": tracked.moves,
            "replays": tracked.replays,
            "model": self._model,
            **self._shared(tracked),
        }

    def _shared(self, tracked: Tracked) -> dict[str, object]:
        """Digests of a request's blocks and session; 40 µs for 1,000 tokens."""
        if self._digests is None:
            return {"session": None, "hash_ids": None, "block_tokens": None}
        session = tracked.ticket.session
        tokens = [*(tracked.request.prompt_token_ids or ()), *tracked.output_token_ids]
        return {
            "session": self._digests.name(session) if session else None,
            "hash_ids": self._digests.blocks(tokens),
            "block_tokens": BLOCK_TOKENS,
        }

    def add_step(self, load: Telemetry) -> None:
        """Remember a worker's steps since those it told of before, each once."""
        if self._steps is None:
            return
        new = load.since(self._last_step.get(load.worker, 0))
        self._last_step[load.worker] = load.steps
        now_s, kind = time.time(), self.kind_of(load.worker) or ""
        rows = [
            f"{step.prefill_tokens},{step.sequences},{step.context_tokens},{step.step_s:.7f}"
            f",{step.prefill_sum_sq},{load.worker},{now_s - step.age_s:.3f},{step.kv_blocks},{kind}\n"
            for step in new
            if step.step_s > 0
        ]
        if not rows:
            return
        self._unwritten += rows
        if now_s - self._written_s >= WRITE_EVERY_S:
            self._pass_on(now_s)

    def _pass_on(self, now_s: float) -> None:
        if self._requests is not None:
            self._requests.later(self._write_steps, self._unwritten)
        self._unwritten, self._written_s = [], now_s

    def _write_steps(self, rows: Sequence[str]) -> None:
        if self._steps is None or self._folder is None:
            return
        try:
            self._steps.write("".join(rows))
            if self._steps.tell() > STEP_FILE_BYTES:
                self._steps.close()
                os.replace(self._folder / "steps.csv", self._folder / "steps.1.csv")
                self._steps = _open_steps(self._folder)
        except (OSError, BadInput) as error:  # a full disk must not end who reads a worker's steps
            log.error("step times end here: %s: %s", self._folder, getattr(error, "strerror", error))
            with suppress(OSError):
                self._steps.close()
            self._steps = None

    def close(self) -> None:
        """Write what is buffered."""
        self._pass_on(time.time())
        for file in (self._requests, self._steps):
            if file is not None:
                file.close()


def _open_steps(folder: Path) -> TextIO:
    """The file to append to: a new one beside an earlier version's, as rows of two forms could not be read.

    Raises BadInput for a file of other columns, and for a folder that cannot be written.
    """
    path, columns = folder / "steps.csv", ",".join(STEP_COLUMNS)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("a+", encoding="utf-8", errors="replace") as there:
            there.seek(0)
            header = there.readline().strip()
        if header in (",".join(STEP_COLUMNS[:-1]), ",".join(STEP_COLUMNS[:-2])):
            os.replace(path, folder / "steps.1.csv")
        elif header not in ("", columns):
            raise BadInput(f"--data: {path}: has columns {header[:80]!r}, expected {columns}")
        file = path.open("a", encoding="utf-8", buffering=1)
        if file.tell() == 0:
            file.write(columns + "\n")
    except OSError as error:
        raise BadInput(f"--data: {path}: cannot be written: {error.strerror}") from error
    return file
