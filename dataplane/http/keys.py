"""API keys: the callers that are let in, with each one's SLO bounds, highest priority and limits.

Limits are buckets that fill by the minute. The tokens that a request will take are known only as it goes on.
So a request is let in while its key's bucket of tokens is not empty, and may leave it in debt.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from controlplane.errors import BadInput
from controlplane.types import Slo
from dataplane.http.tls import is_loopback

PRIORITIES = {"normal": 0, "high": 1}


@dataclass(frozen=True, slots=True)
class SloBounds:
    """The tightest and the loosest target a key may ask for; a request's own is bounded to these."""

    min_ttft_s: float = 0.05
    min_tpot_s: float = 0.005
    max_ttft_s: float = 600.0
    max_tpot_s: float = 60.0

    def __post_init__(self) -> None:
        if not 0 < self.min_ttft_s <= self.max_ttft_s or not 0 < self.min_tpot_s <= self.max_tpot_s:
            raise BadInput(f"key: SLO bounds: need 0 < min <= max, got {self}")

    def bounded(self, slo: Slo) -> Slo:
        """The nearest target within the bounds."""
        return Slo(
            min(max(slo.ttft_s, self.min_ttft_s), self.max_ttft_s),
            min(max(slo.tpot_s, self.min_tpot_s), self.max_tpot_s),
        )


@dataclass(frozen=True, slots=True)
class ApiKey:
    """One caller. A limit of 0 means none; `secret` "" means no key is asked for; `is_filed`: from a file."""

    name: str
    secret: str = field(repr=False)
    bounds: SloBounds = field(default_factory=SloBounds)
    max_priority: int = PRIORITIES["high"]
    requests_per_minute: float = 0.0
    burst: int = 0
    tokens_per_minute: float = 0.0
    is_filed: bool = False
    slo_class: str = ""  # of its requests, unless they say another

    def __post_init__(self) -> None:
        if min(self.requests_per_minute, self.burst, self.tokens_per_minute) < 0:
            raise BadInput(f"key {self.name}: its limits and burst must not be negative")

    @property
    def limits(self) -> tuple[float, float, float]:
        """What its buckets are made of."""
        return self.requests_per_minute, float(self.burst), self.tokens_per_minute

    @property
    def limits_text(self) -> str:
        """Its limits, for a caller that is over one."""
        each = ((self.requests_per_minute, "requests"), (self.tokens_per_minute, "tokens"))
        return " and ".join(f"{limit:g} {what}" for limit, what in each if limit) + " a minute"


ANYONE = ApiKey("anyone", "")


class TokenBucket:
    """Fills at `per_minute` up to `most`; with 0 a minute it is never empty."""

    def __init__(self, per_minute: float, most: float, now_s: float) -> None:
        self._per_s, self._most = per_minute / 60.0, most
        self._there, self._at_s = most, now_s

    def wait_s(self, needed: float, now_s: float) -> float:
        """The seconds until so much is there."""
        if self._per_s == 0:
            return 0.0
        self._there = min(self._most, self._there + (now_s - self._at_s) * self._per_s)
        self._at_s = now_s
        return max(0.0, needed - self._there) / self._per_s

    def take(self, amount: float) -> None:
        """Take it, there or not."""
        self._there -= amount


class KeyLimits:
    """A key's buckets: of requests with a burst, of tokens with what a minute brings."""

    def __init__(self, key: ApiKey, now_s: float) -> None:
        burst = float(key.burst or max(1.0, key.requests_per_minute / 6.0))
        self.requests = TokenBucket(key.requests_per_minute, burst, now_s)
        self.tokens = TokenBucket(key.tokens_per_minute, key.tokens_per_minute, now_s)


class KeyRing:
    """All keys. With none, anyone may call (serve refuses that beyond loopback)."""

    def __init__(self, keys: Sequence[ApiKey]) -> None:
        self._limits: dict[str, KeyLimits] = {}
        self._take(keys)

    def reload(self, file: Path, read: Callable[[Path], Sequence[ApiKey]] | None = None) -> None:
        """Take a file's keys in place of those that came from it before. Raises BadInput for a faulty one.

        Whose limits are as before goes on with what is left of them. `read`: by default `read_keys`.
        """
        self._take([*(key for key in self.keys if not key.is_filed), *(read or read_keys)(file)])

    def _take(self, keys: Sequence[ApiKey]) -> None:
        names = [key.name for key in keys]
        if len(set(names)) != len(names):
            raise BadInput(f"keys: two keys share a name: {sorted(names)}")
        if any(not key.secret for key in keys):
            raise BadInput("keys: an empty key lets no caller in")
        before = {key.name: key.limits for key in getattr(self, "keys", ())}
        kept = {key.name for key in keys if before.get(key.name) == key.limits}
        self._limits = {name: limits for name, limits in self._limits.items() if name in kept}
        self.keys = tuple(keys)

    def find(self, authorization: str) -> ApiKey | None:
        """The key of an `Authorization: Bearer …` header; None when it is not one of ours."""
        if not self.keys:
            return ANYONE
        scheme, _, secret = authorization.partition(" ")
        if scheme.lower() != "bearer":
            return None
        match = None
        for key in self.keys:  # no early exit: the time taken says nothing about the keys
            if hmac.compare_digest(secret.strip().encode(), key.secret.encode()):
                match = key
        return match

    def named(self, name: str) -> ApiKey:
        """The key of that name; where there are none, anyone's."""
        return next((key for key in self.keys if key.name == name), ANYONE)

    def seconds_until_allowed(self, key: ApiKey, now_s: float) -> float:
        """0 when the key may send a request now (and it is counted), else how long to wait."""
        limits = self._limits_of(key, now_s)
        wait_s = max(limits.requests.wait_s(1.0, now_s), limits.tokens.wait_s(1.0, now_s))
        if wait_s == 0:
            limits.requests.take(1.0)
        return wait_s

    def charge(self, name: str, tokens: int, now_s: float) -> None:
        """Count tokens of a key, which may have gone meanwhile; a negative number gives some back."""
        key = self.named(name)
        if key.tokens_per_minute:
            limits = self._limits_of(key, now_s)
            limits.tokens.wait_s(0.0, now_s)
            limits.tokens.take(tokens)

    def _limits_of(self, key: ApiKey, now_s: float) -> KeyLimits:
        limits = self._limits.get(key.name)
        if limits is None:
            limits = self._limits[key.name] = KeyLimits(key, now_s)
        return limits


