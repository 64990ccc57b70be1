"""`Updates`: the replacement of a fleet's workers by others, one rollout at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from controlplane.errors import BadInput
from controlplane.types import WorkerId
from dataplane.live.pool.member import Revision
from dataplane.live.pool.pool import WorkerPool
from dataplane.live.pool.rolling_change import Reshape
from dataplane.live.pool.rollout import Rollout


class Updates:
    """Updates and restarts of one pool; `revised`: the settings of workers of a model with flags."""

    def __init__(self, pool: WorkerPool, revised: Callable[[str, Sequence[str]], Mapping[str, Any]]) -> None:
        self._pool, self._revised = pool, revised
        self.rollout: Rollout | Reshape | None = None
        self._number = 1  # of the last revision that was tried

    def as_json(self) -> dict[str, Any] | None:
        """How the last one stands; None where there was none."""
        return None if self.rollout is None else self.rollout.as_json()

    @property
    def reshapes(self) -> bool:
        """Whether workers become those of another plan now."""
        return isinstance(self.rollout, Reshape) and self.rollout.is_open

    async def begin(self, model: str | None, flags: Sequence[str] | None, finish_s: float) -> dict[str, Any]:
        """Begin to replace every worker by one of another model or with other flags; how it stands."""
        if model is None and flags is None:
            raise BadInput("update: give a model, or the engine flags from now on")
        self.check_no_rollout()
        now = self._pool.revision
        model, flags = model or now.model, now.flags if flags is None else tuple(flags)
        if (model, flags) == (now.model, now.flags):
            raise BadInput("update: the fleet runs this already; to replace a worker, restart it")
        settings = await asyncio.to_thread(self._revised, model, flags)
        self.check_no_rollout()
        self._number = max(self._number, now.number) + 1
        return self.roll(Rollout(self._pool, Revision(self._number, model, flags, settings), finish_s))

    def restart(self, worker: WorkerId, finish_s: float) -> dict[str, Any]:
        """Begin to replace one worker by another of its kind; how it stands."""
        state = self._pool.named(worker).state
        self.check_no_rollout()
        if state != "serving":
            raise BadInput(f"worker {worker}: is {state}, so it cannot be restarted")
        return self.roll(Rollout(self._pool, self._pool.revision, finish_s, worker))

    def cancel(self) -> dict[str, Any]:
        """Roll the update back that is under way."""
        if self.rollout is None or not self.rollout.is_open:
            raise BadInput("update: none is under way")
        self.rollout.cancel("an operator cancelled it")
        return self.rollout.as_json()

    def resume(self) -> None:
        """Go on with the update or restart that was under way as the core before was lost."""
        left, now = self._pool.rollout_left, self._pool.revision
        if left is None:
            return
        revisions, obstacle = [], ""
        for one in (left.revision, left.before):
            settings: Mapping[str, Any] = {}
            try:
                settings = now.settings if one.number == now.number else self._revised(one.model, one.flags)
            except BadInput as why:
                obstacle = f"a new core cannot go on with it: {why}"
            revisions.append(replace(one, settings=settings))
        to, before = revisions
        self._number = max(self._number, to.number)
        rollout = Rollout(self._pool, to, left.finish_s, left.only)
        rollout.resume(left, before, obstacle)
        self.roll(rollout)

    def roll(self, rollout: Rollout | Reshape) -> dict[str, Any]:
        """Begin a rollout, or a reshape; how it stands."""
        self.rollout = rollout
        self._pool.tasks.spawn(rollout.run())
        return rollout.as_json()

    def check_no_reshape(self, what: str) -> None:
        """Raises BadInput while workers become those of another plan."""
        if self.reshapes:
            raise BadInput(f"{what}: a plan is being applied; wait for its end, or `fleet update --cancel`")

    def check_no_rollout(self) -> None:
        """Raises BadInput while workers are being replaced."""
        if self.rollout is not None and self.rollout.is_open:
            under_way = f"{self.rollout.what} is under way, {self.rollout.replaced} workers replaced"
            raise BadInput(f"update: {under_way}; wait for its end, or cancel it")
