"""A plan file of some workers of one profile."""

from controlplane.types import Slo
from tokenfleet.profiles.library import find_profiles

SLO = Slo(0.4, 0.03)


PROFILE = find_profiles("llama-3.1-8b", ["h100"], [1])[0]


def plan_json(workers=2):
    figures = {"p50": 0.1, "p90": 0.2, "p99": 0.3, "mean": 0.1}
    return {
        "schema": "tokenfleet.plan/1",
        "feasible": True,
        "reason": None,
        "fleet": [
            {
                "gpu": PROFILE.gpu,
                "tp_degree": 1,
                "workers": workers,
                "gpus": workers,
                "usd_per_hour": 5.0,
                "role": "any",
            }
        ],
        "workers": workers,
        "gpus": workers,
        "usd_per_hour": 5.0,
        "policy": "spread",
        "engine_mode": str(PROFILE.engine.mode),
        "slo": {"ttft_s": SLO.ttft_s, "tpot_s": SLO.tpot_s},
        "attainment": {"target": 0.9, "expected": 0.95, "low": 0.92},
        "ttft_s": figures,
        "tpot_s": figures,
        "inputs": {
            "rate_rps": 12.0,
            "profiles": [
                {
                    "model": PROFILE.model,
                    "gpu": PROFILE.gpu,
                    "tp_degree": 1,
                    "kind": str(PROFILE.source.kind),
                    "date": str(PROFILE.source.date),
                }
            ],
        },
    }
