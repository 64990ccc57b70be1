"""The live page: what it shows, how soon, and what it does when an order is refused or no answer comes."""

import json
import re
import urllib.request

import pytest
from served_fleet import free_port

from console.browser import HOSTILE, QUICK, planning_api, told

# Words that once stood on these pages for those of the field.
OURS = (
    "operator decides", "controller decides", "worlds", "doubt", "turned away", "left by clients",
    "so many", "over the cheapest", "within both targets", "against reality", "workers wanted",
)  # fmt: skip


def ask(fleet, body, headers=None):
    """Let the fleet answer a completion."""
    headers = {"content-type": "application/json"} | (headers or {})
    request = urllib.request.Request(f"{fleet.gateway}/v1/completions", json.dumps(body).encode(), headers)
    urllib.request.urlopen(request, timeout=60).close()


@pytest.fixture
def live(emulated_fleet, visit):
    tab = visit(f"{emulated_fleet.control}/live")
    tab.page.locator("#decisions li").first.wait_for()
    return tab


def test_the_fleet_is_shown_as_it_is(emulated_fleet, live):
    view = emulated_fleet.ask("GET", "/v1/fleet")
    for worker in view["workers"]:
        row = live.page.locator(f"[data-worker={worker['worker']}]")
        assert worker["state"] in row.inner_text()
        says = "no step yet" if worker["telemetry"] is None else "of 440,176 tokens"
        assert says in row.inner_text()
    assert view["engine"] in live.text("#facts")
    assert f"{view['slo']['ttft_s']:g} s" in live.text("#attainment-says")
    assert live.text("#gap") == f"Cost over the hindsight optimum: {view['gap']['line']}."


def test_an_event_appears_by_itself_with_its_reason(emulated_fleet, live):
    said = told(emulated_fleet, "traffic is rising")
    live.until("#decisions li .says", said)
    assert live.page.locator("#decisions li").first.locator(".kind").inner_text() == "advice-scale"


def test_what_the_server_says_stays_text(emulated_fleet, live):
    said = told(emulated_fleet, HOSTILE)
    live.until("#decisions li .says", said)
    assert live.page.locator("main img").count() == 0
    assert "taken" not in live.page.title()


def test_attainment_is_counted_from_finished_requests(emulated_fleet, live):
    before = emulated_fleet.ask("GET", "/v1/fleet")["attainment"]["both"]["of"]
    body = {"model": "tiny-llama", "prompt": "x", "max_tokens": 5, "ignore_eos": True}
    ask(emulated_fleet, body)
    live.until("#targets", f"of {before + 1} since the fleet started")


def test_what_came_of_late_stands_above_the_workers(emulated_fleet, live):
    titles = live.page.locator("#timeline h3").all_inner_texts()
    assert titles == ["Throughput", "TTFT", "TPOT", "Errors"]
    top = "(id) => document.getElementById(id).getBoundingClientRect().top"
    assert live.page.evaluate(top, "timeline") < live.page.evaluate(top, "workers")
    assert "the last" in live.text("#window")


def test_attainment_is_coloured_by_what_is_asked(live):
    tones = """async () => {
      const { tone } = await import("/console/live_timeline.js");
      return [tone(0.99, 0.99), tone(0.985, 0.99), tone(0.97, 0.99), tone(0.97, 0.95), tone(null, 0.99)];
    }"""
    assert live.page.evaluate(tones) == ["good", "warn", "bad", "good", "good"]


def test_scaling_asks_first_and_is_done_by_keyboard_alone(emulated_fleet, live):
    emulated_fleet.ask("POST", "/v1/fleet/scale", {"workers": 3})
    live.until("#tiles", "of 3")
    live.page.focus("#scale-to")
    live.page.keyboard.press("ControlOrMeta+a")
    live.page.keyboard.type("4")
    live.page.keyboard.press("Enter")
    live.until("dialog", "Scale from 3 to 4?")
    assert "1 worker will start" in live.text("dialog")
    live.page.keyboard.press("Escape")
    live.page.locator("dialog").wait_for(state="detached")
    assert emulated_fleet.ask("GET", "/v1/fleet")["wanted_workers"] == 3
    live.page.keyboard.press("Enter")
    live.until("dialog", "Scale from 3 to 4?")
    live.page.keyboard.press("Tab")
    live.page.keyboard.press("Enter")
    live.until("#tiles", "4 of 4")
    live.until("#decisions", "an operator asked")
    emulated_fleet.ask("POST", "/v1/fleet/scale", {"workers": 3})
    live.until("#tiles", "3 of 3")


