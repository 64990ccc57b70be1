"""Hold manifests against the OpenAPI schemas of custom resource definitions, strictly.

    python -m experiments.serving.kuberay_schemas deployed/kuberay/kuberay.yaml --crds FOLDER_FILE_OR_URL

`--crds`: ray-operator/config/crd/bases of KubeRay's repository, or a file of it (default: kuberay/ of the
public data). Objects of other kinds are passed over. Exit code 1 where an API server would refuse a field, or
drop it.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import yaml

from experiments.lib.public_data import DATA
from harness.crd_schemas import faults, read_schemas


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("manifests", nargs="+", type=Path)
    parser.add_argument("--crds", default=str(DATA / "kuberay"))
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
