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
def map_body(context: Any, body: Any) -> Any:
    """Every second order has a model and kinds of worker that are known, and a trace that is one."""
    if isinstance(body, dict) and "slo" in body and DRAWN.random() < 0.5:
        known = {"model": "llama-3.1-8b", "gpu": ["h100"], "tp": [1], "profiles": [], "policy": "spread"}
        body = body | known | {"trace": {"inline_csv": LINES}, "window": None, "spot": False}
        body["reclaims_per_h"] = None
    return body
