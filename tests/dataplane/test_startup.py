"""Compiled kernels on disk: imports of the core touch no file, and a process that asks keeps its kernels."""

import fcntl
import gc
import os
import re
import subprocess
import sys
import tarfile
from contextlib import suppress
from importlib.metadata import packages_distributions

import pytest
from checkout import ROOT

from dataplane.startup import PACKED, kernel_digest, loading, unpacked

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


# Kernels are compiled, as where a checkout has none packed.
BARE = "from pathlib import Path; from dataplane import startup; startup.PACKED = Path('none')\n"


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
    code = f"""{BARE}
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


FOLDER = """
import os
from dataplane.startup import use_kernel_cache
use_kernel_cache()
print(os.environ["NUMBA_CACHE_DIR"])
"""


def test_without_a_home_all_processes_of_a_user_share_a_private_folder(tmp_path):
    (tmp_path / "file").write_text("no folder")
    said = [python(FOLDER, tmp_path / "file", TMPDIR=str(tmp_path)) for _ in range(2)]
    private = tmp_path / f"tokenfleet-{os.getuid()}"
    assert said[0].stdout == said[1].stdout, said[0].stderr
    assert said[0].stdout.startswith(str(private / "kernels-")), said[0].stderr
    assert private.stat().st_mode & 0o777 == 0o700


def test_a_temporary_folder_that_others_can_enter_is_not_used(tmp_path):
    (tmp_path / "file").write_text("no folder")
    (tmp_path / f"tokenfleet-{os.getuid()}").mkdir(mode=0o777)
    (tmp_path / f"tokenfleet-{os.getuid()}").chmod(0o777)
    said = python(FOLDER, tmp_path / "file", TMPDIR=str(tmp_path))
    assert said.stdout.startswith(str(tmp_path / "tokenfleet-")), said.stderr
    assert f"tokenfleet-{os.getuid()}/" not in said.stdout


# Calls one kernel, and tells whether it was compiled, and whether it was loaded.
LOAD = """
from dataplane import startup
startup.use_kernel_cache()
import numpy as np
from controlplane.perfmodel.coefficients import decode_base_s
print("ready", flush=True)
decode_base_s(np.zeros(64), 1.0)
print(sum(decode_base_s._cache_misses.values()), sum(decode_base_s._cache_hits.values()))
"""
CALL = BARE + LOAD


def test_the_packed_kernels_are_those_of_the_sources():
    packed = list((ROOT / "deploy").glob("kernels-*.tar.xz"))
    assert packed, "deploy/ has no packed kernels: run `make pack-kernels` and commit the archive"
    for path in packed:
        with tarfile.open(path) as archive:
            names = {name.partition("/")[0] for name in archive.getnames()}
        assert names == {f"kernels-{kernel_digest()}"}, (
            f"{path.name} is of other sources: run `make pack-kernels` and commit the archive"
        )


def test_packing_removes_what_is_of_other_sources(tmp_path):
    for name, folder in (("of-these", f"kernels-{kernel_digest()}"), ("of-others", "kernels-0")):
        with tarfile.open(tmp_path / f"kernels-{name}.tar.xz", "w:xz") as archive:
            member = tarfile.TarInfo(folder)
            member.type = tarfile.DIRTYPE
            archive.addfile(member)
    here = f"startup.PACKED = Path({str(tmp_path / 'kernels-none.tar.xz')!r})\n"
    done = python(f"{BARE}{here}from deploy.ship_kernels import remove_stale\nremove_stale()", tmp_path)
    stale = tmp_path / "kernels-of-others.tar.xz"
    assert done.stdout == f"{stale}: removed: it is stale, and this machine cannot pack it\n", done.stderr
    assert [path.name for path in tmp_path.glob("*.xz")] == ["kernels-of-these.tar.xz"]


@pytest.mark.skipif(not PACKED.exists(), reason=f"needs {PACKED.name}")
def test_a_checkout_unpacks_its_kernels_and_compiles_none(tmp_path):
    done = python(LOAD, tmp_path)
    assert (done.stdout, done.stderr) == ("ready\n0 1\n", "")
    (folder,) = (tmp_path / ".cache" / "tokenfleet").iterdir()  # nothing but the folder stays
    assert list(folder.glob("dataplane.simulated.cluster/cluster.advance-*.nbc"))


@pytest.mark.parametrize("size", [0, 100, 200_000])
def test_packed_kernels_that_cannot_be_read_are_told_and_compiled(tmp_path, size):
    cut = tmp_path / "cut.tar.xz"
    folder = tmp_path / "folder" / f"kernels-{kernel_digest()}"
    folder.mkdir(parents=True)
    (folder / "one.nbc").write_bytes(os.urandom(300_000))
    with tarfile.open(cut, "w:xz") as archive:
        archive.add(folder, folder.name)
    os.truncate(cut, size)
    done = python(f"{BARE}startup.PACKED = Path({str(cut)!r}){LOAD}", tmp_path)
    assert done.stdout == "ready\n1 0\n"
    assert re.fullmatch(rf"{cut}: cannot be read \(.+\); the simulator is compiled instead\n", done.stderr)
    (kept,) = (tmp_path / ".cache" / "tokenfleet").iterdir()
    assert not (kept / "one.nbc").exists()


@pytest.mark.parametrize("name", ["../outside", "link"])
def test_packed_kernels_lie_within_their_folder(tmp_path, name):
    into = tmp_path / "into"
    into.mkdir()
    member = tarfile.TarInfo(f"kernels-1/../{name}")
    if name == "link":
        member = tarfile.TarInfo("kernels-1/link")
        member.type, member.linkname = tarfile.SYMTYPE, "/etc/passwd"
    folder = tarfile.TarInfo("kernels-1")
    folder.type = tarfile.DIRTYPE
    with tarfile.open(tmp_path / "packed.tar.xz", "w:xz") as archive:
        archive.addfile(folder)
        archive.addfile(member)
    assert not unpacked(tmp_path / "packed.tar.xz", "kernels-1", into)
    assert [path.name for path in into.rglob("*")] in ([], ["kernels-1"])
    assert not (tmp_path / "outside").exists()


def test_kernels_that_a_wheel_brings_for_every_cpu_are_loaded_not_compiled(tmp_path):
    built, bought = tmp_path / "built", tmp_path / "bought"
    assert python(CALL, built, NUMBA_CPU_NAME="generic").stdout == "ready\n1 0\n"
    shipped = built / ".cache" / "tokenfleet"
    brought = f"startup._SHIPPED = Path({str(shipped)!r})\nstartup.use"
    assert python(CALL.replace("startup.use", brought), bought).stdout == "ready\n0 1\n"
    here, there = ({path.name for path in of.rglob("*.nbc")} for of in (bought, built))
    assert here == there


def test_a_kernel_that_two_processes_need_is_compiled_once(tmp_path):
    assert python(BARE + FOLDER, tmp_path).returncode == 0
    (folder,) = (tmp_path / ".cache" / "tokenfleet").iterdir()
    env = {k: v for k, v in os.environ.items() if k != "NUMBA_CACHE_DIR"} | {"HOME": str(tmp_path)}
    with open(folder / "compiling", "a") as turn:
        fcntl.flock(turn, fcntl.LOCK_EX)  # both wait until both need it
        both = [
            subprocess.Popen(
                [sys.executable, "-B", "-c", CALL], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True
            )
            for _ in range(2)
        ]
        for process in both:
            assert process.stdout.readline() == "ready\n"
    assert sorted(process.communicate()[0] for process in both) == ["0 1\n", "1 0\n"]


def test_a_folder_that_cannot_be_written_to_only_costs_the_compilation(tmp_path):
    code = CALL.replace("startup.use_kernel_cache()", "")
    assert python(code, tmp_path, NUMBA_CACHE_DIR="/proc/self").stdout == "ready\n1 0\n"


def test_the_simulator_is_known_to_be_on_disk_once_it_was_compiled(tmp_path):
    told = f"{BARE}print(startup.has_simulator())"
    assert python(told, tmp_path).stdout == "False\n"
    (folder,) = (tmp_path / ".cache" / "tokenfleet").iterdir()
    kept = folder / "dataplane.simulated.cluster"
    kept.mkdir()
    (kept / "cluster.advance-28.py311.1.nbc").touch()
    assert python(told, tmp_path).stdout == "True\n"


def test_the_simulator_needs_no_package_but_those_that_make_installs_before_it_compiles():
    (early,) = re.findall(r"PINS\) (numba .*)", (ROOT / "Makefile").read_text())
    allowed = {*early.split(), "yaml", "llvmlite", "controlplane", "dataplane"}  # pyyaml's, numba's, ours
    refused = {name for name in packages_distributions() if name not in allowed and not name.startswith("_")}
    code = f"""
