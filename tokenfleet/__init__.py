"""Tokenfleet as a library: how few GPUs meet latency targets (docs/python.md).

    import tokenfleet as tf

    plan = tf.plan("day.csv", "llama-3.1-70b", slo="ttft=1.6s,tpot=75ms", gpus=["h100", "h200"])

Everything is loaded at its first use. Errors are `BadInput`, `ProfileMissing` and `Infeasible`, all of them a
`TokenfleetError` with a message of one line.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from tokenfleet.version import VERSION as __version__

if TYPE_CHECKING:
    from controlplane.errors import BadInput as BadInput
    from controlplane.errors import ControlPlaneError as TokenfleetError
    from controlplane.errors import Infeasible as Infeasible
    from controlplane.errors import ProfileMissing as ProfileMissing
    from controlplane.types import Slo as Slo
    from tokenfleet.api.grid import Grid as Grid
    from tokenfleet.api.grid import whatif as whatif
    from tokenfleet.api.inputs import NamedFleet as Fleet
    from tokenfleet.api.inputs import RequestTrace as Trace
    from tokenfleet.api.inputs import StepProfile as Profile
    from tokenfleet.api.inputs import TraceCheck as TraceCheck
    from tokenfleet.api.plan import PlanAnswer as Plan
    from tokenfleet.api.plan import plan as plan
    from tokenfleet.api.portfolio import PortfolioAnswer as Portfolio
    from tokenfleet.api.portfolio import portfolio as portfolio
    from tokenfleet.api.simulation import Simulation as Simulation
    from tokenfleet.api.simulation import simulate as simulate

__all__ = [
    "BadInput", "Fleet", "Grid", "Infeasible", "Plan", "Portfolio", "Profile", "ProfileMissing", "Simulation",
    "Slo", "TokenfleetError", "Trace", "TraceCheck", "__version__", "plan", "portfolio", "simulate", "whatif",
]  # fmt: skip

# Where a public name is defined. Its class's own name tells the library's nouns from those within.
_HOMES = {
    **{name: ("controlplane.errors", name) for name in ("BadInput", "Infeasible", "ProfileMissing")},
    "TokenfleetError": ("controlplane.errors", "ControlPlaneError"),
    "Slo": ("controlplane.types", "Slo"),
    "Trace": ("tokenfleet.api.inputs", "RequestTrace"),
    "TraceCheck": ("tokenfleet.api.inputs", "TraceCheck"),
    "Profile": ("tokenfleet.api.inputs", "StepProfile"),
    "Fleet": ("tokenfleet.api.inputs", "NamedFleet"),
    "Plan": ("tokenfleet.api.plan", "PlanAnswer"),
    "plan": ("tokenfleet.api.plan", "plan"),
    "Simulation": ("tokenfleet.api.simulation", "Simulation"),
    "simulate": ("tokenfleet.api.simulation", "simulate"),
    "Grid": ("tokenfleet.api.grid", "Grid"),
    "whatif": ("tokenfleet.api.grid", "whatif"),
    "Portfolio": ("tokenfleet.api.portfolio", "PortfolioAnswer"),
    "portfolio": ("tokenfleet.api.portfolio", "portfolio"),
}


def __getattr__(name: str) -> Any:
    """A public name at its first use; kernels are kept on disk from then on."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    import_module("dataplane.startup").use_kernel_cache()
    value = globals()[name] = getattr(import_module(module), attribute)
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
