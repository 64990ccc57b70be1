"""Request history on disk: every row is read once, also after kills; no more is kept than allowed."""

import json
import os
import subprocess
import sys
import threading
import time

import polars as pl
import pytest
from by_day import examples
from checkout import ROOT
from hypothesis import given
from hypothesis import strategies as st
from made_history import NOON_S, row, written

from dataplane.history import files
from dataplane.history.files import SCHEMA, HistoryLimits, HistoryWriter, let_go, pack, read_history
from tokenfleet.traces import read_trace


def prompts(folder, start_s=0.0, end_s=float("inf")):
    return read_history(folder, start_s, end_s)["prompt_tokens"].to_list()


def test_what_was_written_is_packed_and_read_back_with_every_column(tmp_path):
    rows = [row(i, ttft_s=None if i == 3 else 0.5) for i in range(50)]
    written(tmp_path, rows, HistoryLimits(segment_rows=20))
    assert not list(tmp_path.glob("*.jsonl"))
    assert len(list(tmp_path.glob("*.parquet"))) == 3
    assert read_history(tmp_path, 0, float("inf")).to_dicts() == rows


def test_a_window_is_read_from_open_and_packed_segments_alike(tmp_path):
    written(tmp_path, [row(i) for i in range(10)])
    writer = HistoryWriter(tmp_path, HistoryLimits())
    for i in range(10, 20):
        writer.add(row(i))
    while len(prompts(tmp_path)) < 20:
        time.sleep(0.01)
    assert prompts(tmp_path, NOON_S + 5, NOON_S + 15) == list(range(15, 25))
    writer.close()
    assert prompts(tmp_path, NOON_S + 5, NOON_S + 15) == list(range(15, 25))


def test_who_adds_a_row_does_not_wait_for_a_disk_that_stands_still(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(files, "MOST_UNWRITTEN", 5)
    writer, moves = HistoryWriter(tmp_path, HistoryLimits()), threading.Event()

    def stand_still():
        moves.wait(60)

    writer.later(stand_still)
    for i in range(7):  # it would wait here for ever, were it to write itself
        writer.add(row(i))
    assert [record.message.endswith("what follows is left out") for record in caplog.records] == [True]
    moves.set()
    while len(prompts(tmp_path)) < 4:
        time.sleep(0.01)
    writer.add(row(7))
    writer.close()
    assert prompts(tmp_path) == [10, 11, 12, 13, 17]


def test_a_killed_writer_loses_no_row_that_is_written_and_the_next_packs_what_it_left(tmp_path):
    code = (
        "import json, os, sys, signal; from pathlib import Path;"
        "from dataplane.history.files import HistoryWriter, HistoryLimits;"
        "w = HistoryWriter(Path(sys.argv[1]), HistoryLimits());"
        "[w.add(one) for one in json.load(sys.stdin)]; w._thread.submit(int).result();"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    rows = [row(i) for i in range(7)]
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], input=json.dumps(rows), text=True, cwd=ROOT)
    assert len(list(tmp_path.glob("*.jsonl"))) == 1
    written(tmp_path, [row(7)])
    assert not list(tmp_path.glob("*.jsonl"))
    assert prompts(tmp_path) == list(range(10, 18))


@examples(40)
@given(cut=st.integers(0, 2000), killed_after_rename=st.booleans())
def test_a_torn_segment_gives_every_whole_line_once(tmp_path_factory, cut, killed_after_rename):
    folder = tmp_path_factory.mktemp("history")
    path = folder / "requests-1780000000000-1.jsonl"
    lines = "".join(json.dumps(row(i)) + "\n" for i in range(6)).encode()[:cut]
    path.write_bytes(lines)
    whole = lines.count(b"\n")
    assert prompts(folder) == list(range(10, 10 + whole))
    pack(path)
    if killed_after_rename:
        path.write_bytes(lines)
    assert prompts(folder) == list(range(10, 10 + whole))


def test_a_segment_that_is_still_written_is_not_packed_by_another(tmp_path):
    writer = HistoryWriter(tmp_path, HistoryLimits())
    writer.add(row(0))
    (path,) = tmp_path.glob("*.jsonl")
    pack(path)
    assert path.exists()
    writer.close()
    assert prompts(tmp_path) == [10]


def test_old_and_too_many_segments_are_let_go_oldest_first(tmp_path):
    for n in range(5):
        path = tmp_path / f"requests-{n:013d}-1.parquet"
        pl.DataFrame([row(n)], schema=SCHEMA).write_parquet(path)
    size = path.stat().st_size
    now_s = time.time()
    os.utime(tmp_path / f"requests-{1:013d}-1.parquet", (now_s - 3 * 86_400,) * 2)
    let_go(tmp_path, HistoryLimits(keep_days=2, keep_bytes=int(size * 3.5)), now_s)
    assert prompts(tmp_path) == [12, 13, 14]


def test_a_packed_segment_is_a_trace(tmp_path):
    written(tmp_path, [row(i) for i in range(30)])
    (path,) = tmp_path.glob("*.parquet")
    trace = read_trace(path)
    assert (trace.format, len(trace), trace.warnings) == ("history", 30, [])
    assert (trace.clock_start_s, trace.workload.arrival_s[-1]) == (NOON_S, 29.0)
    assert trace.tenants == ("key-0",)


def test_a_full_disk_ends_the_history_and_not_the_request(tmp_path, monkeypatch):
    writer = HistoryWriter(tmp_path, HistoryLimits())

    class Full:
        def write(self, _):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    writer._segment.close()
    monkeypatch.setattr(writer, "_segment", Full())
    writer.add(row(0))
    writer.add(row(1))
    writer.close()


def test_a_folder_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "history").write_text("a file")
    from controlplane.errors import BadInput

    with pytest.raises(BadInput, match=r"--data: .* cannot be written"):
        HistoryWriter(tmp_path / "history", HistoryLimits())


def test_a_segment_of_an_earlier_version_is_read_with_what_it_lacks_as_unknown(tmp_path):
    path = tmp_path / "requests-1780000000000-1.parquet"
    pl.DataFrame([row(0)], schema=SCHEMA).drop("queued_s").write_parquet(path)
    written(tmp_path, [row(1)])
    assert read_history(tmp_path, 0.0, float("inf"))["queued_s"].to_list() == [None, 0.01]
