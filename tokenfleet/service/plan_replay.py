"""A plan's fleet replayed on the requests that it got, and the bias of its profile.

The engines' own steps, which the fleet has recorded, say by how much the profile's step times are wrong. A
latency that the replay with these times does not reach is no error of the profile: it is time outside the
engines, or another batch than the replay's.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import polars as pl
from numpy.typing import NDArray

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import Profile, with_times
from controlplane.placement.lengths import LengthTable
from controlplane.placement.policies import PlacementSettings
from controlplane.types import PLAIN_CLASS, SloClass
from controlplane.worker_type import WorkerType, name_in_role
from controlplane.workload import Workload
from dataplane.simulated.simulate import Outcome, WorkerSpec, simulate
from tokenfleet.planning.plan_file import PlanFile
from tokenfleet.profiles.form import parse_profile
from tokenfleet.profiles.library import find_profiles
from tokenfleet.service.jobs import Serving
from tokenfleet.texts import parse_strictness

FEWEST_STEPS = 100  # of decode alone
TOLD = 0.05  # prefill's share of the steps that carry it: below, they tell nothing of prefill
BATCH = ("prefill_tokens", "sequences", "context_tokens", "prefill_sum_sq")
STEPS = {**dict.fromkeys((*BATCH, "step_s", "at_s"), pl.Float64), "kind": pl.String}


@dataclass(frozen=True, slots=True)
class StepBias:
    """The time of decode and of prefill in the engines, over the profile's.

    With these step times, mean TPOT and median TTFT of the replay are within `remaining` (ratios, observed /
    replayed) of what was observed.
    """

    decode: float
    prefill: float
    remaining: tuple[float, float]

    @property
    def sentences(self) -> list[str]:
        """The step times that fit, and whether anything else differs."""
        sentences = [
            f"steps took {self.decode:.3g}x the profile's time in decode and {self.prefill:.3g}x in prefill"
        ]
        if max(abs(ratio - 1.0) for ratio in self.remaining) > 0.1:
            sentences.append(
                f"with these times mean TPOT is still {self.remaining[0]:.3g}x and median TTFT"
                f" {self.remaining[1]:.3g}x the prediction: step times alone do not explain it"
            )
        return sentences


@dataclass(frozen=True, slots=True)
class PlanReplay:
    """A plan's fleet on the requests it got: latencies (seconds), attainment, also by class, and the bias of
    its profile, or why that is not known."""

    ttft_s: np.ndarray
    tpot_s: np.ndarray
    attainment: float
    by_class: tuple[float, ...]
    bias: StepBias | str


def replay(plan: PlanFile, own_profiles: list[str], rows: pl.DataFrame, steps: pl.DataFrame) -> PlanReplay:
    """Replay the requests of `rows` (history.files.SCHEMA; all with tokens) on the plan's fleet.

    `own_profiles` are the texts of those the plan was made with, empty for the library's. `steps` (STEPS):
    those that the fleet's engines made. Raises BadInput where the plan's profiles are not to be had any more.
    """
    workers = _workers(plan, own_profiles)
    workload = Workload(
        arrival_s=(rows["arrival_s"] - rows["arrival_s"][0]).to_numpy(),
        prompt_tokens=rows["prompt_tokens"].to_numpy(),
        output_tokens=rows["output_tokens"].to_numpy(),
        priority=(rows["priority"] == "high").cast(pl.Int64).to_numpy(),
    )
    predictor = LengthTable.from_history(workload.prompt_tokens, workload.output_tokens)
    strictness = parse_strictness(plan.strictness or "normal")
    settings = PlacementSettings.of(strictness, plan.priority_headroom)
    classes, of = classes_of(rows, plan)
    workload = replace(workload, slo_class=of, slo_classes=tuple(one.name for one in classes))

    def outcome(decode: float, prefill: float) -> Outcome:
        specs = [replace(spec, profile=with_times(spec.profile, decode, prefill)) for spec in workers]
        slos = [one.slo for one in classes]
        return simulate(workload, specs, slos, plan.policy, settings=settings, predictor=predictor)

    first = outcome(1.0, 1.0)
    of_fleet = first.ttft_s, first.tpot_s, first.attainment, tuple(first.class_attainments.tolist())
    try:
        profiles = {name_in_role(WorkerType.of(s.profile).name, s.role): s.profile for s in workers}
        decode, prefill = step_ratios(profiles, steps)
    except BadInput as error:
        return PlanReplay(*of_fleet, str(error))
    simulated = outcome(decode, prefill)
    tpot_s, ttft_s = (rows[name].cast(pl.Float64).to_numpy() for name in ("tpot_s", "ttft_s"))
    remaining = (
        float(np.nanmean(tpot_s) / np.nanmean(simulated.tpot_s)),
        float(np.nanmedian(ttft_s) / np.nanmedian(simulated.ttft_s)),
    )
    return PlanReplay(*of_fleet, StepBias(decode, prefill, remaining))


def step_ratios(profiles: Mapping[str, Profile], steps: pl.DataFrame) -> tuple[float, float]:
    """The time of decode and of prefill in the engines' steps, over their profiles'.

    Steps without prefill tell decode's. What the others took beyond that is prefill's. Both are ratios of
    sums, so that the replay takes as long as the engines did. `profiles`: by worker type; where there is one,
    it is of all steps. Raises BadInput for fewer than FEWEST_STEPS steps of decode alone.
    """
    if len(profiles) == 1:
        steps = steps.with_columns(kind=pl.lit(next(iter(profiles))))
    tables = [(profile.step, steps.filter(pl.col("kind") == kind)) for kind, profile in profiles.items()]
    batches = [(step, table.select(BATCH).to_numpy().T) for step, table in tables]
    took_s, prefilled = pl.concat(table for _, table in tables).select("step_s", BATCH[0]).to_numpy().T
    decode_s = np.concatenate([step.scaled(1.0, 0.0).step_s(*batch) for step, batch in batches])
    prefill_s = np.concatenate([step.step_s(*batch) for step, batch in batches]) - decode_s
    carries = prefilled > 0
    if (alone := int((~carries).sum())) < FEWEST_STEPS:
        raise BadInput(
            f"the fleet has recorded {alone} steps of decode alone under this plan; {FEWEST_STEPS} are needed"
        )
    decode = _bounded(float(took_s[~carries].sum() / decode_s[~carries].sum()))
    if prefill_s.sum() < TOLD * decode_s[carries].sum() or not carries.any():
        return decode, decode
    beyond_s = took_s[carries].sum() - decode * decode_s[carries].sum()
    return decode, _bounded(float(beyond_s / prefill_s.sum()))


def _bounded(factor: float) -> float:
    return float(np.clip(factor, 0.05, 20.0))


def recorded_steps(data: Path, servings: Sequence[Serving]) -> pl.DataFrame:
    """The steps (STEPS) that a data folder has of these servings; those it no longer keeps are missing.

    Raises BadInput for a file that cannot be read.
    """
    tables = [pl.DataFrame(schema=STEPS)]
    for path in (data / "steps.1.csv", data / "steps.csv"):
        if path.is_file():
            tables.append(_read_steps(path))
    steps = pl.concat(tables)
    now_s = time.time()
    spans = [pl.col("at_s").is_between(s.started_s, s.ended_s or now_s) for s in servings]
    return steps.filter(pl.any_horizontal(pl.lit(False), *spans))


def _read_steps(path: Path) -> pl.DataFrame:
    """Its rows that are whole: the last may be half written. Earlier versions wrote no kind."""
    try:
        table = pl.read_csv(path, schema_overrides=STEPS, ignore_errors=True, truncate_ragged_lines=True)
    except (OSError, pl.exceptions.PolarsError) as error:
        raise BadInput(f"{path}: cannot be read: {str(error).splitlines()[0]}") from error
    if "kind" not in table.columns:
        table = table.with_columns(kind=pl.lit(None, pl.String))
    if lacking := [name for name in STEPS if name not in table.columns]:
        raise BadInput(f"{path}: has no column {lacking[0]}")
    numbers = [name for name in STEPS if name != "kind"]
    return table.select(list(STEPS)).drop_nulls(numbers).filter(pl.col("step_s") > 0)


def _workers(plan: PlanFile, own_profiles: list[str]) -> list[WorkerSpec]:
    """The plan's workers, for the simulator."""
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
                f"the plan's profile of {profile.label} dates from {was.date} ({was.kind}), the one here from"
                f" {profile.source.date} ({profile.source.kind}); the plan cannot be replayed"
            )
        if plan.engine_mode and profile.engine.mode != plan.engine_mode:
            profile = profile.with_engine(mode=plan.engine_mode)
        link = None if was.kv_link is None else was.kv_link.whole()
        workers += [WorkerSpec(profile, part.role, link=link)] * part.workers
    return workers


def classes_of(rows: pl.DataFrame, plan: PlanFile) -> tuple[list[SloClass], NDArray[np.int64]]:
    """The plan's classes, those without one last, and the class of each row."""
    named = [one for one in plan.slo_classes if one.name != PLAIN_CLASS]
    plain = next((one for one in plan.slo_classes if one.name == PLAIN_CLASS), None)
    classes = [*named, plain or SloClass(PLAIN_CLASS, plan.targets, plan.attainment.target)]
    number = {one.name: i for i, one in enumerate(named)}
    return classes, np.array([number.get(name, len(named)) for name in rows["slo_class"].to_list()], np.int64)