def test_a_fleet_of_several_kinds_is_scaled_kind_by_kind(mixed_fleet, visit):
    small = "a100-sxm TP1"
    mixed_fleet.ask("POST", "/v1/fleet/scale", {"workers": 2, "kind": small})
    live = visit(f"{mixed_fleet.control}/live")
    live.until("#workers", small)
    live.page.select_option("#scale-kind", small)
    assert live.page.input_value("#scale-to") == "2"
    live.page.fill("#scale-to", "1")
    live.page.keyboard.press("Enter")
    live.until("dialog", f"Scale {small} from 2 to 1?")
    live.page.click("dialog button.primary")
    mixed_fleet.until(lambda: mixed_fleet.ask("GET", "/v1/fleet")["wanted_kinds"][small] == 1)
    mixed_fleet.ask("POST", "/v1/fleet/scale", {"workers": 2, "kind": small})


def test_a_worker_is_drained_and_taken_back(emulated_fleet, live):
    emulated_fleet.ask("POST", "/v1/fleet/scale", {"workers": 3})
    live.until("#tiles", "3 of 3")
    live.page.click("[data-worker] button:enabled:has-text('Drain')")
    worker = re.search(r"Drain (\w+)\?", live.text("dialog"))[1]
    live.page.click("dialog button.primary")
    live.until("#decisions li .says", f"worker {worker}")
    live.page.locator(f"#decisions li:has-text('{worker}') .kind", has_text="draining").first.wait_for()
    emulated_fleet.ask("POST", "/v1/fleet/scale", {"workers": 3})
    live.until("#tiles", "3 of 3")


def test_a_fleet_that_was_not_to_scale_itself_says_so_instead_of_offering_it(live):
    assert live.page.locator("#auto").is_disabled()
    assert "Start the fleet with --autoscale MIN..MAX" in live.text("#auto-says")
    assert ": manual scaling, max " in live.text("#facts")


def test_the_bar_of_a_missed_target_is_seen(emulated_fleet, live):
    """Of the class `hasty` no request meets its targets."""
    body = {"model": "tiny-llama", "prompt": "x", "max_tokens": 5, "ignore_eos": True}

    def miss():
        ask(emulated_fleet, body | {"max_tokens": 2}, {"x-slo-class": "hasty"})
        return live.page.locator("#targets .bar-fill.bad").count()

    ask(emulated_fleet, body)
    emulated_fleet.until(miss)
    fills = live.page.locator("#targets .bar-fill")
    shown = fills.evaluate_all(
        "all => all.map(one => [one.checkVisibility(), one.classList.contains('bad')])"
    )
    assert [True, True] in shown
    assert all(is_seen for is_seen, _ in shown)


LOW_RATES = """async () => {
  const { Timeline } = await import("/console/live_timeline.js");
  document.getElementById("present").hidden = false;
  const now_s = 1.8e9;
  const points = [40, 30, 20].map((ago, i) => ({
    at_s: now_s - ago, tokens_per_s: [0.2, 0.7, 0.4][i], finished: 1, failed: 0, rejected: i % 2, aborted: 0,
    ttft_s: { p50: 0.0101, p90: 0.0103, p99: 0.0104 }, tpot_s: { p50: 0.02, p90: 0.021, p99: 0.022 },
  }));
  new Timeline().draw({ points, bucket_s: 10, now_s }, { ttft_s: 1, tpot_s: 0.05 });
  await new Promise((done) => setTimeout(() => requestAnimationFrame(done)));
  await new Promise((done) => requestAnimationFrame(() => setTimeout(done)));
  return [...document.querySelectorAll("#timeline figure")].map((figure) =>
    [...figure.querySelectorAll("text.tick[text-anchor=end]:not(.strong)")].map((tick) => tick.textContent));
}"""


def test_no_axis_repeats_a_tick_at_low_rates(api, visit):
    tab = visit(f"{api}/live")
    tab.until("#absent", "No fleet here")
    axes = tab.page.evaluate(LOW_RATES)
    assert len(axes) == 4
    for ticks in axes:
        assert len(ticks) >= 2
        assert len(set(ticks)) == len(ticks)
    throughput, _, _, errors = axes
    assert "0.4" in throughput
    assert errors == ["0", "1"]


