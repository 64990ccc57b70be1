"""Fixtures shared by all tests."""

from collections.abc import Generator
from pathlib import Path

import pytest
from checkout import BENCH_DATA
from hypothesis import settings

from dataplane.startup import loading, use_kernel_cache

use_kernel_cache()

# Hypothesis' deadline reads the wall clock and fails correct tests on a busy machine.
settings.register_profile("repeatable", deadline=None, derandomize=True)
settings.load_profile("repeatable")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Test modules load vLLM, torch and Ray."""
    with loading():
        return (yield)


@pytest.fixture(scope="session")
def bench_data() -> Path:
    """Public traces and measurements (docs/data.md); never part of the project."""
    if not BENCH_DATA.is_dir():
        pytest.skip(f"{BENCH_DATA}: no public data here; docs/data.md says where it comes from")
    return BENCH_DATA
