"""Replays on an H100, simulated with step times that were measured a day before on another host.

`h100_replays.csv.gz` has what a client of vLLM 0.32 measured: five replays of a minute of the sample trace,
with the shape of an 8B model and random weights (docs/figures/gpu.md). `fleet` is `tokenfleet serve` with one
worker, `plain` is vLLM's own server. `small`: a flag kept KV memory small, so that requests wait for it. Step
times come from the day before (`h100_steps.csv.gz`), and nothing is fitted to these replays.
"""

from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from controlplane.perfmodel.fit import fit_step
from controlplane.perfmodel.profile import Frontend
from controlplane.perfmodel.samples import StepSamples
from controlplane.types import Slo
from controlplane.workload import Workload
from dataplane.simulated.simulate import WorkerSpec, simulate
from tokenfleet.profiles.library import find_profiles

STEPS = Path(__file__).parents[2] / "controlplane" / "perfmodel" / "h100_steps.csv.gz"
SLO = Slo(1.6, 0.075)
HTTP_S = 0.010  # of lone requests, as `compare` measured it
# KV tokens of the engine, the policy that stands for what placed its requests
SERVED = {
    "fleet-14.6": (152_576, "spread+migrate"),
    "plain-14.6": (137_328, "jsq"),
    "fleet-20.1": (453_200, "spread+migrate"),
    "fleet-20.1-small": (152_576, "spread+migrate"),
    "plain-20.1-small": (137_328, "jsq"),
}


@pytest.fixture(scope="module")
def profile():
    (library,) = find_profiles("llama-3.1-8b", ["h100"], [1])
    ran = pl.read_csv(STEPS)
    batch = (ran[name].cast(float).to_numpy() for name in ("prefill_tokens", "sequences", "context_tokens"))
    seconds, sum_sq = ran["gpu_us"].to_numpy() / 1e6, ran["prefill_sum_sq"].cast(float).to_numpy()
    fit = fit_step(StepSamples(*batch, seconds, sum_sq), robust=True)
    engine = replace(library.engine, max_seqs=1024)
    return replace(library, step=fit.model, residuals=fit.residuals, engine=engine, frontend=Frontend())


@pytest.fixture(scope="module")
def replays():
    rows = pl.read_csv(Path(__file__).with_name("h100_replays.csv.gz"))
    return {name: rows.filter(pl.col("replay") == name) for name in SERVED}


def live(rows):
    ttft_s, tpot_s = (
        rows[name].cast(float).fill_null(np.nan).to_numpy() / 1e3 for name in ("ttft_ms", "tpot_ms")
    )
    return ttft_s, tpot_s


def simulated(profile, rows, kv_tokens, policy):
    columns = (rows[name].cast(pl.Int64).to_numpy() for name in ("prompt_tokens", "output_tokens"))
    workload = Workload(rows["at_ms"].cast(float).to_numpy() / 1e3, *columns)
    spec = WorkerSpec(replace(profile, kv=replace(profile.kv, capacity_tokens=kv_tokens)))
    outcome = simulate(workload, [spec], SLO, policy)
    return outcome.ttft_s + HTTP_S, outcome.tpot_s


def attainment(ttft_s, tpot_s):
    return np.mean((ttft_s <= SLO.ttft_s) & ~(tpot_s > SLO.tpot_s))


@pytest.mark.parametrize("name", SERVED)
def test_the_day_before_predicts_time_per_token_and_attainment(profile, replays, name):
    ran = live(replays[name])
    said = simulated(profile, replays[name], *SERVED[name])
    print(
        f"{name}: TTFT {ran[0].mean():.3f} s live, {said[0].mean():.3f} simulated; TPOT"
        f" {1e3 * np.nanmean(ran[1]):.1f}, {1e3 * np.nanmean(said[1]):.1f} ms; attainment"
        f" {attainment(*ran):.1%}, {attainment(*said):.1%}"
    )
    assert np.nanmean(said[1]) == pytest.approx(np.nanmean(ran[1]), rel=0.08)
    assert attainment(*said) == pytest.approx(attainment(*ran), abs=0.07)
    assert (
        0.5 < said[0].mean() / ran[0].mean() < 1.3
    )  # first tokens: under load a client waits for more than steps


def test_where_memory_is_short_the_fleet_keeps_targets_that_one_queue_misses(profile, replays):
    fleet, plain = "fleet-20.1-small", "plain-20.1-small"
    assert attainment(*live(replays[fleet])) - attainment(*live(replays[plain])) > 0.4
    same = [
        simulated(profile, replays[plain], SERVED[plain][0], policy) for policy in ("spread+migrate", "jsq")
    ]
    by_targets, in_turn = (attainment(*each) for each in same)
    assert by_targets - in_turn > 0.4  # not the fleet's KV, which was a tenth larger
