"""`--since`: what a fleet has served of late as a trace, or one line that says why not."""

import json
import time

import pytest
from made_history import row, written

from controlplane.errors import BadInput
from tokenfleet.cli.main import main
from tokenfleet.service.forks import KEPT_FORKS, asked_traces, fork
from tokenfleet.traces import read_trace

NOW_S = 1_780_010_000.0


def served(data, count, first_s=NOW_S - 3000, every_s=5.0, **changes):
    rows = [row(i, arrival_s=first_s + every_s * i, prompt_tokens=100) | changes for i in range(count)]
    written(data / "history", rows)


def test_the_last_hour_is_a_trace_with_its_times_lengths_and_priorities(tmp_path):
    served(tmp_path, 400)
    forked = fork(tmp_path, "40m", NOW_S, tmp_path / "forks")
    trace = read_trace(forked.path)
    assert (len(trace), trace.workload.rate_rps, trace.clock_start_s) == (280, 0.2, NOW_S - 2400)
    assert set(trace.workload.prompt_tokens) == {100}
    assert forked.warnings == ()


def test_requests_without_a_length_are_counted_and_said(tmp_path):
    served(tmp_path, 200)
    served(tmp_path, 30, outcome="rejected", output_tokens=0, ttft_s=None)
    forked = fork(tmp_path, "1h", NOW_S, tmp_path / "forks")
    assert len(read_trace(forked.path)) == 200
    assert "30 of 230 requests got no token" in forked.warnings[0]


def test_a_history_shorter_than_asked_says_when_it_begins(tmp_path):
    served(tmp_path, 200)
    assert "it begins 50 min ago" in fork(tmp_path, "7d", NOW_S, tmp_path / "forks").warnings[0]


@pytest.mark.parametrize(
    ("count", "every_s", "since", "says"),
    [
        (99, 5.0, "1h", "has 99 requests over 8.17 min of that time; a plan needs at least 100 over 60 s"),
        (500, 0.1, "1h", "has 500 requests over 49.9 s"),
        (400, 5.0, "10s", "has 0 requests over 0 ms"),
        (400, 5.0, "1", "has no unit"),
        (400, 5.0, "0s", "must be positive"),
    ],
)
def test_too_little_is_refused_plainly_and_nothing_is_written(tmp_path, count, every_s, since, says):
    served(tmp_path, count, every_s=every_s)
    with pytest.raises(BadInput) as refused:
        fork(tmp_path, since, NOW_S, tmp_path / "forks")
    assert (says in str(refused.value), "\n" in str(refused.value)) == (True, False)
    assert not (tmp_path / "forks").exists()


def test_a_history_of_two_models_is_refused(tmp_path):
    served(tmp_path, 200)
    served(tmp_path, 200, model="other")
    with pytest.raises(BadInput, match="history of m, other"):
        fork(tmp_path, "1h", NOW_S, tmp_path / "forks")


def test_a_folder_without_history_says_how_to_record_one(tmp_path):
    with pytest.raises(BadInput, match="has no history; `tokenfleet serve --data"):
        fork(tmp_path, "1h", NOW_S, tmp_path / "forks")


def test_either_a_trace_or_history_is_asked_for(tmp_path):
    for trace, since, data in ((None, None, None), ([tmp_path], "1h", None), ([tmp_path], None, tmp_path)):
        with pytest.raises(BadInput, match=r"--trace|--since"):
            asked_traces(trace, since, data)


def test_only_the_newest_forks_are_kept(tmp_path):
    served(tmp_path, 200, first_s=time.time() - 2000)
    (tmp_path / "forks").mkdir()
    for i in range(KEPT_FORKS + 5):
        (tmp_path / "forks" / f"last-{i}.parquet").touch()
    (path,), _ = asked_traces(None, "1h", tmp_path)
    kept = list((tmp_path / "forks").iterdir())
    assert (len(kept), path in kept) == (KEPT_FORKS, True)


def test_the_verbs_plan_from_history(tmp_path, capsys):
    served(tmp_path, 300, first_s=time.time() - 1600)
    asked = [
        "--since", "1h", "--data", str(tmp_path), "--model", "llama-3.1-8b", "--gpu", "h100", "--tp", "1",
        "--slo", "ttft=1s,tpot=50ms", "--attainment", "0.9", "--confidence", "0.6", "--format", "json",
    ]  # fmt: skip
    assert main(["plan", *asked]) == 0
    plan = json.loads(capsys.readouterr().out)
    assert plan["inputs"]["requests"] == 300
    assert main(["whatif", *asked, "--no-cache", "--jobs", "1", "--vary", "rate=1,2"]) == 0
    grid = json.loads(capsys.readouterr().out)
    assert grid["scenarios"][0]["plan"]["inputs"]["requests"] == 300
    assert main(["plan", *asked[:1], "10s", *asked[2:]]) == 2
    assert "a plan needs at least" in capsys.readouterr().err


def test_a_fork_carries_the_sessions_and_prefixes_that_a_history_keeps(tmp_path):
    ids = [2**63 + k for k in range(4)]
    rows = [
        row(i, arrival_s=NOW_S - 3000 + 5 * i, prompt_tokens=256, output_tokens=2, ttft_s=1.0, tpot_s=0.5)
        | {"session": str(i % 3), "hash_ids": [*ids[: 1 + i % 3], 7 + i], "block_tokens": 64}
        for i in range(400)
    ]
    written(tmp_path / "history", rows)
    load = read_trace(fork(tmp_path, "1h", NOW_S, tmp_path / "forks").path).workload
    assert load.prefixes.block_tokens == 64
    assert [len(load.prefixes.of(r)) for r in range(3)] == [1, 2, 3]
    assert set(load.prefixes.of(2)[:2]) == set(load.prefixes.of(1))
    assert load.sessions.session[:4].tolist() == [0, 1, 2, 0]
    assert load.sessions.before.tolist() == list(range(397))
    assert set(load.sessions.think_s[3:].tolist()) == {13.5}
