"""Plan files: what is written is read, and what is no plan is refused in one line."""

import copy
import json
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from made_plans import plan_of_fleet
from planning_builders import planned, poisson, worker, worker_type

from controlplane.errors import BadInput
from controlplane.perfmodel.ranks import Ranks
from controlplane.worker_type import WorkerType
from tokenfleet.planning.plan_file import parse_plan, read_plan
from tokenfleet.report.plan_json import plan_json


@lru_cache(maxsize=1)
def written() -> str:
    """A plan as the planner writes it."""
    return json.dumps(plan_json(planned(explained=True, cold_start_s=60.0)))


def places(document: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The path of everything in a document."""
    inside = document.items() if isinstance(document, dict) else enumerate(document)
    found = []
    for key, value in inside:
        found.append((*at, key))
        if isinstance(value, dict | list):
            found += places(value, (*at, key))
    return found


def test_what_the_planner_writes_is_read(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(written())
    plan = read_plan(tmp_path / "plan.json")
    document = json.loads(written())
    assert plan.document == document
    assert [(p.gpu, p.workers, p.usd_per_hour) for p in plan.fleet] == [
        (p["gpu"], p["workers"], p["usd_per_hour"]) for p in document["fleet"]
    ]
    assert plan.schedule_detail is not None
    assert plan.schedule_detail.paid is not None
    assert plan.schedule_detail.paid.cold_start_s == 60.0
    assert plan.demand_line is not None
    assert plan.demand_line.workers_per_rps == document["demand_line"]["workers_per_rps"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            {"schema": "tokenfleet.plan/2"},
            "schema: input should be 'tokenfleet.plan/1', got 'tokenfleet.plan/2'",
        ),
        ({"fleet": [{"gpu": "h100-sxm"}]}, "fleet.0.tp_degree: field required"),
        ({"workers": 7}, "workers: expected the fleet's 2, got 7"),
        ({"feasible": False}, "fleet: expected none, as the plan is not feasible, got 1"),
        ({"slo": {"ttft_s": 0, "tpot_s": 0.1}}, "slo.ttft_s: input should be greater than 0, got '0'"),
        ({"usd_per_hour": "much"}, "usd_per_hour: input should be a valid number, got 'much'"),
        ({"inputs": {"rate_rps": 1.0, "profiles": []}}, "fleet.0: inputs.profiles has no h100-sxm TP2"),
    ],
)
def test_what_is_no_plan_is_refused_with_its_file_field_and_value(change: dict[str, Any], says: str) -> None:
    document = plan_of_fleet([{"gpu": "h100-sxm", "tp_degree": 2, "workers": 2}]) | change
    with pytest.raises(BadInput) as refused:
        parse_plan(document, "plan.json")
    assert str(refused.value).startswith(f"plan.json: {says}")


def test_a_plan_whose_profile_is_of_another_worker_is_refused() -> None:
    document = json.loads(written())
    document["inputs"]["profiles"][0]["profile"]["gpu"] = "other-gpu"
    says = (
        r"^p: inputs\.profiles\.0: profile: expected one of made on made-gpu TP1, got made on other-gpu TP1$"
    )
    with pytest.raises(BadInput, match=says):
        parse_plan(document, "p")


@pytest.mark.parametrize(("of", "short"), [("data", "DP4"), ("pipeline", "PP4")])
def test_a_plan_of_workers_with_ranks_counts_their_gpus_and_says_who_runs_them(of: Any, short: str) -> None:
    one = worker()
    ranked = replace(one, ranks=Ranks(of, 4), kv=replace(one.kv, capacity_tokens=240_000)).with_engine(
        max_seqs=256
    )
    talk = poisson(rate_rps=30, requests=900, prompt=20, output=150)  # where prefill holds up little
    found = planned(talk, worker_types=[WorkerType.of(ranked, 8.0), worker_type(one)])
    assert found.best is not None
    fewest = {c.fleet.groups[0].worker_type.name: c.fleet.workers for c in (found.best, *found.alternatives)}
    # Four ranks carry more than one engine, and less than four, since each waits for the others' prefill.
    assert fewest[f"made-gpu TP1 {short}"] < fewest["made-gpu TP1"] < 4 * fewest[f"made-gpu TP1 {short}"]
    alone = plan_json(planned(talk, worker_types=[WorkerType.of(ranked, 8.0)]))
    plan = parse_plan(alone, "p")
    assert [(part.tp_degree, part.ranks, part.gpus) for part in plan.fleet] == [(1, short, 4)]
    assert plan.profile_of(plan.fleet[0]).whole() == ranked
    assert plan.groups[0].worker_type.usd_per_h == 8.0
    assert plan.unserved is not None
    assert f"vllm serve --tensor-parallel-size 1 --{of}-parallel-size 4" in plan.unserved
    alone["fleet"][0]["ranks"] = "DP9"
    with pytest.raises(BadInput, match=r"fleet\.0: inputs\.profiles has no made-gpu TP1 DP9"):
        parse_plan(alone, "p")


def test_a_file_of_another_version_is_refused_for_that_whatever_else_it_lacks() -> None:
    with pytest.raises(BadInput, match=r"schema: input should be .*, got 'tokenfleet.plan.2'"):
        parse_plan({"schema": "tokenfleet.plan/2"}, "plan.json")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", '{"schema": NaN}', "[" * 100_000, "\x00"])
def test_a_file_that_holds_no_plan_is_refused_in_one_line(tmp_path: Path, text: str) -> None:
    (tmp_path / "plan.json").write_text(text)
    with pytest.raises(BadInput, match=r"plan\.json: [^\n]+$"):
        read_plan(tmp_path / "plan.json")


VALUES = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.lists(st.integers(), max_size=2)
)


@given(st.data())
def test_a_spoiled_plan_is_read_or_refused_in_one_line(data: st.DataObject) -> None:
    document = json.loads(written())
    for _ in range(data.draw(st.integers(1, 4))):
        *way, last = data.draw(st.sampled_from(places(document)))
        inside = document
        for key in way:
            inside = inside[key]
        if data.draw(st.booleans()):
            del inside[last]
        else:
            inside[last] = data.draw(VALUES | st.sampled_from([copy.deepcopy(inside[last])]))
    said, plan = "plan.json: read", None
    try:
        plan = parse_plan(document, "plan.json")
    except BadInput as refused:
        said = str(refused)
    assert re.fullmatch(r"plan\.json: [^\n]+", said)
    if plan is not None:
        assert plan.document is document
        assert plan.workers == sum(part.workers for part in plan.fleet)
