"""How often the interval of a predicted attainment holds the measured one, on LMBench's ladders.

    python experiments/profiling/attainment_interval.py [--development] [--by-phase] [--resume DIR]
        [--format table|json]

Each rate of each ladder (docs/data.md, `profiling/accuracy.py`) is simulated under DRAWS profiles, drawn from
the library's as a plan's replicates draw them, with as many binomial draws of its requests each; the interval
is from the 5th to the 95th percentile of these shares. Targets are the MET quantiles of TTFT and of TPOT at
the ladder's middle rate, so that they are kept at low rates and missed at high ones. Rates at which all is
far within (measured and least predicted over SURE) tell nothing and are counted apart. Development ladders
are those that terms and doubts were chosen on, the others judge; `calibrated`: by each ladder's three
lowest rates, which are then left out.

`late too`: each draw also loses a share of its requests that are late whatever the engine does, of
Beta(LATE): by the mean and variance of 1 - measured / median drawn at the three lowest rates of the
development ladders. No plan counts them. `--by-phase`: decode and prefill of the library's profiles are in
doubt by BY_PHASE, about what `profiling/profile_doubt.py` finds of dense models, not by what they state.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from controlplane.perfmodel.profile import Profile, draw_profile, with_times
from controlplane.types import Slo
from dataplane.simulated.simulate import Outcome
from experiments.lib.ladders import LMBENCH, ladder
from experiments.lib.results import flags, show
from experiments.profiling.accuracy import DEVELOPMENT, JUDGED
from tokenfleet.profiles.accuracy import CALIBRATED_ON, Ladder
from tokenfleet.profiles.fit_log import calibrated, joined, replay

DRAWS = 24
MET, SURE, CONFIDENCE = 0.9, 0.995, 0.9
WITHIN = 0.04
LATE = (0.44, 2.78)
BY_PHASE = (0.05, 0.12)


def targets(runs: Ladder) -> Slo:
    """The MET quantiles at the middle rate."""
    middle = runs.runs[len(runs.runs) // 2]
    log, m = middle.log, middle.measured
    return Slo(*(float(np.nanquantile(x[m], MET)) for x in (log.ttft_s, log.tpot_s)))


def shares(found: Any, of: Any, slo: Slo) -> float:
    """The share of the measured requests within the targets."""
    return float(np.mean((found.ttft_s[of] <= slo.ttft_s) & ~(found.tpot_s[of] > slo.tpot_s)))


def drawn_by_phase(profile: Profile, rng: np.random.Generator) -> Profile:
    """A profile whose decode and prefill are in doubt by BY_PHASE."""
    decode, prefill = np.exp(np.array(BY_PHASE) * rng.standard_normal(2))
    return with_times(profile, float(decode), float(prefill))


def simulated(name: str, data: Path, calibrates: bool, by_phase: bool) -> list[dict[str, Any]]:
    """Of each rate: the measured share, of how many requests, and the share under each drawn profile."""
    runs = ladder(data, name)
    profile: Profile = runs.worker()
    workers, caches = runs.settings.workers, runs.settings.engine.prefix_caching
    slo = targets(runs)
    judged = runs.runs
    if calibrates:
        learn, judged = judged[:CALIBRATED_ON], judged[CALIBRATED_ON:]
        known = np.concatenate([run.measured for run in learn])
        profile, _ = calibrated(joined([run.log for run in learn]), profile, known, workers, caches)
    rng = np.random.default_rng(0)
    draw = drawn_by_phase if by_phase else draw_profile
    drawn = [draw(profile, rng) for _ in range(DRAWS)]
    found = []
    for run in judged:
        outcomes: list[Outcome] = [replay(run.log, one, workers, caches) for one in drawn]
        found.append(
            {
                "rate_rps": run.rate_rps,
                "requests": int(run.measured.sum()),
                "measured": shares(run.log, run.measured, slo),
                "drawn": [shares(outcome, run.measured, slo) for outcome in outcomes],
            }
        )
    return found


def interval(rate: dict[str, Any], late: bool) -> tuple[float, float]:
    """From the 5th to the 95th percentile of the shares under the drawn profiles, each drawn DRAWS times."""
    rng = np.random.default_rng(int(rate["requests"]))
    drawn = np.repeat(rate["drawn"], DRAWS)
    if late:
        drawn = drawn * (1.0 - rng.beta(*LATE, len(drawn)))
    said = rng.binomial(rate["requests"], drawn) / rate["requests"]
    low, high = np.quantile(said, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
    return float(low), float(high)


def told(found: list[tuple[float, float, float]]) -> tuple[dict[str, Any], list[bool]]:
    """A ladder's row, and of each rate that tells something whether its interval holds what was measured."""
    tells = [one for one in found if min(one[0], one[1]) < SURE]
    held = [low <= share <= high for share, low, high in tells]
    row = {
        "rates": len(tells),
        "sure": len(found) - len(tells),
        "within": float(np.mean(held)) if held else None,
        "too high": sum(low > share for share, low, _ in tells),
        "too low": sum(high < share for share, _, high in tells),
        "mean width": float(np.mean([high - low for _, low, high in tells])) if tells else None,
    }
    return row, held


def main() -> int:
    parser = flags(__doc__, LMBENCH, resumes=True)
    parser.add_argument("--development", action="store_true", help="only those of development")
    parser.add_argument(
        "--by-phase", action="store_true", help="another doubt, of the library's profiles alone"
    )
    asked = parser.parse_args()
    names = DEVELOPMENT if asked.development else (*DEVELOPMENT, *JUDGED)
    rows: list[dict[str, Any]] = []
    bars: dict[str, dict[str, Any]] = {}
    kinds = ((False, "by phase"),) if asked.by_phase else ((False, "as it is"), (True, "calibrated"))
    for calibrates, words in kinds:
        simulates = {
            name: asked.resume.part(
                f"{name} {words}", partial(simulated, name, asked.data, calibrates, asked.by_phase)
            )
            for name in names
        }
        for late in (False, True):
            said = f"{words}, late too" if late else words
            inside: dict[str, list[bool]] = {"development": [], "judged": []}
            for name, rates in simulates.items():
                row, held = told([(rate["measured"], *interval(rate, late)) for rate in rates])
                rows.append({"runs": name, "profile": said} | row)
                inside["development" if name in DEVELOPMENT else "judged"] += held
            for part, held in inside.items():
                if held:
                    share = float(np.round(np.mean(held), 4))
                    bars[f"{said}: share of {len(held)} {part} rates within"] = {
                        "value": share,
                        "bar": CONFIDENCE - WITHIN,
                        "ok": abs(share - CONFIDENCE) <= WITHIN,
                    }
    return show("attainment_interval", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
