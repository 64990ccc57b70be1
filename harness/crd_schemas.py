"""Kubernetes objects held against the OpenAPI schemas of custom resource definitions.

    python -m harness.crd_schemas deployed/kuberay/kuberay.yaml --crds FOLDER_FILE_OR_URL

`--crds`: ray-operator/config/crd/bases of KubeRay's repository, or a file of it. Objects of other kinds are
passed over. Exit code 1 where an API server would refuse a field, or drop it.

A structural schema is JSON Schema with three exceptions, which this reads: `nullable`, lists that are maps,
and fields that no schema names. A server drops such fields in silence; this refuses them. It does not look at
rules in CEL (x-kubernetes-validations), nor at the contents of an object's own `metadata`.
"""

from __future__ import annotations

import argparse
import gzip
import io
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend

Schemas = Mapping[tuple[str, str], Any]  # a validator by apiVersion and kind
FETCH_S = 30.0


def read_schemas(where: str) -> Schemas:
    """The definitions in a folder, a file or at a URL (.yaml or .yaml.gz). FileNotFoundError for none."""
    if where.startswith(("http://", "https://")):
        with urllib.request.urlopen(where, timeout=FETCH_S) as reply:
            texts = [reply.read()]
    else:
        path = Path(where)
        files = sorted([*path.glob("*.yaml"), *path.glob("*.yaml.gz")]) if path.is_dir() else [path]
        texts = [file.read_bytes() for file in files]
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found = {}
    for text in texts:
        plain = gzip.decompress(text) if text[:2] == b"\x1f\x8b" else text
        for definition in yaml.load_all(io.BytesIO(plain), loader):
            if definition and definition.get("kind") == "CustomResourceDefinition":
                found |= dict(_versions(definition["spec"]))
    if not found:
        raise FileNotFoundError(f"{where}: no custom resource definition")
    return found


def _versions(spec: dict[str, Any]) -> Iterator[tuple[tuple[str, str], Any]]:
    for version in spec["versions"]:
        if version["served"]:
            schema = strict(version["schema"]["openAPIV3Schema"])
            schema["properties"]["metadata"] = {"type": "object", "required": ["name"]}
            yield (f"{spec['group']}/{version['name']}", spec["names"]["kind"]), _Validator(schema)


def strict(schema: dict[str, Any]) -> dict[str, Any]:
    """A structural schema as JSON Schema that takes no field it does not name."""
    made = dict(schema)
    for word in ("properties", "patternProperties"):
        if word in made:
            made[word] = {name: strict(part) for name, part in made[word].items()}
    for word in ("items", "additionalProperties", "not"):
        if isinstance(made.get(word), dict):
            made[word] = strict(made[word])
    is_open = made.get("x-kubernetes-preserve-unknown-fields") or made.get("x-kubernetes-embedded-resource")
    if made.get("type") == "object" and not is_open:
        made.setdefault("additionalProperties", False)
    if made.pop("nullable", False) and "type" in made:
        made["type"] = [made["type"], "null"]
    if made.get("x-kubernetes-int-or-string"):
        made.pop("type", None)
        made["anyOf"] = [{"type": "integer"}, {"type": "string"}]
    return made


def _each_key_once(validator: Any, keys: list[str], items: Any, schema: Any) -> Iterator[ValidationError]:
    """A list that is a map has each of its keys once."""
    if not isinstance(items, list):
        return
    defaults = schema["items"].get("properties", {})
    seen = set()
    for item in items:
        key = tuple(item.get(name, defaults.get(name, {}).get("default")) for name in keys)
        if key in seen:
            yield ValidationError(f"{dict(zip(keys, key, strict=True))} is there twice")
        seen.add(key)


_Validator: Any = extend(Draft202012Validator, {"x-kubernetes-list-map-keys": _each_key_once})


def faults(schemas: Schemas, made: dict[str, Any]) -> list[str]:
    """What an API server would refuse, or drop, of an object: a line each, with the place."""
    name = made.get("apiVersion", ""), made.get("kind", "")
    if name not in schemas:
        return [f"{' '.join(name)}: no such definition"]
    found = sorted(schemas[name].iter_errors(made), key=lambda error: list(map(str, error.absolute_path)))
    return [f"{'.'.join(map(str, error.absolute_path)) or '.'}: {error.message}" for error in found]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("manifests", nargs="+", type=Path)
    parser.add_argument("--crds", required=True)
    asked = parser.parse_args()
    schemas, found, looked = read_schemas(asked.crds), 0, 0
    for path in asked.manifests:
        for one in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            if one and (one.get("apiVersion"), one.get("kind")) in schemas:
                looked += 1
                for line in faults(schemas, one):
                    found += 1
                    print(f"{path}: {one['kind']} {one['metadata']['name']}: {line}")
    print(f"{looked} objects, {found} faults")
    return 1 if found or not looked else 0


if __name__ == "__main__":
    sys.exit(main())