import runpy, sys

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {sorted(refused)!r}:
            raise ImportError(name)

sys.meta_path.insert(0, Refuse())
runpy.run_path("deploy/compile_simulator.py", run_name="__main__")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("is_on", [True, False])
def test_nothing_is_collected_while_modules_load_and_all_is_as_before_once_they_have(is_on):
    was_on = gc.isenabled()
    try:
        (gc.enable if is_on else gc.disable)()
        with suppress(ImportError), loading():
            seen = gc.isenabled()
            raise ImportError("a module that is not there")
        assert (seen, gc.isenabled()) == (False, is_on)
    finally:
        (gc.enable if was_on else gc.disable)()


def test_what_was_loaded_is_not_looked_through_again():
    with loading():
        loaded = [{}]
    assert not any(one is loaded for one in gc.get_objects())


@pytest.mark.parametrize(
    ("named", "said"),
    [
        ("", "warning: TP1: a cause\nerror: a fault\na line\n"),
        (
            "named=True",
            "WARNING dataplane.live: TP1: a cause\nERROR dataplane.live: a fault\n"
            "INFO dataplane.live: a line\n",
        ),
    ],
)
def test_warnings_are_logged_as_commands_print_them(named, said, tmp_path):
    code = f"""
import logging
from dataplane.startup import log_to_stderr
log_to_stderr({named})
log = logging.getLogger("dataplane.live")
log.setLevel("INFO")
log.warning("%s: a cause", "TP1")
log.error("a fault")
log.info("a line")
"""
    assert python(code, tmp_path).stderr == said
