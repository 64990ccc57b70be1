"""A plan's answer: its lines agree with each other and with the guide that explains them."""

import json
import re
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from checkout import ROOT
from planning_builders import plan, planned, poisson, said_of, save, search_of, worker, worker_type

from controlplane.worker_type import WorkerType
from harness.prose import BANNED_TURNS, OLD_WORDS, prose_of
from tokenfleet.cli.main import main
from tokenfleet.planning.estimate import rank, replicates_for
from tokenfleet.planning.plan_file import ExpectedLoop, KvOffload, PlanFile
from tokenfleet.planning.result import Plan
from tokenfleet.profiles.library import write_profile
from tokenfleet.report.answer import loop_text, offload_text, says
from tokenfleet.report.page import lines_section, plan_report
from tokenfleet.report.plan_figures import plan_figures
from tokenfleet.report.plan_json import plan_json
from tokenfleet.report.tables import gpu_text

GUIDE = "".join(
    (ROOT / f"docs/read-{name}.md").read_text(encoding="utf-8") for name in ("your-plan", "the-plots")
)
WORKLOAD = poisson(rate_rps=22.0, requests=1500)


@lru_cache(maxsize=1)
def busy() -> Plan:
    """A plan that needs several workers, with all its reasons, and with an alternative."""
    types = [worker_type(), WorkerType.of(worker("other-gpu", slower=1.1), 2.5)]
    return planned(WORKLOAD, types, explained=True)


@lru_cache(maxsize=1)
def document() -> dict[str, Any]:
    return plan_json(busy())


def read() -> PlanFile:
    return PlanFile.model_validate(document())


def test_the_verdict_comes_first_and_the_dates_last() -> None:
    lines = document()["says"]
    assert lines[0][0] == "Recommended fleet"
    assert lines[0][1].endswith("meets the target")
    assert lines[-1] == ["Note", "Profiles date from January 2026."]


def test_every_topic_table_and_plot_is_in_the_guide() -> None:
    source = (ROOT / "tokenfleet/report/answer.py").read_text(encoding="utf-8")
    topics = set(re.findall(r'yield \(?\s*"([A-Z][^"]+)"', source)) | {
        topic for topic, _ in document()["says"]
    }
    assert len(topics) > 20, "the pattern finds them"
    plots = {figure.title for figure in plan_figures(read())}
    columns = {name for table in document()["tables"] for name in table["columns"]}
    titles = {table["title"] for table in document()["tables"]}
    printed = {"Report", "Next", "Every line explained"}
    unexplained = {name for name in topics | plots | columns | titles | printed if f"**{name}**" not in GUIDE}
    assert unexplained == set()


def test_every_line_reads_plainly() -> None:
    tight = planned(WORKLOAD, max_gpus=2)
    prose = prose_of([text for plan in (busy(), tight) for text in said_of(plan).values()])
    assert prose.long_sentences == []
    assert prose.matches(BANNED_TURNS) == prose.matches(OLD_WORDS) == []


def test_an_interval_too_wide_to_decide_says_what_to_measure() -> None:
    """Four workers would do as predicted, and would not where the profile is off as others were."""
    base = worker()
    composed = replace(
        base,
        residuals=replace(base.residuals, unseen_relative=0.1),
        source=replace(base.source, kind="composed"),
    )
    told = plan_json(planned(poisson(18.0, 1500), [worker_type(composed)], explained=True))
    said = dict(told["says"])
    undecided = (
        r"4x made-gpu TP1 are expected to reach 9[5-9][\d.]* %, but the lower bound of \d\d[\d.]* % is below"
    )
    assert re.match(undecided, said["Why not fewer?"])
    assert told["binding"] == "prefill"
    measured = r"step times \(9\d %\): predicted\. `tokenfleet compare` on one engine shows the error\."
    assert re.fullmatch(measured, said["Main uncertainty"])
    by_tpot = dict(says(PlanFile.model_validate(told | {"binding": "tpot"})))["Main uncertainty"]
    assert by_tpot.endswith("predicted. A minute of `tokenfleet calibrate --endpoint` narrows it.")


