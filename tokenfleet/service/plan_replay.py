"""A plan's fleet replayed on the requests it really got: the plan's prediction for that traffic.

The traffic a plan was made for is never quite the traffic that comes. Only beside a replay of the real
traffic does a difference in latency show the profile's own error, and by how much its step times are wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import Profile
from controlplane.perfmodel.uncertainty import with_times
from controlplane.placement.lengths import LengthTable
from controlplane.workload import Workload
from dataplane.simulated.simulate import WorkerSpec, simulate
from tokenfleet.planning.plan_file import PlanFile
from tokenfleet.profiles.form import parse_profile
from tokenfleet.profiles.library import find_profiles

ROUNDS = 4
CLOSE = 0.01  # of a ratio to one: nearer than any profile is right


@dataclass(frozen=True, slots=True)
class PlanReplay:
    """Latencies (seconds) and attainment of the replay, and the step times that would have been right.

    With decode and prefill `decode` and `prefill` times as long as the profile says, mean TPOT and median
    TTFT of the replay come within `remaining` (ratios, observed / replayed) of what was observed.
    """

    ttft_s: np.ndarray
    tpot_s: np.ndarray
    attainment: float
    decode: float
    prefill: float
    remaining: tuple[float, float]


def replay(plan: PlanFile, own_profiles: list[str], rows: pl.DataFrame) -> PlanReplay:
    """Replay the requests of `rows` (history.files.SCHEMA; all with tokens) on the plan's fleet.

    `own_profiles` are the texts of those the plan was made with, empty for the library's. Raises BadInput
    where the plan's profiles are not to be had any more.
    """
    workers = _workers(plan, own_profiles)
    workload = Workload(
        arrival_s=(rows["arrival_s"] - rows["arrival_s"][0]).to_numpy(),
        prompt_tokens=rows["prompt_tokens"].to_numpy(),
        output_tokens=rows["output_tokens"].to_numpy(),
        priority=(rows["priority"] == "high").cast(pl.Int64).to_numpy(),
    )
    predictor = LengthTable.from_history(workload.prompt_tokens, workload.output_tokens)

    def outcome(decode: float, prefill: float) -> Any:
        specs = [WorkerSpec(with_times(profile, decode, prefill), role=role) for profile, role in workers]
        return simulate(workload, specs, plan.targets, plan.policy, predictor=predictor)

    observed_tpot_s, observed_ttft_s = rows["tpot_s"].mean(), rows["ttft_s"].median()
    assert isinstance(observed_tpot_s, float)
    assert isinstance(observed_ttft_s, float)
    decode, prefill = 1.0, 1.0
    first = simulated = outcome(1.0, 1.0)
    ratios = (1.0, 1.0)
    for _ in range(ROUNDS):
        ratios = (
            observed_tpot_s / np.nanmean(simulated.tpot_s),
            observed_ttft_s / np.nanmedian(simulated.ttft_s),
        )
        if max(abs(ratios[0] - 1.0), abs(ratios[1] - 1.0)) < CLOSE:
            break
        decode, prefill = _bounded(decode * ratios[0]), _bounded(prefill * ratios[1])
        simulated = outcome(decode, prefill)
    ratios = (
        observed_tpot_s / np.nanmean(simulated.tpot_s),
        observed_ttft_s / np.nanmedian(simulated.ttft_s),
    )
    return PlanReplay(
        first.ttft_s, first.tpot_s, first.attainment, decode, prefill, (float(ratios[0]), float(ratios[1]))
    )


def _bounded(factor: float) -> float:
    return float(np.clip(factor, 0.05, 20.0))


def _workers(plan: PlanFile, own_profiles: list[str]) -> list[tuple[Profile, Any]]:
    """The plan's workers as (profile, role)."""
    own = [parse_profile(text, "the plan's profile") for text in own_profiles]
    workers = []
    for part in plan.fleet:
        kind = part.gpu, part.tp_degree
        was = plan.profile_of(part)
        now = [p for p in own if (p.gpu, p.tp_degree) == kind] or find_profiles(
            was.model, [kind[0]], [kind[1]]
        )
        profile = now[0]
        if (str(profile.source.kind), str(profile.source.date)) != (was.kind, was.date):
            raise BadInput(
                f"the plan's profile of {profile.label} is of {was.date} ({was.kind}), the one here of"
                f" {profile.source.date} ({profile.source.kind}); the plan cannot be replayed"
            )
        if plan.engine_mode and profile.engine.mode != plan.engine_mode:
            profile = profile.with_engine(mode=plan.engine_mode)
        workers += [(profile, part.role)] * part.workers
    return workers
