"""What a gateway has learned of output lengths outlives it, however it ended."""

import json
import signal
import subprocess
import sys

import numpy as np
from checkout import ROOT
from made_history import row, written

from dataplane.history.files import HistoryLimits, last_lengths
from dataplane.live.gateway.history import History

KILLED = """
import json, os, signal, sys
from pathlib import Path
from types import SimpleNamespace
from controlplane.types import Slo
from dataplane.live.gateway.history import History
from dataplane.live.gateway.request import Ticket, Tracked

history = History(256.0, Path(sys.argv[1]), "m")
for prompt, output in json.load(sys.stdin):
    request = SimpleNamespace(request_id="r", prompt_token_ids=[1] * prompt, sampling_params=None)
    tracked = Tracked(request, Ticket("", "", Slo(1.0, 0.1), 0), 0.0, 1, output_token_ids=[7] * output)
    history.add(tracked, "finished")
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


def test_a_start_reads_the_latest_requests_and_no_more_than_it_is_allowed(tmp_path):
    rows = [row(i, outcome="aborted" if i % 10 == 3 else "finished") for i in range(100)]
    written(tmp_path, rows, HistoryLimits(segment_rows=20))
    whole = last_lengths(tmp_path, "m", 1000)["prompt_tokens"].to_list()
    assert whole == [10 + i for i in range(100) if i % 10 != 3]
    assert last_lengths(tmp_path, "m", 30)["prompt_tokens"].to_list() == whole[-30:]
    assert last_lengths(tmp_path, "m", 1000, files=2)["prompt_tokens"].to_list() == whole[-36:]
    for path in sorted(tmp_path.glob("*.parquet"))[:1]:
        path.write_bytes(b"torn")
    assert last_lengths(tmp_path, "m", 1000)["prompt_tokens"].to_list() == whole[18:]
    assert len(last_lengths(tmp_path / "none", "m", 10)) == 0
