"""Replanning of a served plan: when it is due, what is asked then, and what the new one would change."""

import asyncio
import datetime
import json
import shutil
import time
from contextlib import closing

import polars as pl
import pytest
from made_history import NOON_S, row, written
from made_plans import plan_json, plan_of_fleet

from controlplane.errors import BadInput
from dataplane.http.rules import Conflict
from tokenfleet.planning.plan_file import parse_plan
from tokenfleet.service.plan_service import PlanService, ServiceLimits
from tokenfleet.service.proposals import Proposals, Replanning
from tokenfleet.service.replan import (
    DAY_S,
    AutoApply,
    FleetChange,
    Recorded,
    due,
    next_order,
    sign,
    too_short,
    why_never,
)

TODAY = datetime.date(2026, 11, 25)
LINE = {"workers_per_rps": 0.1, "intercept": 0.2, "mean_prompt_tokens": 500.0, "mean_output_tokens": 100.0}


def plan(workers=2, **fields):
    fields = {"demand_line": LINE, "curves": {"rate_rps": [[0.0, 5.0], [60.0, 12.0]]}} | fields
    return parse_plan(plan_json(workers, **fields), "plan.json")


def recorded(**changes):
    """An hour at 10 req/s as planned, all in time."""
    told = {"seconds": 3600.0, "requests": 36_000, "judged": 36_000, "met": 36_000}
    return Recorded(**told | {"prompt_tokens": 500.0, "output_tokens": 100.0} | changes)


def test_a_plan_is_due_after_a_day_and_not_before_while_it_holds():
    assert due(plan(), 0.0, DAY_S - 1.0, DAY_S, recorded()) is None
    assert due(plan(), 0.0, DAY_S, DAY_S, recorded(requests=0)) == "24 h since the last plan"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"met": 30_000}, "SLO attainment was 83.33 % in the last hour, the target is 90 %"),
        ({"requests": 60_000}, "16.7 req/s in the last hour, the plan's busiest interval had 12"),
        ({"prompt_tokens": 900.0}, "900 prompt tokens a request in the last hour, the plan has 500"),
        ({"output_tokens": 60.0}, "60 output tokens a request in the last hour, the plan has 100"),
    ],
)
def test_a_sign_makes_a_plan_due_an_hour_after_the_last(changes, says):
    assert due(plan(), 0.0, 3600.0, DAY_S, recorded(**changes)) == says
    assert due(plan(), 0.0, 3599.0, DAY_S, recorded(**changes)) is None


def test_what_chance_explains_and_what_was_planned_for_is_no_sign():
    few = recorded(seconds=3600.0, requests=200, judged=200, met=176)  # 90 % asked, 88 % seen
    assert sign(plan(), few) is None
    assert sign(plan(), recorded(requests=3600 * 13)) is None  # 13 of 12 req/s
    assert sign(plan(demand_line=None, curves={}), recorded(prompt_tokens=5e3)) is None


def test_a_short_history_is_refused_in_one_line():
    assert too_short(recorded(seconds=1200.0, requests=40)) == (
        "history too short: 20 min and 40 requests recorded, a re-plan needs 60 min and 100 requests"
    )
    assert too_short(recorded()) is None


def test_requests_are_counted_as_clients_saw_them():
    rows = pl.DataFrame(
        [row(0), row(1, ttft_s=2.0), row(2, tpot_s=0.2), row(3, outcome="failed", output_tokens=0),
         row(4, outcome="aborted"), row(5, tpot_s=None, output_tokens=1)],
        infer_schema_length=None,
    )  # fmt: skip
    found = Recorded.of(rows, NOON_S + 10.0)
    assert (found.requests, found.judged, found.met, found.rate_rps) == (6, 5, 2, 0.6)


def test_the_order_asks_what_the_served_plan_was_asked():
    classes = [
        {"name": "batch", "ttft_s": 9.0, "tpot_s": 0.2, "deadline_s": 7200.0, "attainment": {"target": 0.8}},
        {"name": "default", "ttft_s": 0.4, "tpot_s": 0.03, "attainment": {"target": 0.9}},
    ]  # fmt: skip
    fields = plan_json()["inputs"] | {"budget_usd_per_h": 20.0, "max_gpus": 8, "confidence": 0.9}
    fields["profiles"] = [one | {"usd_per_gpu_h": 2.5} for one in fields["profiles"]]
    served = plan(inputs=fields, classes=classes, policy="spread+migrate")
    request = next_order(served, "6h", TODAY).request()
    assert (request.slo, request.attainment, request.confidence) == (served.targets, 0.9, 0.9)
    assert (request.budget_usd_per_h, request.max_gpus, request.policy) == (20.0, 8, "spread+migrate")
    assert [(one.name, one.deadline_s, one.attainment) for one in request.slo_classes] == [
        ("batch", 7200.0, 0.8)
    ]
    order = next_order(served, "6h", TODAY)
    assert (order.trace.since, len(order.profiles)) == ("6h", 1)
    assert json.loads(order.prices)["prices"][0]["on_demand"] == 2.5


