"""Fixtures shared by all tests."""

from pathlib import Path

import pytest
from hypothesis import settings

# Hypothesis' deadline reads the wall clock and fails correct tests on a busy machine.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Public traces and measurements beside the checkout; never part of the project."""
    folder = ROOT.parent / "shared" / "data"
    if not folder.is_dir():
        pytest.skip("../shared/data is not here: public traces are not part of the project")
    return folder
