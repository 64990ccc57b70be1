"""The plan page: asked, answered, refused, shared."""

import json
import re
import shlex
import subprocess
import sys
import urllib.error
import urllib.request

import pytest
from checkout import ROOT

from console.browser import HOSTILE, QUICK, submitted


def test_pages_may_run_nothing_but_their_own_files(api):
    for path in ("/", "/plan", "/portfolio", "/live", "/console/console.css", "/console/plan_page.js"):
        with urllib.request.urlopen(api + path, timeout=20) as reply:
            policy, body = reply.headers["content-security-policy"], reply.read().decode()
        assert "default-src 'none'" in policy
        assert "script-src 'self';" in policy
        assert "unsafe" not in policy
        assert not re.search(r"<script(?![^>]*src=)|\son\w+=|style=|https?://(?!www\.w3\.org)", body), path


def test_only_the_consoles_files_are_served(api):
    for path in ("/console/plan.html", "/console/..%2fpages.py", "/console/", "/console/pages.py"):
        with pytest.raises(urllib.error.HTTPError) as refused:
            urllib.request.urlopen(api + path, timeout=20)
        assert refused.value.code == 404


def test_a_file_that_has_not_changed_is_not_sent_again(api):
    with urllib.request.urlopen(f"{api}/console/console.css", timeout=20) as reply:
        tag = reply.headers["etag"]
    again = urllib.request.Request(f"{api}/console/console.css", headers={"If-None-Match": tag})
    with pytest.raises(urllib.error.HTTPError) as answer:
        urllib.request.urlopen(again, timeout=20)
    assert answer.value.code == 304


def test_a_plan_is_asked_for_and_its_answer_read(planned, visit):
    url, job = planned
    plan = job["plan"]
    assert (job["state"], plan["feasible"]) == ("done", True)
    tab = visit(url)
    tab.page.locator("#answer-title").wait_for()
    (_, verdict), *lines = plan["says"]
    assert verdict.replace("   ", ", ") in tab.text("#answer-title")
    assert plan["doubt"]["traffic"] == "too short to tell"
    assert "too short to show drift" in dict(lines)["Traffic"]
    # The lines and tables are the plan's own, as the terminal prints them.
    shown = " ".join(tab.text("#answer .says").split())
    for topic, text in lines:
        assert f"{topic} {' '.join(text.split())}".replace("`", "") in shown
    # A command in backticks is code on the page; a name keeps its own, and no text becomes a tag.
    line = "<b>: `tokenfleet compare`, `id`"
    element = f"import('/console/dom.js').then((dom) => dom.make('p', {{}}, {json.dumps(line)}).innerHTML)"
    assert tab.page.evaluate(element) == "&lt;b&gt;: <code>tokenfleet compare</code>, `id`"
    assert [tab.text(f"#answer section:nth-of-type({i}) h3") for i in range(1, 2)] == [
        plan["tables"][0]["title"]
    ]
    # Every plot of the plan has been drawn under its own words, and has its numbers as a table.
    charts = tab.page.locator("figure.chart")
    assert charts.locator("h3").all_inner_texts() == [figure["title"] for figure in plan["figures"]]
    captions = charts.locator("figcaption p").all_inner_texts()
    assert captions == [figure["caption"] for figure in plan["figures"]]
    assert charts.count() >= 5
    for i in range(charts.count()):
        assert charts.nth(i).locator("svg[role=img] path").count() > 0
        assert charts.nth(i).locator("tbody tr").count() > 0
    assert tab.page.input_value("#ttft") == "400"
    assert tab.page.input_value("#window") == "0s..120s"


def test_the_command_shown_gives_the_same_plan(planned, visit):
    url, job = planned
    tab = visit(url)
    tab.page.locator("#command").wait_for()
    _, *words = shlex.split(tab.text("#command"))
    command = [
        sys.executable,
        "-m",
        "tokenfleet",
        *words,
    ]
    done = subprocess.run(
        [*command, "--format", "json"], cwd=ROOT, capture_output=True, text=True, timeout=200
    )
    assert json.loads(done.stdout) == job["plan"]


def test_the_json_downloaded_is_the_plan(planned, visit):
    url, job = planned
    tab = visit(url)
    with tab.page.expect_download() as download:
        tab.page.click("#download")
    assert json.loads(download.value.path().read_text()) == job["plan"]


def test_targets_out_of_reach_get_the_nearest_and_it_can_be_asked_for(api, visit):
    tab = visit(f"{api}/?{QUICK.replace('400ms', '5ms')}")
    assert submitted(tab)["plan"]["feasible"] is False
    assert "No fleet" in tab.text("#answer-title")
    tab.page.click("text=Ask for these targets")
    tab.page.locator("#answer-title", has_text="GPU").wait_for()
    assert float(tab.page.input_value("#ttft")) > 5


