"""A fleet's log, made up: looks at workers of one type, and what the fleet is made of."""

import msgspec
from made_plans import PROFILE

from controlplane.worker_type import WorkerType
from dataplane.history.fleet_log import FleetLog, FleetSpec, Look, day_begin_s

DAY = "2026-06-01"
NOON_S = day_begin_s(DAY) + 43_200.0
KIND = WorkerType.of(PROFILE, 5.0)


def look(at_s, serving=0, starting=0, draining=0, rule=None, fixed=False, kind=KIND.name, cold_start_s=60.0):
    """A look at the fleet, `at_s` seconds after noon."""
    return Look(NOON_S + at_s, {kind: (starting, serving, draining)}, cold_start_s, fixed, rule)


def fleet(types=(KIND,), attainment=0.9, at_s=NOON_S, **more):
    return FleetSpec(at_s, tuple(types), "spread", attainment, **more)


def logged(folder, looks, made_of=None):
    """Write looks as a controller does."""
    log = FleetLog(folder)
    for one in looks:
        log.write(one, msgspec.structs.replace(made_of or fleet(), at_s=one.at_s))
    log.close()
