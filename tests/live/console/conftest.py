"""Fixtures of the console's tests: a browser, a planning API, and tabs that must not see anything wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser

    from console.browser import Tab


@pytest.fixture(scope="package")
def browser() -> Iterator[Browser]:
    """A real Chromium."""
    pytest.importorskip("playwright", reason="playwright is not installed (requirements/dev.txt)")
    from console.browser import running_chromium

    with running_chromium() as browser:
        yield browser


@pytest.fixture(scope="package")
def api(scratch: Path, browser: Browser) -> Iterator[str]:
    """`tokenfleet api`: plans, and no fleet."""
    from console.browser import planning_api

    with planning_api(scratch / "plans") as url:
        yield url


@pytest.fixture(scope="package")
def planned(api: str, browser: Browser) -> tuple[str, Any]:
    """The address of a plan made in the browser, and the job behind it."""
    from console.browser import QUICK, Tab, submitted

    tab = Tab.open(browser, f"{api}/?{QUICK}")
    job = submitted(tab)
    url = tab.page.url
    assert tab.wrongs == []
    tab.close()
    return url, job


@pytest.fixture
def visit(browser: Browser) -> Iterator[Callable[..., Tab]]:
    """Open tabs; at the end none of them may have seen anything wrong."""
    from console.browser import Tab

    tabs: list[Tab] = []

    def open_tab(url: str, **settings: Any) -> Tab:
        tabs.append(Tab.open(browser, url, **settings))
        return tabs[-1]

    yield open_tab
    wrongs = [wrong for tab in tabs for wrong in tab.wrongs]
    for tab in tabs:
        tab.close()
    assert wrongs == []
