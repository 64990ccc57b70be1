"""Plans, history, scorecard and gap of a fleet that really serves, through its own control API."""

import json
import signal
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import httpx
import polars as pl
import pytest
from console.browser import Tab, running_chromium
from made_fleet_log import fleet as made_of
from made_fleet_log import logged, look
from made_history import row, written
from made_plans import plan_json
from served_api import SMALL
from served_fleet import serve

from dataplane.history.files import read_history
from dataplane.history.fleet_log import DAY_S, day_begin_s, day_of, read_fleet_log
from tokenfleet.cli.main import main

REQUESTS = 120
YESTERDAY_S = day_begin_s(day_of(time.time() - DAY_S - 900.0)) + 3600.0


def write_yesterday(folder):
    """What another life of the fleet left: ten minutes with two workers too many, fixed by an operator."""
    written(folder, [row(i, arrival_s=YESTERDAY_S + 2.0 * i) for i in range(300)])
    shift_s = YESTERDAY_S - look(0.0).at_s
    logged(folder, [look(shift_s + 30.0 * n, serving=3, fixed=True) for n in range(20)], made_of())


@pytest.fixture(scope="module")
def fleet(model_folder, tmp_path_factory):
    """One emulated worker, served under a plan, that has answered some requests.

    Were any wait for the end of streams entered as it ends, it would last an hour.
    """
    folder = tmp_path_factory.mktemp("planned")
    (folder / "plan.json").write_text(json.dumps(plan_json(workers=1)))
    write_yesterday(folder / "data" / "history")
    flags = ("--engine", "emulated", "--plan", str(folder / "plan.json"), "--data", str(folder / "data"))
    flags += ("--shutdown-wait", "1h")
    served = serve(model_folder, *flags, folder=folder)
    body = {"model": "tiny-llama", "prompt": "a secret word", "max_tokens": 8, "ignore_eos": True}

    def ask(i):
        header = {"x-tokenfleet-priority": "high" if i % 2 else "normal"}
        reply = httpx.post(f"{served.gateway}/v1/completions", json=body, headers=header, timeout=60)
        assert reply.status_code == 200

    with ThreadPoolExecutor(8) as clients:
        list(clients.map(ask, range(REQUESTS)))
    yield served, folder / "data"
    assert served.stop() == 0


def test_every_request_is_recorded_with_its_figures_and_never_its_text(fleet):
    served, data = fleet
    began_s = YESTERDAY_S + 3600.0
    served.until(lambda: len(read_history(data / "history", began_s, float("inf"))) == REQUESTS)
    rows = read_history(data / "history", began_s, float("inf"))
    assert set(rows["outcome"]) == {"finished"}
    assert set(rows["output_tokens"]) == {8}
    assert rows["worker"].null_count() == 0
    assert rows["priority"].value_counts().sort("priority").rows() == [("high", 60), ("normal", 60)]
    assert (rows["ttft_s"] > 0).all()
    assert (rows["tpot_s"] > 0).all()
    assert "secret" not in rows.select(pl.col(pl.String)).write_csv()
    known = served.ask("GET", "/v1/catalogue")["history"]
    assert known["requests"] == REQUESTS + 300


def test_the_scorecard_compares_the_plan_it_is_served_under(fleet):
    served, data = fleet
    card = httpx.get(f"{served.control}/v1/plans/last/scorecard", timeout=320).json()
    assert (card["requests"], card["workers"]) == (REQUESTS, {"planned": 1, "seen": 1})
    assert card["tpot_s"]["mean"]["observed"] > 0
    assert card["bias"]["decode"] > 0
    assert main(["scorecard", card["plan"], "--data", str(data), "--format", "json"]) == 0


def test_the_fleet_tells_what_yesterday_cost_over_the_cheapest_and_logs_itself(fleet, capsys, monkeypatch):
    served, data = fleet
    served.until(lambda: served.metric("tokenfleet_gap_ratio") > 0, 120)
    parts = {p: served.metric("tokenfleet_gap_gpu_hours", part=p) for p in ("paid", "cheapest", "fixed")}
    assert parts["paid"] == pytest.approx(3 * parts["cheapest"], rel=1e-3)
    assert parts["fixed"] == pytest.approx(parts["paid"] - parts["cheapest"], rel=1e-3)
    told = served.ask("GET", "/v1/fleet")["gap"]
    assert told["day"]["ratio"] == served.metric("tokenfleet_gap_ratio")
    assert " % above the hindsight optimum of $" in told["line"]
    assert "(manual scaling $" in told["line"]
    monkeypatch.setenv("COLUMNS", "300")
    assert main(["fleet", "--control", served.control, "status"]) == 0
    assert f"{told['line']}\n".partition(" (UTC")[2] in capsys.readouterr().out
    now_s = time.time()
    (one,) = served.ask("GET", "/v1/fleet")["workers"]
    looks, fleets = read_fleet_log(data / "history", now_s - 600.0, now_s)
    assert looks[-1].workers == {one["kind"]: (0, 1, 0)}
    assert not looks[-1].fixed
    assert [t.name for t in fleets[-1].types] == [one["kind"]]


def test_the_console_says_what_yesterday_cost_over_the_cheapest(fleet):
    pytest.importorskip("playwright", reason="playwright is not installed (requirements/dev.txt)")
    served, _ = fleet
    told = served.until(lambda: (g := served.ask("GET", "/v1/fleet")["gap"])["day"] and g, 120)
    with running_chromium() as browser:
        tab = Tab.open(browser, f"{served.control}/live")
        tab.until("#gap", f"Cost over the hindsight optimum: {told['line']}.")
        assert tab.page.locator("#gap").is_visible()
        assert tab.wrongs == []
        tab.close()


def test_a_plan_is_made_beside_the_fleet(fleet):
    served, _ = fleet
    job = served.ask("POST", "/v1/plans", SMALL | {"bias_from": "last"})
    done = served.until(
        lambda: (j := served.ask("GET", f"/v1/plans/{job['id']}"))["state"] in ("done", "failed") and j, 120
    )
    assert done["state"] == "done", done["error"]
    assert "seen over 120 requests under plan" in done["plan"]["inputs"]["warnings"][0]
    with pytest.raises(urllib.error.HTTPError) as refused:
        served.ask("POST", "/v1/plans", SMALL | {"trace": {"since": "1h"}})
    assert "a plan needs at least 100 over 60 s" in json.load(refused.value)["error"]["message"]
    with urllib.request.urlopen(f"{served.control}/metrics", timeout=20) as reply:
        assert b'tokenfleet_plan_jobs{state="done"} 1.0' in reply.read()


# The last one: it ends the module's fleet.
def test_an_idle_fleet_ends_on_ctrl_c_without_its_wait_for_streams(fleet):
    """A client's connection and a console page are open."""
    served, _ = fleet
    with (
        httpx.Client(base_url=served.gateway) as client,
        httpx.stream("GET", f"{served.control}/v1/events", timeout=60) as events,
    ):
        assert next(events.iter_lines())
        assert client.get("/health").status_code == 200
        served.process.send_signal(signal.SIGINT)
        assert served.process.wait(timeout=60) == 0
    assert served.lines_of_end() == ["stopping: 0 open requests", "stopping w0", "stopped"]
