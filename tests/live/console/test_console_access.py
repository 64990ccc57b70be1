"""Both pages for everyone: by keyboard, by ear, on a phone, in the dark, without motion."""

import pytest

from console.browser import told

PHONE = {"viewport": {"width": 360, "height": 740}, "has_touch": True}
DARK = {"color_scheme": "dark"}
LOOKS = pytest.mark.parametrize("settings", [{}, PHONE | DARK], ids=["light desktop", "dark phone"])


def violations(tab):
    """What axe-core finds, rule by rule, with the elements."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(tab.page).response["violations"]
    return [f"{one['id']}: {node['html']}" for one in found for node in one["nodes"]]


def overflow(tab):
    """By how many pixels the page is wider than the window."""
    return tab.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")


@LOOKS
def test_axe_finds_nothing_on_the_plan_page(planned, visit, settings):
    tab = visit(planned[0], reduced_motion="reduce", **settings)
    tab.page.locator("#answer-title").wait_for()
    tab.page.locator("#more summary").click()
    for summary in tab.page.locator("figure summary").all():
        summary.click()
    assert violations(tab) == []
    assert overflow(tab) <= 0


@LOOKS
def test_axe_finds_nothing_on_the_live_page(emulated_fleet, visit, settings):
    tab = visit(f"{emulated_fleet.control}/live", reduced_motion="reduce", **settings)
    tab.page.locator("#decisions li").first.wait_for()
    assert violations(tab) == []
    assert overflow(tab) <= 0
    tab.page.click("[data-worker] button:enabled >> nth=0")
    tab.page.locator("dialog").wait_for()
    assert violations(tab) == []


def test_long_hostile_names_do_not_widen_a_phone(emulated_fleet, visit):
    tab = visit(f"{emulated_fleet.control}/live", **PHONE)
    tab.page.locator("#decisions li").first.wait_for()
    tab.until("#decisions li .says", told(emulated_fleet, "w" * 400))
    assert overflow(tab) <= 0


WANTED = """() => {
  const can = "a, button, input, select, summary, [tabindex='0']";
  const all = [...document.querySelector("main").querySelectorAll(can)];
  window.wanted = new Set(all.filter((e) => !e.disabled && e.checkVisibility()));
  window.unmarked = [];
}"""
REACHED = """() => {
  const here = document.activeElement;
  if (getComputedStyle(here).outlineStyle === "none") window.unmarked.push(here.outerHTML);
  window.wanted.delete(here);
  return window.wanted.size;
}"""


@pytest.mark.parametrize("path", ["/plan", "/live"])
def test_the_keyboard_reaches_everything_and_shows_where_it_is(emulated_fleet, api, planned, visit, path):
    tab = visit((api if path == "/plan" else emulated_fleet.control) + path)
    ready = "#recent-list a" if path == "/plan" else "#decisions li"
    tab.page.locator(ready).first.wait_for()
    tab.page.keyboard.press("Tab")
    assert tab.focused().startswith("Skip to")
    assert tab.page.evaluate("document.activeElement.getBoundingClientRect().top") >= 0
    tab.page.keyboard.press("Enter")
    assert tab.focused() == "main"
    tab.page.evaluate(WANTED)
    for _ in range(80):
        tab.page.keyboard.press("Tab")
        if tab.page.evaluate(REACHED) == 0:
            break
    assert tab.page.evaluate("[...window.wanted].map((e) => e.outerHTML)") == []
    assert tab.page.evaluate("window.unmarked") == []


def test_changes_are_spoken_and_pages_have_landmarks(emulated_fleet, visit):
    live = visit(f"{emulated_fleet.control}/live")
    live.page.locator("#decisions li").first.wait_for()
    said = told(emulated_fleet, "for the ear")
    live.until("#spoken", said)
    assert live.page.locator("[role=status]#spoken").count() == 1
    for landmark in ("header", "main", "nav", "footer"):
        assert live.page.locator(landmark).count() == 1
    assert live.page.locator("h1").count() == 1


def test_motion_is_left_out_where_it_is_not_wanted(emulated_fleet, visit):
    tab = visit(f"{emulated_fleet.control}/live", reduced_motion="reduce")
    tab.page.locator("#decisions li").first.wait_for()
    tab.until("#decisions li .says", told(emulated_fleet, "still"))
    assert tab.page.evaluate("document.getAnimations().length") == 0
