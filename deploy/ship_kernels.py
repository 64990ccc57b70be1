"""Packs compiled kernels for every CPU, a Python at a time: those of plans, simulations and gateways.

A checkout unpacks the archive before its first plan, and a wheel brings it unpacked. An archive that fits
the sources stays. Else a process with a home of its own runs what the kernels are to serve. Of its kernels
those are kept that Python calls; each of them contains all that it calls. Another Python that is found does
the same in an environment of its own. An archive of another architecture that does not fit is removed: it is
packed there, or by `deploy/pack_arm64.sh`. Commit the archives together with the change of kernels that asks
for them.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tarfile
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ((3, 11), (3, 12))  # those of pyproject.toml
SAMPLE = ROOT / "examples" / "sample_trace.csv"
TARGETS = ["--model", "llama-3.1-8b", "--slo", "ttft=1s,tpot=50ms", "--gpu", "h100", "--tp", "1"]
PLAN = ["plan", "--trace", str(SAMPLE), *TARGETS, "--window", "20m..25m"]
SIMULATE = ["simulate", *TARGETS, "--workers", "2", "--trace"]
SYNTH = [
    *("trace", "synth", "--arrivals", "poisson:1", "--turns", "fixed:3", "--lengths", "fixed:200:50"),
    *("--system-tokens", "500", "--requests", "300", "--output"),
]


def commands(scratch: str) -> list[list[str]]:
    """What the kernels are to serve: plans, sessions with caches, split fleets, other targets, and moves."""
    sessions = str(Path(scratch, "sessions.csv"))
    return [
        [*SYNTH, sessions, "--overwrite"],
        PLAN,
        [*PLAN, "--rate-scale", "8", "--policy", "longest-prefix"],
        ["plan", "--trace", sessions, *TARGETS],
        [*SIMULATE, sessions, "--agents", "8", "--host-kv", "64GiB@25GB/s"],
        [*SIMULATE, str(SAMPLE), "--window", "0s..60s", "--engine", "split", "--prefill-workers", "1"],
        [*SIMULATE, str(SAMPLE), "--window", "0s..60s", "--policy", "spread+migrate"],
        [*SIMULATE, str(SAMPLE), "--window", "0s..10s", "--policy", "exact"],
    ]


def changing_fleet() -> None:
    """Replay long answers on a fleet that shrinks, moves them, and grows again."""
    import numpy as np

    from controlplane.control import Settings
    from controlplane.migration.balance import MoveSettings
    from controlplane.snapshot import Scale
    from controlplane.types import Slo
    from controlplane.workload import Workload
    from dataplane.simulated.elastic import ElasticSettings
    from dataplane.simulated.elastic_run import simulate_elastic
    from dataplane.simulated.simulate import ControlSettings, WorkerSpec
    from tokenfleet.profiles.library import find_profiles

    def scaled(state: Any, seen: Any) -> tuple[Any, list[Any]]:
        return state, [Scale(1 if seen.now_s < 12.0 else 3, "to move")] if seen.now_s > 6.0 else []

    workers = [WorkerSpec(profile) for profile in find_profiles("llama-3.1-8b", ["h100"], [1]) * 4]
    load = Workload(np.linspace(0.0, 10.0, 200), np.full(200, 3000), np.full(200, 400))
    control = ControlSettings(Settings(MoveSettings()), beat_s=0.5)
    elastic = ElasticSettings(4, cold_start_s=1.0)
    moved, _ = simulate_elastic(
        load, workers, Slo(1.0, 0.05), elastic, control, "spread+migrate", decide=scaled
    )
    if not moved.migrations.any():
        raise SystemExit("no request moved, so the kernels of a move are not compiled")


async def gateway() -> None:
    """Make what places requests, as a gateway does before it is ready; it compiles all that it will call."""
    import numpy as np

    from controlplane.types import Slo
    from dataplane.live.gateway.events import EventLog
    from dataplane.live.gateway.fleet_core import CoreSettings, FleetCore
    from dataplane.live.gateway.history import History
    from dataplane.live.gateway.metrics import Metrics
    from dataplane.live.ledger.placement import Placement
    from tokenfleet.profiles.library import find_profiles

    (profile,) = find_profiles("llama-3.1-8b", ["h100"], [1])
    settings, lengths = CoreSettings(1, Slo(1.0, 0.05)), History(100.0)
    placement = Placement({"": profile}, 1, lengths.lengths, np.random.default_rng(0))
    FleetCore(settings, placement, Metrics(), EventLog(), lengths.expected_tokens)


def compile_all(scratch: str) -> None:
    """Run the commands in this process."""
    from tokenfleet.cli.main import main as run

    for command in commands(scratch):
        with redirect_stdout(StringIO()) as said:
            code = run(command)
        if code not in (0, 1):
            raise SystemExit(f"{' '.join(command)}: exit code {code}\n{said.getvalue()}")
    changing_fleet()
    asyncio.run(gateway())


def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
    """Without owner and time, so that the same kernels are the same archive."""
    member.uid = member.gid = member.mtime = 0
    member.uname = member.gname = ""
    member.mode = 0o755 if member.isdir() else 0o644
    return member


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--within", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.within:
        compile_all(asked.within)
        return 0
    pack()
    for version in PYTHONS:
        if version != sys.version_info[:2]:
            pack_by(*version)
    remove_stale()
    return 0


def remove_stale() -> None:
    """Remove archives of other sources; a line for each."""
    from dataplane.startup import PACKED, kernel_digest, unpacked

    for packed in sorted(PACKED.parent.glob("kernels-*.tar.xz")):
        with tempfile.TemporaryDirectory() as scratch:
            if not unpacked(packed, f"kernels-{kernel_digest()}", Path(scratch)):
                packed.unlink()
                print(f"{packed}: removed: it is stale, and this machine cannot pack it")


def pack_by(major: int, minor: int) -> None:
    """Have another Python pack its kernels; a line says so where it is not found."""
    from dataplane.startup import PACKED, kernel_digest, unpacked

    here = "cp{}{}".format(*sys.version_info)
    packed = PACKED.with_name(PACKED.name.replace(here, f"cp{major}{minor}"))
    python = f"python{major}.{minor}"
    with tempfile.TemporaryDirectory() as scratch:
        # The digest has no Python in it.
        if unpacked(packed, f"kernels-{kernel_digest()}", Path(scratch)):
            print(f"{packed}: fits the sources")
        elif subprocess.run(["sh", "-c", f"{python} -c ''"], capture_output=True).returncode:
            # Also pyenv's command of that name, where no such Python is chosen.
            print(f"{packed}: not packed, as there is no {python}")
        else:
            subprocess.run([python, "-m", "venv", f"{scratch}/venv"], check=True)
            own = f"{scratch}/venv/bin/python"
            pins = [
                word for name in ("live-cpu", "dev") for word in ("-c", f"{ROOT}/requirements/{name}.txt")
            ]
            subprocess.run(
                [own, "-m", "pip", "install", "--quiet", *pins, "--editable", str(ROOT)], check=True
            )
            subprocess.run(
                [own, "-c", "from ship_kernels import pack; pack()"], cwd=ROOT / "deploy", check=True
            )


def pack() -> None:
    """Pack the kernels of this Python, unless the archive fits the sources."""
    from dataplane.startup import PACKED, kernel_digest, unpacked

    with tempfile.TemporaryDirectory() as scratch:
        name = f"kernels-{kernel_digest()}"
        if unpacked(PACKED, name, Path(scratch)):
            print(f"{PACKED}: fits the sources")
            return
        alone = {"HOME": scratch, "NUMBA_CPU_NAME": "generic", "PYTHONPATH": str(ROOT)}
        own = os.environ | alone
        subprocess.run([sys.executable, __file__, "--within", scratch], env=own, check=True)
        built = Path(scratch, ".cache", "tokenfleet", name)
        files = sorted(path for path in built.glob("*/*.nb[ci]") if not path.name.startswith("called."))
        part = PACKED.with_suffix(".part")
        with tarfile.open(part, "w:xz", format=tarfile.PAX_FORMAT, preset=9) as archive:
            for path in [built, *files]:
                archive.add(path, str(path.relative_to(built.parent)), recursive=False, filter=plain)
        part.replace(PACKED)
        size = sum(path.stat().st_size for path in files)
    print(f"{PACKED}: {len(files)} files, {size / 1e6:.1f} MB, packed {PACKED.stat().st_size / 1e6:.2f}")


if __name__ == "__main__":
    sys.exit(main())