def test_a_file_with_a_hostile_name_is_planned_for_and_its_name_is_only_a_name(api, visit, tmp_path):
    lines = (ROOT / "examples" / "sample_trace.csv").read_text().splitlines()[:400]
    trace = tmp_path / "upload.csv"
    trace.write_text("\n".join(lines) + "\n")
    tab = visit(f"{api}/?model=llama-3.1-8b&ttft=400ms&tpot=30ms&gpu=h100&tp=1")
    tab.page.select_option("#trace", "file")
    file = {"name": f"{HOSTILE}.csv", "mimeType": "text/csv", "buffer": trace.read_bytes()}
    tab.page.set_input_files("#file", [file])
    job = submitted(tab)
    name = job["trace"]["name"]
    assert "onerror" in name
    assert name in tab.text("#answer")
    assert tab.page.locator("#answer img, #recent img, select img").count() == 0
    words = shlex.split(tab.text("#command"))
    assert words[words.index("--trace") + 1] == name
    assert "taken" not in tab.page.title()
    again = visit(tab.page.url)
    again.page.locator("#answer-title").wait_for()
    assert again.page.locator("main img").count() == 0


def test_a_refusal_is_said_in_the_apis_own_words(api, visit):
    tab = visit(f"{api}/?{QUICK}")
    tab.page.fill("#window", "noon")
    tab.page.click("#submit:enabled")
    tab.until("#complaint", "window: expected START..END")
    # Chromium itself notes a refused request on its console.
    assert [w for w in tab.wrongs if "400" not in w] == []
    tab.wrongs.clear()
    tab.page.fill("#ttft", "-3")
    tab.page.click("#submit:enabled")
    tab.until("#complaint", "TTFT")
    assert tab.focused() == "ttft"


def test_without_a_trace_users_and_a_shape_are_planned_for_as_on_a_terminal(api, visit):
    tab = visit(f"{api}/?{QUICK}&attainment=0.9")
    assert not tab.page.is_visible("#users")
    tab.page.select_option("#trace", "usage")
    tab.page.fill("#users", "2000")
    tab.page.select_option("#shape", "code")
    tab.page.fill("#growth", "0.5")
    tab.page.fill("#output_tokens", "40")
    job = submitted(tab)
    plan = job["plan"]
    assert (job["trace"]["name"], job["trace"]["format"]) == ("code, 2,000 users", "usage")
    assumed = " ".join(tab.text("#answer section:has(h3:text-is('Assumptions'))").split())
    for name, value, source in plan["inputs"]["assumed"]:
        assert f"{name} {value} {source}" in assumed.replace("\u00a0", " ")
    assert "Range" in tab.text("#answer .says")
    # The command says the same, and its plan is the same.
    command = shlex.split(tab.text("#command"))
    assert command[2:10] == [
        *("--users", "2000", "--shape", "code", "--growth", "0.5"),
        *("--output-tokens", "40.0"),
    ]
    run = subprocess.run(
        [sys.executable, "-m", *command, "--format", "json"], cwd=ROOT, capture_output=True, text=True
    )
    assert json.loads(run.stdout) == plan
    # The address asks the same again.
    again = visit(tab.page.url.split("&job=")[0])
    again.page.wait_for_selector("#submit:enabled")
    assert [again.page.input_value(f"#{key}") for key in ("users", "shape", "growth")] == [
        "2000",
        "code",
        "0.5",
    ]


@pytest.mark.parametrize(
    ("answers", "field", "told"),
    [
        ({"users": "0"}, "users", "0, expected more than 0, at most 1e+10"),
        ({"users": "5", "growth": "-0.2"}, "growth", "-0.2, expected 0 to 100 (0.3: 30 % more traffic)"),
        ({"users": "5", "peak": "0.5"}, "peak", "0.5, expected 1 to 100"),
        ({}, "users", "expected users, requests_per_day or request_rate, got none"),
        (
            {"users": "5", "request_rate": "9"},
            "users",
            "users, requests_per_day or request_rate, got users and request_rate",
        ),
        ({"users": "9e9"}, "users", "requests per second in the busiest hour, at most 10000 of chat"),
        ({"users": "5", "prompt_tokens": "-1"}, "prompt_tokens", "-1, expected more than 0, at most 1e+07"),
    ],
)
def test_an_answer_that_cannot_be_is_refused_beside_its_field(api, visit, answers, field, told):
    tab = visit(f"{api}/?{QUICK}")
    tab.page.select_option("#trace", "usage")
    for name, value in answers.items():
        tab.page.fill(f"#{name}", value)
    tab.page.click("#submit:enabled")
    tab.until(f"#{field}-refusal", told)
    tab.until("#complaint", f"{field}: ")
    assert tab.focused() == field
    tab.page.fill(f"#{field}", "1")
    assert tab.text(f"#{field}-refusal") == ""
    assert [w for w in tab.wrongs if "400" not in w] == []
    tab.wrongs.clear()


