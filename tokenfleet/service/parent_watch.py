"""The parent watch: ends a helper process when its stdin is closed, so that none outlives its parent."""

from __future__ import annotations

import os
import sys
import threading


def end_with_asker() -> None:
    """From now on this process ends, with code 3, once the other end of its stdin is closed.

    However that one ends: the kernel closes its pipes.
    """

    def wait() -> None:
        sys.stdin.buffer.read()
        os._exit(3)

    threading.Thread(target=wait, name="end-with-asker", daemon=True).start()
