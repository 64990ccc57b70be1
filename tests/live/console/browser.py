"""A real Chromium, a tab in it that notes everything a page should not do, and an API to plan with."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, urlsplit

import pytest
from checkout import ROOT
from served_fleet import ServedFleet, free_port

if TYPE_CHECKING:
    from playwright.sync_api import Browser, BrowserContext, Page

NAMES = ("chromium", "chromium-browser", "google-chrome-stable", "google-chrome")
# As root Chromium has no sandbox; the rest keeps it from calling anyone of its own accord.
FLAGS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
WAIT_MS = 180_000.0
# A kind of worker and a stretch of the sample that are planned in seconds.
QUICK = "model=llama-3.1-8b&ttft=400ms&tpot=30ms&gpu=h100&tp=1&window=0s..120s"
_marks = count()
HOSTILE = "<img src=x onerror=\"document.title='taken'\">'; $(touch taken) `id`"


def chromium() -> str:
    """Where Chromium is; skips the test where it is not."""
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("no Chromium here: apt-get install chromium")
    return found


@contextmanager
def running_chromium() -> Iterator[Browser]:
    """A browser of our own, ended with everything it started."""
    path = chromium()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield browser
        browser.close()


@dataclass
class Tab:
    """One page in a context of its own. `wrongs`: console errors, exceptions, foreign requests, dialogs."""

    context: BrowserContext
    page: Page
    wrongs: list[str] = field(default_factory=list)

    @classmethod
    def open(cls, browser: Browser, url: str, **settings: Any) -> Tab:
        """A new tab at `url`; `settings` are Playwright's (color_scheme, viewport, …)."""
        context = browser.new_context(**settings)
        context.set_default_timeout(WAIT_MS)
        page = context.new_page()
        tab = cls(context, page)
        home = urlsplit(url).netloc
        page.on(
            "console", lambda m: m.type in ("error", "warning") and tab.wrongs.append(f"console: {m.text}")
        )
        page.on("pageerror", lambda error: tab.wrongs.append(f"exception: {error}"))
        page.on("dialog", lambda dialog: (tab.wrongs.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        page.on(
            "request",
            lambda r: urlsplit(r.url).netloc not in (home, "") and tab.wrongs.append(f"foreign: {r.url}"),
        )
        page.goto(url)
        return tab

    def text(self, selector: str) -> str:
        """What a person reads there, once it is there."""
        return self.page.locator(selector).inner_text()

    def until(self, selector: str, says: str) -> None:
        """Wait until the element's text contains this."""
        self.page.locator(selector, has_text=says).first.wait_for()

    def focused(self) -> str:
        """The id of the element that has the focus, or its text."""
        return str(self.page.evaluate("document.activeElement.id || document.activeElement.textContent"))

    def close(self) -> None:
        self.context.close()


def submitted(tab: Tab) -> Any:
    """Press Plan, wait until the answer stands on the page, and return the job; the API needs no key."""
    before = tab.page.url
    tab.page.click("#submit:enabled")
    tab.page.wait_for_url(lambda url: "job=" in url and url != before)
    tab.page.locator("#answer-title").wait_for()
    tab.page.locator("#progress").wait_for(state="hidden")
    address = urlsplit(tab.page.url)
    job = parse_qs(address.query)["job"][0]
    with urllib.request.urlopen(f"http://{address.netloc}/v1/plans/{job}", timeout=20) as reply:
        return json.load(reply)


def told(fleet: ServedFleet, reason: str) -> str:
    """Something the controller might advise, said through its own door; unlike anything said before."""
    said = f"{reason} {next(_marks)}"
    fleet.ask("POST", "/v1/decisions/scale", {"workers": 3, "advisory": True, "reason": said})
    return said


@contextmanager
def planning_api(folder: Path, *flags: str, port: int | None = None) -> Iterator[str]:
    """`tokenfleet api` on a folder of its own; yields its address."""
    port = port or free_port()
    command = [
        sys.executable,
        "-m",
        "tokenfleet",
        "api",
    ]
    with (folder.parent / f"api-{port}.log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port), "--data", str(folder), *flags],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=os.environ | {"PYTHONPATH": str(ROOT)},
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line.startswith("ready "), f"api said {line!r}: {Path(log.name).read_text()[-3000:]}"
        yield line.split()[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=60)
        if process.stdout is not None:
            process.stdout.close()
