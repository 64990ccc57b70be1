"""`tokenfleet profile`: runs a real engine over a grid of batches and writes how long its steps took."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, fields, replace
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import numpy as np
import typer

from controlplane.errors import BadInput
from controlplane.perfmodel.profile import Profile, speculating
from dataplane.startup import log_to_stderr
from tokenfleet.cli.flags import EngineFlags, Format, OutputFormat, flag, model_at, takes_flags
from tokenfleet.cli.terminal import console, counted_bar
from tokenfleet.profiles.library import canonical_model, read_profile, write_profile
from tokenfleet.texts import parse_duration_s, parse_speculation

if TYPE_CHECKING:
    from controlplane.perfmodel.samples import Burst
    from dataplane.live.engine_api.link import Step
    from dataplane.live.worker.profiling import ProfiledEngine
    from tokenfleet.profiles.measurements import MeasurementFile

SCHEMA = "tokenfleet.measured/1"
# A visit is outlying when the slowest of its steps took this many times the median of that step's visits. It
# met something else on the machine, and its point is visited once more. Readers take medians.
OUTLYING = 1.5
EXTRA_VISITS = 2
# Flags of --predict alone: engines take theirs after --.
PREDICTED = (
    *("gpu", "tp", "precision", "kv_precision", "speculate", "host"),
    *("expert_parallel", "data_parallel", "pipeline_parallel", "degrees"),
)


@dataclass(frozen=True, slots=True)
class ProfileFlags:
    """What `tokenfleet profile` is asked."""

    model: Annotated[str, typer.Option(help="a model folder, or a Hugging Face name")]
    out: Annotated[
        Path, typer.Option("--output", help="CSV of the measurements; an unfinished file is continued")
    ]
    budget: str = flag("30m", "stop after this long; run again to go on")
    repeats: int = flag(3, "measurements of every grid point, after one to warm up", min=1, max=50)
    points: int | None = flag(None, "measure at most this many grid points", min=1)
    max_context: int | None = flag(None, "longest context measured", min=64)
    clock: str = flag("wall", "wall, or cpu: processor time, for a busy CPU host")
    cores: str = flag("", "cores of a CPU engine, as VLLM_CPU_OMP_THREADS_BIND")
    seed: int = flag(0, "random seed of the order and the prompts", min=0)
    output_format: Format = OutputFormat.TABLE
    predict: bool = flag(False, "compose a profile from operation tables, without an engine", "--predict")
    gpu: str | None = flag(None, "with --predict: the GPU, e.g. h100_sxm")
    tp: int = flag(1, "with --predict: GPUs of a worker", min=1)
    precision: str | None = flag(
        None, "with --predict: precision of weights: bf16, fp8, int4, nvfp4 (default: config.json)"
    )
    kv_precision: str | None = flag(None, "with --predict: precision of KV: bf16 or fp8")
    expert_parallel: bool = flag(
        False, "with --predict: whole experts on each GPU, like vLLM's flag", "--expert-parallel"
    )
    data_parallel: int = flag(
        1, "with --predict: attention ranks that share the experts, --tp GPUs each", min=1
    )
    pipeline_parallel: int = flag(1, "with --predict: pipeline stages, --tp GPUs each", min=1)
    degrees: list[Path] | None = flag(
        None,
        "with --predict: a profile of another TP degree; two of them replace the operation tables",
        "--from",
    )
    speculate: str = flag("off", "with --predict: draft acceptance by position, e.g. 0.8/0.6@1ms+0.5ms")
    host: str = flag("1ms", "with --predict: host time per step (no table has it)")
    engine_flags: EngineFlags = None


@takes_flags()
def profile_command(flags: ProfileFlags) -> None:
    """Measure a real engine, or with --predict compose a profile without one.

    On a noisy host give more --repeats. Points are measured in rounds. From three rounds on, `fit` finds
    the host's slow and fast periods and removes them.

    tokenfleet profile --model ./llama --output steps.csv -- --max-num-seqs 64
    tokenfleet fit --measurements steps.csv --model llama --gpu my-gpu --output my.yaml

    tokenfleet profile --predict --model llama-3.1-8b --gpu h100_sxm --tp 2 --output my.yaml
    tokenfleet profile --predict --model ./Qwen3-30B-A3B --gpu b200 --precision fp8 --output moe.yaml

    tokenfleet profile --predict --from tp1.yaml --from tp2.yaml --model llama-3.1-8b --tp 4 --output tp4.yaml

    tokenfleet profile --predict --model deepseek-v3 --gpu h200 --data-parallel 8 --output dp.yaml
    tokenfleet profile --predict --model llama-3.1-70b --gpu l40s --tp 2 --pipeline-parallel 4 --output p.yaml
    """
    if flags.predict:
        _predict(flags)
        return
    _refuse(flags, PREDICTED, "only with --predict; an engine runs where and as it runs")
    if flags.clock not in ("wall", "cpu"):
        raise BadInput(f"--clock: wall or cpu, got {flags.clock!r}")
    budget_s = parse_duration_s(flags.budget, "--budget")
    name = model_at(flags.model)
    if flags.out.is_dir():
        raise BadInput(f"--output: {flags.out}: is a folder, expected a file")
    if importlib.util.find_spec("vllm") is None:
        raise BadInput("profile: vllm not installed; pip install --no-deps -r requirements/live-cpu.txt")
    _prepare_process(flags.cores)
    summary = asyncio.run(_measure(flags, name, budget_s))
    _say(summary, flags.out, flags.output_format)


def _refuse(flags: ProfileFlags, names: Collection[str], why: str) -> None:
    """Raise BadInput where one of these was given."""
    for one in fields(ProfileFlags):
        if one.name in names and getattr(flags, one.name) != one.default:
            option = {"degrees": "from"}.get(one.name, one.name.replace("_", "-"))
            raise BadInput(f"--{option}: {why}")


def _predict(flags: ProfileFlags) -> None:
    host_s, drafts = parse_duration_s(flags.host, "--host"), parse_speculation(flags.speculate)
    profile = _of_degrees(flags) if flags.degrees else _of_tables(flags, host_s)
    if drafts is not None:
        profile = speculating(profile, drafts)
    write_profile(profile, flags.out)
    residuals = profile.residuals
    summary: dict[str, Any] = {
        "schema": "tokenfleet.predicted/1",
        "profile": str(flags.out),
        "label": profile.label,
        "kv_tokens": profile.kv.capacity_tokens,
        "fit_error": residuals.mean_relative,
        "unseen_error": residuals.unseen_relative,
        "host_s": host_s,
        "precision": flags.precision,
        "kv_precision": flags.kv_precision,
        "gpus": profile.gpus,
        "says": profile.source.what,
    }
    if flags.output_format == OutputFormat.JSON:
        print(json.dumps(summary))
        return
    print(f"Predicted {profile.label}: {profile.kv.capacity_tokens:,} KV tokens; written to {flags.out}")
    print(
        f"The mean error {'of the profiles' if flags.degrees else 'on its operation tables'} is"
        f" {100 * residuals.mean_relative:.1f} %. Plans add {100 * residuals.unseen_relative:.0f} %"
        f" of model error, since no engine {'of that degree ' if flags.degrees else ''}was measured."
    )
    print(f"Source: {profile.source.what}")
    if flags.precision or flags.kv_precision:
        print("The effect of a lower precision on answers is not covered.")


def _of_tables(flags: ProfileFlags, host_s: float) -> Profile:
    from tokenfleet.profiles.predict import PredictedWorker, predicted_profile

    if flags.gpu is None:
        raise BadInput("--gpu: which one? --predict needs it, e.g. --gpu h100_sxm")
    worker = PredictedWorker(
        flags.model,
        flags.gpu,
        flags.tp,
        host_s,
        precision=flags.precision,
        kv_precision=flags.kv_precision,
        expert_parallel=flags.expert_parallel,
        data_parallel=flags.data_parallel,
        pipeline_parallel=flags.pipeline_parallel,
    )
    with console(stderr=True).status("composing"):
        return predicted_profile(worker, date.today())


def _of_degrees(flags: ProfileFlags) -> Profile:
    from controlplane.perfmodel.degrees import at_degree

    tables = ("gpu", "precision", "kv_precision", "expert_parallel", "data_parallel", "pipeline_parallel")
    _refuse(flags, tables, "the profiles of --from say it; leave it out")
    known = [read_profile(path) for path in flags.degrees or ()]
    if len(known) != 2:
        raise BadInput(f"--from: two profiles are needed, got {len(known)}")
    if canonical_model(known[0].model) != canonical_model(flags.model):
        raise BadInput(f"--model: the profiles of --from are of {known[0].model}, got {flags.model!r}")
    return at_degree((known[0], known[1]), flags.tp)


async def _measure(flags: ProfileFlags, model: str, budget_s: float) -> dict[str, Any]:
    from controlplane.perfmodel.samples import grid
    from dataplane.live.gateway.server import engine_settings_of, parse_flags
    from dataplane.live.worker.profiling import ProfiledEngine
    from tokenfleet.profiles.measurements import MeasurementFile

    engine_settings = engine_settings_of(parse_flags(["--model", model, *(flags.engine_flags or [])]))
    began_s = time.monotonic()
    with console(stderr=True).status("starting the engine"):
        engine = await ProfiledEngine.start(engine_settings, "cpu" if flags.clock == "cpu" else "wall")
    try:
        file = MeasurementFile(flags.out, engine.environment())
        room = engine.room
        if flags.max_context is not None:
            room = replace(room, max_context_tokens=min(room.max_context_tokens, flags.max_context))
        bursts = grid(room, np.random.default_rng(flags.seed))[: flags.points]
        if not bursts:
            raise BadInput("profile: the engine's KV has no room for any grid point")
        await _Visitor(engine, file, flags.seed, began_s + budget_s).visit(bursts, flags.repeats)
    finally:
        await engine.close()
    return {
        "points": len(bursts),
        "begun": len([b for b in bursts if b.name in file.visits]),
        "done": len([b for b in bursts if file.visits.get(b.name, 0) >= flags.repeats]),
        "seconds": time.monotonic() - began_s,
        "environment": engine.environment(),
    }


class _Visitor:
    """Visits grid points, round by round, until all have been visited often enough or the time is over.

    Each round has an order of its own. The machine is now faster and now slower, for seconds or minutes. A
    point's visits must not all fall into one such time.
    """

    def __init__(self, engine: ProfiledEngine, file: MeasurementFile, seed: int, until_s: float) -> None:
        self._engine, self._file, self._seed, self._until_s = engine, file, seed, until_s
        self._measured: dict[str, list[Sequence[Step]]] = {}

    async def visit(self, bursts: Sequence[Burst], repeats: int) -> None:
        """Measure. Raises BadInput when the engine dies; what was measured before is kept."""
        visited = sum(min(self._file.visits.get(b.name, 0), repeats) for b in bursts)
        with counted_bar("measuring", len(bursts) * repeats, visited) as advance:
            for turn in range(repeats + EXTRA_VISITS):
                for at in np.random.default_rng([self._seed, turn]).permutation(len(bursts)):
                    burst = bursts[at]
                    if not self._is_due(burst.name, turn, repeats):
                        continue
                    if time.monotonic() > self._until_s:
                        return
                    advance(0, description=f"{burst.name:>16}")
                    await self._go(burst)
                    advance()

    def _is_due(self, point: str, turn: int, repeats: int) -> bool:
        if turn < repeats:
            return self._file.visits.get(point, 0) <= turn
        measured = self._measured.get(point, [])
        return any(is_outlying(measured, i) for i in range(len(measured)))

    async def _go(self, burst: Burst) -> None:
        from dataplane.live.worker.bursts import EngineDied

        def lots(visit: int) -> np.random.Generator:
            # By name, so that a point is measured on the same prompts whatever was measured before it.
            return np.random.default_rng([self._seed, visit, *burst.name.encode()])

        try:
            if burst.name not in self._measured:  # the first run of a new shape is slower, and thrown away
                await self._engine.run(burst, lots(0))
            at_s = time.time()
            steps = await self._engine.run(burst, lots(1 + self._file.visits.get(burst.name, 0)))
        except EngineDied as error:
            raise EngineDied(
                f"{error}, at grid point {burst.name}; the measurements of {len(self._file.visits)} points"
                f" before it are kept in {self._file.path}, and the same command goes on from there"
            ) from error
        self._measured.setdefault(burst.name, []).append(steps)
        self._file.add(burst.name, steps, at_s)


def is_outlying(measured: Sequence[Sequence[Step]], repeat: int) -> bool:
    """Whether a step of this repeat took OUTLYING times the median of the same step over all repeats."""
    for step in measured[repeat]:
        alike = [
            s.step_s
            for steps in measured
            for s in steps
            if (s.prefill_tokens, s.sequences, s.context_tokens, s.prefill_sum_sq)
            == (step.prefill_tokens, step.sequences, step.context_tokens, step.prefill_sum_sq)
        ]
        if len(alike) > 2 and step.step_s > OUTLYING * float(np.median(alike)):
            return True
    return False


def _prepare_process(cores: str) -> None:
    """Logs to stderr and no telemetry to anyone, for this process and the engine's."""
    from dataplane.live.engine_api.processes import QUIET

    for name, value in {
        **QUIET,
        "VLLM_LOGGING_LEVEL": "WARNING",
        "TOKENIZERS_PARALLELISM": "false",
        **({"VLLM_CPU_OMP_THREADS_BIND": cores} if cores else {}),
    }.items():
        os.environ.setdefault(name, value)
    log_to_stderr()


def _say(summary: dict[str, Any], out: Path, output_format: OutputFormat) -> None:
    environment = summary["environment"]
    fit = (
        f"tokenfleet fit --measurements {out} --robust --model {environment['model']} --gpu GPU"
        f" --tp {environment['tp_degree']} --kv-tokens {environment['kv_tokens']}"
        f" --block-tokens {environment['block_tokens']} --engine-version {environment['vllm']}"
        f" --max-num-batched-tokens {environment['max_batched_tokens']}"
        f" --max-num-seqs {environment['max_seqs']} --output PROFILE.yaml"
    )
    if output_format == OutputFormat.JSON:
        print(json.dumps({"schema": SCHEMA, "measurements": str(out), **summary, "fit": fit}))
        return
    rest = summary["points"] - summary["done"]
    seconds = f"{summary['seconds']:.0f} s"
    print(f"Measured {summary['begun']} of {summary['points']} grid points in {seconds}; written to {out}")
    if rest:
        print(f"The --budget is spent: {rest} points need more repeats. Run the same command again to go on.")
    print(f"Next: {fit}")