def test_no_line_has_another_policy_sized_on_another_footing() -> None:
    assert {b["policy"] for b in document()["baselines"]} == {"jsq", "p2c", "round-robin"}
    told = json.dumps([document()["says"], document()["tables"]]) + plan_report(read())
    assert not re.search("jsq|p2c|round-robin", told)


def test_the_cost_of_the_asked_target_is_the_answer_s() -> None:
    plan, rows = document(), document()["curves"]["cost_by_slo"]
    asked = next(row for row in rows if row["scale"] == 1.0)
    assert asked["on"] == "hardest resampled traces"
    assert (asked["workers"], asked["usd_per_hour"]) == (plan["workers"], plan["usd_per_hour"])
    on_trace = min(n for n, share in busy().on_trace.items() if share >= plan["attainment"]["target"])
    assert on_trace < plan["workers"], "a plan in which both agree shows nothing"
    costs = [row["usd_per_hour"] for row in rows if row["workers"]]
    assert costs == sorted(costs, reverse=True)


@pytest.mark.parametrize(("rate_rps", "confidence"), [(22.0, 0.9), (35.0, 0.6)])
def test_the_headroom_is_where_replays_stop_meeting_the_target(rate_rps: float, confidence: float) -> None:
    """Also where a low confidence lets more resampled traces fail than a search looks at first."""
    load = poisson(rate_rps=rate_rps, requests=1500)
    plan = planned(load, confidence=confidence, explained=True)
    best, room = plan.best, plan.headroom
    assert best is not None
    assert room is not None
    assert room.misses is not None
    assert 1.0 <= room.meets < room.misses
    search = search_of(load, plan.request)

    looks = replicates_for(confidence)

    def held(growth: float) -> int:
        outcomes = (search.replay(best.fleet, i, growth=growth) for i in range(1, looks + 1))
        return sum(outcome.attainment >= 0.95 for outcome in outcomes)

    assert held(room.meets) >= rank(looks, confidence) > held(room.misses)
    said = said_of(plan)
    assert said["Headroom"] == (
        f"meets 95 % up to {room.meets:g}x this traffic, misses it at {room.misses:g}x"
        " (in the hardest resampled traces)"
    )
    assert not re.search("utilisation|busy", " ".join(said.values()))
    no_end = room.model_copy(update={"misses": None})
    said = said_of(replace(plan, headroom=no_end))
    assert "x this traffic, the most that was tried (in" in said["Headroom"]


def test_a_lower_bound_is_never_shown_above_the_expected_value() -> None:
    low = planned(WORKLOAD, confidence=0.6, explained=True)
    for row in (plan_json(low), *plan_json(low)["alternatives"]):
        reached = row["attainment"]
        if reached["low"] is not None:
            assert reached["low"] <= reached["expected"]


@pytest.mark.parametrize(
    ("limit", "says"),
    [
        (
            {"max_gpus": 1},
            r"--max-gpus 1 allows no worker. .* made-gpu TP2 \(2 GPUs\). .*: set --max-gpus \d+ or more",
        ),
        (
            {"budget_usd_per_h": 1.0},
            r"--budget-usd-per-h 1 .* \(\$4.00/h\). .*: set --budget-usd-per-h \d+ or more",
        ),
    ],
)
def test_a_limit_below_one_worker_says_the_smallest_and_the_flag(limit: dict[str, Any], says: str) -> None:
    types = [worker_type(worker(tp=2)), worker_type(replace(worker(tp=4)))]
    found = planned(poisson(), types, **limit)
    assert re.search(says, said_of(found)["No fleet meets the target"])
    least = float(re.findall(r"set \S+ (\S+) or more", found.reason)[0])
    assert (
        planned(poisson(), types, **{name: type(value)(least) for name, value in limit.items()}).reason
        != found.reason
    )


@pytest.mark.parametrize(
    ("gpu", "others", "text"),
    [
        ("h100-sxm", ["a100-sxm"], "H100"),
        ("h100-sxm", ["h100-pcie"], "H100 SXM"),
        ("l40s", [], "L40S"),
        ("gb200", ["b200-sxm"], "GB200"),
        ("made-gpu", [], "made-gpu"),
    ],
)
def test_a_gpu_has_the_name_that_people_use(gpu: str, others: list[str], text: str) -> None:
    assert gpu_text(gpu, [gpu, *others]) == text


