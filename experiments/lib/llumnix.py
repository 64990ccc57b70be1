"""Llumnix' testbed (OSDI '24, §6.1) as the simulator has it: workers, workloads, policies, published curves.

Workers. LLaMA-7B on an A10 under vLLM 0.1.7: prefill-first, 256 sequences, KV as the artifact's profile run
leaves it (792 blocks of 16 tokens at 12,000 batched tokens), 1 % of them a watermark. Prefill times fit
Figure 10's recompute curve (within 2 %). A decode step is a + b·sequences + c·tokens with c = KV bytes / the
A10's 600 GB/s, and a + 8192·c = 42.6 ms, Figure 10's intercept at 8k tokens. b is the one number calibrated:
what the published engine and front end spend on a sequence and step. It is the multiple of 0.1 ms closest to
the mean decode latency of INFaaS++, a metric in which the systems hardly differ, over the 25 points of the
generated traces (mean absolute log error 4.8 %). All else is predicted.

Workloads. Lengths to the token (tokenfleet.traces.distributions); gaps from the same random stream. Seeds
other than the published one redraw the gaps alone.

Policies. Those of the artifact's flags. Its migrate load counts all that wait (the paper: the head), its
thresholds are in blocks, it moves the newest request that has a token and does not look at what comes after.
Its dispatcher knows an instance's load as the instance noted it when its last step began, told when that
step ended, and does not count what it has sent out since (`AsReported`): from a long
prompt's arrival to the end of its prefill, seconds, all that arrive go to the one that looked best before it.
Ours counts every dispatch at once.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from controlplane.control import Settings
from controlplane.migration.balance import MoveSettings
from controlplane.migration.move import Price
from controlplane.migration.usage import Reading, WorkerView
from controlplane.perfmodel.profile import EngineLimits, KvModel, Profile, Residuals, Source
from controlplane.perfmodel.step import PrefillModel, StepModel
from controlplane.placement.constraints import AS_REPORTED
from controlplane.placement.policies import PlacementSettings
from controlplane.snapshot import Load, RunningRequest
from controlplane.types import EngineMode, Slo, WorkerId
from controlplane.workload import Workload
from dataplane.simulated.simulate import ControlSettings, Outcome, WorkerSpec, simulate
from experiments.lib.public_data import LLUMNIX_FIGURES
from tokenfleet.traces.distributions import LONG, MEDIUM, PUBLISHED_SEED, SHORT, LengthMix, gamma, poisson

WORKERS = 16
REQUESTS = 10_000
BLOCK = 16
KV_BYTES = 524_288
PER_TOKEN_S = KV_BYTES / 600e9
PER_SEQUENCE_S = 1.3e-3
HEADROOM = 1.0 - 1600 / (int(792 * 0.99) * BLOCK)  # full at 1,600 tokens
BEAT_S = 0.2  # four steps
SIDES = {"S": SHORT, "M": MEDIUM, "L": LONG}
SLO = Slo(60.0, 1.0)  # the policies here know none


def a10(per_sequence_s: float = PER_SEQUENCE_S) -> Profile:
    """One LLaMA-7B instance."""
    return Profile(
        "llama-7b",
        "a10",
        1,
        step=StepModel(0.0426 - 8192 * PER_TOKEN_S, 2.03e-4, per_sequence_s, PER_TOKEN_S),
        prefill=PrefillModel(0.0046, 2.03e-4, 5.1e-9),
        kv=KvModel(int(792 * 0.99) * BLOCK, BLOCK, KV_BYTES),
        engine=EngineLimits(mode=EngineMode.PREFILL_FIRST, max_batched_tokens=12_800, max_seqs=256),
        residuals=Residuals(0.0, 0.0, 0.0, 0),
        source=Source("published", "Llumnix (OSDI '24), Figure 10, and its artifact", "none", "2024-07-10"),
    )


def workload(name: str, rate_rps: float, seed: int, cv: float = 1.0, requests: int = REQUESTS) -> Workload:
    """A generated trace such as `S-L` (prompts short, outputs long); seed 0 is the published one."""
    stream = np.random.RandomState(PUBLISHED_SEED)
    prompt, output = name.split("-")
    prompts, outputs = LengthMix(SIDES[prompt], SIDES[output]).draw(REQUESTS, stream)
    if seed > 0:
        stream = np.random.RandomState([PUBLISHED_SEED, seed])
    arrivals = poisson(rate_rps, REQUESTS, stream) if cv == 1.0 else gamma(rate_rps, cv, REQUESTS, stream)
    return Workload(arrivals, prompts, outputs).take(slice(0, requests))


class AllWaiting(Reading):
    """Virtual usage with the demand of all that wait."""

    def queued_tokens(self, load: Load) -> int:
        return load.waiting_tokens


class PublishedMoves(MoveSettings):
    """Defragmentation: the newest request with a token goes, low priority first, whatever comes of it."""

    def in_order(self, requests: Sequence[RunningRequest], target: WorkerId) -> Iterable[RunningRequest]:
        newest = (r for r in reversed(requests) if r.generated != 0)
        return sorted(newest, key=lambda r: r.priority)

    def requeues(self, target: WorkerView, request: RunningRequest) -> bool:
        return False

    def helps(
        self, source: WorkerView, target: WorkerView, request: RunningRequest, price: Price | None
    ) -> bool:
        return True


class AsReported(PlacementSettings):
    """A dispatcher that knows of a worker what it told at the end of its last step, as it began that step."""

    def row(self) -> NDArray[np.float64]:
        row = super().row()
        row[AS_REPORTED] = True
        return row


def published_moves(threshold_blocks: float, priorities: bool) -> ControlSettings:
    """The artifact's migration."""
    reading = AllWaiting(HEADROOM if priorities else 0.0)
    steps = threshold_blocks * BLOCK
    moves = PublishedMoves(reading, steps, steps, rest_s=0.0)
    return ControlSettings(Settings(moves, shed=None), beat_s=BEAT_S, errors=False)


