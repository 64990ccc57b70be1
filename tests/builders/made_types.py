"""Types of worker, profiles, traffic and questions to the mix, as the tests of the scaler make them."""

from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.profile import Profile, Residuals, Source
from controlplane.perfmodel.step import StepModel
from controlplane.scaler.line import Weights
from controlplane.scaler.mix import MixNeed, MixSettings
from controlplane.scaler.traffic import Traffic
from controlplane.types import ClassArrivals, EngineMode, Slo
from controlplane.worker_type import WorkerType

SLO = Slo(1.0, 0.1)


def profile_of(step, kv_tokens, seats, gpu="made", prefill=None, mode=EngineMode.CHUNKED):
    """A profile with this step model, KV memory and number of seats."""
    engine = EngineLimits(mode=mode, max_seqs=seats)
    source = Source("measured", "made for a test", "none", "2026-01-01")
    return Profile(
        "made", gpu, 1, step, KvModel(kv_tokens), engine, Residuals(0.0, 0.0, 0.0, 1), source, prefill
    )


SMALL = profile_of(StepModel(0.02, 2e-4, 2e-3, 1e-6), 20_000, 64)
BIG = profile_of(StepModel(0.02, 5e-5, 6e-4, 4e-7), 60_000, 128)


def made_type(gpu, usd=1.0, profile=SMALL, **more):
    """A type named `GPU TP1` (of another `tp_degree`, by that)."""
    return WorkerType(gpu, known_profile=profile, usd_per_h=usd, **more)


def ask(demand, types, weights, there=None, settings=None, **more):
    of = dict(zip((t.name for t in types), weights, strict=True))
    lightest = min(of, key=of.__getitem__)
    return MixNeed(
        tuple(types), Weights(lightest, of), demand, settings or MixSettings(), there or {}, **more
    )


def seen(prompt=200.0, output=100.0, requests=50.0):
    return Traffic((ClassArrivals(SLO, requests, prompt * requests, output * requests),), 0.0)