def test_a_running_plan_is_cancelled(api, visit):
    tab = visit(f"{api}/?model=llama-3.1-70b&ttft=1.6s&tpot=75ms")
    tab.page.click("#submit:enabled")
    tab.page.click("#cancel:visible")
    tab.until("#status", "Cancelled")
    tab.page.locator("#submit:enabled").wait_for()


def test_the_form_keeps_its_state_in_the_address(api, visit):
    tab = visit(f"{api}/?{QUICK}&attainment=0.999&rate=2&max-gpus=7&policy=jsq&seed=3")
    tab.page.locator("#submit:enabled").wait_for()
    tab.page.fill("#tpot", "31")
    tab.page.wait_for_url("**tpot=31ms**")
    shared = visit(tab.page.url)
    shared.page.locator("#submit:enabled").wait_for()
    fields = ("ttft", "tpot", "attainment", "rate", "max-gpus", "policy", "seed")
    seen = [shared.page.input_value(f"#{name}") for name in fields]
    assert seen == ["400", "31", "99.9", "2", "7", "jsq", "3"]
    assert shared.page.locator("#gpus input:checked").count() == 1


def test_every_option_has_a_field_that_orders_it(api, visit):
    tab = visit(f"{api}/?{QUICK}&policy=p2c&attainment=0.9&confidence=0.6&price=2")
    tab.page.locator("#submit:enabled").wait_for()
    with urllib.request.urlopen(f"{api}/v1/catalogue", timeout=20) as reply:
        options = json.load(reply)["options"]
    ids = {"slo": "ttft", "gpu": "gpus", "tp": "tps"}
    missing = [
        o["key"]
        for o in options
        if tab.page.locator(f"#{ids.get(o['key'], o['key'])}".replace(".", "\\.")).count() != 1
    ]
    assert missing == []
    job = submitted(tab)
    asked = {name: job["question"][name] for name in ("policy", "price_scale", "attainment")}
    assert asked == {"policy": "p2c", "price_scale": 2.0, "attainment": 0.9}
    assert job["plan"]["policy"] == "p2c"
    for words in ("--policy p2c", "--price-scale 2.0"):
        assert words in tab.text("#command")


ROUND_TRIPS = """async (hostile) => {
  const { Questions } = await import("/console/plan_question.js");
  const { options } = await (await fetch("/v1/catalogue")).json();
  const questions = new Questions(options);
  const upload = { kind: "upload", id: "a1", name: hostile };
  const usage = { kind: "usage", usage: { users: 2000, shape: hostile.slice(0, 40), growth: 0.3 } };
  const traces = [{ kind: "sample" }, upload, { kind: "since", since: "7d" }, usage];
  const changed = [];
  for (let i = 0; i < 300; i += 1) {
    const some = (n) => 1 + Math.floor(Math.abs(Math.sin(i * 7.3 + n)) * 1e4);
    const of = {
      number: (n) => some(n) / 1e5,
      duration: (n) => some(n) / 1e3,
      count: (n) => 1 + (some(n) % 1000),
      switch: (n) => some(n) % 2 === 0,
      choice: (n, { choices }) => choices[some(n) % choices.length],
      word: () => hostile,
    };
    const asked = { ...questions.defaults, trace: traces[i % 4] };
    options.forEach((option, n) => {
      const { kind, name, is_list, bounds } = option;
      if (kind === "slo") asked.slo = { ttft_s: some(1) / 1e3, tpot_s: some(2) / 1e5 };
      else if (kind !== "file" && (i + n) % 3) {
        const value = of[kind](n, option);
        asked[name] = is_list ? [value] : value < bounds.ge ? bounds.ge : value;
      }
    });
    const read = questions.fromQuery(`?${questions.toQuery(asked)}`);
    if (JSON.stringify(read) !== JSON.stringify(asked)) changed.push([asked, read]);
  }
  return changed;
}"""
NONSENSE = (
    "?ttft=<script>&tpot=1e999s",
    "?seed=-1&rate=NaN&attainment=2",
    "?trace=upload:",
    "?tp=a&tp=-1&tp=1.5",
)


def test_a_question_survives_its_address_whatever_it_holds(api, visit):
    tab = visit(f"{api}/?{QUICK}")
    assert tab.page.evaluate(ROUND_TRIPS, HOSTILE) == []
    read = """async (text) => {
      const { Questions } = await import("/console/plan_question.js");
      return new Questions((await (await fetch("/v1/catalogue")).json()).options).fromQuery(text);
    }"""
    defaults = tab.page.evaluate(read, "")
    assert [tab.page.evaluate(read, text) for text in NONSENSE] == [defaults] * len(NONSENSE)