@pytest.mark.parametrize(("usd", "words"), [(2.0, "$2.00/h less in all"), (-1.0, "$1.00/h more in all")])
def test_what_kv_offload_saves_is_net_of_its_price(usd: float, words: str) -> None:
    host = KvOffload(
        gib=64.0, gb_per_s=25.0, prefix_hit_rate=0.5, loaded=0.2, prefix_hit_rate_without=0.4, workers=2,
        workers_without=3, host_usd_per_hour=0.5, saved_usd_per_hour=usd, tried_up_to=9,
    )  # fmt: skip
    assert offload_text(host).endswith(
        f"saves 1 worker on the recorded trace: {words}, its own $0.50/h included."
    )


def test_the_terminal_prints_the_same_lines_and_its_next_commands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save(poisson(requests=400), tmp_path / "trace.csv")
    write_profile(replace(worker("h100-sxm"), model="llama-3.1-8b"), tmp_path / "worker.yaml")
    assert plan(tmp_path, "--output-dir", f"{tmp_path}/out") == 0
    said = capsys.readouterr()
    assert said.out.startswith("Recommended fleet")
    assert "days old" not in said.err
    written = json.loads((tmp_path / "out/plan.json").read_text())
    page = (tmp_path / "out/report.html").read_text()
    unwrapped = " ".join(said.out.split())
    for topic, text in written["says"]:
        assert f"{topic}{':' if topic == 'Note' else ''} {' '.join(text.split())}" in unwrapped
        assert topic in page
    assert f"\nNext: tokenfleet serve --model DIR --plan {tmp_path}/out/plan.json\n" in said.out
    (command,) = re.findall(r"^On Kubernetes: tokenfleet (.*)$", said.out, re.MULTILINE)
    assert main(command.split()) == 0
    assert list((tmp_path / "out/deploy").rglob("*.yaml"))


def test_the_report_shows_commands_as_code_and_a_name_of_backticks_as_it_is() -> None:
    shown = lines_section([("Note", "`tokenfleet fit --log <x>` or `--prices`, of `<b>`")])
    assert "<code>tokenfleet fit --log &lt;x&gt;</code> or <code>--prices</code>, of `&lt;b&gt;`" in shown


def test_the_loops_expected_cost_is_compared_with_the_fixed_fleets() -> None:
    """In figures and in words; a schedule of the plan's own and one that needs fewer at times."""
    made = document()
    loop, fixed = made["loop"], made["workers"]
    assert (loop["most_workers"], loop["floor_by"]) == (fixed, None)
    hours = sum(s["workers"] * (s["end_s"] - s["start_s"]) for s in made["schedule"])
    mean = hours / sum(s["end_s"] - s["start_s"] for s in made["schedule"])
    assert loop["mean_workers"] == pytest.approx(mean, abs=1e-3)
    assert loop["saved_share"] == pytest.approx(made["schedule_detail"]["saved_share"], abs=1e-3)
    assert loop_text(ExpectedLoop(**loop), fixed, made["usd_per_hour"]) in dict(made["says"])["Autoscaling"]
    half = ExpectedLoop(
        fewest_workers=1,
        most_workers=4,
        mean_workers=2.0,
        usd_per_hour=5.0,
        saved_share=0.5,
        cold_starts=False,
    )
    saved = "saves 50.00 % of the worker-hours"
    assert loop_text(half, 4, 10.0) == (
        f"costs $5.00/h on average (expected, cold starts left out), a fixed fleet $10.00/h; {saved}"
    )
    paid = half.model_copy(update={"cold_starts": True})
    assert loop_text(paid, 4, None) == f"takes 2 workers on average (expected), a fixed fleet 4; {saved}"
    none = half.model_copy(update={"saved_share": 0.0})
    needs = "saves nothing for sure: with the plan's margin the trace needs 4 workers throughout"
    assert loop_text(none, 4, 10.0) == f"{needs}; at quiet times `serve` may still release some"
    assert loop_text(none.model_copy(update={"fewest_workers": 4}), 4, 10.0) == needs
