"""`tokenfleet compare` on a fleet of emulated workers behind a real gateway."""

import json
import time
from pathlib import Path

import numpy as np
import pytest
from checkout import ROOT
from served_fleet import ServedFleet

from controlplane.perfmodel.profile import with_times
from controlplane.types import Slo
from tokenfleet.cli.compare import compared, met
from tokenfleet.cli.main import main
from tokenfleet.profiles.library import read_profile, write_profile
from tokenfleet.service.jobs import Serving
from tokenfleet.service.plan_replay import recorded_steps, step_ratios

pytestmark = pytest.mark.live
PROFILE = ROOT / "profiles" / "h100-sxm" / "llama-3.1-8b_tp1.yaml"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "t.csv"
    rng = np.random.default_rng(0)
    rows = [
        f"{0.05 * i:.3f},{rng.integers(8, 300)},{1 if i == 3 else rng.integers(2, 30)}" for i in range(25)
    ]
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    return path


def words(trace: Path, fleet: ServedFleet) -> list[str]:
    return ["compare", "--trace", str(trace), "--endpoint", fleet.gateway, "--profile", str(PROFILE)]


def fleet_sizes(fleet: ServedFleet) -> list[dict[str, int]]:
    """The KV tokens and seats of each worker, as the control API reports them."""
    return [
        {"kv_tokens": w["kv_blocks"] * w["block_tokens"], "max_seqs": w["max_seqs"]}
        for w in fleet.ask("GET", "/v1/fleet")["workers"]
    ]


def test_a_fleet_is_replayed_and_simulated_request_by_request(
    emulated_fleet: ServedFleet, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--control", emulated_fleet.control, "--slo", "ttft=60s,tpot=60s"]
    kept = trace.with_name("requests.csv")
    assert main([*words(trace, emulated_fleet), *flags, "--format", "json", "--per-request", str(kept)]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["requests"], answer["workers"], answer["failed"]) == (25, 3, 0)
    workers = fleet_sizes(emulated_fleet)
    assert answer["simulated_workers"] == workers
    figures = {f["name"]: f for f in answer["figures"]}
    assert figures["attainment"]["live"] == figures["attainment"]["simulated"] == 1.0
    # Placement predicted the lengths; the answers have them all the same.
    lengths = np.loadtxt(trace, delimiter=",", skiprows=1, usecols=2)
    assert sorted(np.genfromtxt(kept, delimiter=",", skip_header=1, usecols=2)) == sorted(lengths)
    assert {"TTFT p50", "TTFT p90", "TPOT mean", "preemptions", "migrations"} <= set(figures)
    assert all(f["live"] >= 0 and f["simulated"] >= 0 for f in answer["figures"])
    rows = kept.read_text().splitlines()
    assert rows[0].startswith("sent_unix_s,prompt_tokens,output_tokens,ttft_s,tpot_s,simulated_ttft_s")
    assert len(rows) == 26
    assert sum(",," in row for row in rows) == 1  # the lone token
    # An emulated worker takes at least the profile's time a step; nothing bounds what a busy host adds.
    assert figures["TPOT mean"]["live"] > 0.9 * figures["TPOT mean"]["simulated"]


def test_a_minute_of_requests_calibrates_a_profile_twice_too_slow(
    emulated_fleet: ServedFleet, scratch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    slow, made = tmp_path / "slow.yaml", tmp_path / "made.yaml"
    write_profile(with_times(read_profile(PROFILE), 2.0, 2.0), slow)
    flags = ["--endpoint", emulated_fleet.gateway, "--profile", str(slow), "--workers", "3"]
    serving = Serving(time.time(), None)
    code = main(["calibrate", *flags, "--output", str(made), "--format", "json"])
    said, refused = capsys.readouterr()
    if code == 2:  # other tests on this host held the engines up
        assert "does not fit" in refused, refused
        assert not made.exists()
        return
    assert code in (0, None), refused
    (decode,) = (one for one in json.loads(said)["corrections"] if one["name"] == "decode")
    # An emulated worker takes at least the profile's time a step, which is half of what `slow` says. What a
    # busy host adds is in the steps that the fleet recorded.
    took, _ = step_ratios({"any": read_profile(slow)}, recorded_steps(scratch / "data", [serving]))
    assert took > 0.45
    assert 0.45 < decode["factor"] < 1.6 * took
    assert read_profile(made).source.kind == "measured"
    assert "requests to an idle endpoint" in read_profile(made).source.what


def test_the_way_to_the_engine_is_learned_from_the_steps_that_the_fleet_recorded(
    emulated_fleet: ServedFleet, scratch: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "apart.csv"
    rows = [
        f"{0.3 * i:.1f},{40 + i},2" for i in range(20)
    ]  # each finds a worker idle, and is known by its length
    path.write_text("\n".join(["arrival_s,prompt_tokens,output_tokens", *rows]) + "\n")
    flags = ["--control", emulated_fleet.control, "--slo", "ttft=60s,tpot=60s", "--format", "json"]
    steps = ["--steps", str(scratch / "data" / "steps.csv")]
    assert main([*words(path, emulated_fleet), *flags, *steps]) == 0
    said = capsys.readouterr()
    assert "HTTP's share is that of lone requests" not in said.err
    answer = json.loads(said.out)
    assert 10 <= len(answer["overheads_s"]) <= 20
    figures = {f["name"]: f for f in answer["figures"]}
    ttfts_s = figures["TTFT mean"]["live"]
    assert 0 < np.mean(answer["overheads_s"]) < ttfts_s  # less than all of it: a step was taken off
    assert figures["TTFT mean"]["simulated"] == pytest.approx(ttfts_s, rel=0.5)


def test_what_cannot_be_compared_is_told_in_a_line(
    emulated_fleet: ServedFleet, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*words(trace, emulated_fleet), "--slo", "ttft=1s,tpot=1s"]) == 2
    assert "--workers: how many" in capsys.readouterr().err
    both = ["--workers", "1", "--overhead", "3ms", "--steps", str(trace)]
    assert main([*words(trace, emulated_fleet), "--slo", "ttft=1s,tpot=1s", *both]) == 2
    assert "--steps: sets the same overhead as --overhead" in capsys.readouterr().err
    assert main([*words(trace, emulated_fleet), "--slo", "ttft=1s,tpot=1s", *both[:2], *both[4:]]) == 2
    assert f"{trace}: column at_s is missing" in capsys.readouterr().err
    nowhere = [*words(trace, emulated_fleet), "--slo", "ttft=1s,tpot=1s", "--workers", "1"]
    nowhere[nowhere.index("--endpoint") + 1] = "http://127.0.0.1:9"
    assert main(nowhere) == 2
    assert "no OpenAI endpoint answers there" in capsys.readouterr().err


def test_figures_are_of_both_columns_and_a_lone_token_has_no_tpot_to_miss() -> None:
    ttft, tpot = np.array([0.1, 0.2, 0.9]), np.array([0.01, np.nan, 0.01])
    slo = Slo(0.5, 0.02)
    assert met(ttft, tpot, slo) == pytest.approx(2 / 3)
    simulated = {"ttft_s": 2 * ttft, "tpot_s": tpot, "preemptions": 3, "migrations": 0}
    figures = {f.name: f for f in compared(ttft, tpot, simulated, slo, {"preemptions": 1})}
    assert figures["TTFT p50"].error == pytest.approx(1.0)
    assert figures["TPOT mean"].error == pytest.approx(0.0)
    assert figures["attainment"].error == pytest.approx(0.0)
    assert figures["preemptions"].error == 2
    assert "migrations" not in figures
