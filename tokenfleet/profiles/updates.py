"""Updates of the user's own prices and profiles, from a file or an address: `tokenfleet data update`.

An address is fetched when a person asks for it, and at no other time. A source may hold several YAML
documents. All of them are checked before any is kept. `updates.json` has where each came from, and when.
"""

from __future__ import annotations

import http.client
import json
import re
import shutil
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from controlplane.errors import BadInput
from controlplane.perfmodel.physics import broken_rule
from tokenfleet.field_errors import read_text
from tokenfleet.files import write_files
from tokenfleet.profiles.form import parse_profile
from tokenfleet.profiles.own import PRICES, own_folder, own_prices, own_profiles
from tokenfleet.profiles.prices import parse_prices

MOST_BYTES = 20_000_000
TIMEOUT_S = 30.0
_UPDATES = "updates.json"
_SCHEMA = re.compile(r"^schema:\s*[\"']?tokenfleet\.(\w+)/", re.M)


@dataclass(frozen=True, slots=True)
class OwnFile:
    """A file that is kept: its name, the newest date in it, where it came from, and the day it did."""

    name: str
    dated: str
    source: str
    updated: str


def update(source: str, today: date) -> list[OwnFile]:
    """Keep the prices and profiles in a file or at an address. Raises BadInput, and keeps nothing then."""
    folder = own_folder()
    if folder is None:
        raise BadInput("data: no home folder to keep it in; set XDG_DATA_HOME")
    kept: list[OwnFile] = []
    texts: dict[str, str] = {}
    documents = [text for text in re.split(r"^---[ \t]*$", _text_of(source), flags=re.M) if text.strip()]
    for number, text in enumerate(documents, 1):
        where = source if len(documents) == 1 else f"{source}: document {number}"
        name, dated = _checked(text, where)
        if name in texts:
            raise BadInput(f"{where}: a second {name}; expected one")
        texts[name] = text.strip() + "\n"
        kept.append(OwnFile(name, dated, source, today.isoformat()))
    if not kept:
        raise BadInput(f"{source}: empty; expected prices or profiles in YAML")
    noted = {**_noted(folder)} | {one.name: {"source": source, "updated": one.updated} for one in kept}
    files = {folder / name: text for name, text in texts.items()}
    for path in files:
        path.parent.mkdir(parents=True, exist_ok=True)
    write_files(files | {folder / _UPDATES: json.dumps(noted, indent=1) + "\n"})
    return kept


def kept() -> list[OwnFile]:
    """What is kept: the prices first, then profiles by name. Raises BadInput for a file that has gone bad."""
    folder, prices = own_folder(), own_prices()
    if folder is None:
        return []
    noted, files = _noted(folder), []
    for path in [*([prices] if prices else []), *own_profiles()]:
        name = str(path.relative_to(folder))
        of = noted.get(name, {})
        dated = _checked(read_text(path, MOST_BYTES), str(path))[1]
        files.append(
            OwnFile(name, dated, str(of.get("source", "unknown")), str(of.get("updated", "unknown")))
        )
    return files


def forget() -> int:
    """Remove all that was kept, so that what ships is used again; how many files there were."""
    folder = own_folder()
    if folder is None or not folder.is_dir():
        return 0
    files = len(own_profiles()) + (own_prices() is not None)
    shutil.rmtree(folder)
    return files


def _checked(text: str, where: str) -> tuple[str, str]:
    """The name that a document is kept by, and its newest date. Raises BadInput for what is neither form."""
    form = _SCHEMA.search(text)
    if form is None or form[1] not in ("prices", "profile"):
        raise BadInput(f"{where}: expected `schema: tokenfleet.prices/1` or `schema: tokenfleet.profile/1`")
    if form[1] == "prices":
        dates = [price.date for price in parse_prices(text, where).prices.values()]
        if not dates:
            raise BadInput(f"{where}: prices: none; expected at least one")
        return PRICES, max(dates).isoformat()
    profile = parse_profile(text, where)
    if (broken := broken_rule(profile)) is not None:
        raise BadInput(f"{where}: {broken}")
    plain = (re.sub(r"[^\w.-]", "-", part) for part in (profile.gpu, profile.model))
    gpu, model = (part.lstrip(".") or "-" for part in plain)
    return f"profiles/{gpu}/{model}_tp{profile.tp_degree}.yaml", profile.source.date


def _text_of(source: str) -> str:
    """The text of a file, or at an address. Raises BadInput."""
    if not source.startswith(("http://", "https://")):
        if "://" in source:
            raise BadInput(f"{source}: expected a file, or an http:// or https:// address")
        return read_text(Path(source), MOST_BYTES)
    try:
        with urllib.request.urlopen(source, timeout=TIMEOUT_S) as reply:
            told = reply.read(MOST_BYTES + 1)
    except TimeoutError:
        raise BadInput(f"{source}: does not answer within {TIMEOUT_S:g} s") from None
    except (OSError, http.client.HTTPException, ValueError) as error:
        why = getattr(error, "reason", None) or error
        raise BadInput(f"{source}: cannot be fetched: {getattr(why, 'strerror', None) or why}") from None
    if len(told) > MOST_BYTES:
        raise BadInput(f"{source}: over {MOST_BYTES:,} bytes; expected prices or profiles in YAML")
    try:
        return str(told.decode("utf-8-sig"))
    except UnicodeDecodeError:
        raise BadInput(f"{source}: not a text in UTF-8") from None


def _noted(folder: Path) -> Mapping[str, Any]:
    """Where each file came from, as far as that is known."""
    try:
        noted = json.loads((folder / _UPDATES).read_text())
    except (OSError, ValueError):
        return {}
    return {name: of for name, of in noted.items() if isinstance(of, dict)} if isinstance(noted, dict) else {}
