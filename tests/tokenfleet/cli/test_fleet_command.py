"""The text that `tokenfleet fleet status` makes of the control API's answer."""

import json
import re
import socket
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from controlplane.figures import fact_lines
from dataplane.live.control.views import fleet_words
from tokenfleet.cli.main import main

REPLAYED = {"at_s": 1e9, "kind": "replay", "worker": None, "reason": "w0 is gone"}
DECIDED = [
    *(REPLAYED | {"request_id": f"r{i}"} for i in range(17)),
    {"at_s": 1e9, "kind": "lost", "worker": "w0", "reason": "its process is gone"},
    {"at_s": 1e9 + 60, "kind": "migrate", "request_id": "r3", "worker": "w1", "reason": "w2 is drained"},
    {"at_s": 1e9 + 61, "kind": "migrate", "request_id": "r4", "worker": "w1", "reason": "w2 is drained"},
    {"at_s": 1e9 + 62, "kind": "migrate", "request_id": "r5", "worker": "w3", "reason": "w2 is drained"},
]  # fmt: skip
SCALED: dict[str, Any] = {
    "kind": "scale", "before": 1, "workers": 3, "reason": "7.5 requests/s: 3 workers",
    "seen": {"waiting_requests": 1, "workers_per_rps": 0.16}, "compared": {"backlog": 1.704},
    "cost": {"workers": 2, "ready_after_s": 60},
}  # fmt: skip
SCALED["says"] = fact_lines({name: SCALED[name] for name in SCALED if name not in ("kind", "reason")})
BOUNDS: dict[str, Any] = {"min_workers": 1, "max_workers": 8, "floor": None}
FLEET: dict[str, Any] = {
    "transport": {"moves": 0, "bytes_per_s": 2e9, "pause_s": 0.01, "ways": {}, "pairs": []},
    "name": "m", "model": "/models/m",
    "engine": "vllm", "workers": [], "auto": False, "autoscale": None, "advisory": False, "wanted_workers": 2,
    "wanted_kinds": {"TP1": 2}, "max_workers": 8, "requests": {"running": 0, "waiting": 0}, "moving": [],
    "fixed": {}, "update": None,
    "decisions": DECIDED, "scaling": [SCALED], "losses": [], "slo": {"ttft_s": 0.4, "tpot_s": 0.03},
    "attainment_target": 0.99, "lately": {
        "over_s": 60.0, "tokens_per_s": 0.0, "finished": 0, "failed": 0, "rejected": 0, "ttft_s": None,
        "tpot_s": None,
        "attainment": {"both": {"met": 0, "of": 0}},
    },
    "placement": {"policy": "spread+migrate", "by": "load", "step_times_known": False, "unmeasured": {}},
    "step_times": [],
    "gap": {"line": "unknown: 2026-06-01: [/data] cannot be read", "day": None},
}  # fmt: skip


@pytest.fixture
def control() -> Iterator[str]:
    """A control API with FLEET and no requests."""

    class Answer(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            fleet = FLEET | {"says": fleet_words(FLEET)}
            told = {"/v1/fleet": fleet, "/v1/fleet/proposal": FLEET.get("proposal")}
            body = json.dumps(told.get(self.path, {"requests": []})).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            self.send_error(404)

        def log_message(self, *_: Any) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Answer)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


PROPOSED = {"state": "ready", "plan": "p1", "line": "2x H100 TP1 → 1x H100 TP2, $5.38/h (±$0.00/h)"}


def test_a_proposal_is_a_line_of_the_status_and_one_that_changes_nothing_is_a_detail(
    control: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str) -> str:
        main(["fleet", "--control", control, *words])
        return capsys.readouterr().out

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setitem(FLEET, "proposal", PROPOSED)
    assert "Proposed: 2x H100 TP1 → 1x H100 TP2, $5.38/h" in said("status")
    monkeypatch.setitem(FLEET, "proposal", PROPOSED | {"state": "same", "line": "keep 2x H100 TP1"})
    assert "Proposed" not in said("status")
    assert "Proposed: keep 2x H100 TP1" in said("status", "--verbose")


