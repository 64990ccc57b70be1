"""What the fleet has served and how long its steps took: for predicting lengths, and for refitting.

Two files in the data folder, where one was given. `requests.jsonl` has a line per finished request and reads
as a trace (`tokenfleet plan --trace`); `steps.csv` has a line per sampled engine step and reads as
measurements (`tokenfleet fit --measurements`).
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from controlplane.errors import BadInput
from controlplane.placement.lengths import LengthTable
from dataplane.live.link import Telemetry
from dataplane.live.metrics import PRIORITY_NAMES
from dataplane.live.tracked import Tracked

REMEMBERED = 20_000
LEARN_FROM = 50  # finished requests before history is believed
LEARN_EVERY = 200
STEP_COLUMNS = ("prefill_tokens", "sequences", "context_tokens", "step_s", "worker")


class History:
    """Finished requests and step samples; `lengths` is what they teach about output lengths.

    `prior_tokens` is expected of every output until enough has been seen. Raises BadInput for a folder
    that cannot be written.
    """

    def __init__(self, prior_tokens: float, started_s: float, folder: Path | None = None) -> None:
        self.lengths = LengthTable.constant(prior_tokens)
        self._started_s = started_s
        self._prompts: deque[int] = deque(maxlen=REMEMBERED)
        self._outputs: deque[int] = deque(maxlen=REMEMBERED)
        self._since_learnt = 0
        self.on_learnt: list[Callable[[LengthTable], None]] = []
        self._last_step: dict[str, int] = {}
        self._requests = None if folder is None else _open(folder, "requests.jsonl")
        self._steps = None if folder is None else _open(folder, "steps.csv")
        if self._steps is not None and self._steps.tell() == 0:
            self._steps.write(",".join(STEP_COLUMNS) + "\n")

    def expected_tokens(self, prompt_tokens: int, generated: int = 0) -> int:
        """Output tokens to expect in all of a request that has made so many and goes on."""
        return max(generated + 1, round(float(self.lengths.predict(prompt_tokens, generated))))

    def add(self, tracked: Tracked, outcome: str) -> None:
        """Remember a request that is over; only finished ones teach."""
        if outcome != "finished" or not tracked.output_token_ids:
            return
        self._prompts.append(max(1, tracked.prompt_tokens))
        self._outputs.append(len(tracked.output_token_ids))
        self._since_learnt += 1
        if len(self._outputs) == LEARN_FROM or self._since_learnt >= LEARN_EVERY:
            self._since_learnt = 0
            self.lengths = LengthTable.from_history(list(self._prompts), list(self._outputs))
            for tell in self.on_learnt:
                tell(self.lengths)
        if self._requests is not None:
            row = {
                "arrival_s": round(tracked.arrival_s - self._started_s, 6),
                "prompt_tokens": tracked.prompt_tokens,
                "output_tokens": len(tracked.output_token_ids),
                "priority": PRIORITY_NAMES[tracked.ticket.priority],
                "tenant": tracked.ticket.key,
                "ttft_s": tracked.ttft_s(),
                "tpot_s": tracked.tpot_s(),
                "moves": tracked.moves,
                "replays": tracked.replays,
            }
            self._requests.write(json.dumps(row) + "\n")

    def add_step(self, load: Telemetry) -> None:
        """Remember a worker's last step, once."""
        if self._steps is None or load.step_s <= 0 or not (load.prefill_tokens or load.sequences):
            return
        if self._last_step.get(load.worker) != load.steps:
            self._last_step[load.worker] = load.steps
            row = (
                load.prefill_tokens,
                load.sequences,
                load.context_tokens,
                f"{load.step_s:.7f}",
                load.worker,
            )
            self._steps.write(",".join(str(value) for value in row) + "\n")

    def close(self) -> None:
        """Write what is buffered."""
        for file in (self._requests, self._steps):
            if file is not None:
                file.close()


def _open(folder: Path, name: str) -> TextIO:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / name).open("a", encoding="utf-8", buffering=1)
    except OSError as error:
        raise BadInput(f"--data: {folder / name}: cannot be written: {error.strerror}") from error
