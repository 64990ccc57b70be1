"""`tokenfleet api`: plan jobs over HTTP, in a real service that is stopped, killed and started again."""

import json
import os
import signal
import sqlite3
import time
from contextlib import suppress
from pathlib import Path

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from served_api import LARGE, PORTFOLIO, SMALL, planners_of, serve_api
from served_fleet import free_port

from tokenfleet.cli.main import main
from tokenfleet.service.data_folder import VERSIONS, Database
from tokenfleet.service.jobs import Jobs


@pytest.fixture(scope="module")
def api(tmp_path_factory):
    served = serve_api(tmp_path_factory.mktemp("api"), "--queue", "4")
    yield served
    assert served.stop() == 0


def message(reply):
    said = reply.json()["error"]["message"]
    assert "\n" not in said
    return said


def gone(pids, seconds=30.0):
    deadline = time.monotonic() + seconds
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)


def test_a_plan_over_http_is_the_plan_of_the_command_line(api, tmp_path, capsys):
    csv = tmp_path / "day.csv"
    csv.write_text(SMALL["trace"]["inline_csv"])
    sent = api.ask("POST", "/v1/traces", params={"name": "day.csv"}, content=csv.read_bytes())
    assert (sent.status_code, sent.json()["requests"]) == (201, 300)
    job = api.until(api.order(SMALL | {"trace": {"upload": sent.json()["id"]}}), "done", "failed")
    words = ["--trace", str(csv), "--model", "llama-3.1-8b", "--gpu", "h100", "--tp", "1"]
    words += ["--slo", "ttft=1s,tpot=50ms", "--attainment", "0.9", "--confidence", "0.6"]
    assert main(["plan", *words, "--format", "json"]) == 0
    assert job["plan"] == json.loads(capsys.readouterr().out)
    assert (job["brief"]["workers"], job["attempts"]) == (job["plan"]["workers"], 1)


def test_a_portfolio_over_http_is_that_of_the_command_line(api, tmp_path, capsys, monkeypatch):
    name = api.order(PORTFOLIO, "portfolios")
    job = api.until(name, "done", "failed", of="portfolios")
    assert (job["error"], job["state"]) == (None, "done")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "more").mkdir()
    for trace, source in PORTFOLIO["traces"].items():
        (tmp_path / trace).write_text(source["inline_csv"])
    (tmp_path / "own.yaml").write_text(PORTFOLIO["files"]["own.yaml"])
    (tmp_path / "models.yaml").write_text(PORTFOLIO["portfolio"])
    assert main(["portfolio", "models.yaml", "--no-cache", "--format", "json"]) == 0
    assert job["portfolio"] == json.loads(capsys.readouterr().out)
    assert [one["plan"]["usd_per_hour"] / one["plan"]["gpus"] for one in job["portfolio"]["models"]][
        1
    ] == 1.25
    listed = api.ask("GET", "/v1/portfolios", params={"state": "done", "limit": 1}).json()["portfolios"]
    brief = {"models": ["chat", "code"], "usd_per_hour": job["portfolio"]["usd_per_hour"]}
    assert listed == [{key: told for key, told in job.items() if key != "portfolio"}]
    assert listed[0]["brief"] == brief
    # A portfolio is no plan: neither is listed, shown, cancelled or served as the other.
    assert name not in [one["id"] for one in api.ask("GET", "/v1/plans").json()["plans"]]
    for path in ("", "/events", "/scorecard"):
        assert api.ask("GET", f"/v1/plans/{name}{path}").status_code in (404, 409)
    assert api.ask("DELETE", f"/v1/plans/{name}").status_code == 404
    assert api.ask("POST", "/v1/plans", json=SMALL | {"bias_from": name}).status_code == 404
    plan = api.order(SMALL | {"seed": 7})
    assert api.ask("GET", f"/v1/portfolios/{plan}").status_code == 404
    assert plan not in [one["id"] for one in api.ask("GET", "/v1/portfolios").json()["portfolios"]]
    told = [view["state"] for view in followed(api, name, of="portfolios")]
    assert told == ["done"]


