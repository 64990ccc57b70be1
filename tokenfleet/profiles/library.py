"""The profile library: profile files on disk, found by model, GPU and tensor-parallel degree.

`find_profiles` looks on three shelves in this order. The first is the library proper: the user's own
profiles, and one folder per GPU. The second is what was measured in 2023. The third are the two profiles that
reproduce Aladdin's tables. A later shelf answers only for a GPU that no earlier one has, so an old
measurement is never taken for a current one by accident.

`LearnedProfiles` caches the profiles that fleets have learned. Each is one file, named by a digest of its
key, which is what step times depend on. A file holds key and profile, and is there whole or not at all. A
file that cannot be read, or has another form, gets one line in the log and is written again.
"""

from __future__ import annotations

import difflib
import hashlib
import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any

from controlplane.errors import BadInput, ProfileMissing
from controlplane.perfmodel.physics import broken_rule
from controlplane.perfmodel.profile import Frontend, Profile
from tokenfleet.field_errors import read_text
from tokenfleet.files import keep_newest, write_files
from tokenfleet.profiles.form import parse_profile, profile_text
from tokenfleet.profiles.own import own_profiles

MAX_FILE_BYTES = 1_000_000
STALE_AFTER_DAYS = 180
LEARNED_SCHEMA = "tokenfleet.learned/1"
MOST_LEARNED = 500  # some 3 kB each; older ones go
log = logging.getLogger(__name__)

# For profiles that were not made from what clients saw: the time that vLLM's server adds to a first token on
# the development load sweeps (docs/accuracy.md). A gateway in front of it adds its own.
FRONTEND = Frontend(per_request_s=0.011, per_prompt_token_s=2.5e-6)

_SHELVES = ("current", "measured-2023", "aladdin")
_GPU_ALIASES = {
    # Newest stack first; the 80gb names are the 2023 machines and answer to `a100`, `h100` last.
    "a100": ("a100-sxm", "a100-80gb"),
    "h100": ("h100-sxm", "h100-80gb"),
    "h200": ("h200-sxm",),
    "b200": ("b200-sxm",),
    "rtx-pro-6000": ("rtx-pro-6000",),
}
# Models whose layers are those of another, by their configurations, with their own context in tokens. With
# weights of 8 bits they are as the other is with such weights.
_SAME_LAYERS = {
    **dict.fromkeys(("llama-3.3-70b", "deepseek-r1-distill-llama-70b"), ("llama-3.1-70b", 131_072)),
    "llama-3-70b": ("llama-3.1-70b", 8192),
    "deepseek-r1-distill-llama-8b": ("llama-3.1-8b", 131_072),
    "llama-3-8b": ("llama-3.1-8b", 8192),
    **dict.fromkeys(
        ("qwen3-30b-a3b-instruct-2507", "qwen3-30b-a3b-thinking-2507", "qwen3-coder-30b-a3b"),
        ("qwen3-30b-a3b", 262_144),
    ),
    **dict.fromkeys(
        ("qwen3-235b-a22b-instruct-2507", "qwen3-235b-a22b-thinking-2507"), ("qwen3-235b-a22b", 262_144)
    ),
    **dict.fromkeys(
        ("deepseek-v3-0324", "deepseek-v3.1", "deepseek-v3.1-terminus", "deepseek-r1", "deepseek-r1-0528"),
        ("deepseek-v3", 163_840),
    ),
}


def read_profile(path: Path | str) -> Profile:
    """The profile in a YAML file. Raises BadInput naming the file, the field and the value.

    One whose step times no hardware has is refused, too.
    """
    profile = parse_profile(read_text(Path(path), MAX_FILE_BYTES), str(path))
    if (broken := broken_rule(profile)) is not None:
        raise BadInput(f"{path}: {broken}; check step, and that kv is what gpu_memory_utilization leaves")
    return profile


def write_profile(profile: Profile, path: Path | str) -> None:
    """Write a profile whole or not at all. Raises BadInput when the place cannot be written."""
    write_files({Path(path): profile_text(profile)})


def library_folder() -> Path:
    """The folder of the shipped profiles: in the wheel, or in the repository next to the package."""
    package = Path(__file__).resolve().parents[1]
    packed = package / "_profiles"
    return packed if packed.is_dir() else package.parent / "profiles"


@lru_cache
def _shelves(model: str = "") -> tuple[tuple[str, Profile], ...]:
    """Shelf and profile; with a model, of the shipped files only those named for its layers are read."""
    name = model.removesuffix("-fp8")
    layers, _ = _SAME_LAYERS.get(name, (name, 0))
    rows = []
    shipped = (path for path in library_folder().glob("*/*.yaml") if path.name.startswith(layers))
    for path in [*own_profiles(), *sorted(shipped)]:
        shelf = path.parent.name if path.parent.name in _SHELVES else "current"
        profile = read_profile(path)
        rows += [(shelf, one) for one in (profile, *_of_same_layers(profile))]
    return tuple(sorted(rows, key=lambda row: _SHELVES.index(row[0])))


