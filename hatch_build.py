"""Build hook of the wheel: it adds the commit, and compiled kernels where `deploy/` has them for this Python.

With kernels the wheel is for one version of Python and one architecture. Without them it is pure Python.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

KERNELS = Path("build", "kernels")  # one folder, named by the digest of its sources
THIS = f"cp{sys.version_info.major}{sys.version_info.minor}-{sysconfig.get_platform()}"
PACKED = Path("deploy", f"kernels-{THIS}.tar.xz")  # startup.PACKED: that module is not there yet
COMMIT = Path("build", "commit.txt")


class WheelHook(BuildHookInterface):  # type: ignore[type-arg]
    """Adds files that are not in the repository to the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        root = Path(self.root)
        if commit := commit_of(root):
            (root / COMMIT).parent.mkdir(exist_ok=True)
            (root / COMMIT).write_text(commit + "\n", encoding="ascii")
            build_data["force_include"][str(root / COMMIT)] = "tokenfleet/_commit.txt"
        if (root / PACKED).exists():
            shutil.rmtree(root / KERNELS, ignore_errors=True)
            with tarfile.open(root / PACKED) as archive:
                archive.extractall(root / KERNELS)
            build_data["force_include"][str(root / KERNELS)] = "tokenfleet/_kernels"
            build_data["pure_python"] = False
            build_data["infer_tag"] = True


def commit_of(root: Path) -> str:
    """The commit that is checked out, with `+` where files differ from it; empty outside of a checkout."""
    git = ["git", "-C", str(root)]
    try:
        asked = [*git, "rev-parse", "--short", "HEAD"]
        commit = subprocess.run(asked, capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], check=False).returncode
    except (OSError, subprocess.CalledProcessError):
        return ""
    return commit.stdout.strip() + ("+" if changed else "")
