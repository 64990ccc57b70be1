"""Fixtures that tests of the live plane's channels share."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from wiretap import Wiretap


@pytest.fixture
def recorded() -> Iterator[Callable[[int], tuple[int, list[bytes]]]]:
    """Puts a listener before a port: the port to connect to instead, and what is heard there."""
    taps: list[Wiretap] = []

    def tap(port: int) -> tuple[int, list[bytes]]:
        taps.append(Wiretap(port))
        return taps[-1].port, taps[-1].heard

    yield tap
    for one in taps:
        one.close()
