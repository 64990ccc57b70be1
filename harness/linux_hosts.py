"""Hosts on one Linux machine: network, process, mount and IPC namespaces on a bridge, with Ray on each.

To the kernel they are as far apart as machines: no shared memory, abstract socket or `process_vm_readv`
reaches another. Files are shared, as on NFS, except /dev/shm and /tmp/ray. All of a host's processes end
with its first one, as when the power goes; `link(False)` pulls its cable. It takes root.
"""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from harness.served import Server, cleaning_up, fleet

RAY_PORT = 6379
START_S = 180.0
NEW_NETWORK = 0x40000000  # CLONE_NEWNET
# Process 1 of a namespace inherits every orphan there, and has to collect it.
FIRST_PROCESS = "import os, time\nwhile True:\n try: os.wait()\n except OSError: time.sleep(0.1)"
Answer = TypeVar("Answer")


def why_not() -> str | None:
    """Why there can be no hosts here; None where there can."""
    for tool in ("ip", "unshare", "nsenter"):
        if shutil.which(tool) is None:
            return f"{tool} is not installed"
    tried = subprocess.run(["unshare", "--net", "--mount", "--pid", "--fork", "true"], capture_output=True)
    return "this user may not make namespaces" if os.getuid() or tried.returncode else None


def _do(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.stdout.strip()}")


@dataclass(eq=False)
class Host:
    """One host; `port` is its end of the cable at the switch."""

    name: str
    ip: str
    switch: str
    port: str
    folder: Path
    first_pid: int = 0
    _opened: list[subprocess.Popen[Any]] = field(default_factory=list)

    def boot(self) -> None:
        """Start its first process."""
        ray = self.folder / "ray"
        shutil.rmtree(ray, ignore_errors=True)
        ray.mkdir(parents=True)
        script = (
            f"hostname {self.name} && mount -t tmpfs -o size=512m tmpfs /dev/shm"
            f" && mount --bind {ray} /tmp/ray && echo up && exec {sys.executable} -S -c '{FIRST_PROCESS}'"
        )
        apart = [
            "unshare",
            "--pid",
            "--fork",
            "--mount-proc",
            "--mount",
            "--ipc",
            "--uts",
            "sh",
            "-c",
            script,
        ]
        process = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *apart],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            process_group=0,
        )
        self._opened.append(process)
        assert process.stdout is not None
        if process.stdout.readline() != "up\n":
            raise RuntimeError(f"{self.name} did not boot")
        (child,) = _children(process.pid)
        self.first_pid = child

    def command(self, *words: str) -> list[str]:
        """The command line that runs `words` on this host."""
        return ["nsenter", "-t", str(self.first_pid), "-n", "-p", "-m", "-i", "-u", "--", *words]

    def call(self, work: Callable[[], Answer]) -> Answer:
        """Call a function in a thread of this process whose sockets are the host's."""
        answers: list[Answer] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                with open(f"/run/netns/{self.name}") as network:
                    if ctypes.CDLL(None, use_errno=True).setns(network.fileno(), NEW_NETWORK):
                        raise OSError(ctypes.get_errno(), f"setns to {self.name}")
                answers.append(work())
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, name=self.name, daemon=True)
        thread.start()
        thread.join()
        if errors:
            raise errors[0]
        return answers[0]

    def link(self, is_up: bool) -> None:
        """Plug its cable in, or pull it."""
        _do("ip", "-n", self.switch, "link", "set", self.port, "up" if is_up else "down")

    def reaches(self, other: Host, is_so: bool) -> None:
        """Let what this host sends to another arrive, or be lost unsaid; the way back is untouched."""
        if is_so:
            _do("ip", "-n", self.name, "neigh", "del", other.ip, "dev", "eth0")
        else:  # frames to a machine that is not there
            nowhere = ["lladdr", "02:00:00:00:00:01", "dev", "eth0", "nud", "permanent"]
            _do("ip", "-n", self.name, "neigh", "replace", other.ip, *nowhere)

    def bound(self, megabits: float) -> None:
        """Send at this rate at most, and drop what waits for longer than 0.4 s; 0 for no bound."""
        if megabits:
            rate = ["rate", f"{megabits}mbit", "burst", "16kb", "latency", "400ms"]
            _do("tc", "-n", self.name, "qdisc", "replace", "dev", "eth0", "root", "tbf", *rate)
        else:
            _do("tc", "-n", self.name, "qdisc", "del", "dev", "eth0", "root")

    def die(self) -> None:
        """End it as a power cut does: silently."""
        self.link(False)
        os.kill(self.first_pid, signal.SIGKILL)
        for process in self._opened:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()
        self._opened.clear()
        self.first_pid = 0


