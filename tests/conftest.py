"""Fixtures shared by all tests."""

from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import by_day
import parts
import pytest
from checkout import BENCH_DATA

from dataplane.startup import loading, use_kernel_cache

use_kernel_cache()


def pytest_configure(config: pytest.Config) -> None:
    by_day.load(all_of_them=not config.getoption("part"))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Test modules load vLLM, torch and Ray."""
    with loading():
        return (yield)


def pytest_addoption(parser: pytest.Parser) -> None:
    numbers = range(1, parts.PARTS + 1)
    parser.addoption("--part", type=int, choices=numbers, help="of the long tests, run this part's")
    parser.addoption("--keep-seconds", action="store_true", help="write down what tests take")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out long tests of the other parts, and begin with the files that take longest."""
    if part := config.getoption("part"):
        dealt = (item.nodeid for item in items if not item.get_closest_marker("always"))
        others = parts.others(dealt, part)
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in others])
        items[:] = [item for item in items if item.nodeid not in others]
    files_s = parts.files_s(item.nodeid for item in items if not item.nodeid.startswith(parts.FLEETS))
    items.sort(key=lambda item: -files_s.get(parts.file_of(item.nodeid), 0.0))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if config.getoption("keep_seconds"):
        took_s: defaultdict[str, float] = defaultdict(float)
        for reports in terminalreporter.stats.values():
            for one in reports:
                if isinstance(one, pytest.TestReport):
                    took_s[one.nodeid] += one.duration
        parts.keep(took_s)


@pytest.fixture(scope="session")
def bench_data() -> Path:
    """Public traces and measurements (docs/data.md); never part of the project."""
    if not BENCH_DATA.is_dir():
        pytest.skip(f"{BENCH_DATA}: no public data here; docs/data.md says where it comes from")
    return BENCH_DATA
