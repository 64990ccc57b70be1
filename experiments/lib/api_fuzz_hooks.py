"""Loaded by schemathesis: lets many of its orders get past the first look, and names jobs that there are.

Without this nearly every made-up model is unknown and nearly every made-up job id leads to a 404.
"""

from __future__ import annotations

import os
import random
from typing import Any

import schemathesis

JOBS = os.environ.get("FUZZ_JOBS", "").split()
DRAWN = random.Random(0)
LINES = "arrival_s,prompt_tokens,output_tokens\n" + "".join(
    f"{i},{100 + i},{10 + i % 7}\n" for i in range(200)
)


@schemathesis.hook
def map_path_parameters(context: Any, path_parameters: dict[str, Any] | None) -> dict[str, Any] | None:
    """Every second job is one that exists."""
    if path_parameters and "job" in path_parameters and JOBS and DRAWN.random() < 0.5:
        path_parameters["job"] = DRAWN.choice(JOBS)
    return path_parameters


@schemathesis.hook
def before_call(context: Any, case: Any, kwargs: Any) -> None:
    """Every second order that fits the schema has a known model and kind of worker, and a trace that is one.

    Never one that is meant to break the schema: this might mend it.
    """
    meta = case.meta
    positive = meta is not None and meta.generation.mode.is_positive
    if positive and isinstance(case.body, dict) and "slo" in case.body and DRAWN.random() < 0.5:
        known = {"model": "llama-3.1-8b", "gpu": ["h100"], "tp": [1], "profiles": [], "policy": "spread"}
        plain = {"window": None, "spot": False, "reclaims_per_h": None}
        case.body = case.body | known | plain | {"trace": {"inline_csv": LINES}}
