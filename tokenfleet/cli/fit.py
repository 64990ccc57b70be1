"""`tokenfleet fit`: a profile, with its errors, from measurements of an engine."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from controlplane.errors import BadInput, ProfileMissing
from controlplane.perfmodel.engine import EngineLimits, KvModel, steps_ahead_of
from controlplane.perfmodel.fit import OUTLYING, StepFit, fit_phases, fit_prefill, fit_step, outlying, pooled
from controlplane.perfmodel.profile import Profile, Residuals, Source, relative_error
from controlplane.perfmodel.samples import StepSamples, concatenated
from controlplane.perfmodel.step import PrefillModel, StepModel, coefficients
from controlplane.types import EngineMode
from tokenfleet.cli.flags import Format, OutputFormat, flag, takes_flags
from tokenfleet.cli.terminal import show
from tokenfleet.profiles.diagnostics import Break, HostSpeed, form_of, linear_breaks
from tokenfleet.profiles.fit_log import fit_log
from tokenfleet.profiles.kv_memory import KvUse, fit_kv
from tokenfleet.profiles.library import canonical_gpus, canonical_model, find_profiles, write_profile
from tokenfleet.profiles.measurements import RequestLog, is_request_log, read_measurements, read_request_log
from tokenfleet.report.tables import table

CONFIDENCES = (0.5, 0.9, 0.99)
INEXACT = 0.15  # a mean error from which plans mislead


@dataclass(frozen=True, slots=True)
class FitFlags:
    """The flags of `tokenfleet fit`."""

    measurements: Annotated[
        list[Path],
        typer.Option(help="CSV of steps, or JSONL request log of one engine; repeatable"),
    ]
    model: Annotated[str, typer.Option(help="the model measured, e.g. llama-3.1-8b")]
    gpu: Annotated[str, typer.Option(help="the GPU measured, e.g. h100-sxm")]
    out: Annotated[Path, typer.Option("--output", help="the profile to write")]
    tp: int = flag(1, "GPUs of the engine (tensor parallel)", min=1)
    kv_tokens: int | None = flag(
        None, "KV cache size in tokens, as vLLM prints it at start (default: the shipped profile's)", min=1
    )
    block_tokens: int = flag(16, "tokens of a KV block", min=1)
    context_limit: int = flag(0, "the model's longest prompt and output; 0 = not stated", min=0)
    engine: EngineMode = flag(EngineMode.CHUNKED, "how the engine forms its batches")
    engine_version: str = flag("", "e.g. 0.19.0; since 0.14 vLLM plans a step ahead on GPUs")
    max_batched_tokens: int = flag(2048, "vLLM's setting of that name", "--max-num-batched-tokens", min=1)
    max_seqs: int = flag(256, "vLLM's setting of that name", "--max-num-seqs", min=1)
    robust: bool = flag(False, "give outliers less weight", "--robust")
    as_measured: bool = flag(
        False, "keep outliers, and steps from the machine's slow and fast times", "--as-measured"
    )
    licence: str = flag("own measurements", "licence of the measurements")
    measured_on: str | None = flag(None, "date of the measurements, YYYY-MM-DD; today if not given")
    seed: int = flag(0, "random seed of the search over a request log")
    output_format: Format = OutputFormat.TABLE

    def worker(self, kv: KvModel) -> Profile:
        """The profile to be fitted, without its times."""
        plans_ahead = self.engine_version and self.engine == EngineMode.CHUNKED and self.gpu != "cpu"
        ahead = steps_ahead_of(self.engine_version) if plans_ahead else 0.0
        batch = self.max_batched_tokens, self.max_seqs
        limits = EngineLimits("vllm", self.engine_version, self.engine, *batch, ahead)
        names = ", ".join(path.name for path in self.measurements)
        return Profile(
            model=canonical_model(self.model),
            gpu=canonical_gpus(self.gpu)[0],
            tp_degree=self.tp,
            step=StepModel(0.0, 0.0, 0.0, 0.0),
            prefill=PrefillModel(0.0, 0.0),
            kv=kv,
            engine=limits,
            residuals=Residuals(0.0, 0.0, 0.0, 0),
            source=Source("measured", names, self.licence, iso_day(self.measured_on)),
            context_limit_tokens=self.context_limit,
        )


@takes_flags()
def fit_command(flags: FitFlags) -> None:
    """Fit a profile to an engine's measured step times.

    tokenfleet fit --measurements steps.csv --model llama-3.1-8b --gpu h100-sxm --tp 1 --output my.yaml
    """
    iso_day(flags.measured_on)
    speeds: list[HostSpeed] = []
    read = _read(flags, speeds)
    worker = flags.worker(_kv(flags, read))
    use: KvUse | str | None = None
    if isinstance(read, RequestLog):
        profile = fit_log(read, worker, seed=flags.seed)
        profile = replace(profile, prefill=PrefillModel.of_step(profile.step))
    else:
        if not (flags.robust or flags.as_measured):
            read = _without_outliers(read)
        profile = fitted_profile(read, worker, flags.robust)
        use = _kv_use(read, worker.kv, flags.robust)
        if isinstance(use, KvUse):
            profile = replace(profile, kv=use.put_in(profile.kv))
    write_profile(profile, flags.out)
    breaks = linear_breaks(read, flags.robust) if isinstance(read, StepSamples) else []
    _say(profile, flags, breaks, speeds, use)


def _read(flags: FitFlags, speeds: list[HostSpeed]) -> StepSamples | RequestLog:
    """The measurements; the machine's speed in each grid that was measured goes to `speeds`."""
    logs = [path for path in flags.measurements if is_request_log(path)]
    if not logs:
        notes = None if flags.as_measured else speeds.append
        return concatenated([read_measurements(path, notes) for path in flags.measurements])
    if len(flags.measurements) > 1 or flags.engine != EngineMode.CHUNKED:
        raise BadInput(f"{logs[0]}: a request log is fitted alone, as the log of one chunked engine")
    return read_request_log(logs[0])


