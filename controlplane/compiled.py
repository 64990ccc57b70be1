"""`compiled`: a function compiled by Numba on its first call, without Python's global lock.

Threads run simulations side by side. Kernels are kept on disk where the process has named a folder for them
(numba.config.CACHE_DIR, see dataplane/kernel_cache.py); by itself an import touches no file.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numba

F = TypeVar("F", bound=Callable[..., Any])


def compiled(function: F) -> F:
    """The function's kernel; raises what the function raises."""
    kernel: F = numba.njit(cache=bool(numba.config.CACHE_DIR), nogil=True)(function)
    return kernel