def test_what_is_wrong_with_a_portfolio_is_one_line_that_names_the_field(api):
    def refused(status, says, **order):
        reply = api.ask("POST", "/v1/portfolios", json=PORTFOLIO | order)
        assert (reply.status_code, says in message(reply)) == (status, True), reply.text

    text, traces = PORTFOLIO["portfolio"], PORTFOLIO["traces"]
    for old, new, says in (
        ("portfolio/1", "portfolio/9", "portfolio: schema: "),
        ("name: code", "name: chat", "portfolio: models: chat is given twice"),
        ("ttft: 1s", "ttft: soon", "portfolio: models: chat: slo: "),
        ("rate-scale", "rate-scales", "portfolio: models: code: rate-scales: no such flag"),
        ("model: llama-3.1-8b", "model: gpt-9", "portfolio: models: chat: model 'gpt-9': no profile"),
        ("chat.csv", "day.csv", "portfolio: models: chat: trace: day.csv: is among neither traces nor files"),
        ("own.yaml", "/etc/passwd", "portfolio: models: code: prices: /etc/passwd: is among neither"),
        ("limits: {", "limits: {zones: {east-: {h100: 1}}, ", "portfolio: limits.zones.east-"),
        ("slo: {ttft: 1s,", "seed: &one 1, window: *one, slo: {ttft: 1s,", "portfolio: has aliases"),
        ("models:", "models: {", "portfolio: is not YAML"),
    ):
        refused(400, says, portfolio=text.replace(old, new))
    refused(
        400,
        "extra.csv: was sent, and the portfolio does not name it",
        traces=traces | {"extra.csv": SMALL["trace"]},
    )
    refused(
        400,
        "traces: chat.csv: inline trace: row 1",
        traces=traces | {"chat.csv": {"inline_csv": "arrival_s,prompt_tokens,output_tokens\n0,x,1\n"}},
    )
    refused(
        404, "traces: chat.csv: trace none: is not here", traces=traces | {"chat.csv": {"upload": "none"}}
    )
    for name in ("/etc/passwd", "../day.csv", "a/../b", "."):
        refused(400, "expected a path below the portfolio's folder", files={name: "x"})
    refused(422, "body.traces", traces={})
    refused(422, "body.portfolio", portfolio="")


def eight_models():
    """A portfolio that takes a minute and more."""
    models = "".join(f"- {{name: m{n}, trace: day.csv, seed: {n}}}\n" for n in range(8))
    text = (
        "schema: tokenfleet.portfolio/1\nlimits: {max-gpus: 999}\n"
        f"defaults: {{model: llama-3.1-70b, slo: 'ttft=1s,tpot=50ms'}}\nmodels:\n{models}"
    )
    return {"portfolio": text, "traces": {"day.csv": {"sample": True}}}


def test_a_portfolio_that_is_cancelled_leaves_no_process(api):
    name = api.order(eight_models(), "portfolios")
    api.until(name, "running", of="portfolios")
    deadline = time.monotonic() + 60
    while len(group := group_of(planners_of(api.process.pid))) < 3:  # it, and those that plan for it
        assert time.monotonic() < deadline, group
        time.sleep(0.05)
    assert api.ask("DELETE", f"/v1/portfolios/{name}").status_code == 202
    api.until(name, "cancelled", of="portfolios")
    gone(group)


