"""What-ifs: the grid and its refusals, the same answers wherever it runs, what is kept, what a step costs."""

import json
import multiprocessing
import os
import re
import shlex
import signal
from dataclasses import replace
from pathlib import Path

import pytest
from planning_builders import SLO, planned, poisson, save, search_of, worker, worker_type

from controlplane.errors import BadInput
from controlplane.types import Slo
from tokenfleet.cli.main import main
from tokenfleet.planning.fleet import of_one_kind
from tokenfleet.planning.request import PlanRequest
from tokenfleet.planning.search import Replayer
from tokenfleet.planning.traffic.sample import Sampler
from tokenfleet.profiles.library import write_profile
from tokenfleet.report.plan_json import plan_json
from tokenfleet.texts import parse_slo
from tokenfleet.traces import Trace, read_traces
from tokenfleet.whatifs import run
from tokenfleet.whatifs.axes import Scenario, changed, grid, prepared
from tokenfleet.whatifs.run import solved
from tokenfleet.whatifs.solve import Cache, families, key_of
from tokenfleet.whatifs.view import whatif_json

PRICES = "schema: tokenfleet.prices/1\nprices:\n" + "".join(
    f'- {{gpu: {gpu}, on_demand: {usd}, spot: {usd / 2}, date: 2026-01-01, source: "made"}}\n'
    for gpu, usd in (("made-gpu", 2.5), ("slow-gpu", 1.5))
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A trace, two kinds of worker and their prices."""
    save(poisson(requests=400), tmp_path / "trace.csv")
    write_profile(worker(), tmp_path / "worker.yaml")
    write_profile(worker(gpu="slow-gpu", slower=1.4), tmp_path / "slow.yaml")
    (tmp_path / "prices.yaml").write_text(PRICES)
    return tmp_path


def asked(folder: Path, **more: object) -> PlanRequest:
    base = PlanRequest(
        SLO,
        attainment=0.95,
        profiles=(folder / "worker.yaml", folder / "slow.yaml"),
        prices=folder / "prices.yaml",
    )
    return replace(base, **more)  # type: ignore[arg-type]


def trace(folder: Path) -> Trace:
    return read_traces([str(folder / "trace.csv")])


def whatif(folder: Path, *varies: str, **more: object) -> list[Scenario]:
    source = ["--trace", str(folder / "trace.csv")]
    found, _ = run.planned(trace(folder), asked(folder), grid(varies), source=source, **more)  # type: ignore[arg-type]
    return found


def test_the_grid_is_every_combination_in_the_order_given() -> None:
    assert grid(["rate=1,2", "slo.ttft=400ms, 1s"]) == [
        {"rate": "1", "slo.ttft": "400ms"},
        {"rate": "1", "slo.ttft": "1s"},
        {"rate": "2", "slo.ttft": "400ms"},
        {"rate": "2", "slo.ttft": "1s"},
    ]


@pytest.mark.parametrize(
    ("varies", "says"),
    [
        ([], "nothing to vary"),
        (["rates=1"], "did you mean rate"),
        (["rate"], "expected rate=VALUE"),
        (["rate=1", "rate=2"], "given twice"),
        (["rate=fast"], "expected a number"),
        (["rate=0"], "must be above 0"),
        (["rate=1,1.0"], "1.0 is given twice"),
        (["tp=1.5"], "whole number"),
        (["slo.tpot=30"], "no unit"),
        (["attainment=1"], "must be above 0 and below 1"),
        (["spot=maybe"], "expected yes or no"),
        (["policy=bestfit"], "best-fit"),
        (["engine=v1"], "one of chunked"),
        (["slo.chat.ttft=30"], "no unit"),
        (["slo.chat.attainment=99"], "must be above 0 and below 1"),
        (["slo.chat.share=1"], "slo.chat.share: must be above 0 and below 1"),
        (["slo.chat.deadline=1h"], "cannot be varied"),
        (["lengths=1,2", "lengths.output=1,2"], "exclude each other"),
        (["rate=" + ",".join(map(str, range(1, 21))), "tp=" + ",".join(map(str, range(1, 21)))], "at most"),
    ],
)
def test_a_wrong_grid_is_refused_in_one_line(varies: list[str], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        grid(varies)


def test_a_change_without_meaning_is_refused_not_ignored(folder: Path) -> None:
    with pytest.raises(BadInput, match="only spot workers are interrupted"):
        changed(asked(folder), {"reclaims": "0.1", "spot": "no"})
    with pytest.raises(BadInput, match="how often are workers interrupted"):
        changed(asked(folder), {"spot": "yes"})
    with pytest.raises(BadInput, match="needs --cold-start"):
        whatif(folder, "spot=yes", "reclaims=0.1")


CLASSES = ("chat:ttft=300ms,tpot=30ms", "batch:ttft=10s,tpot=200ms,attainment=0.9")


def classed(folder: Path, *varies: str) -> list[str]:
    """A command line of a grid over a trace whose requests are chat's and batch's in turn."""
    header, *rows = (folder / "trace.csv").read_text().splitlines()
    named = [f"{row},{('chat', 'batch')[n % 2]}" for n, row in enumerate(rows)]
    (folder / "trace.csv").write_text("\n".join([f"{header},slo_class", *named]))
    words = ["whatif", "--trace", f"{folder}/trace.csv", "--no-cache", "--profile", f"{folder}/worker.yaml"]
    words += ["--slo", CLASSES[0], "--slo", CLASSES[1], "--prices", f"{folder}/prices.yaml"]
    return [*words, *(word for vary in varies for word in ("--vary", vary))]


def test_a_class_s_targets_are_axes_and_the_others_stay(folder: Path) -> None:
    only_classes = asked(folder, slo=parse_slo("ttft=300ms,tpot=30ms"), classes=CLASSES)
    cell = {"slo.chat.ttft": "1s", "slo.chat.tpot": "45ms", "slo.batch.attainment": "0.8"}
    chat, batch = changed(only_classes, cell).slo_classes
    assert (chat.slo, chat.attainment) == (Slo(1.0, 0.045), 0.95)
    assert (batch.slo, batch.attainment) == (Slo(10.0, 0.2), 0.8)
    assert changed(only_classes, cell).slo == chat.slo  # the tightest class's
    assert changed(asked(folder, classes=CLASSES), cell).slo == SLO  # plain targets, for who has no class


@pytest.mark.parametrize(
    ("cell", "says"),
    [
        ({"slo.caht.ttft": "1s"}, "slo.caht.ttft: no such class .did you mean chat"),
        ({"slo.night.ttft": "1s"}, "--slo: night: a deadline stands alone"),
    ],
)
def test_a_class_that_is_none_is_refused(folder: Path, cell: dict[str, str], says: str) -> None:
    with pytest.raises(BadInput, match=says):
        changed(asked(folder, classes=(*CLASSES, "night:deadline=6h")), cell)
    with pytest.raises(BadInput, match="--slo NAME:"):
        changed(asked(folder), cell)


def test_a_class_s_share_of_the_requests_is_an_axis(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of the trace's requests are chat's."""
    words = classed(folder, "slo.chat.share=0.6,0.9")
    assert main([*words, "--format", "json"]) == 0
    few, many = json.loads(capsys.readouterr().out)["scenarios"]
    assert [one["unbeaten"] for one in (few, many)] == [True, True]  # in different circumstances
    assert [len(one["plan"]["classes"]) for one in (few, many)] == [2, 2]
    assert main([*shlex.split(many["command"])[1:], "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["usd_per_hour"] == many["plan"]["usd_per_hour"]
    assert "chat: 0.9 of the requests, as asked, not the trace's" in told["inputs"]["warnings"]


def test_a_class_s_targets_are_planned_and_priced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Half of the requests are chat's, whose target decides the number of workers; batch's does not."""
    words = classed(folder, "slo.chat.ttft=150ms,2s", "slo.batch.attainment=0.5,0.9")
    assert main([*words, "--format", "json"]) == 0
    rows_of = json.loads(capsys.readouterr().out)["scenarios"]
    usd = [one["plan"]["usd_per_hour"] for one in rows_of]
    assert min(usd[:2]) > max(usd[2:])
    # At the same dollars the scenario that promises batch more beats the other.
    assert [one["unbeaten"] for one in rows_of] == [False, True, False, True]
    for one in rows_of:
        assert main([*shlex.split(one["command"])[1:], "--format", "json"]) == 0
        assert json.loads(capsys.readouterr().out)["usd_per_hour"] == one["plan"]["usd_per_hour"]


def test_one_process_two_processes_and_the_cache_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    varies = ("rate=1,2", "slo.tpot=20ms,30ms", "price=1,2")
    one = json.dumps(whatif_json(whatif(folder, *varies)))
    assert json.dumps(whatif_json(whatif(folder, *varies, jobs=2))) == one
    kept = Cache(tmp_path / "cache")
    assert json.dumps(whatif_json(whatif(folder, *varies, cache=kept))) == one
    assert json.dumps(whatif_json(whatif(folder, *varies, cache=kept))) == one


def test_an_interrupted_grid_goes_on_where_it_was(folder: Path, tmp_path: Path) -> None:
    kept, cells = Cache(tmp_path / "cache"), grid(["rate=1,2,3", "price=1,2"])
    done = 0

    def told() -> None:
        nonlocal done
        done += 1
        if done == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run.planned(trace(folder), asked(folder), cells, cache=kept, told=told)
    files = sorted((tmp_path / "cache").glob("*/*.json"))
    assert len(files) == 3
    # A mark in what was kept shows that it is not planned again.
    for path in files:
        path.write_text(path.read_text().replace('"policy": "spread+migrate"', '"policy": "kept"'))
    found, _ = run.planned(trace(folder), asked(folder), cells, cache=kept)
    policies = sorted(one.plan.document["policy"] for one in found if one.plan)
    assert policies == ["kept"] * 3 + ["spread+migrate"] * 3
    assert len(list((tmp_path / "cache").glob("*/*.json"))) == 6


def test_a_kept_file_that_cannot_be_read_is_planned_anew(folder: Path, tmp_path: Path) -> None:
    kept = Cache(tmp_path / "cache")
    (first,) = whatif(folder, "rate=1", cache=kept)
    (path,) = (tmp_path / "cache").glob("*/*.json")
    for text in ("", "{", "[]", path.read_text()[:-30], path.read_text().replace(path.stem, "0" * 62)):
        path.write_text(text)
        (again,) = whatif(folder, "rate=1", cache=kept)
        assert again == first


def test_whatever_has_a_say_in_a_plan_is_in_its_key(folder: Path) -> None:
    read = trace(folder)

    def key(cell: dict[str, str], **more: object) -> str:
        return key_of(prepared(0, read, changed(asked(folder, **more), cell), False, None, None))

    cells = [{}, {"rate": "2"}, {"slo.ttft": "1s"}, {"slo.tpot": "1s"}, {"attainment": "0.9"}, {"price": "2"}]
    cells += [{"lengths.prompt": "2"}, {"lengths.output": "2"}, {"lengths": "2"}, {"confidence": "0.9"}]
    cells += [{"policy": "jsq"}, {"engine": "prefill-first"}, {"cold-start": "1m"}]
    keys = [key(cell) for cell in cells] + [key({}, seed=1), key({}, max_gpus=9), key({}, spot=True)]
    assert len(set(keys)) == len(keys)
    assert keys == [key(cell) for cell in cells] + [
        key({}, seed=1),
        key({}, max_gpus=9),
        key({}, spot=True),
    ]


@pytest.mark.parametrize("again", [{}, {"attainment": 0.9}, {"attainment": 0.97}, {"max_gpus": 3}])
def test_remembered_replays_change_nothing(again: dict[str, object]) -> None:
    """A question answered after others, from what they left behind, is answered as if it were the first."""
    from tokenfleet.planning.inputs import described
    from tokenfleet.planning.planner import make_plan
    from tokenfleet.planning.threads import open_threads

    workload, memory = poisson(), Replayer()
    worker_types = [worker_type(), worker_type(worker(gpu="slow-gpu", slower=1.4), 1.0)]
    with open_threads(2) as threads:
        for changes in ({}, again):
            request = replace(PlanRequest(SLO, attainment=0.95, confidence=0.9), **changes)  # type: ignore[arg-type]
            found = make_plan(
                workload,
                worker_types,
                request,
                described("made", workload, ()),
                threads,
                replayer=memory,
            )
    asked_again = {"policy": None} | again
    assert plan_json(found) == plan_json(planned(workload, worker_types, explained=True, **asked_again))
    assert memory.recalled


def test_replays_of_other_samples_are_not_taken_for_each_other() -> None:
    workload, fleet, memory = poisson(requests=3000), of_one_kind(worker_type(), 3), Replayer()
    search = replace(search_of(workload), replayer=memory)
    few, many = (Sampler(workload, 0.05, SLO.tpot_s, 0, requests) for requests in (300, 900))
    traffics = [replace(search.traffic, sampler=sampler) for sampler in (few, many, few)]
    outcomes = [replace(search, traffic=traffic).replay(fleet) for traffic in traffics]
    assert outcomes[0] is outcomes[2]
    assert outcomes[0] is not outcomes[1]
    assert memory.simulated == 2


def test_other_prices_need_no_new_simulation(folder: Path) -> None:
    from tokenfleet.planning.planner import make_plan
    from tokenfleet.planning.threads import open_threads

    memory, counts = Replayer(), []
    cells = [{"price": "1"}, {"price": "3"}, {"confidence": "0.9"}]
    tasks = [
        prepared(i, trace(folder), changed(asked(folder), c), False, None, None) for i, c in enumerate(cells)
    ]
    with open_threads(1) as threads:
        for task in tasks:
            make_plan(
                task.workload,
                task.worker_types,
                task.request,
                task.inputs,
                threads,
                explained=False,
                replayer=memory,
            )
            counts.append(memory.simulated)
    assert counts[0] > 0
    assert counts[1] == counts[0]
    assert len(families(tasks)) == 1


def test_memory_is_bounded_and_forgetting_changes_nothing(folder: Path) -> None:
    small = Replayer(most_bytes=1)
    plain = planned()
    from tokenfleet.planning.planner import make_plan
    from tokenfleet.planning.threads import open_threads

    with open_threads(1) as threads:
        found = make_plan(
            poisson(),
            [worker_type()],
            plain.request,
            plain.inputs,
            threads,
            explained=False,
            replayer=small,
        )
    assert plan_json(found) == plan_json(plain)
    assert len(small._kept) == 1


def test_a_process_that_dies_is_an_error_and_not_a_hang(folder: Path) -> None:
    cells = grid(["rate=1,2,3,4"])
    tasks = [
        prepared(i, trace(folder), changed(asked(folder), c), False, None, None) for i, c in enumerate(cells)
    ]
    running = solved(families(tasks), 2)
    next(running)
    for child in multiprocessing.active_children():
        assert child.pid
        os.kill(child.pid, signal.SIGKILL)
    with pytest.raises(RuntimeError, match=r"ended before its work was done \(exit code -9\)"):
        list(running)
    assert not multiprocessing.active_children()


def test_each_row_s_command_makes_the_row_s_plan(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = whatif(folder, "rate=1.5", "slo.ttft=300ms,0.75s", "lengths.output=0.7", "cold-start=90s")
    for one in found:
        assert main([*shlex.split(one.command)[1:], "--format", "json"]) == 0
        alone = json.loads(capsys.readouterr().out)
        assert one.plan
        for field in ("fleet", "attainment", "ttft_s", "slo", "schedule", "schedule_detail"):
            assert alone[field] == one.plan.document[field], field


def test_rates_and_targets_are_planned_and_priced(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["whatif", "--trace", f"{folder}/trace.csv", "--slo", "ttft=500ms,tpot=30ms"]
    words += ["--profile", f"{folder}/worker.yaml", "--prices", f"{folder}/prices.yaml", "--no-cache"]
    words += ["--attainment", "0.95", "--vary", "rate=1,3", "--vary", "slo.tpot=5ms,30ms", "--jobs", "1"]
    assert main([*words, "--format", "json", "--output-dir", f"{folder}/out"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["schema"] == "tokenfleet.whatif/1"
    cells = {(s["changes"]["rate"], s["changes"]["slo.tpot"]): s["plan"] for s in said["scenarios"]}
    assert cells[1.0, 0.03]["workers"] < cells[3.0, 0.03]["workers"]
    assert not cells[1.0, 0.005]["feasible"]
    (step,) = said["marginal"]["rate"]
    assert step["gpus"] == cells[3.0, 0.03]["gpus"] - cells[1.0, 0.03]["gpus"]
    assert step["per_unit"] == pytest.approx(step["gpus"] * 2.5 / 2.0)
    assert step["says"].startswith(f"Raising traffic from 1x to 3x costs ${step['usd_per_hour']:.2f}/h more")
    assert [s["unbeaten"] for s in said["scenarios"]] == [False, True, False, True]
    assert sorted(p.name for p in (folder / "out").iterdir()) == ["whatif.html", "whatif.json"]
    page = (folder / "out" / "whatif.html").read_text()
    assert "tokenfleet plan --trace" in page
    assert "What steps cost" in page


def test_the_first_line_is_the_verdict_and_steps_of_no_cost_need_the_same_fleet(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["whatif", "--trace", f"{folder}/trace.csv", "--prices", f"{folder}/prices.yaml", "--no-cache"]
    words += ["--profile", f"{folder}/worker.yaml", "--attainment", "0.95", "--jobs", "1"]
    grid = ["--slo", "ttft=500ms,tpot=30ms", "--vary", "rate=1,3", "--vary", "slo.tpot=100ms,200ms"]
    assert main([*words, *grid]) == 0
    out = capsys.readouterr().out
    head = r"4 of 4 scenarios can meet the target; the cheapest is \d+x \S+ TP\d \(\d+ GPUs?, \$[\d.]+/h\) at"
    assert re.match(f"{head} rate 1,", out.splitlines()[0])
    assert "* Pareto-optimal: nothing cheaper meets this target" in out
    assert "Raising traffic from 1x to 3x costs $" in out
    assert "Tightening TPOT from 200 ms to 100 ms needs the same fleet (at rate " in out
    assert "tokenfleet plan --trace" not in out
    assert main([*words, *grid, "--verbose"]) == 0
    assert capsys.readouterr().out.count("tokenfleet plan --trace") == 4
    assert main([*words, "--slo", "ttft=500ms,tpot=1ms", "--vary", "rate=1,3"]) == 1
    assert capsys.readouterr().out.startswith("No fleet meets the target in any of 2 scenarios")


def test_cold_starts_spot_and_lengths_are_told_as_far_as_they_go(folder: Path) -> None:
    calm, cold = whatif(folder, "cold-start=0,30s")
    assert calm.plan
    assert cold.plan
    assert calm.plan.document["fleet"] == cold.plan.document["fleet"]
    assert (
        calm.plan.document["schedule_detail"]["paid"]["worker_hours"]
        <= cold.plan.document["schedule_detail"]["paid"]["worker_hours"]
    )
    base = asked(folder, cold_start_s=300.0, reclaims_per_h=0.2)
    (demand, spot), _ = run.planned(trace(folder), base, grid(["spot=no,yes"]))
    assert demand.plan
    assert spot.plan
    assert demand.plan.document["spares"] is None
    assert spot.plan.document["spares"]["workers"] >= 1
    assert "--spot --reclaims-per-h 0.2 --cold-start 300s" in spot.command
    short, long = whatif(folder, "lengths=0.5,2")
    assert short.plan
    assert long.plan
    assert short.plan.document["gpus"] < long.plan.document["gpus"]


def test_what_cannot_be_planned_keeps_its_reason(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(poisson(requests=300), tmp_path / "trace.csv")
    words = ["whatif", "--trace", f"{tmp_path}/trace.csv", "--slo", "ttft=500ms,tpot=30ms", "--tp", "1"]
    words += ["--model", "llama-3.1-8b", "--attainment", "0.95", "--jobs", "1", "--no-cache"]
    assert main([*words, "--vary", "gpu=h1000,h100", "--format", "json"]) == 0
    unknown, known = json.loads(capsys.readouterr().out)["scenarios"]
    assert "h1000" in unknown["error"]
    assert unknown["plan"] is None
    assert known["plan"]["feasible"]
    words[words.index("llama-3.1-8b")] = "no-such-model"
    assert main([*words, "--vary", "rate=1,2"]) == 2
    assert "no-such-model" in capsys.readouterr().err