def _of_same_layers(profile: Profile) -> list[Profile]:
    """The profile as that of each model with the same layers."""
    base, mark = re.fullmatch(r"(.*?)(-fp8)?", profile.model).groups("")  # type: ignore[union-attr]
    of = f"{profile.model}, whose layers are the same: {profile.source.what}"
    return [
        replace(profile, model=name + mark, context_limit_tokens=n, source=replace(profile.source, what=of))
        for name, (other, n) in _SAME_LAYERS.items()
        if other == base
    ]


def library() -> list[Profile]:
    """Every shipped profile: current ones first, then those of 2023, then Aladdin's two."""
    return [profile for _, profile in _shelves()]


def has_model(name: str) -> bool:
    """Whether a profile ships for a model by any of its names."""
    return any(profile.model == canonical_model(name) for profile in library())


def find_profiles(model: str, gpus: Sequence[str] = (), tps: Sequence[int] = ()) -> list[Profile]:
    """Shipped profiles of a model, at most one per (GPU, TP degree), in order of GPU and degree.

    Names are taken as people write them (`meta-llama/Llama-3.1-8B-Instruct`, `H100-SXM-80GB`, `a100`).
    Raises ProfileMissing naming what was not found and what is nearest.
    """
    wanted = canonical_model(model)
    of_model = [(shelf, p) for shelf, p in _shelves(wanted) if p.model == wanted]
    if not of_model:
        models = sorted({p.model for p in library()})
        how = "`tokenfleet profile --predict` composes one from a config.json"
        raise ProfileMissing(f"model {model!r}: no profile ships; {_nearest(wanted, models)}; {how}")
    if gpus:
        matches = [p for gpu in gpus for p in _of_gpu(gpu, [p for _, p in of_model])]
    else:
        matches = [p for shelf, p in of_model if shelf == of_model[0][0]]
    if tps:
        matches = _of_degrees(tps, matches)
    # First wins: an earlier shelf, and there a measured before a composed one.
    single = {(p.gpu, p.tp_degree): p for p in reversed(matches)}
    return [single[key] for key in sorted(single)]


def _of_degrees(tps: Sequence[int], profiles: Sequence[Profile]) -> list[Profile]:
    have = sorted({p.tp_degree for p in profiles})
    if missing := sorted(set(tps) - set(have)):
        degrees = ", ".join(str(n) for n in missing)
        raise ProfileMissing(f"{profiles[0].model}: no profile at TP {degrees}; there is TP {_listed(have)}")
    return [p for p in profiles if p.tp_degree in tps]


def _of_gpu(gpu: str, profiles: Sequence[Profile]) -> list[Profile]:
    names = canonical_gpus(gpu)
    of_names = ([p for p in profiles if p.gpu == name] for name in names)
    if matching := next(filter(None, of_names), []):
        return matching
    if "," in gpu:
        raise ProfileMissing(f"gpu {gpu!r}: one name was expected; give --gpu once for each")
    gpus = sorted({p.gpu for p in library()})
    if not set(names) & set(gpus):
        raise ProfileMissing(f"gpu {gpu!r}: no profile ships; {_nearest(names[0], [*_GPU_ALIASES, *gpus])}")
    there = _listed(sorted({p.gpu for p in profiles}))
    raise ProfileMissing(f"{profiles[0].model}: no profile on {gpu!r}; there is one on {there}")


def canonical_gpus(name: str) -> tuple[str, ...]:
    """The library's names a GPU name may mean, best first; an unknown name comes back normalised.

    `h100`, `H100_SXM`, `NVIDIA H100 80GB HBM3` mean `h100-sxm`; `a100-80gb` and `h100-80gb` are names of
    their own (the machines measured in 2023); a PCIe card is not an SXM one.
    """
    plain = re.sub(r"[\s_/]+", "-", name.strip().lower()).removeprefix("nvidia-")
    if plain in ("a100-80gb", "h100-80gb"):
        return (plain,)
    if re.fullmatch(r"(a100|h100|h200|b200)(-sxm\d?)?(-(80|141|180|192)-?gb)?(-hbm\w+)?", plain):
        family = _GPU_ALIASES[plain[:4]]
        return family if "sxm" not in plain else family[:1]
    if re.fullmatch(r"rtx-?pro-?6000(-blackwell.*)?", plain):
        return _GPU_ALIASES["rtx-pro-6000"]
    return (plain,)


# GB/s of one GPU's share of its server's network, as in NVIDIA's own servers. Their data sheets give 200 Gb/s
# a GPU for DGX A100, 400 Gb/s for DGX H100, H200 and B200. Of others little is known: a 25 Gb/s adapter.
_NETWORK_GB_PER_S = {"a100": 25.0, "h100": 50.0, "h200": 50.0, "b200": 50.0}
_OTHER_NETWORK_GB_PER_S = 3.0


