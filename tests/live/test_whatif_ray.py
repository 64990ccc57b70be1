"""A what-if grid on a Ray cluster gives the bytes that one process gives."""

import json
from pathlib import Path

import pytest
from planning_builders import SLO, poisson, save, worker

from tokenfleet.planning.request import PlanRequest
from tokenfleet.profiles.library import write_profile
from tokenfleet.traces import read_traces
from tokenfleet.whatifs import run
from tokenfleet.whatifs.axes import grid
from tokenfleet.whatifs.view import whatif_json

pytest.importorskip("ray")


def test_a_grid_on_ray_is_the_grid_of_one_process(tmp_path: Path) -> None:
    save(poisson(requests=300), tmp_path / "trace.csv")
    write_profile(worker(), tmp_path / "worker.yaml")
    request = PlanRequest(SLO, attainment=0.95, profiles=(tmp_path / "worker.yaml",))
    traces, cells = read_traces([str(tmp_path / "trace.csv")]), grid(["rate=1,2", "confidence=0.9,0.95"])
    here, _ = run.planned(traces, request, cells)
    there, _ = run.planned(traces, request, cells, ray="local")
    assert json.dumps(whatif_json(there)) == json.dumps(whatif_json(here))
