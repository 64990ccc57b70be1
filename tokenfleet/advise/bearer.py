"""The bearer token that metrics are asked with: from a file or the environment, never a flag's value."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path

from controlplane.errors import BadInput
from tokenfleet.field_errors import read_text

VARIABLE = "TOKENFLEET_METRICS_TOKEN"
MOST_BYTES = 100_000


class Bearer:
    """A token, read again at each look where it is in a file. Raises BadInput for none in the file."""

    def __init__(self, file: Path | None = None, env: Mapping[str, str] = os.environ) -> None:
        self._file, self._token = file, env.get(VARIABLE, "") if file is None else self._read(file)

    def headers(self) -> dict[str, str]:
        """The header that carries it; while the file cannot be read, with the last token."""
        if self._file is not None:
            with contextlib.suppress(BadInput):
                self._token = self._read(self._file)
        return {"Authorization": f"Bearer {self._token}"} if self._token else {}

    def _read(self, file: Path) -> str:
        token = read_text(file, MOST_BYTES).strip()
        if not token or not token.isascii() or any(c.isspace() for c in token):
            raise BadInput(f"{file}: expected one bearer token")
        return token