def test_the_live_page_has_the_words_of_the_field(emulated_fleet, live):
    said = live.page.locator("body").inner_text().lower()
    assert [word for word in OURS if word in said] == []


def test_a_refused_order_is_said(emulated_fleet, live):
    # As on a page that does not know yet: the order goes out, and is refused.
    live.page.locator("#auto").evaluate("button => { button.disabled = false; button.click(); }")
    live.page.click("dialog button.primary")
    live.until("#complaint", "--autoscale")
    assert [w for w in live.wrongs if "400" not in w] == []
    live.wrongs.clear()


def test_out_of_reach_is_said_and_nothing_is_lost_when_it_is_back(emulated_fleet, live):
    live.page.evaluate("window.mark = 1")
    live.context.set_offline(True)
    live.until("#connection", "does not answer")
    assert live.page.locator("[data-worker]").count() >= 3
    said = told(emulated_fleet, "nobody watched")
    live.context.set_offline(False)
    live.until("#decisions li .says", said)
    live.page.locator("#connection").wait_for(state="hidden")
    assert live.page.locator("#decisions li .says", has_text=said).count() == 1
    ids = live.page.eval_on_selector_all("#decisions li", "lines => lines.map((l) => Number(l.dataset.id))")
    assert ids == sorted(set(ids), reverse=True)
    assert live.page.evaluate("window.mark") == 1
    assert [w for w in live.wrongs if "ERR_INTERNET_DISCONNECTED" not in w] == []
    live.wrongs.clear()


def test_decisions_pause_and_go_on(emulated_fleet, live):
    live.page.click("#pause")
    said = told(emulated_fleet, "while paused")
    live.until("#decisions-note", "more")
    assert live.page.locator("#decisions li .says", has_text=said).count() == 0
    live.page.click("#pause")
    live.until("#decisions li .says", said)


def test_without_a_fleet_the_live_page_says_so(api, visit):
    tab = visit(f"{api}/live")
    tab.until("#absent", "No fleet here")


def test_a_page_survives_the_api_and_finds_it_again(scratch, visit):
    port = free_port()
    with planning_api(scratch / "passing", port=port) as url:
        tab = visit(f"{url}/live")
        tab.until("#absent", "No fleet here")
    tab.until("#connection", "does not answer")
    assert tab.page.locator("h1").is_visible()
    with planning_api(scratch / "passing", port=port):
        tab.page.locator("#connection").wait_for(state="hidden")
    tab.wrongs.clear()


def test_a_key_is_asked_for_and_kept_in_this_tab_only(scratch, visit):
    with planning_api(scratch / "guarded", "--control-key", "s3cret") as url:
        tab = visit(f"{url}/?{QUICK}")
        tab.until("dialog", "asks for a key")
        tab.page.fill("#key", "guess")
        tab.page.keyboard.press("Enter")
        tab.until("dialog", "refused")
        tab.page.fill("#key", "s3cret")
        tab.page.keyboard.press("Enter")
        tab.page.locator("#submit:enabled").wait_for()
        kept = tab.page.evaluate("[JSON.stringify(localStorage), document.cookie, location.href]")
        assert not any("s3cret" in place for place in kept)
        assert "s3cret" in tab.page.evaluate("JSON.stringify(sessionStorage)")
    assert [w for w in tab.wrongs if "401" not in w] == []
    tab.wrongs.clear()


SPLITS = """async (stream) => {
  const { EventParser } = await import("/console/event_stream.js");
  const read = (...pieces) => {
    const parser = new EventParser();
    return JSON.stringify(pieces.flatMap((piece) => [...parser.take(piece)]));
  };
  const answers = new Set();
  for (let i = 0; i <= stream.length; i += 1) {
    for (let j = i; j <= stream.length; j += 1) {
      answers.add(read(stream.slice(0, i), stream.slice(i, j), stream.slice(j)));
    }
  }
  return [...answers].map((text) => JSON.parse(text));
}"""


def test_events_are_the_same_however_the_stream_is_cut(api, visit):
    stream = (
        ": ping\r\n\r\nid: 1\nevent: scale\ndata: {}\n\n"
        "data: x\r\ndata:  y\r\n\r\nretry: 5\n\nid: 3\rdata: z\r\r\n"
    )
    (events,) = visit(f"{api}/live").page.evaluate(SPLITS, stream)
    assert [(e["id"], e["name"], e["data"]) for e in events] == [
        ("1", "scale", "{}"),
        (None, "message", "x\n y"),
        ("3", "message", "z"),
    ]