def network_gb_per_s(gpu: str) -> float:
    """The rate at which a GPU sends to one of another server, by any name people write."""
    return _NETWORK_GB_PER_S.get(canonical_gpus(gpu)[0][:4], _OTHER_NETWORK_GB_PER_S)


# GB/s that a GPU reads from its server's memory: H100 and H200 as measured (docs/figures/gpu.md), others by
# four fifths of the bus's rate one way. PCIe 5.0 x16 has 64, 4.0 32, 3.0 16 (data sheets); GH200's chips 450.
_HOST_GB_PER_S = {"t4": 12.0, "v100": 12.0, "h100": 47.0, "h200": 47.0, "b200": 50.0, "gh20": 360.0}
_OTHER_HOST_GB_PER_S = 25.0


def host_gb_per_s(gpu: str) -> float:
    """The rate at which a GPU reads from host memory, by any name people write."""
    return _HOST_GB_PER_S.get(canonical_gpus(gpu)[0][:4], _OTHER_HOST_GB_PER_S)


def canonical_model(name: str) -> str:
    """The library's name of a model: lower case, without the owner and the marks of fine-tuning.

    `meta-llama/Llama-3.1-8B-Instruct` -> `llama-3.1-8b`, `Llama-2-13b-chat-hf` -> `llama-2-13b`,
    `bigscience/bloom` -> `bloom-176b`. Marks that change speed or memory (`-fp8`, `-awq`) stay, so
    that a quantised model is not taken for the plain one; how its activations are scaled goes
    (`-FP8-dynamic` -> `-fp8`).
    """
    plain = name.strip().lower().rstrip("/").rsplit("/", 1)[-1].replace("_", "-")
    plain = re.sub(r"^(mixtral-.*)-v0\.1(?=-|$)", r"\1", plain)
    plain = re.sub(r"-fp8-(dynamic|block)$", "-fp8", plain)
    plain = re.sub(r"(-(instruct|chat|hf|it|bf16))+(?=$|-fp8$)", "", plain)
    plain = re.sub(r"^(meta-)?llama-?(?=[23])", "llama-", plain)
    if plain == "bloom":
        return "bloom-176b"
    return plain


def age_warning(profile: Profile, today: date) -> str | None:
    """A plain sentence when the measurement is old; None while it is recent."""
    try:
        measured = date.fromisoformat(profile.source.date)
    except ValueError:
        return f"{profile.label}: its measurement has no readable date ({profile.source.date!r})"
    days = (today - measured).days
    if days <= STALE_AFTER_DAYS:
        return None
    age = f"{days} days" if days < 730 else f"{days / 365.25:.0f} years"
    return (
        f"{profile.label}: its figures are of {measured.isoformat()}, {age} old; engines get faster and"
        " slower between releases, so fit your own with `tokenfleet fit`"
    )


def _nearest(name: str, names: Sequence[str]) -> str:
    close = difflib.get_close_matches(name, list(dict.fromkeys(names)), n=3, cutoff=0.5)
    return f"nearest: {_listed(close)}" if close else f"known: {_listed(sorted(set(names)))}"


def _listed(values: Iterable[object]) -> str:
    return ", ".join(str(v) for v in values) or "none"


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
            return _read_learned(path, key)
        except BadInput as error:
            log.warning("%s; the engine is measured again", error)
            return None

    def keep(self, key: Mapping[str, Any], profile: Profile) -> None:
        """Keep a profile; where the folder cannot be written, that is only said."""
        kept = {"schema": LEARNED_SCHEMA, "key": dict(key), "profile": profile_text(profile)}
        try:
            write_files({self._path(key): json.dumps(kept, indent=1, sort_keys=True) + "\n"})
        except BadInput as error:
            log.warning("%s; the next fleet will be measured again", error)
            return
        keep_newest(self._folder.glob("*.json"), MOST_LEARNED)

    def _path(self, key: Mapping[str, Any]) -> Path:
        digest = hashlib.sha256(json.dumps(dict(key), sort_keys=True).encode()).hexdigest()
        return self._folder / f"{digest[:32]}.json"


def _read_learned(path: Path, key: Mapping[str, Any]) -> Profile:
    """The profile in a file. Raises BadInput for one of another form or another key."""
    try:
        kept = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise BadInput(f"{path}: cannot be read: {error}") from error
    if not isinstance(kept, dict) or kept.get("schema") != LEARNED_SCHEMA or kept.get("key") != dict(key):
        raise BadInput(f"{path}: expected the {LEARNED_SCHEMA} file of this engine")
    return parse_profile(str(kept.get("profile")), str(path))
