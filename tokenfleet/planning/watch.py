"""Whoever watches a plan being made: told of each stage and each simulation. This one does not look."""

from __future__ import annotations


class Watch:
    """Subclass to show progress; `simulated` is called from several threads."""

    def stage(self, says: str, share: float) -> None:
        """A stage begins; `share` in [0, 1] of the work is behind it."""

    def simulated(self) -> None:
        """One more simulation has run."""


class Part(Watch):
    """One of several equal parts of what another watches."""

    def __init__(self, whole: Watch, number: int, parts: int) -> None:
        self._whole, self._number, self._parts = whole, number, parts

    def stage(self, says: str, share: float) -> None:
        says = f"{self._number + 1} of {self._parts}: {says}"
        self._whole.stage(says, (self._number + share) / self._parts)

    def simulated(self) -> None:
        self._whole.simulated()