class Hosts:
    """Hosts of one cluster; the first is its head. Make them with `linux_hosts`."""

    def __init__(self, count: int, folder: Path, labels: Sequence[str] = ()) -> None:
        key = secrets.token_hex(2)
        self.switch = f"tf{key}s"
        # A number for each set of hosts: two of them on one machine never meet, but people read logs.
        self._hosts = [
            Host(f"tf{key}h{n}", f"10.77.0.{n}", self.switch, f"p{n}", folder / str(n))
            for n in range(1, count + 1)
        ]
        self._labels = dict(zip(self._hosts, labels, strict=False))
        self.environment = {
            # Otherwise a head takes the token of the user's home, if there is one, and other nodes do not.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
            "RAY_ADDRESS": f"{self._hosts[0].ip}:{RAY_PORT}",
            "RAY_raylet_start_wait_time_s": "180",  # 30 s are too few on a busy machine
            "RAY_worker_niceness": "0",
            "RAY_memory_monitor_refresh_ms": "0",  # it would count the whole machine's memory as a host's
            "RAY_prestart_worker_first_driver": "0",
        }

    def __getitem__(self, at: int) -> Host:
        return self._hosts[at]

    def __iter__(self) -> Iterator[Host]:
        return iter(self._hosts)

    def wire_up(self) -> None:
        """Make switch, cables and hosts."""
        Path("/tmp/ray").mkdir(exist_ok=True)  # each host has its own in that place
        _do("ip", "netns", "add", self.switch)
        _do("ip", "-n", self.switch, "link", "add", "br0", "type", "bridge")
        _do("ip", "-n", self.switch, "link", "set", "br0", "up")
        for host in self._hosts:
            _do("ip", "netns", "add", host.name)
            cable = ["type", "veth", "peer", "name", "eth0", "netns", host.name]
            _do("ip", "link", "add", host.port, "netns", self.switch, *cable)
            _do("ip", "-n", self.switch, "link", "set", host.port, "master", "br0", "up")
            _do("ip", "-n", host.name, "link", "set", "lo", "up")
            _do("ip", "-n", host.name, "addr", "add", f"{host.ip}/24", "dev", "eth0")
            _do("ip", "-n", host.name, "link", "set", "eth0", "up")
            host.boot()

    def start_ray(self, host: Host) -> None:
        """Start the head's Ray, or let a host join it."""
        head = self._hosts[0]
        role = ["--head", f"--port={RAY_PORT}", "--include-dashboard=false"]
        if host is not head:
            role = [f"--address={self.environment['RAY_ADDRESS']}"]
        ray = str(Path(sys.executable).with_name("ray"))
        options = ["--num-cpus=2", f"--object-store-memory={80 << 20}", "--disable-usage-stats"]
        if host in self._labels:
            options.append(f"--labels={self._labels[host]}")
        command = [ray, "start", *role, f"--node-ip-address={host.ip}", *options]
        environment = {k: v for k, v in self.environment.items() if k != "RAY_ADDRESS"}
        done = subprocess.run(
            host.command(*command),
            env=os.environ | environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=START_S,
        )
        if done.returncode:
            raise RuntimeError(f"ray start on {host.name}: {done.stdout[-2000:]}")

    def revive(self, host: Host) -> None:
        """Boot a host that has died, and let it join again."""
        host.link(True)
        host.boot()
        self.start_ray(host)

    def clear(self) -> None:
        """End everything on all hosts, and take hosts and switch away."""
        for host in self._hosts:
            if host.first_pid:
                with suppress(RuntimeError):
                    host.die()
            with suppress(RuntimeError):
                _do("ip", "netns", "del", host.name)
        with suppress(RuntimeError):
            _do("ip", "netns", "del", self.switch)

    @contextmanager
    def fleet(self, model: Path, *flags: str, **more: Any) -> Iterator[Server]:
        """A `tokenfleet serve` (`more`: see `fleet`) on the first host over all; talk to it from `call`."""
        prefix = self._hosts[0].command()
        with fleet(model, *flags, prefix=prefix, environment=self.environment, **more) as server:
            yield server


@contextmanager
def linux_hosts(count: int, has_ray: bool = True, labels: Sequence[str] = ()) -> Iterator[Hosts]:
    """Hosts, with a Ray cluster over them, gone afterwards. `labels`: of their Ray nodes, as text."""
    folder = Path(tempfile.mkdtemp(prefix="tf-", dir="/tmp"))  # short: a socket's path holds 107 bytes
    hosts = Hosts(count, folder, labels)
    with cleaning_up():
        try:
            hosts.wire_up()
            for host in hosts if has_ray else ():
                hosts.start_ray(host)
            yield hosts
        finally:
            hosts.clear()
            shutil.rmtree(folder, ignore_errors=True)


def _children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
