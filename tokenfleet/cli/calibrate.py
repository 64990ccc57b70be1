"""`tokenfleet calibrate`: corrects a profile by an engine in service, from its metrics or its access log."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Annotated, Any

import typer

from controlplane.errors import BadInput
from controlplane.perfmodel.calibration import Correction
from controlplane.perfmodel.profile import Profile
from tokenfleet.cli.flags import takes
from tokenfleet.cli.plan import OutputFormat
from tokenfleet.cli.terminal import console

EVERY_S = 3.0
FEWEST_REQUESTS = 30


@dataclass(frozen=True, slots=True)
class CalibrateFlags:
    """What `tokenfleet calibrate` is asked."""

    profile: Annotated[str, typer.Option(help="what is corrected: a profile file, or a model of the library")]
    output: Annotated[Path, typer.Option(help="the profile to write, for plan, simulate and serve --profile")]
    metrics: Annotated[
        list[str] | None,
        typer.Option(help="address of an engine's metrics, e.g. http://host:8000/metrics; repeat for more"),
    ] = None
    log: Annotated[
        Path | None, typer.Option(help="instead: an access log (JSONL: arrival, tokens, TTFT, E2E)")
    ] = None
    minutes: Annotated[float, typer.Option(min=0.1, max=1440, help="to watch, with --metrics")] = 15.0
    gpu: Annotated[str | None, typer.Option(help="with a model's name: the GPU, e.g. h100")] = None
    tp: Annotated[int | None, typer.Option(min=1, help="with a model's name: GPUs of a worker")] = None
    workers: Annotated[int, typer.Option(min=1, help="with --log: engines that took them in turn")] = 1
    max_seqs: Annotated[int | None, typer.Option(min=1, help="the engine's, where not the profile's")] = None
    max_batched_tokens: Annotated[int | None, typer.Option(min=1, help="the same")] = None
    output_format: Annotated[OutputFormat, typer.Option("--format", help="on stdout")] = OutputFormat.TABLE


@takes(CalibrateFlags)
def calibrate_command(flags: CalibrateFlags) -> None:
    """Correct a profile by the traffic that any vLLM serves: no benchmark, nothing sent to it.

    Metrics are read every 3 seconds; an access log has arrival_s, prompt_tokens, output_tokens and either
    ttft_s and e2e_s or first_token_s and last_token_s, a request a line. What the traffic cannot tell stays
    in the profile's proportions, and that is said.

    tokenfleet calibrate --metrics host:8000 --profile llama-3.1-8b --gpu h100 --tp 1 --output mine.yaml
    tokenfleet calibrate --metrics a:8000 --metrics b:8000 --profile old.yaml --minutes 30 --output new.yaml
    tokenfleet calibrate --log requests.jsonl --profile old.yaml --output new.yaml
    tokenfleet plan --trace trace.csv --profile mine.yaml --slo ttft=400ms,tpot=30ms
    """
    from tokenfleet.profiles.library import write_profile

    if (flags.log is None) == (not flags.metrics):
        raise BadInput("calibrate: give --metrics ADDRESS (or several), or --log FILE")
    if flags.output.is_dir():
        raise BadInput(f"--output: {flags.output}: is a folder, expected a file")
    around = _around(flags).with_engine(max_batched_tokens=flags.max_batched_tokens, max_seqs=flags.max_seqs)
    said: list[str] = []
    if flags.log is not None:
        made, corrections = _by_log(flags.log, around, flags.workers)
    else:
        made, corrections = _by_metrics(flags.metrics or [], around, flags.minutes * 60.0, said)
    write_profile(made, flags.output)
    said += _untold(corrections)
    _say(made, corrections, said, flags)


def _around(flags: CalibrateFlags) -> Profile:
    from tokenfleet.profiles.library import find_profiles, read_profile

    path = Path(flags.profile)
    if path.is_file() or path.suffix in (".yaml", ".yml"):
        return read_profile(path)
    found = find_profiles(flags.profile, [flags.gpu] if flags.gpu else [], [flags.tp] if flags.tp else [])
    if len(found) > 1:
        names = ", ".join(one.type_name for one in found)
        raise BadInput(f"--profile: {flags.profile}: there are {names}; choose with --gpu and --tp")
    return found[0]


def _by_metrics(
    urls: Sequence[str], around: Profile, watch_s: float, said: list[str]
) -> tuple[Profile, list[Correction]]:
    """Watch the engines and calibrate by what they did; a page that fails meanwhile is a gap, and said."""
    from controlplane.perfmodel.calibration import calibrated_by
    from tokenfleet.profiles.engine_metrics import (
        EngineCounts,
        drafts,
        engine_counts,
        intervals_of,
        kv_of,
        scraped,
    )

    def look(missed: list[str]) -> dict[str, EngineCounts]:
        seen: dict[str, EngineCounts] = {}
        for url in urls:
            try:
                counts = engine_counts(scraped(url), time.monotonic(), url)
            except BadInput as error:
                if not scrapes:
                    raise
                missed.append(str(error))
            else:
                seen |= {f"{url} {engine}": one for engine, one in counts.items()}
        return seen

    scrapes: list[dict[str, EngineCounts]] = []
    missed: list[str] = []
    began_s = time.monotonic()
    with console(stderr=True).status(f"watching {', '.join(urls)} for {watch_s / 60:g} minutes"):
        scrapes.append(look(missed))
        while time.monotonic() < began_s + watch_s:
            time.sleep(min(EVERY_S, max(began_s + watch_s - time.monotonic(), 0.0)))
            scrapes.append(look(missed))
    if missed:
        said.append(f"{len(missed)} looks failed and were left out, the last: {missed[-1]}")
    if drafts(scrapes):
        said.append("the engine decodes speculatively: steps are learned, their tokens beyond one are not")
    kv_tokens, block_tokens = kv_of(scrapes[-1] or scrapes[0])
    if kv_tokens:
        around = around.with_kv(None, kv_tokens)
        around = replace(around, kv=replace(around.kv, block_tokens=block_tokens))
    else:
        said.append("the engines do not say one size of their KV; the profile's is kept")
    found = intervals_of(scrapes)
    made, corrections = calibrated_by(found, around)
    gaps = sum(one.gaps for one in found)
    what = f"calibrated by /metrics over {watch_s / 60:g} minutes ({gaps:.0f} tokens), from {around.label}"
    return _sourced(made, around, what), corrections


def _by_log(path: Path, around: Profile, workers: int) -> tuple[Profile, list[Correction]]:
    import numpy as np

    from tokenfleet.profiles.fit_log import calibrated, judged
    from tokenfleet.profiles.measurements import read_request_log

    log = read_request_log(path)
    requests = len(log.workload)
    if requests < FEWEST_REQUESTS:
        raise BadInput(f"{path}: {requests} requests, at least {FEWEST_REQUESTS} are needed")
    known = np.ones(requests, np.bool_)
    made, corrections = calibrated(log, around, known, workers)
    what = f"calibrated by the log of {requests} requests, {path.name}, from {around.label}"
    return _sourced(judged(log, made, known, workers), around, what), corrections


def _sourced(made: Profile, around: Profile, what: str) -> Profile:
    source = replace(
        around.source,
        kind="measured",
        what=what[:2000],
        licence="own measurements",
        date=date.today().isoformat(),
        host_s=0.0,
    )
    return replace(made, source=source)


def _untold(corrections: Sequence[Correction]) -> list[str]:
    """What the traffic could not tell, in a sentence."""
    untold = [one.name for one in corrections if not one.told]
    if not untold:
        return []
    if len(untold) == len(corrections):
        return ["the traffic was too uniform to tell the terms apart: all are scaled alike"]
    return [f"the traffic does not tell {', '.join(untold)}: in the profile's proportion to the others"]


def _say(
    made: Profile, corrections: Sequence[Correction], said: Sequence[str], flags: CalibrateFlags
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
    print(f"{made.label}: in {flags.output}")
    for one in corrections:
        print(f"  {one.name:24} x {one.factor:.3g} ± {one.error:.2g}{'' if one.told else ' (not told)'}")
    held = "" if residuals.held_out_mean is None else f", {residuals.held_out_mean:.1%} held out"
    print(f"error {residuals.mean_relative:.1%}{held}; doubt of the factors {residuals.unseen_relative:.1%}")
    frontend_ms = made.frontend.per_request_s * 1e3
    print(f"KV {made.kv.capacity_tokens:,} tokens; frontend {frontend_ms:.1f} ms a request")
    for line in said:
        print(line)
