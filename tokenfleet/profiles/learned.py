"""The cache of profiles that fleets have learned: one file each, named by a digest of its key.

The key is what step times depend on. A file holds it beside its profile, and is there whole or not at all.
One that cannot be read, or is of another form, is said so in one line and written anew.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import Profile
from tokenfleet.files import write_files
from tokenfleet.profiles.form import parse_profile, profile_text

SCHEMA = "tokenfleet.learned/1"
MOST_FILES = 500  # some 3 kB each; older ones go
log = logging.getLogger(__name__)


def default_folder() -> Path:
    """`learned` in the user's cache folder."""
    home = os.environ.get("XDG_CACHE_HOME")
    return (Path(home) if home else Path.home() / ".cache") / "tokenfleet" / "learned"


class LearnedProfiles:
    """Learned profiles in a folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def read(self, key: Mapping[str, Any]) -> Profile | None:
        """The profile of this key, where there is one that can be read."""
        path = self._path(key)
        if not path.exists():
            return None
        try:
            return _read(path, key)
        except BadInput as error:
            log.warning("%s; the engine is measured anew", error)
            return None

    def keep(self, key: Mapping[str, Any], profile: Profile) -> None:
        """Keep a profile; where the folder cannot be written, that is only said."""
        kept = {"schema": SCHEMA, "key": dict(key), "profile": profile_text(profile)}
        try:
            write_files({self._path(key): json.dumps(kept, indent=1, sort_keys=True) + "\n"})
        except BadInput as error:
            log.warning("%s; the next fleet will be measured again", error)
            return
        files = sorted(self._folder.glob("*.json"), key=lambda path: path.stat().st_mtime)
        for old in files[: max(len(files) - MOST_FILES, 0)]:
            old.unlink(missing_ok=True)

    def _path(self, key: Mapping[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
        return self._folder / f"{digest[:32]}.json"


def _read(path: Path, key: Mapping[str, Any]) -> Profile:
    """The profile in a file. Raises BadInput for one of another form or another key."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error
    if not isinstance(kept, dict) or kept.get("schema") != SCHEMA or kept.get("key") != dict(key):
        raise BadInput(f"{path}: expected the {SCHEMA} file of this engine")
    return parse_profile(str(kept.get("profile")), str(path))
