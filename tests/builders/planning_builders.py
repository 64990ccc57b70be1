"""Small questions for the planner: a made workload, a made kind of worker, a plan of both."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from controlplane.perfmodel.engine import EngineLimits, KvModel
from controlplane.perfmodel.profile import Profile, Residuals, Source
from controlplane.perfmodel.step import PrefillModel, StepModel
from controlplane.prefixes import Prefixes, Sessions
from controlplane.types import EngineMode, Slo, SloClass
from controlplane.worker_type import WorkerType
from controlplane.workload import Workload
from tokenfleet.cli.main import main
from tokenfleet.planning.inputs import described
from tokenfleet.planning.planner import make_plan
from tokenfleet.planning.request import PlanRequest
from tokenfleet.planning.result import Plan
from tokenfleet.planning.search import Replayer, Search
from tokenfleet.planning.threads import open_threads
from tokenfleet.report.plan_json import plan_json

SLO = Slo(ttft_s=0.5, tpot_s=0.03)
BLOCK = 16
SYSTEM = 4  # blocks that all talks begin with


def poisson(rate_rps: float = 8.0, requests: int = 600, prompt: int = 400, output: int = 60) -> Workload:
    """Poisson arrivals with lengths spread around their means, always the same."""
    rng = np.random.default_rng(7)
    return Workload(
        np.cumsum(rng.exponential(1.0 / rate_rps, requests)),
        rng.integers(prompt // 2, prompt * 3 // 2, requests),
        rng.integers(2, output * 2, requests),
    )


def talks(
    seed: int, sessions: int = 40, *, told: bool = True, waits: bool = False, together: bool = False
) -> Workload:
    """Conversations behind one system prompt; each turn begins with the whole conversation before it."""
    rng = np.random.default_rng(seed)
    rows = []
    named = SYSTEM
    for session in range(sessions):
        at_s = 0.0 if together else float(rng.uniform(0, 3600))
        blocks = list(range(SYSTEM))
        for turn in range(int(rng.integers(1, 9))):
            more = int(rng.integers(2, 6))
            blocks = [*blocks, *range(named, named + more)]
            named += more
            answer = int(rng.integers(1, 3))
            rows.append((at_s, session, turn, len(blocks), answer, [*blocks, *range(named, named + answer)]))
            blocks = rows[-1][-1]
            named += answer
            at_s += float(rng.uniform(5, 60))
    rows.sort(key=lambda row: row[0])
    lists = [row[5] for row in rows]
    place = {(row[1], row[2]): i for i, row in enumerate(rows)}
    before = [[place[row[1], row[2] - 1]] if waits and row[2] else [] for row in rows]
    return Workload(
        np.array([row[0] for row in rows]),
        np.array([BLOCK * row[3] + 3 for row in rows]),
        np.array([BLOCK * row[4] for row in rows]),
        prefixes=Prefixes(BLOCK, offsets(lists), np.concatenate(lists)),
        sessions=Sessions(
            np.array([row[1] for row in rows]),
            offsets(before),
            np.array([b for of in before for b in of], np.int64),
            np.full(len(rows), 2.0),
        )
        if told
        else None,
    )


def offsets(lists: list[list[int]]) -> np.ndarray:
    return np.concatenate([[0], np.cumsum([len(one) for one in lists])])


def worker(
    gpu: str = "made-gpu",
    tp: int = 1,
    *,
    slower: float = 1.0,
    kv: int = 60_000,
    doubt: float = 0.02,
    mode: EngineMode = EngineMode.CHUNKED,
) -> Profile:
    """A worker that carries about four requests a second of `poisson()` within SLO."""
    return Profile(
        model="made",
        gpu=gpu,
        tp_degree=tp,
        step=StepModel(0.010 * slower, 2e-4 * slower, 3e-4 * slower, 1e-7 * slower),
        prefill=PrefillModel(0.010 * slower, 2e-4 * slower),
        kv=KvModel(kv),
        engine=EngineLimits(mode=mode, max_batched_tokens=1024, max_seqs=64),
        residuals=Residuals(doubt, 2 * doubt, 3 * doubt, 100),
        source=Source("measured", "made for a test", "none", "2026-01-01"),
    )


def worker_type(profile: Profile | None = None, usd: float | None = 2.0) -> WorkerType:
    """A type of worker; `usd` of one of its GPUs."""
    profile = profile or worker()
    if usd is None:
        return WorkerType.of(profile)
    return WorkerType.of(profile, usd * profile.tp_degree, "made")


def planned(
    workload: Workload | None = None,
    worker_types: list[WorkerType] | None = None,
    *,
    explained: bool = False,
    replayer: Replayer | None = None,
    **asked: object,
) -> Plan:
    """The plan of a small request, without moves; `asked` replaces fields of the request."""
    workload = poisson() if workload is None else workload
    asked = {"attainment": 0.95, "confidence": 0.9, "policy": "spread"} | asked
    request = replace(PlanRequest(SLO), **asked)  # type: ignore[arg-type]
    with open_threads(2) as threads:
        return make_plan(
            workload,
            worker_types or [worker_type()],
            request,
            described("made", workload, ()),
            threads,
            explained=explained,
            replayer=replayer,
        )


def search_of(
    workload: Workload, request: PlanRequest | None = None, classes: Sequence[SloClass] = (), **terms: object
) -> Search:
    """The search for a request on a workload, one thing at a time; `terms` replaces some of its terms."""
    request = request or PlanRequest(SLO)
    with open_threads(1) as threads:  # closed: what needs more is given threads of its own
        return Search.of(request, workload, (), threads, classes=classes).on(**terms)


def said_of(plan: Plan) -> dict[str, str]:
    """The lines of a plan's answer, by topic."""
    return dict(plan_json(plan)["says"])


def save(workload: Workload, path: Path) -> None:
    columns = np.column_stack((workload.arrival_s, workload.prompt_tokens, workload.output_tokens))
    np.savetxt(path, columns, "%.6f,%d,%d", header="arrival_s,prompt_tokens,output_tokens", comments="")


def plan(folder: Path, *more: str, slo: str = "ttft=500ms,tpot=30ms") -> int:
    words = ["plan", "--trace", f"{folder}/trace.csv", "--slo", slo, "--attainment", "0.95"]
    return main([*words, "--profile", f"{folder}/worker.yaml", *more])
