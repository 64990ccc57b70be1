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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--third", type=int, choices=(1, 2, 3), help="of tests marked `third`, run this one's")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out tests of the other two thirds."""
    asked = config.getoption("third")
    left_out = [item for item in items if asked and _third(item) not in (None, asked)]
    config.hook.pytest_deselected(items=left_out)
    items[:] = [item for item in items if item not in left_out]


def _third(item: pytest.Item) -> int | None:
    """A test's third. One without runs always."""
    mark = item.get_closest_marker("third")
    if mark is not None and mark.args not in ((1,), (2,), (3,)):
        raise pytest.UsageError(f"{item.nodeid}: third: expected 1, 2 or 3, got {mark.args}")
    return mark.args[0] if mark else None


@pytest.fixture(scope="session")
def bench_data() -> Path:
    """Public traces and measurements (docs/data.md); never part of the project."""
    if not BENCH_DATA.is_dir():
        pytest.skip(f"{BENCH_DATA}: no public data here; docs/data.md says where it comes from")
    return BENCH_DATA