def our_moves(priorities: bool = False) -> ControlSettings:
    """Ours: the paper's virtual usage, waiting requests requeued, moves that must help, forecasts mended."""
    reading = Reading(HEADROOM if priorities else 0.0)
    return ControlSettings(Settings(MoveSettings(reading)), beat_s=BEAT_S)


@dataclass(frozen=True, slots=True)
class System:
    """A system under test: its name in the figures, and how the simulator runs it."""

    name: str
    policy: str
    control: ControlSettings | None = None
    settings: PlacementSettings | None = None

    def run(self, trace: Workload, workers: int = WORKERS) -> Outcome:
        return simulate(
            trace,
            [WorkerSpec(a10())] * workers,
            SLO,
            self.policy,
            settings=self.settings,
            control=self.control,
        )


HEARD = AsReported()
ROUND_ROBIN = System("Round-Robin", "round-robin")
INFAAS = System("INFaaS++", "freeness", settings=HEARD)
OURS = System("ours", "freeness+migrate", our_moves())


def llumnix(trace: str) -> System:
    """Llumnix with the threshold its authors chose for a trace."""
    threshold = 10 if trace in ("M-M", "S-L") else 3
    return System("Llumnix", "freeness+migrate", published_moves(threshold, False), HEARD)


def metrics(outcome: Outcome, rows: np.ndarray | None = None) -> dict[str, float]:
    """The figures' metrics by their names there (§6.9), over all requests or some."""
    which = np.ones(len(outcome.workload), bool) if rows is None else rows
    request_s = (outcome.finish_s - outcome.workload.arrival_s)[which]
    prefill_s, decode_s = outcome.ttft_s[which], outcome.tpot_s[which]
    return {
        "Request P99 s": float(np.percentile(request_s, 99)),
        "Request Mean s": float(request_s.mean()),
        "Prefill P99 s": float(np.percentile(prefill_s, 99)),
        "Prefill Mean s": float(prefill_s.mean()),
        "Decode P99 s/tok": float(np.nanpercentile(decode_s, 99)),
        "Decode Mean s/tok": float(np.nanmean(decode_s)),
    }


Curves = Mapping[tuple[str, str, float, str], float]


def published(data: Path, figure: str) -> Curves:
    """Published points by (row, metric, x, series)."""
    with (data / LLUMNIX_FIGURES).open() as file:
        return {
            (row["row"], row["metric"], float(row["x"]), row["series"]): float(row["y"])
            for row in csv.DictReader(file)
            if row["figure"] == figure
        }
