"""Output lengths that a gateway has learned outlive it, however it ended."""

import json
import signal
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
from checkout import ROOT
from made_history import row, written

from controlplane.types import Slo
from dataplane.history import files
from dataplane.history.files import Digests, HistoryLimits, last_lengths, read_history
from dataplane.live.gateway.history import History
from dataplane.live.ledger.request import Ticket, Tracked

KILLED = """
import json, os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from controlplane.types import Slo
from dataplane.live.gateway.history import History
from dataplane.live.ledger.request import Ticket, Tracked

history = History(256.0, Path(sys.argv[1]), "m")
for prompt, output in json.load(sys.stdin):
    request = SimpleNamespace(request_id="r", prompt_token_ids=[1] * prompt, sampling_params=None)
    tracked = Tracked(request, Ticket("", "", Slo(1.0, 0.1), 0), 0.0, 1, output_token_ids=[7] * output)
    history.add(tracked, "finished")
history._requests._thread.submit(int).result()
print(json.dumps([history.expected_tokens(prompt) for prompt in (1, 50, 500, 2000)]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_killed_gateways_successor_predicts_the_first_requests_as_it_did(tmp_path):
    rng = np.random.default_rng(0)
    served = [(p, p // 2 + 3) for p in rng.integers(1, 1000, 650).tolist()]  # learned at 50, 250, 450, 650
    ended = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path)],
        input=json.dumps(served), capture_output=True, text=True, cwd=ROOT, check=False,
    )  # fmt: skip
    assert ended.returncode == -signal.SIGKILL
    before = json.loads(ended.stdout)
    again = History(256.0, tmp_path, "m")
    assert [again.expected_tokens(prompt) for prompt in (1, 50, 500, 2000)] == before
    assert before[0] < 100 < 200 < before[2]
    again.close()
    other = History(256.0, tmp_path, "another model")
    assert other.expected_tokens(50) == 256
    other.close()


def test_a_start_reads_the_latest_requests_and_no_more_than_it_is_allowed(tmp_path, monkeypatch):
    rows = [row(i, outcome="aborted" if i % 10 == 3 else "finished") for i in range(100)]
    written(tmp_path, rows, HistoryLimits(segment_rows=20))
    whole = last_lengths(tmp_path, "m", 1000)["prompt_tokens"].to_list()
    assert whole == [10 + i for i in range(100) if i % 10 != 3]
    assert last_lengths(tmp_path, "m", 30)["prompt_tokens"].to_list() == whole[-30:]
    with monkeypatch.context() as fewer:
        fewer.setattr(files, "LAST_FILES", 2)
        assert last_lengths(tmp_path, "m", 1000)["prompt_tokens"].to_list() == whole[-36:]
    for path in sorted(tmp_path.glob("*.parquet"))[:1]:
        path.write_bytes(b"torn")
    assert last_lengths(tmp_path, "m", 1000)["prompt_tokens"].to_list() == whole[18:]
    assert len(last_lengths(tmp_path / "none", "m", 10)) == 0


def ended(tokens, output=(), session="", arrival_s=0.0):
    request = SimpleNamespace(request_id="r", prompt_token_ids=list(tokens), sampling_params=None)
    ticket = Ticket("", "", Slo(1.0, 0.1), 0, session=session)
    return Tracked(request, ticket, arrival_s, 1, output_token_ids=list(output))


def test_rows_say_in_digests_what_requests_share_where_it_is_asked_for(tmp_path):
    history = History(256.0, tmp_path, "m", prefixes=True)
    prompt = list(range(200))
    for i, one in enumerate(
        (
            (prompt, range(200, 260), "amy"),
            ([*prompt, *range(200, 260), *range(900, 1000)], [1], "amy"),
            ([*range(64), *range(70, 140)], [1], "bob"),
            ([5, *range(1, 64)], [1]),
        )
    ):
        history.add(ended(*one, arrival_s=float(i)), "finished")
    history.close()
    rows = read_history(tmp_path / "history", 0, float("inf"))
    one, two, three, four = rows["hash_ids"].to_list()
    assert [len(one), len(two), len(three), len(four)] == [4, 5, 2, 1]
    assert two[:4] == one
    assert (three[0] == one[0], three[1] == one[1], four[0] == one[0]) == (True, False, False)
    sessions = rows["session"].to_list()
    assert (sessions[0] == sessions[1] != sessions[2], sessions[3]) == (True, None)
    everything = b"".join(path.read_bytes() for path in (tmp_path / "history").iterdir())
    assert b"amy" not in everything
    assert (tmp_path / "history" / "salt").stat().st_mode & 0o777 == 0o600
    # The same requests elsewhere have other digests; a fleet that begins anew here has the same.
    elsewhere, again = Digests(tmp_path / "other"), Digests(tmp_path / "history")
    assert not set(elsewhere.blocks(prompt)) & set(one)
    assert again.blocks(prompt) == one[:3]


def test_a_history_says_nothing_of_prefixes_unasked(tmp_path):
    history = History(256.0, tmp_path, "m")
    history.add(ended(range(200), [1], "amy"), "finished")
    history.close()
    (kept,) = read_history(tmp_path / "history", 0, float("inf")).to_dicts()
    assert (kept["session"], kept["hash_ids"], kept["block_tokens"]) == (None, None, None)
    assert not (tmp_path / "history" / "salt").exists()
