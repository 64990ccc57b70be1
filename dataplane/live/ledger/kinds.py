"""`WorkerKinds`: the kind of each worker, and the step times that the ledger has for it.

A kind's step times are those of its profile, until they are refitted or learned. Where those of any attached
worker's kind are not known, none count: workers are then told apart by their KV and their seats alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from controlplane.perfmodel import coefficients as speed
from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.step import StepModel
from controlplane.placement.constraints import kept_tpot_s
from controlplane.placement.ledger import Floats
from dataplane.live.engine_api.link import WorkerInfo

MOST_TARGETS = 64


class WorkerKinds:
    """Kinds by a worker's row, profiles by kind. `coefficients`: the ledger's, written here alone."""

    def __init__(self, profiles: Mapping[str, Profile], coefficients: Floats) -> None:
        self.of: dict[int, str] = {}
        self.profiles = dict(profiles)
        self._rows = {kind: speed.coefficient_row(profile) for kind, profile in profiles.items()}
        self._coefficients = coefficients
        self._kept_up_to: dict[float, int] = {}  # of a TPOT target, the longest prompt known to keep it
        self._lay_out()

    def become(self, w: int, kind: str, info: WorkerInfo) -> None:
        """A worker is of that kind from now on."""
        self.of[w], row = kind, self._coefficients[w]
        self._lay_out()
        row[speed.KV_BLOCKS], row[speed.BLOCK_TOKENS] = info.kv_blocks, info.block_tokens
        row[speed.MAX_BATCHED], row[speed.MAX_SEQS] = info.max_batched_tokens, info.max_seqs

    def leave(self, w: int) -> None:
        """A worker is gone."""
        del self.of[w]
        self._lay_out()

    def refit(self, kind: str, step: StepModel) -> None:
        """Use other step times than the profile's from now on, for all workers of a kind."""
        self.know(kind, replace(self.profiles[kind], step=step))

    def know(self, kind: str, profile: Profile) -> None:
        """Place by this profile of a kind from now on."""
        self.profiles[kind], self._rows[kind] = profile, speed.coefficient_row(profile)
        self._lay_out()

    def forget(self, kind: str) -> None:
        """There are no workers of a kind any more."""
        self.profiles.pop(kind, None)
        self._rows.pop(kind, None)
        self._lay_out()

    def kept_tpot_s(self, asked_s: float, prompt_tokens: int) -> float:
        """The TPOT that placement keeps for a request of this target and prompt, on all kinds."""
        if not self.knows_step_times or prompt_tokens <= self._kept_up_to.get(asked_s, -1):
            return asked_s
        types = np.stack(list(self._rows.values()))
        kept_s = float(kept_tpot_s(types, np.array([prompt_tokens]), np.array([asked_s]))[0])
        if kept_s == asked_s and len(self._kept_up_to) < MOST_TARGETS:
            self._kept_up_to[asked_s] = prompt_tokens
        return kept_s

    def _lay_out(self) -> None:
        """Write the step times of each worker's kind, or none at all; free rows have those of the first."""
        self.knows_step_times = bool(self.profiles) and set(self.of.values()) <= set(self.profiles)
        self._kept_up_to.clear()
        first = next(iter(self._rows), None)
        limits = slice(speed.KV_BLOCKS, speed.MODE)
        for w, row in enumerate(self._coefficients):
            known = self._rows.get(self.of.get(w, first or "")) if self.knows_step_times else None
            own = row[limits].copy()
            row[:] = 0.0 if known is None else known
            if w in self.of:  # the engine's own, whatever the profile's engine had
                row[limits] = own
