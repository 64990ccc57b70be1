"""Leftovers of a killed worker: found by process, and removed."""

import subprocess
import sys
from dataclasses import dataclass
from multiprocessing.shared_memory import SharedMemory

import pytest

from controlplane.errors import BadInput
from dataplane.live.engine_api.processes import Record, descendants, shared_memory, unlink


@dataclass(frozen=True)
class Share:
    workers: int
    reason: str


WAITS = "import sys; print('up', flush=True); sys.stdin.read()"


def test_descendants_are_found_and_gone_ones_are_not():
    child = subprocess.Popen([sys.executable, "-c", WAITS], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert child.stdout.readline() == b"up\n"
    assert child.pid in descendants()
    child.communicate()
    assert child.pid not in descendants()


def test_the_shared_memory_of_a_process_is_found_and_removed():
    import os

    memory = SharedMemory(create=True, size=64)
    mine = {path.name for path in shared_memory([os.getpid()])}
    assert memory.name in mine
    found = [path for path in shared_memory([os.getpid()]) if path.name == memory.name]
    unlink(found)
    assert not found[0].exists()
    unlink(found)  # twice is no error
    memory.close()
    SharedMemory(memory.name, create=True, size=64).unlink()  # the name is free again


def test_a_record_that_cannot_be_written_does_not_end_what_serves(tmp_path, caplog):
    record = Record(tmp_path / "gone" / "record.json")
    record.note(wanted=3)
    assert "a successor of this core would not know wanted: " in caplog.text


def test_a_successor_reads_a_record_by_its_fields_and_refuses_that_of_another_version(tmp_path):
    file = tmp_path / "record.json"
    Record(file).note(share=Share(3, "an operator asked"), auto=True)
    assert Record(file).part("share", Share) == Share(3, "an operator asked")
    assert Record(file).part("pool", Share) is None
    file.write_text('{"pool": {"members": {"w0": ["TP1", "serving", "", 1, null, false]}}}')
    with pytest.raises(BadInput) as refused:
        Record(file).part("pool", Share)
    assert str(refused.value) == f"{file}: version: expected 3, got 1; start the fleet again"
