"""The start of a process: our packages on its path, and compiled kernels on disk, never stale ones.

Numba's own cache notices a change of the file a kernel stands in, not of a kernel that it calls from another
file. So the folder's name carries a digest of every source file that has to do with kernels. The core does no
I/O when it is imported: every process that runs kernels calls `use_kernel_cache` as it begins.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

_SOURCES = Path(__file__).resolve().parent.parent  # our packages
_KEPT = 4  # digests to keep; older folders are removed


def packages_path() -> str:
    """PYTHONPATH for a child process to find our packages by, also in a checkout that is not installed."""
    return os.pathsep.join([str(_SOURCES), *filter(None, [os.environ.get("PYTHONPATH", "")])])


def child_environment() -> dict[str, str]:
    """This process's environment, for a child that runs a program of ours."""
    return os.environ | {"PYTHONPATH": packages_path()}


def use_kernel_cache() -> None:
    """Keep this process's kernels on disk: those loaded already, and those still to be loaded.

    Child processes inherit the folder. Without a home that can be written to, it is a temporary one.
    """
    folder = str(_folder())
    os.environ["NUMBA_CACHE_DIR"] = folder  # read by Numba as it is imported, which takes half a second
    if "numba" not in sys.modules:
        return
    sys.modules["numba"].config.CACHE_DIR = folder
    for name, module in list(sys.modules.items()):
        if name.startswith(("controlplane.", "dataplane.simulated.", "tokenfleet.planning.")):
            for kernel in vars(module).values():
                if hasattr(kernel, "enable_caching"):
                    kernel.enable_caching()


def _folder() -> Path:
    digest = hashlib.sha256(version("numba").encode())
    for source in sorted(
        path
        for folder in ("controlplane", "dataplane/simulated", "tokenfleet/planning")
        for path in (_SOURCES / folder).rglob("*.py")
    ):
        text = source.read_bytes()
        if b"compiled" in text:
            digest.update(text)
    try:
        home = Path.home() / ".cache" / "tokenfleet"
        folder = home / f"kernels-{digest.hexdigest()[:16]}"
        if folder.exists():
            return folder
        folder.mkdir(parents=True)
    except (OSError, RuntimeError):  # no home, or a read-only one
        return Path(tempfile.mkdtemp(prefix="tokenfleet-kernels-"))
    others = sorted((p for p in home.glob("kernels-*") if p != folder), key=lambda p: p.stat().st_mtime)
    for old in others[: -_KEPT or None]:
        shutil.rmtree(old, ignore_errors=True)
    return folder
