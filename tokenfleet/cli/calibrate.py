"""`tokenfleet calibrate`: a profile corrected by its engines' traffic, or by test requests.

A lone prompt shows prefill and what a first token takes outside steps. A lone decode shows the base of a
step, and a batch what sequences and context add. Each group is sent once the one before should be over.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer
from numpy.typing import NDArray

from controlplane.errors import BadInput
from controlplane.perfmodel.calibration import calibrated_by
from controlplane.perfmodel.factors import FittedFactor
from controlplane.perfmodel.profile import Profile
from controlplane.workload import Workload
from tokenfleet.cli.fit import error_text, iso_day, term_words
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
from tokenfleet.cli.terminal import console, counted_bar
from tokenfleet.profiles.fit_log import calibrated, judged
from tokenfleet.profiles.library import find_profiles, read_profile, write_profile
from tokenfleet.profiles.measurements import read_request_log

if TYPE_CHECKING:
    from tokenfleet.compare.replay import Replay

FEWEST_LOGGED = 30  # requests of an access log
WARM_UP = 2  # requests that load what an engine loads late; they are not judged
PROMPTS = (128, 512, 1024, 2048, 4096)
BATCH, BATCH_PROMPT, BATCH_OUTPUT = 16, 256, 48
LONE_PROMPT, LONE_OUTPUT = 64, 64
SLOWER, PAUSE_S = 2.0, 0.2  # an engine may be so much slower than the profile before groups meet


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
        date=iso_day(None),
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
    print(f"Calibrated {made.label}: {error_text(residuals)}; written to {flags.output}")
    for one in corrections:
        untold = "" if one.told else " (not determined)"
        print(f"  {term_words(one.name):32} {one.factor:.3g} ± {one.error:.2g} times the profile's{untold}")
    print(f"Plans with this profile add a model-error margin of {100 * residuals.unseen_relative:.1f} %.")
    frontend_ms = made.frontend.per_request_s * 1e3
    print(f"KV memory: {made.kv.capacity_tokens:,} tokens. HTTP overhead: {frontend_ms:.1f} ms a request.")
    for line in said:
        print(f"{line[0].upper()}{line[1:]}.")


def probes(profile: Profile, workers: int = 1) -> tuple[Workload, NDArray[np.bool_]]:
    """The requests to send to `workers` idle engines, and which of them are judged; shape [requests].

    Raises BadInput where the model's context or the KV memory has no room for them.
    """
    arrival_s, prompts, outputs, now_s = [], [], [], 0.0
    for count, prompt, output in _groups(profile, workers):
        arrival_s += [now_s] * count
        prompts += [prompt] * count
        outputs += [output] * count
        now_s += SLOWER * _lasts_s(profile, count, prompt, output) + PAUSE_S
    judged = np.arange(len(prompts)) >= WARM_UP * workers
    return Workload(np.array(arrival_s), np.array(prompts), np.array(outputs)), judged


def _groups(profile: Profile, workers: int) -> Iterator[tuple[int, int, int]]:
    """Groups of like requests in order: how many, their prompt and output tokens."""
    most = min(profile.context_limit_tokens or PROMPTS[-1] + LONE_OUTPUT, profile.kv.capacity_tokens)
    if most < LONE_PROMPT + LONE_OUTPUT:
        raise BadInput(f"{profile.label}: a request of {LONE_PROMPT + LONE_OUTPUT} tokens does not fit")
    batch = min(BATCH, profile.engine.max_seqs, profile.kv.capacity_tokens // (BATCH_PROMPT + BATCH_OUTPUT))
    for _ in range(WARM_UP):
        yield workers, LONE_PROMPT, 8
    for _ in range(2):
        for prompt in PROMPTS:
            yield 1, min(prompt, most - 1), 1
        yield 1, LONE_PROMPT, LONE_OUTPUT
        yield 1, LONE_PROMPT, LONE_OUTPUT
        if batch > 1 and most >= BATCH_PROMPT + BATCH_OUTPUT:
            yield batch * workers, BATCH_PROMPT, BATCH_OUTPUT


def _lasts_s(profile: Profile, count: int, prompt: int, output: int) -> float:
    """Seconds that a group takes on one idle engine, by the profile."""
    prefill_s = float(profile.step.step_s(count * prompt, 0, 0, count * prompt**2))
    return prefill_s + output * float(profile.step.step_s(0, count, count * (prompt + output)))
