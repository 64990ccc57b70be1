"""`tokenfleet fit` and `calibrate`: profiles, with errors, from measurements of engines or their service."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from controlplane.errors import BadInput, ProfileMissing
from controlplane.perfmodel.calibration import calibrated_by
from controlplane.perfmodel.factors import FittedFactor
from controlplane.perfmodel.fit import OUTLYING, StepFit, fit_phases, fit_prefill, fit_step, outlying, pooled
from controlplane.perfmodel.profile import (
    EngineLimits,
    KvModel,
    Profile,
    Residuals,
    Source,
    relative_error,
    steps_ahead_of,
)
from controlplane.perfmodel.samples import StepSamples, concatenated
from controlplane.perfmodel.step import PrefillModel, StepModel, coefficients
from controlplane.types import EngineMode
from tokenfleet.cli.flags import (
    EndpointKey,
    Format,
    MaxBatchedTokens,
    MaxSeqs,
    OutputFormat,
    TlsCa,
    flag,
    takes_flags,
)
from tokenfleet.cli.terminal import console, counted_bar, show
from tokenfleet.profiles.diagnostics import Break, HostSpeed, form_of, linear_breaks
from tokenfleet.profiles.fit_log import calibrated, fit_log, judged
from tokenfleet.profiles.kv_memory import KvUse, fit_kv
from tokenfleet.profiles.library import (
    canonical_gpus,
    canonical_model,
    find_profiles,
    read_profile,
    write_profile,
)
from tokenfleet.profiles.measurements import RequestLog, is_request_log, read_measurements, read_request_log
from tokenfleet.report.tables import table

if TYPE_CHECKING:
    from tokenfleet.compare.replay import Replay

CONFIDENCES = (0.5, 0.9, 0.99)
INEXACT = 0.15  # a mean error from which plans mislead
FEWEST_LOGGED = 30  # requests of an access log


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
            source=Source("measured", names, self.licence, _day(self.measured_on)),
            context_limit_tokens=self.context_limit,
        )


@takes_flags()
def fit_command(flags: FitFlags) -> None:
    """Fit a profile to an engine's measured step times.

    tokenfleet fit --measurements steps.csv --model llama-3.1-8b --gpu h100-sxm --tp 1 --output my.yaml
    """
    _day(flags.measured_on)
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


def _day(text: str | None) -> str:
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
    lines = [(f"step time, {_words(name)}", f"{1e6 * value:.6g} µs") for name, value in terms if value]
    lines += [(f"error of {100 * c:.0f} % of steps", f"up to {100 * e:.1f} %") for c, e in errors.items()]
    show(
        [
            f"{profile.label}: {residuals.samples:,} steps, {_error_text(residuals)}",
            table(("fitted", "value"), lines, left=("fitted",)),
            f"Terms, chosen by cross-validation: linear{''.join(f', {term}' for term in form_of(step))}",
            *map(speed_text, speeds),
            *said,
            *(f"The linear terms alone do not fit {cell.text}" for cell in breaks),
        ]
    )
    print(f"wrote {flags.out}", file=sys.stderr)


def _words(coefficient: str) -> str:
    return coefficient.removesuffix("_s").replace("_", " ")


def _error_text(residuals: Residuals) -> str:
    held, mean = residuals.held_out_mean, residuals.mean_relative
    text = f"mean error {100 * mean:.1f} %"
    text += "" if held is None else f", {100 * held:.1f} % on held-out steps"
    return text + f" (above {100 * INEXACT:g} % a plan misleads)" * (mean > INEXACT)


@dataclass(frozen=True, slots=True)
class CalibrateFlags:
    """The flags of `tokenfleet calibrate`."""

    profile: Annotated[str, typer.Option(help="profile to correct: a file, or a model of the library")]
    output: Annotated[Path, typer.Option(help="the profile to write, for plan, simulate and serve --profile")]
    metrics: list[str] | None = flag(
        None, "address of an engine's metrics, e.g. http://host:8000/metrics; repeat for more"
    )
    log: Path | None = flag(None, "read an access log instead (JSONL: arrival, tokens, TTFT, E2E)")
    endpoint: str | None = flag(None, "send 48 test requests to this idle OpenAI endpoint; takes a minute")
    api_key: EndpointKey = None
    tls_ca: TlsCa = None
    minutes: float = flag(15.0, "with --metrics: minutes to watch", min=0.1, max=1440)
    gpu: str | None = flag(None, "with a model's name: the GPU, e.g. h100")
    tp: int | None = flag(None, "with a model's name: GPUs of a worker", min=1)
    workers: int = flag(1, "with --log or --endpoint: engines that serve the requests in turn", min=1)
    max_seqs: MaxSeqs = None
    max_batched_tokens: MaxBatchedTokens = None
    output_format: Format = OutputFormat.TABLE


@takes_flags()
def calibrate_command(flags: CalibrateFlags) -> None:
    """Correct a profile with the traffic that a vLLM serves, or with test requests to an idle one.

    With --metrics, it reads the metrics every 3 seconds. An access log has one request a line: arrival_s,
    prompt_tokens, output_tokens, and either ttft_s and e2e_s or first_token_s and last_token_s. The answer
    names the coefficients that the traffic does not determine; they keep the profile's proportions.

    tokenfleet calibrate --metrics host:8000 --profile llama-3.1-8b --gpu h100 --tp 1 --output mine.yaml
    tokenfleet calibrate --metrics a:8000 --metrics b:8000 --profile old.yaml --minutes 30 --output new.yaml

    tokenfleet calibrate --endpoint http://host:8000 --profile llama-3.1-8b --gpu h100 --output mine.yaml

    tokenfleet calibrate --log requests.jsonl --profile old.yaml --output new.yaml
    tokenfleet plan --trace trace.csv --profile mine.yaml --slo ttft=400ms,tpot=30ms
    """
    if sum((flags.log is not None, bool(flags.metrics), flags.endpoint is not None)) != 1:
        raise BadInput("calibrate: give --metrics ADDRESS (or several), --log FILE, or --endpoint URL")
    if flags.output.is_dir():
        raise BadInput(f"--output: {flags.output}: is a folder, expected a file")
    around = _around(flags).with_engine(max_batched_tokens=flags.max_batched_tokens, max_seqs=flags.max_seqs)
    said: list[str] = []
    if flags.log is not None:
        made, corrections = _by_log(flags.log, around, flags.workers, said)
    elif flags.endpoint is not None:
        made, corrections = _by_probes(flags.endpoint, around, flags, said)
    else:
        made, corrections = _by_metrics(flags.metrics or [], around, flags.minutes, said)
    write_profile(made, flags.output)
    said += _untold(corrections)
    _say_calibrated(made, corrections, said, flags)


def _around(flags: CalibrateFlags) -> Profile:
    path = Path(flags.profile)
    if path.is_file() or path.suffix in (".yaml", ".yml"):
        return read_profile(path)
    found = find_profiles(flags.profile, [flags.gpu] if flags.gpu else [], [flags.tp] if flags.tp else [])
    if len(found) > 1:
        names = ", ".join(one.type_name for one in found)
        raise BadInput(f"--profile: {flags.profile}: there are {names}; choose with --gpu and --tp")
    return found[0]


def _by_metrics(
    urls: Sequence[str], around: Profile, minutes: float, said: list[str]
) -> tuple[Profile, list[FittedFactor]]:
    """Watch the engines and calibrate by what they did; a page that fails meanwhile is a gap, and said."""
    from tokenfleet.profiles.engine_metrics import drafts, intervals_of, kv_of, watched

    with console(stderr=True).status(f"watching {', '.join(urls)} for {minutes:g} minutes"):
        scrapes, missed = watched(urls, 60.0 * minutes)
    if missed:
        said.append(f"{len(missed)} reads failed and were left out; the last: {missed[-1]}")
    if drafts(scrapes):
        said.append(
            "the engine uses speculative decoding; step times are learned, accepted draft tokens are not"
        )
    kv_tokens, block_tokens = kv_of(scrapes[-1] or scrapes[0])
    if kv_tokens:
        around = around.with_kv(None, kv_tokens, block_tokens)
    else:
        said.append("the engines report no common KV size; the profile's is kept")
    found = intervals_of(scrapes)
    made, corrections = calibrated_by(found, around)
    gaps = sum(one.gaps for one in found)
    what = f"calibrated by /metrics over {minutes:g} minutes ({gaps:.0f} tokens), from {around.label}"
    return _sourced(made, around, what), corrections


def _by_probes(
    url: str, around: Profile, flags: CalibrateFlags, said: list[str]
) -> tuple[Profile, list[FittedFactor]]:
    """Calibrate by requests sent to an idle endpoint, and refuse what step times do not explain."""
    from dataplane.http.tls import client_context
    from tokenfleet.compare.replay import replay, served_model
    from tokenfleet.profiles.engine_metrics import engine_counts, kv_of, scraped
    from tokenfleet.profiles.probe import probes

    with suppress(BadInput):  # a gateway shows no engine's KV
        kv_tokens, block_tokens = kv_of(engine_counts(scraped(url), 0.0))
        if kv_tokens:
            around = around.with_kv(None, kv_tokens, block_tokens)
            said.append("the engine itself reports this KV memory")
    at = asyncio.run(served_model(url, flags.api_key, client_context(flags.tls_ca)))
    longest = min(filter(None, (at.context_limit_tokens, around.context_limit_tokens)), default=0)
    workload, judged_rows = probes(replace(around, context_limit_tokens=longest), flags.workers)

    async def send() -> Replay:
        with counted_bar("sending requests", len(workload)) as advance:
            return await replay(workload, at, np.random.default_rng(0), advance)

    sent = asyncio.run(send())
    if sent.errors:
        raise BadInput(
            f"--endpoint: {url}: {len(sent.errors)} of {len(workload)} requests failed: {sent.errors[0]}"
        )
    log = sent.log
    made, corrections, fit = calibrated(log, around, judged_rows, flags.workers)
    fit.refuse(f"--endpoint: {url}")
    said.append(fit.text)
    what = f"calibrated by {int(judged_rows.sum())} requests to an idle endpoint, from {around.label}"
    return _sourced(judged(log, made, judged_rows, flags.workers), around, what), corrections


def _by_log(path: Path, around: Profile, workers: int, said: list[str]) -> tuple[Profile, list[FittedFactor]]:
    """Calibrate by a log, and refuse one that step times do not explain."""
    log = read_request_log(path)
    requests = len(log.workload)
    if requests < FEWEST_LOGGED:
        raise BadInput(f"{path}: {requests} requests, at least {FEWEST_LOGGED} are needed")
    known = np.ones(requests, np.bool_)
    made, corrections, fit = calibrated(log, around, known, workers)
    fit.refuse(str(path))
    said.append(fit.text)
    what = f"calibrated by the log of {requests} requests, {path.name}, from {around.label}"
    return _sourced(judged(log, made, known, workers), around, what), corrections


def _sourced(made: Profile, around: Profile, what: str) -> Profile:
    source = replace(
        around.source,
        kind="measured",
        what=what[:2000],
        licence="own measurements",
        date=_day(None),
        host_s=0.0,
    )
    return replace(made, source=source)


def _untold(corrections: Sequence[FittedFactor]) -> list[str]:
    """The number of coefficients that the traffic does not determine, in a sentence."""
    untold = sum(not one.told for one in corrections)
    if untold == len(corrections):
        return ["the traffic was too uniform to separate the coefficients; all are scaled alike"]
    text = (
        f"the traffic does not determine {untold} of {len(corrections)} coefficients; their proportions stay"
    )
    return [text] * (untold > 0)


def _say_calibrated(
    made: Profile, corrections: Sequence[FittedFactor], said: Sequence[str], flags: CalibrateFlags
) -> None:
    residuals = made.residuals
    if flags.output_format == OutputFormat.JSON:
        answer: dict[str, Any] = {
            "schema": "tokenfleet.calibration/1",
            "profile": str(flags.output),
            "corrections": [asdict(one) for one in corrections],
            "frontend_s": made.frontend.per_request_s,
            "kv_tokens": made.kv.capacity_tokens,
            "mean_error": residuals.mean_relative,
            "held_out_error": residuals.held_out_mean,
            "doubt": residuals.unseen_relative,
            "says": list(said),
        }
        print(json.dumps(answer))
        return
    print(f"Calibrated {made.label}: {_error_text(residuals)}; written to {flags.output}")
    for one in corrections:
        untold = "" if one.told else " (not determined)"
        print(f"  {_words(one.name):32} {one.factor:.3g} ± {one.error:.2g} times the profile's{untold}")
    print(f"Plans with this profile add a model-error margin of {100 * residuals.unseen_relative:.1f} %.")
    frontend_ms = made.frontend.per_request_s * 1e3
    print(f"KV memory: {made.kv.capacity_tokens:,} tokens. HTTP overhead: {frontend_ms:.1f} ms a request.")
    for line in said:
        print(f"{line[0].upper()}{line[1:]}.")
