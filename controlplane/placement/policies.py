"""The placement policies by name, what can be set of them, and their codes in compiled code (assign.py).

A name with the suffix `+migrate` says that running requests may also be moved.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from controlplane.errors import BadInput
from controlplane.placement import constraints
from controlplane.placement.queue import QueueSettings
from controlplane.placement.strictness import Strictness

PATIENCE = 4.0  # TTFT targets that a request is held for at most, unless a run says otherwise
MIGRATE = "+migrate"


class Policy(StrEnum):
    """Placement policies by name; `exact` solves a heartbeat's requests together (placement.heartbeat)."""

    SPREAD = "spread"
    BEST_FIT = "best-fit"
    EXACT = "exact"
    JSQ = "jsq"
    P2C = "p2c"
    ROUND_ROBIN = "round-robin"
    LEAST_KV = "least-kv"
    FREENESS = "freeness"
    SLACK_FIT = "slack-fit"
    LONGEST_PREFIX = "longest-prefix"
    LLM_D = "llm-d"
    SGLANG = "sglang"
    LEAST_PREFILL = "least-prefill"
    RANDOM = "random"
    LEAST_REQUEST = "least-request"


POLICY_CODE = {policy: code for code, policy in enumerate(Policy)}
SPREAD, BEST_FIT, EXACT, JSQ, P2C, ROUND_ROBIN, LEAST_KV, FREENESS, SLACK_FIT = range(9)
LONGEST_PREFIX, LLM_D, SGLANG, LEAST_PREFILL, RANDOM, LEAST_REQUEST = range(9, 15)
CONSTRAINED = (SPREAD, BEST_FIT, SLACK_FIT)
WITHOUT_RANK = (P2C, ROUND_ROBIN, LEAST_PREFILL, LONGEST_PREFIX, LLM_D, SGLANG, RANDOM, LEAST_REQUEST)
BY_TARGETS = frozenset((Policy.SPREAD, Policy.BEST_FIT, Policy.SLACK_FIT, Policy.EXACT))
# Routers of the field, to be compared with; no fleet runs them.
ONLY_SIMULATED = frozenset(
    (
        Policy.LEAST_PREFILL,
        Policy.LONGEST_PREFIX,
        Policy.LLM_D,
        Policy.SGLANG,
        Policy.RANDOM,
        Policy.LEAST_REQUEST,
    )
)


@dataclass(frozen=True, slots=True)
class PlacementSettings(Strictness):
    """The strictness of the constraints, and what else placement reads.

    `headroom`: the share of KV by which a worker with a high-priority request counts as fuller for normal
    ones, and one without for high ones; 0: all are alike. So the high keep together where `spread` and
    `freeness` rank workers (see migration.usage). `queue`: of requests that no worker takes.
    """

    headroom: float = 0.0
    queue: QueueSettings = QueueSettings()  # noqa: RUF009 - frozen

    def __post_init__(self) -> None:
        Strictness.__post_init__(self)
        if not 0.0 <= self.headroom < 1.0:
            raise BadInput(f"placement: headroom: must be at least 0 and below 1, got {self.headroom:g}")

    @classmethod
    def of(cls, strictness: Strictness, headroom: float = 0.0) -> PlacementSettings:
        """Placement at that strictness."""
        return cls(strictness.theta, strictness.gamma, strictness.tolerance, headroom)

    def row(self) -> NDArray[np.float64]:
        """The settings as the row that compiled code reads."""
        row = np.zeros(constraints.SETTINGS)
        row[constraints.THETA], row[constraints.GAMMA], row[constraints.TOLERANCE] = (
            self.theta,
            self.gamma,
            self.tolerance,
        )
        row[constraints.HEADROOM] = self.headroom
        row[[constraints.USE_B, constraints.USE_C, constraints.USE_D, constraints.USE_E]] = True
        return row


def read_policy(name: str) -> tuple[Policy, bool]:
    """The placement policy, and whether tick moves requests. Raises BadInput listing the names."""
    placement = name.removesuffix(MIGRATE)
    try:
        return Policy(placement), name.endswith(MIGRATE)
    except ValueError:
        raise BadInput(
            f"policy: one of {', '.join(Policy)}, each also with {MIGRATE}, got {name!r}"
        ) from None


def policy_names(served: bool = False) -> list[str]:
    """Every name `read_policy` knows; `served`: of policies that a fleet may run."""
    names = [name for name in Policy if not served or name not in ONLY_SIMULATED]
    return [name + suffix for name in names for suffix in ("", MIGRATE)]
