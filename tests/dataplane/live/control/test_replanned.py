"""Plans that a fleet was ordered to serve by, as a core's successor takes them up."""

from made_plans import PROFILE

from controlplane.worker_type import WorkerGroup, WorkerType


class Left:
    """An estate with a record, as an earlier core has left it."""

    def __init__(self, folder, **facts):
        from dataplane.live.engine_api.processes import Record

        Record(folder / "record.json").note(**facts)
        self.record = Record(folder / "record.json")


def group(tp, workers):
    return WorkerGroup(WorkerType("h100-sxm", tp, PROFILE, usd_per_h=2.5 * tp), workers)


def pool(**wanted):
    from dataplane.live.pool.member import Revision
    from dataplane.live.pool.roster import PoolRecord

    kinds = {name.replace("_", " ").replace("h100", "h100-sxm"): n for name, n in wanted.items()}
    return PoolRecord(3, kinds, kinds, None, 0.0, 0.0, "", Revision(1, "m"), {})


def test_a_successor_has_the_types_and_the_bounds_of_the_plan_that_was_applied(tmp_path):
    from controlplane.scaler.bounds import Autoscale
    from dataplane.live.control.replanned import PlanRecord, PlanToServe, taken_up
    from dataplane.live.pool.fleet_types import FleetTypes

    large, bounds = group(2, 1), Autoscale(1, 3, line=(0.2, 0.1))
    order = PlanToServe("p2", (large,), {"h100-sxm TP2": PROFILE.engine}, bounds)
    for is_open, then in ((False, bounds), (True, None)):
        wanted = {"h100_TP1": 1, "h100_TP2": 1} if is_open else {"h100_TP2": 1}
        types = FleetTypes([group(1, 2)])
        left = Left(tmp_path, replan=PlanRecord((order,), is_open), pool=pool(**wanted))
        assert taken_up(left, types, None) == then
        assert set(types.names) == {name.replace("_", " ").replace("h100", "h100-sxm") for name in wanted}
        assert types["h100-sxm TP2"] == large.worker_type
        assert types.planned["h100-sxm TP2"] == PROFILE.engine


def test_a_fleet_that_was_never_replanned_stays_as_it_was_started(tmp_path):
    from controlplane.scaler.bounds import Autoscale
    from dataplane.live.control.replanned import taken_up
    from dataplane.live.pool.fleet_types import FleetTypes

    types, bounds = FleetTypes([group(1, 2)]), Autoscale(1, 2)
    assert taken_up(Left(tmp_path, pool=pool(h100_TP1=2)), types, bounds) == bounds
    assert types.names == ("h100-sxm TP1",)


def test_limits_are_named_with_what_would_break_them():
    from controlplane.scaler.mix import MixSettings
    from dataplane.live.control.replanned import PlanToServe

    types = tuple(group(tp, 1).worker_type for tp in (1, 2))
    order = PlanToServe("p", (), most=MixSettings(max_gpus=4, budget_usd_per_h=9.0))
    one, two = (t.name for t in types)
    assert order.most.beyond(types, {one: 1, two: 1}) is None
    assert order.most.beyond(types, {one: 1, two: 2}) == "5 GPUs are more than the limit of 4"
    assert order.most.beyond(types, {two: 2}) == "$10.00/h is more than the budget of $9.00/h"