def group_of(leaders):
    """The processes in the groups that these lead."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            if int(stat.read_text().rpartition(")")[2].split()[2]) in leaders:
                found.append(int(stat.parent.name))
    return found


def followed(api, name, until=lambda view: False, of="plans"):
    """The job as its events tell it, to the end of the stream or the first view that `until` is true of."""
    with httpx.stream("GET", f"{api.url}/v1/{of}/{name}/events", timeout=120) as reply:
        for line in reply.iter_lines():
            if line.startswith("event: "):
                event = line.removeprefix("event: ")
            elif line.startswith("data: "):
                view = json.loads(line.removeprefix("data: "))
                assert view["state"] == event
                yield view
                if until(view):
                    return


def test_a_stream_of_events_ends_with_its_job(api):
    told = list(followed(api, api.order(SMALL | {"seed": 1})))
    assert (told[-1]["state"], told[-1]["progress"]) == ("done", 1.0)
    assert [t["progress"] for t in told] == sorted(t["progress"] for t in told)


def test_events_tell_how_far_a_job_is_and_that_it_was_cancelled(api):
    name = api.order(LARGE)
    told = list(followed(api, name, until=lambda view: view["progress"] > 0.05))
    assert told[-1]["state"] == "running"
    assert [t["progress"] for t in told] == sorted(t["progress"] for t in told)
    assert api.ask("DELETE", f"/v1/plans/{name}").status_code == 202
    assert [view["state"] for view in followed(api, name)][-1] == "cancelled"


def test_a_bad_trace_and_bad_orders_are_one_line(api):
    def refused(status, says, method="POST", path="/v1/plans", **how):
        reply = api.ask(method, path, **how)
        assert (reply.status_code, says in message(reply)) == (status, True), reply.text

    refused(400, "x.csv: columns found", path="/v1/traces?name=x.csv", content=b"a,b\n1,2\n")
    refused(
        400,
        "inline trace: row 1",
        json=SMALL | {"trace": {"inline_csv": "arrival_s,prompt_tokens,output_tokens\n0,x,1\n"}},
    )
    refused(400, "empty", path="/v1/traces", content=b"")
    refused(400, "has no history", json=SMALL | {"trace": {"since": "1h"}})
    refused(400, "policy: one of", json=SMALL | {"policy": "best"})
    refused(400, "no profile", json=SMALL | {"model": "gpt-9"})
    refused(400, "window: expected", json=SMALL | {"window": "20m"})
    refused(404, "POST /v1/traces", json=SMALL | {"trace": {"upload": "none"}})
    refused(404, "no such plan is kept", json=SMALL | {"bias_from": "none"})
    refused(404, "no such plan is kept", "GET", "/v1/plans/none/scorecard")
    refused(404, "no such job", "GET", "/v1/plans/none")
    refused(404, "no such job", "DELETE", "/v1/plans/none")
    refused(404, "no such job", "GET", "/v1/plans/none/events")
    refused(405, "Method Not Allowed", "PUT")
    refused(422, "body.slo.ttft_s", json=SMALL | {"slo": {"ttft_s": -1, "tpot_s": 1}})
    refused(422, "body.sloe", json=SMALL | {"sloe": 1})
    refused(422, "JSON", content=b"{", headers={"content-type": "application/json"})
    refused(413, "at most", content=b"[" * (9 << 20), headers={"content-type": "application/json"})
    refused(413, "at most", path="/v1/traces", content=(b"x" * (1 << 20) for _ in range(66)))


def test_the_queue_is_bounded_and_a_waiting_job_is_cancelled_at_once(api):
    running = api.order(LARGE)
    api.until(running, "running")
    waiting = [api.order(LARGE | {"seed": seed}) for seed in range(4)]
    full = api.ask("POST", "/v1/plans", json=LARGE)
    assert (full.status_code, int(full.headers["retry-after"]) > 0) == (429, True)
    early = api.ask("GET", f"/v1/plans/{waiting[0]}/scorecard")
    assert (early.status_code, "has no plan" in message(early)) == (409, True)
    for name in waiting:
        assert api.ask("DELETE", f"/v1/plans/{name}").json()["state"] == "cancelled"
    planners = planners_of(api.process.pid)
    assert len(planners) == 1
    assert api.ask("DELETE", f"/v1/plans/{running}").status_code == 202
    assert api.until(running, "cancelled")["plan"] is None
    gone(planners)
    assert api.ask("DELETE", f"/v1/plans/{running}").status_code == 202  # again is no fault


def test_what_is_over_is_kept(api):
    name = api.order(SMALL | {"seed": 2})
    api.until(name, "done")
    refused = api.ask("DELETE", f"/v1/plans/{name}")
    assert (refused.status_code, "is done already" in message(refused)) == (409, True)
    listed = api.ask("GET", "/v1/plans", params={"state": "done", "limit": 1}).json()["plans"]
    assert [job["id"] for job in listed] == [name]


def test_a_job_that_takes_too_long_is_ended(api):
    for order, of in ((LARGE, "plans"), (eight_models(), "portfolios")):
        job = api.until(api.order(order | {"timeout_s": 1}, of), "failed", of=of)
        assert "longer than 1 s" in job["error"]
        gone(planners_of(api.process.pid))


def test_an_order_sent_twice_with_a_key_is_one_job(api):
    key = {"idempotency-key": "once"}
    assert api.order(SMALL | {"seed": 3}, **key) == api.order(SMALL | {"seed": 3}, **key)
    other = api.ask("POST", "/v1/portfolios", json=PORTFOLIO, headers=key)
    assert (other.status_code, "of another kind" in message(other)) == (409, True)


def test_a_question_the_planner_refuses_fails_with_its_line(api):
    job = api.until(api.order(SMALL | {"window": "20h..21h"}), "failed")
    assert "no requests between" in job["error"]


def test_the_catalogue_names_what_can_be_planned_with(api):
    known = api.ask("GET", "/v1/catalogue").json()
    assert "llama-3.1-8b" in [model["name"] for model in known["models"]]
    assert any(gpu["on_demand"] for gpu in known["gpus"])
    assert "spread" in known["policies"]
    assert known["sample"]["requests"] == 18_000
    assert b"tokenfleet_plan_jobs" in api.ask("GET", "/metrics").content
    assert api.ask("GET", "/ready").json() == {"status": "ready"}


def test_a_killed_service_leaves_no_planner_and_goes_on_where_it_was(tmp_path):
    first = serve_api(tmp_path)
    running, waiting = first.order(LARGE), first.order(SMALL)
    first.until(running, "running")
    planners = planners_of(first.process.pid)
    first.stop(signal.SIGKILL)
    gone(planners)
    second = serve_api(tmp_path)
    assert second.until(running, "running")["attempts"] == 2
    second.ask("DELETE", f"/v1/plans/{running}")
    assert second.until(waiting, "done")["attempts"] == 1
    planners = planners_of(second.process.pid)
    unfinished = second.order(LARGE)
    second.until(unfinished, "running")
    assert second.stop() == 0
    gone(planners)
    jobs = Jobs(Database(tmp_path / "tokenfleet.db"))
    assert (jobs.find(unfinished)["state"], jobs.runs(running)) == (
        "queued",
        [(1, "killed"), (2, "cancelled")],
    )


def test_a_second_service_on_the_folder_takes_orders_and_goes_on_when_the_first_ends(tmp_path):
    first, second = serve_api(tmp_path), serve_api(tmp_path)
    running, other = second.order(LARGE), second.order(SMALL)
    first.until(running, "running")
    assert planners_of(second.process.pid) == []
    second.ask("DELETE", f"/v1/plans/{running}")
    first.stop(signal.SIGKILL)
    assert second.until(other, "done")["plan"]["feasible"]
    assert second.stop() == 0


def test_callers_need_the_key_where_there_is_one_and_a_loopback_name_where_there_is_none(api, tmp_path):
    keyed = serve_api(tmp_path, "--control-key", "secret")
    assert keyed.ask("GET", "/v1/plans").status_code == 401
    assert keyed.ask("GET", "/v1/plans", headers={"authorization": "Bearer secret"}).status_code == 200
    assert keyed.ask("GET", "/health").status_code == 200
    described = keyed.ask("GET", "/openapi.json", headers={"authorization": "Bearer secret"}).json()
    assert described["components"]["securitySchemes"]["HTTPBearer"]["scheme"] == "bearer"
    assert keyed.stop() == 0
    assert api.ask("GET", "/v1/plans", headers={"host": "example.org"}).status_code == 403
    assert api.ask("POST", "/v1/plans", headers={"origin": "https://example.org"}).status_code == 403


def test_what_cannot_be_served_is_one_line_and_exit_code_2(api, tmp_path, capsys):
    def refused(*words):
        assert main(["api", "--data", str(tmp_path), *words]) == 2
        return capsys.readouterr().err

    assert "--control-key" in refused("--host", "0.0.0.0")
    assert "cannot listen" in refused("--port", api.url.rpartition(":")[2])
    assert "--job-timeout" in refused("--job-timeout", "0s")
    raw = sqlite3.connect(tmp_path / "tokenfleet.db")
    raw.execute(f"PRAGMA user_version = {len(VERSIONS) + 1}")
    raw.close()
    assert "use a newer tokenfleet" in refused("--port", str(free_port()))


def test_the_api_keeps_its_own_schema(tmp_path, request):
    schemathesis = pytest.importorskip("schemathesis")
    from schemathesis.specs.openapi.checks import positive_data_acceptance

    served = serve_api(tmp_path, "--queue", "1", "--job-timeout", "1s")
    request.addfinalizer(served.stop)
    schema = schemathesis.openapi.from_url(f"{served.url}/openapi.json")
    checked = 0
    for found in schema.get_all_operations():
        operation = found.ok()

        @settings(max_examples=15, deadline=None, suppress_health_check=list(HealthCheck), database=None)
        @given(case=operation.as_strategy())
        def fuzz(case):
            # A schema cannot say which models there are, or what makes a trace; such orders get a 400.
            case.call_and_validate(base_url=served.url, excluded_checks=[positive_data_acceptance])

        fuzz()
        checked += 1
    assert checked >= 9
    assert served.stop() == 0
