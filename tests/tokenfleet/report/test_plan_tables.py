"""Origins of a plan's numbers: one row for each input, with its origin and what narrows it."""

from dataclasses import replace

from planning_builders import planned, poisson, worker, worker_type

from controlplane.perfmodel.profile import Frontend
from controlplane.worker_type import WorkerType
from tokenfleet.report.plan_json import plan_file
from tokenfleet.report.plan_tables import COLUMNS, origins


def rows(types):
    read = plan_file(planned(poisson(rate_rps=4.0, requests=400), types))
    shown = origins(read, {profile.gpu for profile in read.inputs.profiles})
    assert shown.columns == COLUMNS
    assert all(len(row) == len(COLUMNS) and all(row) for row in shown.rows)
    return {row[0]: row[1:] for row in shown.rows}


def test_measured_and_predicted_step_times_say_so():
    profile = worker()
    for kind, origin, constant in (
        ("measured", "measured", "measured"),
        ("composed", "predicted", "assumed"),
    ):
        told = replace(
            profile, source=replace(profile.source, kind=kind), frontend=Frontend(per_request_s=0.009)
        )
        found = rows([WorkerType.of(told, 2.5)])
        step, kv, http = (row for name, row in found.items() if name.endswith(f"TP{profile.tp_degree}"))
        assert (step[1], kv[1], http[1]) == (origin, origin, constant)
        assert kv[0] == f"{profile.kv.capacity_tokens:,} tokens"


def test_the_trace_is_recorded_and_a_price_is_listed_or_unknown():
    found = rows([worker_type()])
    assert found["Traffic"][:2] == ["400 requests", "recorded"]
    (price,) = (row for name, row in found.items() if name.startswith("Price"))
    assert price[1] == "listed"
    found = rows([WorkerType.of(worker(), 2.5, "your mine.yaml: on demand, 2026-11-01, our contract")])
    (price,) = (row for name, row in found.items() if name.startswith("Price"))
    assert price[1:3] == ["given", "your mine.yaml of 2026-11-01"]
    (price,) = (
        row for name, row in rows([WorkerType.of(worker(), None)]).items() if name.startswith("Price")
    )
    assert price[0] == "unknown"


def test_only_the_types_of_the_answer_are_named():
    found = rows([worker_type(), WorkerType.of(worker("other-gpu", slower=9.0), 2.5)])
    assert not [name for name in found if "other-gpu" in name]
