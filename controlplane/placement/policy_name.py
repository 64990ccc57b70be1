"""A policy by name: how requests are placed, and, with the suffix `+migrate`, that they may be moved."""

from __future__ import annotations

from controlplane.errors import BadInput
from controlplane.placement.assign import Policy

MIGRATE = "+migrate"


def read_policy(name: str) -> tuple[Policy, bool]:
    """The placement policy, and whether tick moves requests. Raises BadInput listing the names."""
    placement = name.removesuffix(MIGRATE)
    try:
        return Policy(placement), name.endswith(MIGRATE)
    except ValueError:
        raise BadInput(
            f"policy: one of {', '.join(Policy)}, each also with {MIGRATE}, got {name!r}"
        ) from None


def policy_names() -> list[str]:
    """Every name `read_policy` knows."""
    return [name + suffix for name in Policy for suffix in ("", MIGRATE)]
