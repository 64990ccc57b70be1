"""The portfolio page: asked with the sample and with files, answered, refused, and shared by its address."""

import json
import urllib.request
from urllib.parse import parse_qs, urlsplit

import pytest
from checkout import ROOT

from console.browser import HOSTILE
from console.test_console_access import LOOKS, overflow, violations

# Planned in seconds; one H100 more than the two models need has no price.
TEXT = """schema: tokenfleet.portfolio/1
limits: {gpus: {h100: 9}, spot-share: 0.6}
defaults: {model: llama-3.1-8b, gpu: [h100], tp: [1], confidence: 0.6, slo: {ttft: 400ms, tpot: 30ms},
  spot: [no, yes], reclaims-per-h: 0.01, cold-start: 1m}
models:
- {name: chat, trace: sample_trace.csv, window: 0s..120s, rate-scale: 10}
- {name: code, trace: days/monday.csv}
- {name: support, adapter-of: code, trace: days/monday.csv}
"""


def trace_file(name):
    lines = (ROOT / "examples" / "sample_trace.csv").read_text().splitlines()[:300]
    return {"name": name, "mimeType": "text/csv", "buffer": ("\n".join(lines) + "\n").encode()}


def job_of(tab):
    address = urlsplit(tab.page.url)
    path = f"/v1/portfolios/{parse_qs(address.query)['job'][0]}"
    with urllib.request.urlopen(f"http://{address.netloc}{path}", timeout=20) as reply:
        return json.load(reply)


@pytest.fixture(scope="module")
def answered(api, browser):
    """The address of a portfolio that was planned in the browser, and its job."""
    from console.browser import Tab

    tab = Tab.open(browser, f"{api}/portfolio")
    tab.page.fill("#text", TEXT)
    tab.page.set_input_files("#files", [trace_file("monday.csv")])
    tab.page.click("#submit:enabled")
    tab.page.locator("#answer-title").wait_for()
    assert tab.wrongs == []
    url, job = tab.page.url, job_of(tab)
    tab.close()
    return url, job


def test_a_portfolio_is_asked_for_and_its_answer_read(answered, visit):
    url, job = answered
    plan = job["portfolio"]
    assert job["question"]["traces"].keys() == {"sample_trace.csv", "days/monday.csv"}
    tab = visit(url)
    tab.page.locator("#answer-title").wait_for()
    verdict, *lines = plan["says"]
    assert f"${plan['usd_per_hour']:.2f}/h" in verdict[1]
    assert tab.text("#answer-title") == ": ".join(verdict).replace("   ", ", ")
    assert tab.focused() == "answer-title"
    shown = " ".join(tab.text("#answer .says").split())
    assert [line for line in lines if " ".join(line) not in shown] == []
    for i, shown in enumerate(plan["tables"]):
        rows = tab.page.locator("#answer table").nth(i).locator("tbody tr")
        assert [row.locator("th, td").all_inner_texts() for row in rows.all()] == shown["rows"]
    (chat, _) = plan["models"]
    assert (chat["name"], chat["on_demand_workers"], chat["plan"]["workers"]) == ("chat", 1, 2)
    assert plan["tables"][0]["rows"][0][1] == "2x H100 TP1, 1 on demand, 1 on spot"
    adds = f"they add ${plan['models'][1]['adapters_usd_per_hour']:.2f}/h"
    assert ["Adapters", f"share of the requests of code: support 50.00 %; {adds}"] in lines
    assert plan["tables"][1]["rows"][0][0] == "gpus.h100-sxm"
    assert tab.page.locator("figure.chart svg[role=img] path.line").count() == 1
    stretches = tab.page.locator("figure.chart tbody tr")
    assert stretches.count() == len(plan["gpus"])
    assert tab.page.input_value("#text") == TEXT
    with tab.page.expect_download() as download:
        tab.page.click("#download")
    assert json.loads(download.value.path().read_text()) == plan


def test_the_last_portfolios_are_listed_and_lead_to_their_answers(answered, api, visit):
    url, job = answered
    tab = visit(f"{api}/portfolio")
    line = tab.page.locator("#recent-list li", has=tab.page.locator(f"a[href='?job={job['id']}']"))
    assert line.inner_text().startswith(f"chat, code ${job['portfolio']['usd_per_hour']:.2f}/h ")
    line.locator("a").click()
    tab.page.locator("#answer-title").wait_for()
    assert tab.page.url == url


def test_a_file_takes_the_place_of_the_text_and_hostile_names_are_only_names(api, visit):
    tab = visit(f"{api}/portfolio")
    text = TEXT.replace("days/monday.csv", json.dumps(HOSTILE)).encode()
    tab.page.set_input_files("#file", [{"name": "mine.yaml", "mimeType": "text/yaml", "buffer": text}])
    tab.page.wait_for_function("document.getElementById('text').value.includes('onerror')")
    tab.page.click("#submit:enabled")
    tab.until("#complaint", "portfolio: models: code: trace: <img src=x")
    assert tab.page.locator("main img").count() == 0
    # Chromium itself notes a refused request on its console.
    assert [wrong for wrong in tab.wrongs if "400" not in wrong] == []
    tab.wrongs.clear()
    assert "taken" not in tab.page.title()


def test_a_refusal_is_said_in_the_apis_own_words_and_a_running_job_is_cancelled(api, visit):
    tab = visit(f"{api}/portfolio")
    first = tab.page.input_value("#text")
    tab.page.fill("#text", first.replace("rate-scale", "rate-scales"))
    tab.page.click("#submit:enabled")
    tab.until("#complaint", "portfolio: models: code: rate-scales: no such flag")
    assert [wrong for wrong in tab.wrongs if "400" not in wrong] == []
    tab.wrongs.clear()
    tab.page.fill("#text", first)  # two models on two types of GPU over a whole hour
    tab.page.click("#submit:enabled")
    tab.page.click("#cancel:visible")
    tab.until("#status", "Cancelled")
    tab.page.locator("#submit:enabled").wait_for()


@LOOKS
def test_axe_finds_nothing_on_the_portfolio_page(answered, visit, settings):
    tab = visit(answered[0], reduced_motion="reduce", **settings)
    tab.page.locator("#answer-title").wait_for()
    tab.page.locator("figure summary").click()
    assert violations(tab) == []
    assert overflow(tab) <= 0