def _without_outliers(samples: StepSamples) -> StepSamples:
    """The steps that nothing else held up. It prints the numbers of the others."""
    far = outlying(samples)
    if not far.any():
        return samples
    rows = np.flatnonzero(far)
    named = ", ".join(str(row + 1) for row in rows[:5]) + (", …" if len(rows) > 5 else "")
    print(
        f"Left out {len(rows):,} of {len(samples):,} steps, over {OUTLYING:g} times as long as fitted:"
        f" row {named} (--robust gives them less weight, --as-measured keeps them)",
        file=sys.stderr,
    )
    return samples.take(~far)


def fitted_profile(samples: StepSamples, shape: Profile, robust: bool) -> Profile:
    """`shape` with the step times of `samples`, as its engine mode uses them."""
    if shape.engine.mode != EngineMode.CHUNKED:
        phases, prefill = fit_phases(samples, robust)
        return _with(shape, phases, prefill.model, pooled(phases.residuals, prefill.residuals))
    step = fit_step(samples, robust)
    alone = PrefillModel.of_step(step.model)
    with suppress(BadInput):  # a chunked engine need not have run enough steps of prefill alone
        alone = fit_prefill(samples, robust).model
    return _with(shape, step, alone, step.residuals)


def _kv(flags: FitFlags, read: StepSamples | RequestLog) -> KvModel:
    """KV memory as told, as in the shipped profile, or as the measurements held. It prints what was not told.

    vLLM prints tokens that all layers keep. Shipped profiles with windows count those that some layers keep.
    """
    try:
        shipped = find_profiles(flags.model, [flags.gpu], [flags.tp])[0]
        kv, said = replace(shipped.kv, vocabulary=0), f"as in the shipped profile of {shipped.label}"
    except ProfileMissing:
        peak = read.peak_tokens if isinstance(read, RequestLog) else int(read.context_tokens.max())
        kv, said = KvModel(max(peak, 1)), "the most these measurements held"
    if flags.kv_tokens is not None:
        return KvModel(flags.kv_tokens, flags.block_tokens, 0 if kv.request_tokens else kv.bytes_per_token)
    print(f"KV cache size: {kv.capacity_tokens:,} tokens, {said} (--kv-tokens sets it)", file=sys.stderr)
    return replace(kv, block_tokens=flags.block_tokens)


