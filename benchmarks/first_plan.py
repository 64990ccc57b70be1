"""The first plan of a new installation: a wheel in an empty environment, with a home that has no kernels.

`make wheel` builds the wheel. The plan is that of `make demo`. Its answer is held field by field against this
checkout's, which compiles kernels for this CPU. So is the speed of one simulation: 18,000 requests on 30
workers, CPU seconds, the best of five in alternation. `--quick` leaves out the comparison with the checkout.
The installation itself fetches packages and is not counted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dataplane.startup import kernel_digest
from experiments.lib.public_data import ROOT
from experiments.lib.results import bar, flags, show

MOST_CPU_S, MOST_MB, LEAST_SPEED = 40.0, 1024.0, 0.9  # 20 s on two cores that do nothing else
REPEATS = 5
PLAN = [
    *("plan", "--trace", str(ROOT / "examples" / "sample_trace.csv"), "--model", "llama-3.1-70b"),
    *("--gpu", "a100", "--gpu", "h100", "--gpu", "h200", "--slo", "ttft=1.6s,tpot=75ms", "--format", "json"),
]
SIMULATE = """
import sys, time
import tokenfleet as tf
trace = tf.Trace.read(sys.argv[1])
asked = dict(slo="ttft=1.6s,tpot=75ms", model="llama-3.1-70b")
tf.simulate(trace, "30x h100 TP4", **asked)
began = time.process_time()
outcome = tf.simulate(trace, "30x h100 TP4", **asked)
print(time.process_time() - began, outcome.requests.hash_rows().sum())
"""


def planned(program: list[str], home: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """A row of figures and the plan of one process; `home` is its home."""
    began = time.perf_counter()
    process = subprocess.Popen([*program, *PLAN], env=environment(home), stdout=subprocess.PIPE)
    assert process.stdout is not None
    plan = json.loads(process.stdout.read())
    _, code, usage = os.wait4(process.pid, 0)
    process.returncode = code
    wall_s = time.perf_counter() - began
    assert code == 0, f"the plan failed: {code}"
    row = {
        "wall s": round(wall_s, 1),
        "CPU s": round(usage.ru_utime + usage.ru_stime, 1),
        "MB": round(usage.ru_maxrss / 1024),
        "kernels on disk": len(list(home.rglob("*.nbc"))),
    }
    return row, plan


def environment(home: Path) -> dict[str, str]:
    """This process's, without what tells it where its kernels are."""
    ours = ("NUMBA_CACHE_DIR", "PYTHONPATH")
    return {name: value for name, value in os.environ.items() if name not in ours} | {"HOME": str(home)}


def simulated(python: Path, home: Path, scratch: Path) -> tuple[float, str]:
    """CPU seconds of one simulation, and a digest of its requests."""
    trace = str(ROOT / "examples" / "sample_trace.csv")
    command = [str(python), "-c", SIMULATE, trace]
    said = subprocess.run(
        command, env=environment(home), cwd=scratch, capture_output=True, text=True, check=True
    )
    took_s, digest = said.stdout.split()
    return float(took_s), digest


def main() -> int:
    parser = flags(__doc__)
    parser.add_argument("--wheel", type=Path, help="the wheel (default: the newest in dist/)")
    asked = parser.parse_args()
    built = sorted((ROOT / "dist").glob("*.whl"), key=lambda path: path.stat().st_mtime)
    if not (asked.wheel or built):
        parser.exit(2, "dist: no wheel; `make wheel` builds it\n")
    wheel = asked.wheel or built[-1]
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        env, home = scratch / "env", scratch / "home"
        home.mkdir()
        subprocess.run([sys.executable, "-m", "venv", str(env)], check=True)
        install = [str(env / "bin" / "pip"), "install", "--quiet", "--disable-pip-version-check", str(wheel)]
        subprocess.run(install, check=True)
        program = [str(env / "bin" / "tokenfleet")]
        first, plan = planned(program, home)
        second, again = planned(program, home)
        third, bare = planned(program, Path("/dev/null"))  # no folder can be made there
        rows = [
            {"what": "first plan", **first},
            {"what": "second plan", **second},
            {"what": "without a home", **third},
        ]
        bars = {
            "CPU s of the first plan": bar(first["CPU s"], MOST_CPU_S),
            "MB of the first plan": bar(first["MB"], MOST_MB),
            "kernels compiled": bar(second["kernels on disk"] - first["kernels on disk"], 0),
            "plans that differ": bar(sum(one != plan for one in (again, bare)), 0),
        }
        if not asked.quick:
            own, mine = [sys.executable, "-m", "tokenfleet"], scratch / "mine"
            # An empty folder is not filled with the packed kernels: this checkout compiles its own.
            (mine / ".cache" / "tokenfleet" / f"kernels-{kernel_digest()}").mkdir(parents=True)
            _, native = planned(own, mine)
            times: dict[str, list[float]] = {"wheel": [], "checkout": []}
            digests = set()
            for _ in range(REPEATS):
                for name, python, at in (
                    ("wheel", env / "bin" / "python", home),
                    ("checkout", Path(sys.executable), mine),
                ):
                    took_s, digest = simulated(python, at, scratch)
                    times[name].append(took_s)
                    digests.add(digest)
            rows += [{"what": f"simulation, {name}", "CPU s": round(min(t), 3)} for name, t in times.items()]
            speed = min(times["checkout"]) / min(times["wheel"])
            bars["plans that differ from the checkout's"] = bar(float(native != plan), 0)
            bars["simulations that differ"] = bar(len(digests) - 1, 0)
            bars["speed over kernels for this CPU"] = bar(speed, LEAST_SPEED, at_least=True)
    return show("first-plan", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
