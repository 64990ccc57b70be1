"""Plans of these tests look at fewer resampled traces, as few as make their confidence exact."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tokenfleet.planning import estimate


@pytest.fixture(scope="module", autouse=True)
def few_replicates() -> Iterator[None]:
    """Nine in place of nineteen; a confidence of 0.95, a plan's default, still has nineteen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(estimate, "REPLICATES", 9)
        yield