def key_from_mapping(where: str, entry: Mapping[str, object]) -> ApiKey:
    """An ApiKey from a file's entry; unknown fields and wrong types are refused with their place."""
    allowed = {
        "name", "key", "min_ttft_ms", "min_tpot_ms", "max_ttft_ms", "max_tpot_ms", "priority",
        "requests_per_minute", "burst", "tokens_per_minute", "slo_class",
    }  # fmt: skip
    if unknown := sorted(set(entry) - allowed):
        raise BadInput(f"{where}: {unknown[0]}: unknown field, expected one of {', '.join(sorted(allowed))}")
    for name in ("name", "key"):
        if not isinstance(entry.get(name), str) or not entry[name]:
            raise BadInput(f"{where}: {name}: must be a non-empty string")
    slo_class = entry.get("slo_class", "")
    if not isinstance(slo_class, str):
        raise BadInput(f"{where}: slo_class: must be the name of a class, got {slo_class!r}")
    priority = entry.get("priority", "high")
    if priority not in PRIORITIES:
        raise BadInput(f"{where}: priority: must be high or normal, got {priority!r}")
    plain = SloBounds()

    def number(name: str, default: float) -> float:
        value = entry.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
            raise BadInput(f"{where}: {name}: must be a number of at least 0, got {value!r}")
        return float(value)

    bounds = SloBounds(
        number("min_ttft_ms", plain.min_ttft_s * 1e3) / 1e3,
        number("min_tpot_ms", plain.min_tpot_s * 1e3) / 1e3,
        number("max_ttft_ms", plain.max_ttft_s * 1e3) / 1e3,
        number("max_tpot_ms", plain.max_tpot_s * 1e3) / 1e3,
    )
    return ApiKey(
        name=str(entry["name"]),
        secret=str(entry["key"]),
        bounds=bounds,
        max_priority=PRIORITIES[str(priority)],
        requests_per_minute=number("requests_per_minute", 0.0),
        burst=int(number("burst", 0)),
        tokens_per_minute=number("tokens_per_minute", 0.0),
        is_filed=True,
        slo_class=slo_class,
    )


def read_keys(path: Path) -> list[ApiKey]:
    """Keys of a YAML list; docs/guides/secure.md has the fields. Raises BadInput with the entry's place."""
    try:
        entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise BadInput(f"{path}: cannot be read: {error.strerror}") from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        # YAML's own words quote the line, which may hold a key.
        mark = getattr(error, "problem_mark", None)
        raise BadInput(f"{path}: is not YAML{f', in line {mark.line + 1}' if mark else ''}") from None
    if not entries or not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise BadInput(f"{path}: expected a list of keys, each with at least a name and a key")
    return [key_from_mapping(f"{path}: {i}", entry) for i, entry in enumerate(entries)]


def control_keys_of(given: str | None, file: Path | None, hosts: Mapping[str, str]) -> tuple[ApiKey, ...]:
    """The keys of operators; raises BadInput where others reach one of `hosts` (by flag) without any."""
    keys = [] if given is None else [ApiKey("control", given)]
    keys += [] if file is None else read_control_keys(file)
    for flag, host in hosts.items():
        if not is_loopback(host) and not keys:
            raise BadInput(f"{flag}: {host} is reachable by others, so give --control-key or --control-keys")
    return tuple(keys)


def read_control_keys(path: Path) -> list[ApiKey]:
    """Keys of a YAML list, as `read_keys` has them; raises BadInput for one with more than name and key."""
    keys = read_keys(path)
    for i, key in enumerate(keys):
        if key != ApiKey(key.name, key.secret, is_filed=True):
            raise BadInput(f"{path}: {i}: a control key has a name and a key alone")
    return keys


def keys_of(given: Sequence[str], file: Path | None, host: str) -> tuple[ApiKey, ...]:
    """The keys of clients; raises BadInput for a door to others without one."""
    keys = [ApiKey(f"key-{i}", secret) for i, secret in enumerate(given)]
    keys += read_keys(file) if file is not None else []
    if not keys and (secret := os.environ.get("VLLM_API_KEY")):
        keys = [ApiKey("key-0", secret)]
    if not is_loopback(host) and not keys:
        raise BadInput(f"--host: {host} is reachable by others, so give --api-key or --api-keys")
    return tuple(keys)
