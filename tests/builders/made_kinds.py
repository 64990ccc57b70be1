"""Kinds of worker, traffic and questions to the program, as the tests of mixed fleets make them."""

from controlplane.perfmodel.step import StepModel
from controlplane.scaler.counts import Asked
from controlplane.scaler.line import Speed
from controlplane.scaler.traffic import Mix
from controlplane.scaler.worker_types import PARTS, KindSettings, MixingSettings, Weights
from controlplane.types import ClassArrivals, Slo

SLO = Slo(1.0, 0.1)
SMALL = Speed(StepModel(0.02, 2e-4, 2e-3, 1e-6), 20_000, 64)
BIG = Speed(StepModel(0.02, 5e-5, 6e-4, 4e-7), 60_000, 128)


def kind(name, usd=1.0, speed=SMALL, **more):
    return KindSettings(name, speed, usd, **more)


def ask(units, kinds, weights, there=None, mixing=None, **more):
    of = dict(zip((k.kind for k in kinds), weights, strict=True))
    lightest = min(of, key=of.__getitem__)
    return Asked(
        tuple(kinds), mixing or MixingSettings(), Weights(lightest, of), units * PARTS, there or {}, **more
    )


def seen(prompt=200.0, output=100.0, requests=50.0):
    return Mix((ClassArrivals(SLO, requests, prompt * requests, output * requests),), 0.0)
