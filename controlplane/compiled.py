"""Compilation of the hot kernels with Numba, with a cache that never holds a stale one.

Numba's own on-disk cache notices a change of the file a kernel stands in, not of a kernel that it calls from
another file. So the cache folder's name carries a digest of every source file that holds kernels. The
compiled functions release the GIL: threads run simulations side by side.
"""

from __future__ import annotations

import hashlib
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., Any])

_PACKAGES = Path(__file__).resolve().parent.parent
_KEPT = 4  # digests to keep; older folders are removed


def _cache_folder() -> str:
    digest = hashlib.sha256(numba.__version__.encode())
    for source in sorted(
        [*_PACKAGES.glob("controlplane/**/*.py"), *_PACKAGES.glob("dataplane/simulated/*.py")]
    ):
        text = source.read_bytes()
        if b"@compiled" in text:
            digest.update(text)
    try:
        home = Path.home() / ".cache" / "tokenfleet"
        home.mkdir(parents=True, exist_ok=True)
    except (OSError, RuntimeError):  # no home, or a read-only one
        home = Path(tempfile.mkdtemp(prefix="tokenfleet-"))
    folder = home / f"kernels-{digest.hexdigest()[:16]}"
    if not folder.exists():
        folder.mkdir(exist_ok=True)
        others = [p for p in home.glob("kernels-*") if p != folder]
        for old in sorted(others, key=lambda p: p.stat().st_mtime)[: -_KEPT or None]:
            shutil.rmtree(old, ignore_errors=True)
    return str(folder)


numba.config.CACHE_DIR = _cache_folder()


def compiled(function: F) -> F:
    """Compile on first call, or load from the cache; raises what the function raises."""
    jitted: F = numba.njit(cache=True, nogil=True)(function)
    return jitted
