"""The fleet's log: looks come back as written, unseen time is unknown, and bad files are named."""

from dataclasses import replace

import pytest
from made_fleet_log import DAY, NOON_S, fleet, logged, look
from made_states import STEP

from controlplane.errors import BadInput
from dataplane.history.files import HistoryLimits, let_go
from dataplane.history.fleet_log import (
    EVERY_S,
    LASTS_S,
    FleetLog,
    LogWindows,
    Ruled,
    day_begin_s,
    logged_days,
    read_fleet_log,
)


def test_looks_and_fleets_come_back_as_they_were(tmp_path):
    rule = Ruled(3, 0.5, 0.2, 0.4, 1, None)
    looks = [look(0.0, serving=1), look(20.0, starting=1, serving=1, rule=rule), look(80.0, serving=2)]
    logged(tmp_path, looks)
    found, fleets = read_fleet_log(tmp_path, NOON_S, NOON_S + 3600.0)
    assert found == looks
    assert fleets == [fleet()]
    assert logged_days(tmp_path) == [DAY]


def test_a_look_is_kept_where_it_is_news_and_once_a_minute(tmp_path):
    rules = [Ruled(n, 0.5, 0.2, 0.4, 1, None) for n in (3, 4)]
    logged(tmp_path, [look(t / 2.0, serving=1, rule=rules[t // 11 % 2]) for t in range(500)])
    found, _ = read_fleet_log(tmp_path, NOON_S, NOON_S + 3600.0)
    assert len(found) < 60  # the rule changes every 5.5 s, workers never
    logged(tmp_path / "b", [look(t / 2.0, serving=1) for t in range(500)])
    found, _ = read_fleet_log(tmp_path / "b", NOON_S, NOON_S + 3600.0)
    assert [one.at_s - NOON_S for one in found] == [0.0, EVERY_S, 2 * EVERY_S, 3 * EVERY_S, 4 * EVERY_S]


def test_each_day_has_a_file_that_stands_alone_and_half_a_line_is_forgotten(tmp_path):
    logged(tmp_path, [look(0.0, serving=1), look(86_400.0, serving=1)])
    assert len(logged_days(tmp_path)) == 2
    last = tmp_path / f"fleet-{logged_days(tmp_path)[1]}.jsonl"
    assert last.read_bytes().startswith(b'{"what":"fleet"')
    with last.open("ab") as file:
        file.write(b'{"what":"lo')
    logged(tmp_path, [look(86_400.0 + 30.0, serving=2)])
    found, _ = read_fleet_log(tmp_path, NOON_S, NOON_S + 2 * 86_400.0)
    assert [one.workers["h100-sxm TP1"][1] for one in found] == [1, 1, 2]


def test_step_times_that_change_are_kept_now_and_then(tmp_path):
    log = FleetLog(tmp_path)
    known = fleet().types[0].profile
    for n in range(100):
        step = replace(STEP, base_s=0.01 + n / 1e4)
        one = replace(fleet().types[0], known_profile=replace(known, step=step))
        log.write(look(30.0 * n, serving=1), fleet(types=(one,), at_s=NOON_S + 30.0 * n))
    log.close()
    _, fleets = read_fleet_log(tmp_path, NOON_S, NOON_S + 86_400.0)
    assert 4 <= len(fleets) <= 6


LOOK = '{"what": "look", "at_s": -, "workers": {"a": [1, 0, 0]}, "cold_start_s": 0, "fixed": true}'


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 3"),
        ('{"what": "other"}', "Invalid value 'other'"),
        (LOOK.replace("-", "5").replace("0, 0", "0, -2"), ">= 0"),
        (LOOK.replace("-", '"noon"'), "at_s"),
        ('{"what": "fleet", "at_s": 1, "types": [{"gpu": "a", "tp_degree": 0}], "policy": "spread", '
         '"attainment": 0.9}', "TP degree"),
    ],
)  # fmt: skip
def test_a_line_that_cannot_be_read_is_named(tmp_path, line, said):
    logged(tmp_path, [look(0.0, serving=1)])
    with (tmp_path / f"fleet-{DAY}.jsonl").open("a") as file:
        file.write(line + "\n")
    with pytest.raises(BadInput) as refused:
        read_fleet_log(tmp_path, NOON_S, NOON_S + 3600.0)
    assert f"fleet-{DAY}.jsonl: line 3" in str(refused.value)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_name_that_is_no_day_is_refused(tmp_path):
    (tmp_path / "fleet-2026-13-45.jsonl").write_text("")
    with pytest.raises(BadInput, match="no day"):
        read_fleet_log(tmp_path, 0.0, 1e10)


def test_old_days_go_with_the_history(tmp_path):
    logged(tmp_path, [look(0.0, serving=1)])
    path = tmp_path / f"fleet-{DAY}.jsonl"
    made_s = path.stat().st_mtime
    let_go(tmp_path, HistoryLimits(keep_days=2), made_s + 86_400.0)
    assert path.exists()
    let_go(tmp_path, HistoryLimits(keep_days=2), made_s + 3 * 86_400.0)
    assert not path.exists()


def test_what_nobody_looked_at_is_in_no_window():
    looks = [look(60.0 * n, serving=1) for n in range(21)]  # 20 minutes and what the last one holds
    looks += [look(3600.0 + 60.0 * n, serving=2) for n in range(6)] + [look(7200.0, serving=3)]
    found = LogWindows.of(looks, NOON_S, NOON_S + 86_400.0)
    assert found.stretch.tolist() == [0] * 4 + [1, 2]
    assert found.seconds.sum() == pytest.approx(1200 + LASTS_S + 300 + LASTS_S + LASTS_S)
    assert sum(seconds for _, _, seconds in found.pieces) == pytest.approx(found.seconds.sum())
    for w, span in enumerate(found.windows):
        within = [seconds for at, _, seconds in found.pieces if at == w]
        assert sum(within) == pytest.approx(span[1] - span[0])


def test_a_day_has_only_what_is_within_it():
    looks = [look(60.0 * n, serving=1) for n in range(100)]
    found = LogWindows.of(looks, NOON_S + 90.0, NOON_S + 690.0)
    assert found.windows.tolist() == [[NOON_S + 90.0, NOON_S + 390.0], [NOON_S + 390.0, NOON_S + 690.0]]
    assert day_begin_s(DAY) <= NOON_S < day_begin_s(DAY) + 86_400.0