def _kv_use(samples: StepSamples, kv: KvModel, robust: bool) -> KvUse | str | None:
    """Eq 1 fitted, or why it is not; None where the measurements have no KV."""
    try:
        return None if samples.kv_blocks is None else fit_kv(samples, kv, robust)
    except BadInput as error:
        return f"KV (Eq 1) is not fitted: {error}"


def _with(shape: Profile, step: StepFit, prefill: PrefillModel, residuals: Residuals) -> Profile:
    return replace(shape, step=step.model, prefill=prefill, residuals=residuals, fitted=step.fitted)


def speed_text(speed: HostSpeed) -> str:
    """A sentence on the machine's speed."""
    if speed.window_s is None:
        return f"Host: repeated steps differ by {100 * speed.off:.1f} %, without slow spells to remove"
    low, high = speed.range
    return (
        f"Host: steps took {low:.2f} to {high:.2f} times the usual, in spells of about {speed.window_s:g} s."
        f" Without these spells repeated steps differ by {100 * speed.off_left:.1f} %,"
        f" before by {100 * speed.off:.1f} %"
        " (--as-measured keeps the spells)."
    )


def iso_day(text: str | None) -> str:
    try:
        return (date.today() if text is None else date.fromisoformat(text)).isoformat()
    except ValueError:
        raise BadInput(f"--measured-on: expected YYYY-MM-DD, got {text!r}") from None


def _say(
    profile: Profile, flags: FitFlags, breaks: list[Break], speeds: list[HostSpeed], use: KvUse | str | None
) -> None:
    step, residuals = profile.step, profile.residuals
    errors = {c: relative_error(residuals, c) for c in CONFIDENCES}
    rows: dict[str, float | int | None] = {
        **coefficients(step),
        "hinges": len(step.hinges),
        "samples": residuals.samples,
        "mean_relative": residuals.mean_relative,
        "p95_relative": residuals.p95_relative,
        "max_relative": residuals.max_relative,
        "held_out_mean": residuals.held_out_mean,
    }
    said = use.texts(profile.kv.bytes_per_token) if isinstance(use, KvUse) else [use] if use else []
    if flags.output_format == OutputFormat.JSON:
        answer: dict[str, object] = {"schema": "tokenfleet.fit/1", "profile": str(flags.out), **rows}
        answer["error_within"] = {f"{c:g}": error for c, error in errors.items()}
        answer |= {"form": form_of(step), "breaks": [asdict(cell) for cell in breaks]}
        answer["machine"] = [
            {"window_s": s.window_s, "slowness": s.range, "off": s.off, "off_left": s.off_left}
            for s in speeds
        ]
        answer["kv"] = asdict(use) if isinstance(use, KvUse) else None
        answer["says"] = said
        print(json.dumps(answer))
        return
    terms = coefficients(step).items()
    lines = [(f"step time, {term_words(name)}", f"{1e6 * value:.6g} µs") for name, value in terms if value]
    lines += [(f"error of {100 * c:.0f} % of steps", f"up to {100 * e:.1f} %") for c, e in errors.items()]
    show(
        [
            f"{profile.label}: {residuals.samples:,} steps, {error_text(residuals)}",
            table(("fitted", "value"), lines, left=("fitted",)),
            f"Terms, chosen by cross-validation: linear{''.join(f', {term}' for term in form_of(step))}",
            *map(speed_text, speeds),
            *said,
            *(f"The linear terms alone do not fit {cell.text}" for cell in breaks),
        ]
    )
    print(f"wrote {flags.out}", file=sys.stderr)


def term_words(coefficient: str) -> str:
    return coefficient.removesuffix("_s").replace("_", " ")


def error_text(residuals: Residuals) -> str:
    held, mean = residuals.held_out_mean, residuals.mean_relative
    text = f"mean error {100 * mean:.1f} %"
    text += "" if held is None else f", {100 * held:.1f} % on held-out steps"
    return text + f" (above {100 * INEXACT:g} % a plan misleads)" * (mean > INEXACT)