def test_split_fleets_and_agents_are_not_planned_again():
    parts = [
        {"gpu": "h100-sxm", "tp_degree": 1, "workers": 1, "role": role} for role in ("prefill", "decode")
    ]
    split = parse_plan(plan_of_fleet(parts, "llama-3.1-8b"), "split.json")
    assert "prefill and decode" in why_never(split)
    with pytest.raises(BadInput, match="proposal: plans with prefill and decode"):
        next_order(split, "1d", TODAY)
    assert "agents" in why_never(plan(agents=4))


def fleet(tp, workers, usd=5.0):
    part = {"gpu": "h100-sxm", "tp_degree": tp, "workers": workers, "usd_per_hour": usd}
    attainment = {"target": 0.9, "expected": 0.9712, "low": 0.95}
    return parse_plan(plan_of_fleet([part], "llama-3.1-8b", attainment=attainment), "plan.json")


def test_a_change_names_workers_tp_degree_and_dollars():
    change = FleetChange.between(fleet(1, 4, 10.76), fleet(2, 1, 5.38), 0.8841)
    assert change.text() == (
        "4x H100 TP1 → 1x H100 TP2, $5.38/h (-$5.38/h), SLO attainment 97.12 % expected, 88.41 % recorded"
    )
    told = change.as_json()
    assert told["workers"] == {"before": 4, "after": 1}
    assert told["tp_degrees"] == {"before": [1], "after": [2]}
    assert told["gpu_types"] == {"before": ["h100-sxm"], "after": ["h100-sxm"]}
    assert told["usd_per_hour"] == {"before": 10.76, "after": 5.38}


def test_the_same_fleet_is_no_change():
    change = FleetChange.between(fleet(1, 2), fleet(1, 2), None)
    assert change.is_none
    assert change.text() == "keep 2x H100 TP1"


@pytest.mark.parametrize("text", ["", "8", "workers=8", "max-workers=soon", "usd=-1", "max-workers=2.5"])
def test_limits_of_auto_apply_that_are_none_are_refused(text):
    with pytest.raises(BadInput, match=r"--auto-apply: expected limits such as max-workers=8,usd=20"):
        AutoApply.read(text)


@pytest.mark.parametrize(
    ("limits", "hours", "why"),
    [
        ("max-workers=4,usd=12", 24.0, None),
        ("max-workers=3", 24.0, "4 workers are more than max-workers=3"),
        ("usd=10", 24.0, "$10.76/h is more than usd=10"),
    ],
)
def test_a_larger_fleet_is_applied_within_the_limits(limits, hours, why):
    change = FleetChange.between(fleet(1, 2, 5.38), fleet(1, 4, 10.76), None)
    assert AutoApply.read(limits).refusal(change, hours * 3600.0) == why


def test_fewer_gpus_need_a_whole_day_of_history_before_they_are_applied_without_an_operator():
    change = FleetChange.between(fleet(1, 4), fleet(1, 2), None)
    limits = AutoApply.read("max-workers=8")
    assert limits.refusal(change, 7200.0) == "fewer GPUs need a whole day of history, there are 2 h"
    assert limits.refusal(change, DAY_S) is None


# A fleet's own folder.


@pytest.fixture
def service(tmp_path):
    made = PlanService(tmp_path, ServiceLimits())
    yield made
    made.close()


def kept(service, served, **options):
    replanning = Replanning(**options)
    return Proposals(service, service.plans.keep(served.document, "served"), served, replanning)


def test_a_fleet_with_a_short_history_says_so_and_plans_nothing(service, tmp_path):
    now_s = time.time()
    written(tmp_path / "history", [row(0, arrival_s=now_s - 1200.0 + i) for i in range(40)])
    proposals = kept(service, plan(), every_s=1.0)
    asyncio.run(proposals.look(time.time() + 2.0))
    view = proposals.view()
    assert (view["state"], view["plan"]) == ("none", None)
    assert view["line"].startswith("history too short: 20 min and 40 requests recorded")
    assert service.jobs.newest(10) == []