def test_fleet_proposal_shows_the_last_one_and_says_by_its_exit_code_whether_there_is_one(
    control: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(FLEET, "proposal", PROPOSED)
    assert main(["fleet", "--control", control, "proposal"]) == 0
    assert capsys.readouterr().out.startswith("Proposed: 2x H100 TP1 → 1x H100 TP2")
    none = {"state": "none", "plan": None, "line": "history too short: 20 min"}
    monkeypatch.setitem(FLEET, "proposal", none)
    assert main(["fleet", "--control", control, "proposal"]) == 1
    assert main(["fleet", "--control", control, "proposal", "--since", "1h"]) == 2
    assert "--since: is the history that --now plans from" in capsys.readouterr().err


def test_what_happened_alike_to_many_requests_is_one_line(
    control: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fleet", "--control", control, "status", "--verbose"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("│")]
    told = [[cell.strip() for cell in line.strip("│").split("│")][1:] for line in lines]
    assert told == [
        ["replay", "17 requests", "w0 is gone"],
        ["lost", "w0", "its process is gone"],
        ["migrate", "2 requests w1", "w2 is drained"],
        ["migrate", "r5 w3", "w2 is drained"],
    ]


def test_what_a_decision_saw_is_told_whole_in_eighty_columns(
    control: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["fleet", "--control", control, "explain"]) == 0
    out = capsys.readouterr().out
    assert "observed: waiting requests 1" in out
    assert "cost: workers 2, ready after 60 s" in out
    assert "…" not in out


def test_as_json_nothing_is_left_out(control: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["fleet", "--control", control, "status", "--format", "json"]) == 0
    view = json.loads(capsys.readouterr().out)
    assert (view["decisions"], view["gap"]) == (DECIDED, FLEET["gap"])


def test_status_says_which_step_times_are_in_force_since_when_and_how_far_off(
    control: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    learned = {"variant": "cpu TP1", "since_s": 1.79e9, "steps": 700, "refit_error": 0.0412}
    learned["source"] = "learned from 893 steps of 2 workers in 6.3 s at the fleet's start"
    placement = {"policy": "spread", "by": "targets", "step_times_known": True, "unmeasured": {}}
    monkeypatch.setitem(FLEET, "step_times", [learned])
    monkeypatch.setitem(FLEET, "placement", placement)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["fleet", "--control", control, "status", "--verbose"]) == 0
    said = capsys.readouterr().out
    assert "Placement: spread, for TTFT 400 ms, TPOT 30 ms" in said
    times = (
        r"Step times of cpu TP1: in use since \d\d:\d\d:\d\d, recent error 4\.12 %; source: learned from 893"
    )
    assert re.search(times, said)
    unmeasured = {"TP1": "no step was measured in time"}
    monkeypatch.setitem(FLEET, "placement", placement | {"by": "load", "unmeasured": unmeasured})
    assert main(["fleet", "--control", control, "status"]) == 0
    assert "No step times of TP1: no step was measured in time" in capsys.readouterr().out


def test_status_says_what_the_last_day_cost_over_the_cheapest_or_why_that_is_not_known(
    control: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["fleet", "--control", control, "status"]) == 0
    told = "Cost over the hindsight optimum: unknown: 2026-06-01: [/data] cannot be read\n"
    assert told in capsys.readouterr().out
    share = {"gpus_per_worker": 1, "gpu": "h100", "held": 1, "share": 1, "right": 1, "asked": 1, "needed": 1}
    shown = {name: FLEET[name] for name in ("requests", "lately", "attainment_target", "gap")}
    shares = [share | {"name": "chat"}, share | {"name": "lost", "zone": "east"}]
    models = [shown | {"name": "chat"}]
    for name, value in {"models": models, "shares": shares, "limits": [], "changes": []}.items():
        monkeypatch.setitem(FLEET, name, value)
    assert main(["fleet", "--control", control, "status"]) == 0
    brief = capsys.readouterr().out
    assert brief.splitlines()[0] == "2 models · lost does not answer"
    assert "1 h100, east" in brief
    assert told not in brief
    assert main(["fleet", "--control", control, "status", "--verbose"]) == 0
    assert f"chat: {told}" in capsys.readouterr().out


def test_status_says_by_which_way_kv_moves_and_how_fast(
    control: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pairs = [
        {"source": s, "target": t, "bytes_per_s": 1e9 * n} for s, t, n in (("w0", "w1", 3), ("w1", "w0", 1))
    ]
    moved = {"moves": 12, "bytes_per_s": 2e9, "pause_s": 0.01, "ways": {"memory": 40_000_000}, "pairs": pairs}
    monkeypatch.setitem(FLEET, "transport", moved)
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["fleet", "--control", control, "status", "--verbose"]) == 0
    said = capsys.readouterr().out
    assert "KV transfers: by memory (40 MB), 2.00 GB/s, pause 10 ms in 12 migrations" in said
    assert "slowest: w1 → w0 1.00 GB/s, w0 → w1 3.00 GB/s" in said
    monkeypatch.setitem(FLEET, "transport", moved | {"moves": 1, "bytes_per_s": 2.4e6, "pairs": []})
    assert main(["fleet", "--control", control, "status", "--verbose"]) == 0
    assert (
        "KV transfers: by memory (40 MB), 2.4 MB/s, pause 10 ms in 1 migration\n" in capsys.readouterr().out
    )


def test_status_says_to_how_many_workers_an_operator_scaled(
    control: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"at_s": 1e9, "kind": "scale", "reason": "an operator asked", "before": 2, "workers": 0}
    monkeypatch.setitem(FLEET, "decisions", [asked])
    assert main(["fleet", "--control", control, "status", "--verbose"]) == 0
    assert re.search(r"scale +│ 2 → 0 +│ an operator asked", capsys.readouterr().out)


WORKER: dict[str, Any] = {
    "worker": "w0", "state": "serving", "for_s": 60.0, "requests": 3, "tokens": 900, "telemetry": None,
    "reason": "it is ready"}  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "first"),
    [
        ({}, "m · healthy · 2 of 2 workers (manual scaling, max 8) · 0 running, 0 waiting"),
        ({"met": 98}, "m · missing its SLO · 2 of 2 workers (manual scaling, max 8) · 0 running, 0 waiting"),
        ({"auto": True}, "m · healthy · 2 of 2 workers (autoscaling, max 8) · 0 running, 0 waiting"),
        (
            {"auto": True, "autoscale": BOUNDS | {"min_workers": 1, "max_workers": 2}},
            "m · healthy · 2 of 2 workers (autoscaling, 1 to 2) · 0 running, 0 waiting",
        ),
        (
            {"auto": True, "autoscale": BOUNDS | {"min_workers": 2, "max_workers": 2}},
            "m · healthy · 2 of 2 workers (autoscaling, always 2) · 0 running, 0 waiting",
        ),
        ({"serving": 1}, "m · degraded · 1 of 2 workers (manual scaling, max 8) · 0 running, 0 waiting"),
        ({"serving": 0}, "m · down · 0 of 2 workers (manual scaling, max 8) · 0 running, 0 waiting"),
        (
            {"serving": 0, "wanted_workers": 0, "auto": True},
            "m · no workers · 0 of 0 workers (autoscaling, max 8) · 0 running, 0 waiting",
        ),
    ],
)
def test_status_begins_with_the_fleets_health_and_its_last_minutes(
    control: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    first: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    lately = FLEET["lately"] | {"finished": 100, "failed": 2, "tokens_per_s": 2100.0, "over_s": 300.0}
    lately |= {"ttft_s": {"p50": 0.1, "p90": 0.31}, "tpot_s": {"p50": 0.02, "p90": 0.035}}
    lately |= {"attainment": {"both": {"met": changes.get("met", 100), "of": 100}}}
    workers = [WORKER | {"worker": f"w{i}"} for i in range(changes.get("serving", 2))]
    view = {"lately": lately, "workers": workers, **changes}
    for name in ("lately", "workers", "auto", "autoscale", "wanted_workers"):
        if name in view:
            monkeypatch.setitem(FLEET, name, view[name])
    assert main(["fleet", "--control", control, "status"]) == 0
    head, last, *rest = capsys.readouterr().out.splitlines()
    assert head == first
    share = "98 %" if "met" in changes else "100 %"
    counts = "100 done, 2 failed, 2,100 tok/s, TTFT p90 310 ms, TPOT p90 35 ms"
    assert last == f"Last 5 min: {share} in SLO (target 99 %), {counts}"
    assert not any(line.startswith("Placement") for line in rest)
    assert main(["fleet", "--control", control, "status", "--verbose"]) == 0
    assert "Placement: spread+migrate, by load alone" in capsys.readouterr().out


def test_status_says_the_floor_why_and_until_when(
    control: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    until = datetime(2024, 5, 3, 15, tzinfo=UTC).timestamp()
    floor = {"workers": 3, "why": "the plan's schedule", "until_unix_s": until, "then_workers": 5}
    monkeypatch.setitem(FLEET, "auto", True)
    monkeypatch.setitem(FLEET, "autoscale", BOUNDS | {"floor": floor})
    assert main(["fleet", "--control", control, "status"]) == 0
    line = "Floor: at least 3 workers until Friday 15:00 UTC, then 5 (the plan's schedule)"
    assert line in capsys.readouterr().out.splitlines()
    monkeypatch.setitem(FLEET, "autoscale", BOUNDS | {"floor": floor | {"until_unix_s": None}})
    assert main(["fleet", "--control", control, "status"]) == 0
    assert "Floor: at least 3 workers (the plan's schedule)" in capsys.readouterr().out.splitlines()
    for changes in ({"autoscale": BOUNDS}, {"autoscale": BOUNDS | {"floor": floor}, "auto": False}):
        for name, value in changes.items():
            monkeypatch.setitem(FLEET, name, value)
        assert main(["fleet", "--control", control, "status"]) == 0
        assert "Floor" not in capsys.readouterr().out


def test_status_calls_the_last_day_yesterday(
    control: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    yesterday = (datetime.now(UTC) - timedelta(days=1)).strftime("%Y-%m-%d")
    costs = "48.00 GPU-hours, 17 % above the hindsight optimum of 41.20 GPU-hours"
    line = f"{yesterday} (UTC, 24 h): {costs}"
    monkeypatch.setitem(FLEET, "gap", {"line": line, "day": {"day": yesterday}})
    assert main(["fleet", "--control", control, "status"]) == 0
    assert f"Yesterday (UTC, 24 h): {costs}\n" in capsys.readouterr().out


def test_explain_begins_with_the_fleets_size_or_the_requests_place(
    control: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fleet", "--control", control, "explain"]) == 0
    assert capsys.readouterr().out.startswith("Desired: 2 workers (manual scaling, max 8)\n")


def test_explain_names_lost_workers_where_the_desired_number_has_not_changed(
    control: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setitem(FLEET, "scaling", [])
    monkeypatch.setitem(FLEET, "losses", [DECIDED[17]])
    assert main(["fleet", "--control", control, "explain"]) == 0
    _, title, *lines = capsys.readouterr().out.splitlines()
    assert (title.strip(), lines[-2]) == ("Lost workers", "The desired number of workers has not changed.")
    assert [cell.strip() for cell in lines[3].split("│")[2:-1]] == ["lost", "w0", "its process is gone"]


def test_explain_names_the_last_change_point_and_what_it_did(
    control: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = {"rate_rps": 9.0, "before_rps": 3.25, "changed_s_ago": 40.0}
    later = {**SCALED, "before": 3, "workers": 4, "seen": {"rate_rps": 9.0}}  # by no change point
    monkeypatch.setitem(FLEET, "scaling", [{**SCALED, "seen": {**SCALED["seen"], **seen}}, later])
    assert main(["fleet", "--control", control, "explain"]) == 0
    _, second, *_ = capsys.readouterr().out.splitlines()
    assert second == "Last change point: 3.25 to 9 req/s; 40 s later 1 → 3 workers"


def test_what_is_asked_of_no_request_or_of_another_address_says_what_to_do(
    control: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fleet", "--control", control, "explain", ""]) == 2
    assert "expected a request's id" in capsys.readouterr().err
    assert main(["fleet", "--control", control, "--model", "chat", "drain", "w0"]) == 2
    assert f"--model: {control} is the control API of one fleet" in capsys.readouterr().err
    assert main(["fleet", "--control", f"{control}/x", "drain", "w0"]) == 2
    assert f"--control: {control}/x is no control API of a fleet" in capsys.readouterr().err


@pytest.mark.parametrize(
    "said",
    [
        b"SSH-2.0-x\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n\r\n<html>",
        b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{",
    ],
)
def test_what_is_no_control_api_is_told_in_one_line(said: bytes, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def answer() -> None:
            taken, _ = listening.accept()
            with taken:
                taken.recv(65536)
                taken.sendall(said)

        thread = threading.Thread(target=answer)
        thread.start()
        address = f"http://127.0.0.1:{listening.getsockname()[1]}"
        assert main(["fleet", "--control", address, "status"]) == 2
        thread.join()
    assert capsys.readouterr().err.startswith(f"error: --control: {address} does not answer (")
    assert main(["fleet", "--control", "http://[::1", "status"]) == 2


LOAD = {
    "running": 2, "waiting": 1, "kv_used_blocks": 30, "kv_total_blocks": 100, "step_s": 0.02, "preemptions": 0
}  # fmt: skip


@pytest.mark.parametrize(
    ("hit", "loaded", "expected", "says"),
    [
        (50, 0, 50, "50 %"),
        (50, 0, 40, "50 %, predicted 40 %"),
        (50, 30, 50, "50 %, 30 % from host"),
        (0, 0, 0, "0 %"),
        (None, 0, 0, "–"),
    ],
)
def test_the_table_of_workers_has_what_each_had_of_prompts_and_its_load(
    control: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    hit: int | None,
    loaded: int,
    expected: int,
    says: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    tokens = {"queried": 0 if hit is None else 100, "hit": hit or 0, "loaded": loaded, "expected": expected}
    told = WORKER | {"prefix_tokens": tokens | {"ideal": 60}, "telemetry": LOAD, "block_tokens": 16}
    monkeypatch.setitem(FLEET, "workers", [told | {"host": "::1"}, WORKER | {"worker": "w1"}])
    assert main(["fleet", "--control", control, "status", "--verbose"]) == 0
    head, busy, new = (
        line for line in capsys.readouterr().out.splitlines() if line.startswith(("worker ", "w0 ", "w1 "))
    )
    named = "worker state for running waiting KV in use tokens prefix hits step preempted"
    assert head.split() == named.split()
    assert busy.split()[:9] == ["w0", "serving", "60", "s", "2", "1", "30", "%", "900"]
    assert says in busy
    assert new.split()[4:] == ["3", "–", "–", "900", "–", "–", "–"]


def test_a_worker_and_a_move_are_told_in_the_same_words_to_every_reader() -> None:
    load = {"running": 2, "waiting": 1, "kv_used_blocks": 30, "kv_total_blocks": 100, "step_s": 0.02}
    worker = WORKER | {"telemetry": load | {"preemptions": 0}, "block_tokens": 16, "silent": True}
    move = {
        "request_id": "r1",
        "mode": "live",
        "outcome": "copying",
        "stages_tokens": [512, 80],
        "bytes": 30300,
    }
    move |= {"source": None, "target": "w1", "cached_tokens": 92, "why": "w0 is full"}
    says = fleet_words(FLEET | {"workers": [worker], "moving": [move]})
    assert says["workers"][0]["state"] == "unresponsive"
    assert says["workers"][0]["kv_note"] == "30 % of 1,600 tokens"
    assert says["moving"] == [
        "the queue → w1: request r1, live, copying, 500 tokens copied so far, 29.6 KiB; w0 is full"
    ]
