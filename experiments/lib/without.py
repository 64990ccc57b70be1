"""What a rule of moving gives, by leaving it out: the rules are no settings, so they are patched here."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

# Of `migration.room`, by rule: the function, its user in a simulation, and what it answers without the rule.
RULES: dict[str, tuple[str, str, list[Any] | None]] = {
    "room": ("make_room", "controlplane.control", []),
    "consolidation": ("next_off", "dataplane.simulated.control_loop", None),
}
SITE = """import os
from experiments.lib.without import leave_out
leave_out(os.environ["LEFT_OUT"])
"""


@contextmanager
def without(rule: str) -> Iterator[None]:
    """A rule is left out of simulations here; "" leaves none out."""
    name, user, answer = RULES.get(rule, ("", "", None))
    with patch(f"{user}.{name}", lambda *_: answer) if rule else nullcontext():
        yield


@contextmanager
def processes_without(rule: str) -> Iterator[dict[str, str]]:
    """The environment of processes that leave a rule out; "" leaves none out."""
    with tempfile.TemporaryDirectory(prefix="tokenfleet-") as folder:
        (Path(folder) / "sitecustomize.py").write_text(SITE)
        paths = os.pathsep.join([folder, str(Path(__file__).parents[2])])
        yield {"PYTHONPATH": paths, "LEFT_OUT": rule} if rule else {}


def leave_out(rule: str) -> None:
    """Leave a rule out of this process for good, before anything else has imported it."""
    name, _, answer = RULES[rule]
    setattr(import_module("controlplane.migration.room"), name, lambda *_: answer)