def proposed(service, folder, running=None, **options):
    """A proposal of one worker in place of two, by the real planner in its own process."""
    now_s = time.time()
    lengths = {"prompt_tokens": 200, "output_tokens": 20, "model": "llama-3.1-8b"}
    written(folder / "history", [row(0, arrival_s=now_s - 3700.0 + 9.0 * i, **lengths) for i in range(400)])
    proposals = kept(service, plan(), every_s=1.0, **options)
    if running is not None:
        proposals.attach(running)

    async def story():
        async with service.running():
            await proposals.look(time.time() + 2.0)

    asyncio.run(story())
    return proposals


@pytest.fixture(scope="module")
def due_folder(tmp_path_factory):
    """The folder of a fleet whose plan was made again."""
    folder = tmp_path_factory.mktemp("due")
    with closing(PlanService(folder, ServiceLimits())) as service:
        view = proposed(service, folder).view()
    return folder, view


@pytest.fixture
def due_service(due_folder, tmp_path):
    shutil.copytree(due_folder[0], tmp_path, dirs_exist_ok=True)
    with closing(PlanService(tmp_path, ServiceLimits())) as made:
        yield made


def test_a_due_plan_is_made_of_the_fleets_own_history_and_kept(due_folder, due_service):
    view = due_folder[1]
    assert view["state"] == "ready", view["line"]
    assert view["change"]["workers"] == {"before": 2, "after": 1}
    assert view["change"]["attainment"]["observed"] == 1.0
    assert view["change"]["attainment"]["expected"] > 0.9
    assert due_service.plans.find(view["plan"]).workers == 1
    assert kept(due_service, plan()).view() == view, "a restart keeps it"
    assert kept(due_service, plan(3)).view()["state"] == "none", "it is no proposal for another plan"


class Running:
    """A fleet that takes a plan to serve by, and ends when a test says so."""

    def __init__(self, served=None, is_left=False):
        self.orders, self.on_end, self.served, self.is_left = [], [], served, is_left

    def apply(self, order):
        self.orders.append(order)
        return {"what": f"plan {order}"}

    def end(self, state, cause):
        self.on_end[0](self.orders[-1], state, cause)


def attached(service, running):
    """The proposal of a folder that has one, on a fleet."""
    proposals = kept(service, plan(), every_s=1.0, to_serve=lambda name, plan: name)
    proposals.attach(running)
    return proposals


def test_an_applied_proposal_is_the_plan_that_is_served_and_one_rolled_back_is_not(due_service):
    running, service = Running(), due_service
    proposals = attached(service, running)
    name = proposals.view()["plan"]
    assert proposals.apply() == {"what": f"plan {name}"}
    assert running.orders == [name]
    with pytest.raises(Conflict, match=r"no proposal is ready to apply; the last one: .* applies it"):
        proposals.apply()
    with pytest.raises(Conflict, match="is being applied already"):
        asyncio.run(proposals.begin("an operator asked", "1h"))
    running.end("rolled-back", "w3 did not start")
    assert proposals.view()["state"] == "rolled-back"
    assert proposals.view()["line"].endswith("; rolled back: w3 did not start")
    assert service.plans.last_served() is None
    proposals.apply()
    running.end("done", "")
    assert proposals.view()["state"] == "applied"
    assert service.plans.last_served() == name == proposals.name
    assert proposals.plan.workers == 1


def test_a_cores_successor_serves_by_the_plan_that_was_applied_and_hears_of_one_under_way(due_service):
    running, service = Running(), due_service
    proposals = attached(service, running)
    proposals.apply()
    left, name = Running(is_left=True), proposals.view()["plan"]
    again = kept(service, plan())
    assert again.view()["state"] == "ready", "that fleet has ended"
    again.attach(left)
    assert again.view()["state"] == "applying"
    left.orders.append(name)
    left.end("done", "")
    assert (again.view()["state"], again.name) == ("applied", name)
    third = kept(service, plan())
    third.attach(Running(served=name))
    assert (third.name, third.plan.workers, third.view()["state"]) == (name, 1, "applied")


def test_auto_apply_leaves_to_an_operator_what_is_beyond_its_limits(service, tmp_path):
    running, options = Running(), {"auto": AutoApply(max_workers=8), "to_serve": lambda name, plan: name}
    view = proposed(service, tmp_path, running, **options).view()
    assert (view["state"], running.orders) == ("ready", [])
    assert "; not applied by itself: fewer GPUs need a whole day of history" in view["line"]


def test_what_cannot_be_planned_is_refused_and_leaves_the_proposal_as_it_was(service):
    proposals = kept(service, plan())
    before = proposals.view()
    for since, says in (("soon", "since: "), ("1h", "has no history")):
        with pytest.raises(BadInput, match=says):
            asyncio.run(proposals.begin("an operator asked", since))
    assert proposals.view() == before
