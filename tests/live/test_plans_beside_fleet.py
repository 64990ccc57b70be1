"""Plans, history and scorecard of a fleet that really serves, through its own control API."""

import json
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor

import httpx
import polars as pl
import pytest
from made_plans import plan_json
from served_api import SMALL
from served_fleet import serve

from dataplane.history.files import read_history
from tokenfleet.cli.main import main

REQUESTS = 120


@pytest.fixture(scope="module")
def fleet(model_folder, tmp_path_factory):
    """One emulated worker, served under a plan, that has answered some requests."""
    folder = tmp_path_factory.mktemp("planned")
    (folder / "plan.json").write_text(json.dumps(plan_json(workers=1)))
    flags = ("--engine", "emulated", "--plan", str(folder / "plan.json"), "--data", str(folder / "data"))
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
    served.until(lambda: len(read_history(data / "history", 0, float("inf"))) == REQUESTS)
    rows = read_history(data / "history", 0, float("inf"))
    assert set(rows["outcome"]) == {"finished"}
    assert set(rows["output_tokens"]) == {8}
    assert rows["worker"].null_count() == 0
    assert rows["priority"].value_counts().sort("priority").rows() == [("high", 60), ("normal", 60)]
    assert (rows["ttft_s"] > 0).all()
    assert (rows["tpot_s"] > 0).all()
    assert "secret" not in rows.select(pl.col(pl.String)).write_csv()
    known = served.ask("GET", "/v1/catalogue")["history"]
    assert known["requests"] == REQUESTS


def test_the_scorecard_compares_the_plan_it_is_served_under(fleet):
    served, data = fleet
    card = httpx.get(f"{served.control}/v1/plans/last/scorecard", timeout=320).json()
    assert (card["requests"], card["workers"]) == (REQUESTS, {"planned": 1, "seen": 1})
    assert card["tpot_s"]["mean"]["observed"] > 0
    assert card["bias"]["decode"] > 0
    assert main(["scorecard", card["plan"], "--data", str(data), "--format", "json"]) == 0


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
