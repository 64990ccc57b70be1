"""The start of a process: our packages on its path, and compiled kernels on disk, never stale ones.

Numba's own cache notices a change of the file a kernel stands in, not of a kernel that it calls from another
file. So the folder's name carries a digest of every source file that has to do with kernels. A wheel brings a
folder that is filled already, and a checkout brings it packed. The core does no I/O when it is imported: each
process that runs kernels calls `use_kernel_cache` as it begins.
"""

from __future__ import annotations

import gc
import hashlib
import logging
import os
import shutil
import stat
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

_SOURCES = Path(__file__).resolve().parent.parent  # our packages
_SHIPPED = _SOURCES / "tokenfleet" / "_kernels"  # a wheel has it: kernels for every CPU of its architecture
_THIS = f"cp{sys.version_info.major}{sys.version_info.minor}-{sysconfig.get_platform()}"
PACKED = _SOURCES / "deploy" / f"kernels-{_THIS}.tar.xz"  # a checkout has it: the same, packed
_KEPT = 4  # digests to keep; older folders are removed


def packages_path() -> str:
    """PYTHONPATH for a child process to find our packages by, also in a checkout that is not installed."""
    return os.pathsep.join([str(_SOURCES), *filter(None, [os.environ.get("PYTHONPATH", "")])])


def child_environment() -> dict[str, str]:
    """This process's environment, for a child that runs a program of ours."""
    return os.environ | {"PYTHONPATH": packages_path()}


@contextmanager
def loading() -> Iterator[None]:
    """Collect no garbage while modules are loaded, nor what they hold afterwards.

    There is none, and looking for it is a tenth of what loading vLLM takes.
    """
    is_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if is_on:
            gc.enable()


def log_to_stderr(*, named: bool = False) -> None:
    """Log warnings to stderr as commands print theirs, `warning: …`; `named`: more, each with its logger."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(levelname)s %(name)s: %(message)s") if named else _Plain())
    logging.basicConfig(level="INFO" if named else "WARNING", handlers=[handler])


class _Plain(logging.Formatter):
    def formatMessage(self, record: logging.LogRecord) -> str:
        return f"{record.levelname.lower()}: " * (record.levelno > logging.INFO) + record.message


def use_kernel_cache() -> None:
    """Keep this process's kernels on disk: those loaded already, and those still to be loaded.

    Child processes inherit the folder. Without a home that can be written to, it is one in the system's
    temporary folder that only this user can enter. Failing that it is the wheel's own, from which kernels are
    only read.
    """
    folder = str(_folder())
    os.environ["NUMBA_CACHE_DIR"] = folder  # Numba reads it during its import, which takes half a second
    if "numba" not in sys.modules:
        return
    sys.modules["numba"].config.CACHE_DIR = folder
    for name, module in list(sys.modules.items()):
        if name.startswith(("controlplane.", "dataplane.simulated.", "tokenfleet.planning.")):
            for kernel in vars(module).values():
                if hasattr(kernel, "enable_caching"):
                    kernel.enable_caching()


def has_simulator() -> bool:
    """Whether the compiled simulator is on disk; else its first run compiles it, for minutes."""
    python = f"py{sys.version_info.major}{sys.version_info.minor}"
    return any(_folder().glob(f"dataplane.simulated.cluster/cluster.advance-*.{python}.*.nbc"))


def has_other_kernels() -> bool:
    """Whether the wheel's kernels are for another Numba, Python or architecture."""
    return any(_SHIPPED.glob("kernels-*")) and not has_simulator()


def kernel_digest() -> str:
    """A digest of Numba's version and of every source that has to do with kernels."""
    from importlib.metadata import version  # loads a mail parser, 12 ms

    digest = hashlib.sha256(version("numba").encode())
    for source in sorted(
        path
        for folder in ("controlplane", "dataplane/simulated", "tokenfleet/planning")
        for path in (_SOURCES / folder).rglob("*.py")
    ):
        text = source.read_bytes()
        if b"compiled" in text:
            digest.update(text)
    return digest.hexdigest()[:16]


@lru_cache(maxsize=1)
def _folder() -> Path:
    name = f"kernels-{kernel_digest()}"
    shipped = _SHIPPED / name
    with suppress(OSError, RuntimeError):  # no home, or a read-only one
        home = Path.home() / ".cache" / "tokenfleet"
        folder = _filled(home, name, shipped)
        others = sorted((p for p in home.glob("kernels-*") if p != folder), key=lambda p: p.stat().st_mtime)
        for old in others[: -_KEPT or None]:
            shutil.rmtree(old, ignore_errors=True)
        return folder
    with suppress(OSError):
        private = Path(tempfile.gettempdir()) / f"tokenfleet-{os.getuid()}"
        private.mkdir(mode=0o700, exist_ok=True)
        found = private.lstat()
        # Kernels are code: only a folder that this user owns is trusted.
        if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
            return _filled(private, name, shipped)
        return _filled(Path(tempfile.mkdtemp(prefix="tokenfleet-")), name, shipped)
    return shipped


def unpacked(packed: Path, name: str, into: Path) -> bool:
    """Whether the archive holds the folder of that name; then it lies in `into`.

    An archive that cannot be read costs a line on stderr and the compilation.
    """
    import tarfile  # 10 ms, once
    from lzma import LZMAError

    try:
        with tarfile.open(packed, "r:xz") as archive:
            first = archive.next()
            if first is None or first.name != name:
                return False
            for member in archive:
                # Python before 3.11.4 has no filter for it. Nothing but files, all of them in the folder.
                if not (member.isfile() or member.isdir()) or not _is_within(name, member.name):
                    raise tarfile.TarError(f"{member.name}: expected a file in {name}")
                archive.extract(member, into)
    except FileNotFoundError:
        return False
    except (OSError, EOFError, LZMAError, tarfile.TarError) as error:
        logging.getLogger(__name__).warning(
            "%s: cannot be read (%s); the simulator is compiled instead", packed, error
        )
        return False
    return True


def _is_within(folder: str, name: str) -> bool:
    parts = Path(name).parts
    return parts[:1] == (folder,) and ".." not in parts


def _filled(parent: Path, name: str, shipped: Path) -> Path:
    """The folder of that name in `parent`, made with the kernels of wheel or checkout. Raises OSError."""
    folder = parent / name
    if not folder.exists():
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=f".{name}.", dir=parent) as part:
            new = Path(part, name)
            if shipped.is_dir():
                shutil.copytree(shipped, new)
            elif not unpacked(PACKED, name, Path(part)):
                shutil.rmtree(new, ignore_errors=True)
                new.mkdir()
            with suppress(OSError):  # another process was first
                new.rename(folder)
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder}: cannot be written to")
    return folder
