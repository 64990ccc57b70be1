"""What a plan can be asked for here: models, kinds of worker, prices, policies, and this fleet's history."""

from __future__ import annotations

from typing import Any

from controlplane.placement.policy_name import policy_names
from controlplane.types import EngineMode
from tokenfleet.prices import read_prices
from tokenfleet.profile_files import find_profiles, library


def known_models() -> list[dict[str, Any]]:
    """The library's models, each with the kinds of worker a plan looks at unless told otherwise."""
    models = []
    for name in sorted({profile.model for profile in library()}):
        profiles = find_profiles(name)
        limits = [p.context_limit_tokens for p in profiles if p.context_limit_tokens]
        models.append(
            {
                "name": name,
                "context_limit_tokens": min(limits, default=None),
                "kinds": [
                    {
                        "gpu": p.gpu,
                        "tp_degree": p.tp_degree,
                        "measured": str(p.source.kind),
                        "date": str(p.source.date),
                        "engine_mode": str(p.engine.mode),
                        "kv_tokens": p.kv.capacity_tokens,
                    }
                    for p in profiles
                ],
            }
        )
    return models


def known_gpus() -> list[dict[str, Any]]:
    """Every GPU with a profile or a price, and what it costs."""
    prices = read_prices()
    names = sorted({profile.gpu for profile in library()} | set(prices.gpus))

    def price(gpu: str, spot: bool) -> dict[str, Any] | None:
        found = prices.usd_per_gpu_h(gpu, spot=spot)
        if found is None:
            return None
        return {"usd_per_gpu_h": found.usd, "date": found.date.isoformat(), "source": found.source}

    return [{"name": gpu, "on_demand": price(gpu, False), "spot": price(gpu, True)} for gpu in names]


def known_names() -> dict[str, list[str]]:
    """Policies and engine modes."""
    return {"policies": policy_names(), "engine_modes": [str(mode) for mode in EngineMode]}
