"""The bottleneck of a replica on its traffic: the limit that, if relaxed, lets it carry the most."""

from __future__ import annotations

from dataclasses import dataclass, replace

from controlplane.perfmodel.profile import Profile
from controlplane.scaler.line import capacity_rps
from controlplane.types import ClassArrivals, Slo

RELIEF = 1.25
NEXT_TO_NOTHING = 0.01


@dataclass(frozen=True, slots=True)
class Bottleneck:
    """A limit, and the share of the replicas that a quarter more of it saves."""

    name: str
    spares: float


def bottleneck(profile: Profile, slo: Slo, prompt_tokens: float, output_tokens: float) -> Bottleneck:
    """What binds a replica on requests of these lengths."""
    arrivals = ClassArrivals(slo, 1.0, prompt_tokens, output_tokens)
    looser = replace(arrivals, slo=replace(slo, tpot_s=slo.tpot_s * RELIEF))
    more_kv = replace(profile.kv, capacity_tokens=int(profile.kv.capacity_tokens * RELIEF))
    seats = replace(profile.engine, max_seqs=int(profile.engine.max_seqs * RELIEF))
    step = profile.step.scaled(1.0 / RELIEF, 1.0 / RELIEF)
    now = capacity_rps(profile, arrivals)
    relieved = {
        "TPOT target": capacity_rps(profile, looser),
        "KV memory": capacity_rps(replace(profile, kv=more_kv), arrivals),
        "max_num_seqs": capacity_rps(replace(profile, engine=seats), arrivals),
    }
    name, best = max(relieved.items(), key=lambda item: item[1])
    if best <= now * (1.0 + NEXT_TO_NOTHING):
        name, best = "step time", capacity_rps(replace(profile, step=step), arrivals)
    return Bottleneck(name, 1.0 - now / best)


def hopeless(profile: Profile, slo: Slo, prompt_tokens: float, output_tokens: float) -> str:
    """Why no number of replicas meets the target; nothing where one may."""
    prompt, output = max(round(prompt_tokens), 1), max(output_tokens, 1.0)
    first_s = profile.alone_ttft_s(prompt)
    step_s = float(profile.step.step_s(0.0, 1.0, prompt + output / 2.0))
    if first_s > slo.ttft_s:
        return f"a mean prompt alone takes {first_s:.3g} s to its first token, the target is {slo.ttft_s:g} s"
    if step_s > slo.tpot_s:
        return f"a request alone takes {step_s * 1e3:.3g} ms a token, the target is {slo.tpot_s * 1e3:g} ms"
    return ""
