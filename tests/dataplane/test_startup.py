"""Compiled kernels on disk: imports of the core touch no file, and a process that asks keeps its kernels."""

import os
import subprocess
import sys

import pytest
from checkout import ROOT

WATCH = """
import importlib, os, pkgutil, sys

FORBIDDEN = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.symlink", "os.link", "shutil.rmtree",
             "tempfile.mkdtemp", "tempfile.mkstemp", "subprocess.Popen", "os.fork", "socket.connect"}

def watch(event, arguments):
    writes = event == "open" and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    if (writes and arguments[0] != os.devnull) or event in FORBIDDEN:
        raise SystemExit(f"{event} {arguments}")

sys.addaudithook(watch)
import controlplane, dataplane.simulated
for package in (controlplane, dataplane.simulated):
    for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        importlib.import_module(module.name)
"""


def python(code, home, **more):
    env = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"} | {"HOME": str(home), **more}
    return subprocess.run(
        [sys.executable, "-B", "-c", code], cwd=ROOT, env=env, capture_output=True, text=True
    )


def test_importing_the_core_writes_no_file_and_starts_no_process(tmp_path):
    said = python(WATCH, tmp_path)
    assert said.returncode == 0, said.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("loaded_first", [False, True])
def test_a_process_that_asks_keeps_its_kernels_whenever_they_were_loaded(tmp_path, loaded_first):
    imports = "from controlplane.placement.lengths import expected_output" if loaded_first else ""
    code = f"""
{imports}
from dataplane.startup import use_kernel_cache
use_kernel_cache()
import numpy as np
from controlplane.perfmodel.coefficients import decode_base_s
from controlplane.placement.lengths import expected_output
decode_base_s(np.zeros(64), 1.0)
print(expected_output._cache.cache_path)
"""
    said = python(code, tmp_path)
    (folder,) = (tmp_path / ".cache" / "tokenfleet").iterdir()
    assert said.stdout.startswith(str(folder)), said.stderr
    assert [path.suffix for path in sorted(folder.rglob("*decode_base_s*"))] == [".nbc", ".nbi"]


def test_only_the_newest_folders_stay(tmp_path):
    kept = tmp_path / ".cache" / "tokenfleet"
    for age in range(8):
        (kept / f"kernels-{age}").mkdir(parents=True)
        os.utime(kept / f"kernels-{age}", (1000 - age, 1000 - age))
    assert python("from dataplane.startup import use_kernel_cache as use; use()", tmp_path).returncode == 0
    old = sorted(path.name for path in kept.iterdir() if len(path.name) < 20)
    assert old == ["kernels-0", "kernels-1", "kernels-2", "kernels-3"]


def test_without_a_home_kernels_are_kept_for_this_process_alone(tmp_path):
    (tmp_path / "file").write_text("no folder")
    code = """
import os
from dataplane.startup import use_kernel_cache
use_kernel_cache()
print(os.environ["NUMBA_CACHE_DIR"])
"""
    said = python(code, tmp_path / "file", TMPDIR=str(tmp_path))
    assert said.stdout.startswith(str(tmp_path / "tokenfleet-kernels-")), said.stderr
