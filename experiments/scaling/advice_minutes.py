"""The advice against the scaler of `serve` on one fleet, minute by minute, and the arrivals that it counts.

    python experiments/scaling/advice_minutes.py [--resume FOLDER]

Three days of ServeGen (m-mid), as in autoscaling.py: rates recorded, arrivals Poisson, lengths ShareGPT's.
Llama-3.1 70B on 2 H100s, 1 s / 75 ms, cold starts of 60 s, each request to the replica with the fewest. The
fleet follows `serve`'s scaler, which sees every prompt as it arrives. It learns output lengths from requests
that ended, by its own `History`. The advice looks at the same moments, every 5 s, at what the metrics of vLLM
would show, and nothing follows it. Days chosen before the first run.

A minute agrees where both want the same number at its end, or numbers one apart. `serve` on another draw of
the day shows the noise. A look is held where a replica left: what came in those 5 s is counted by no metric.
Nor is what a new replica got before its first look. In all other looks arrivals must agree to the request.
"""

from __future__ import annotations

import sys
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace
from typing import Any

from controlplane.control import Settings, State, tick
from controlplane.port import Decide
from controlplane.scaler.bounds import Autoscale
from controlplane.snapshot import Action, Scale, Snapshot
from controlplane.types import ClassArrivals, Slo
from controlplane.worker_type import WorkerType
from dataplane.live.control.fleet import PRIOR_OUTPUT_TOKENS
from dataplane.live.gateway.history import History
from dataplane.simulated.elastic_run import ElasticPlane
from experiments.lib.autoscaling import COLD_S, SLOTS, TARGET, servegen
from experiments.lib.fewest_workers import sharegpt
from experiments.lib.public_data import SERVEGEN, SHAREGPT
from experiments.lib.results import bar, flags, show
from tokenfleet.advise.advice import AdviceSettings, AdviceState
from tokenfleet.advise.decide import ORIGIN_S, advise, looked_at
from tokenfleet.advise.followers import LOOK_S, FleetMeter
from tokenfleet.advise.look import Watched, look
from tokenfleet.advise.replay import ReplayedDay
from tokenfleet.profiles.library import find_profiles

NAME, START, DAYS = "m-mid", 12, (3, 8, 13)
LOOKS_A_MINUTE = round(60.0 / LOOK_S)


@dataclass
class Day:
    """What was seen on a day: what both want at the end of each minute; looks; arrivals."""

    looks: int = 0
    off: int = 0
    off_new: int = 0
    arrived: int = 0
    uncounted: int = 0
    wanted: list[int] = field(default_factory=list)
    advised: list[int] = field(default_factory=list)

    def row(self, day: int, other_draw: Day) -> dict[str, Any]:
        within, own = (
            round(sum(abs(a - b) <= 1 for a, b in zip(of, self.wanted, strict=False)) / len(of), 4)
            for of in (self.advised, other_draw.wanted)
        )
        return {
            "day": day, "minutes": len(self.wanted), "within 1": within, "serve on two draws": own,
            "arrivals": self.arrived, "in held looks": self.uncounted, "at new replicas": self.off_new,
            "off elsewhere": self.off,
        }  # fmt: skip


def both(settings: AdviceSettings, control: Settings, found: Day) -> Any:
    """Decide as `serve` does; the advice looks on."""

    def brain(plane: ElasticPlane) -> Decide:
        meter, watched, known = FleetMeter(plane), Watched(), AdviceState()
        history, run = History(PRIOR_OUTPUT_TOKENS), plane.run

        def arrivals() -> tuple[ClassArrivals, ...]:
            """What a gateway knows of them. The plane itself knows the lengths of the whole day."""
            prompts = run.workload.prompt_tokens[run.arrived[found.arrived :]]
            outputs = history.lengths.predict(prompts).round().clip(1)
            for row in plane.ended.rows.tolist():
                prompt, made = run.workload.prompt_tokens[row], range(run.engines.requests["output"][row])
                ended: Any = SimpleNamespace(prompt_tokens=prompt, output_token_ids=made)
                history.add(ended, "finished")
            return (ClassArrivals(settings.slo, len(prompts), prompts.sum(), outputs.sum()),)

        def decide(state: State, seen: Snapshot) -> tuple[State, list[Action]]:
            nonlocal watched, known
            at_s, before = ORIGIN_S + seen.now_s - LOOK_S, watched.last.keys()
            watched, traffic = look(watched, meter.pages(seen, at_s), at_s)
            known, advice = advise(settings, known, traffic)
            state, actions = tick(control, state, replace(seen, by_class=arrivals()))
            asked = [one.workers for one in actions if isinstance(one, Scale)]
            wanted = asked[-1] if asked else seen.wanted
            arrived = round(seen.arrivals or 0.0)
            found.looks, found.arrived = found.looks + 1, found.arrived + arrived
            if traffic.held:
                found.uncounted += arrived
            elif traffic.arrivals is not None:
                is_off = abs(round(traffic.arrivals) - arrived)
                found.off_new += is_off if watched.last.keys() - before else 0
                found.off += 0 if watched.last.keys() - before else is_off
            if found.looks % LOOKS_A_MINUTE == 0 and advice.wanted is not None:
                found.wanted.append(wanted)
                found.advised.append(advice.wanted)
            return state, actions

        return decide

    return brain


def day(asked: Any, number: int, hours: float, seed: int) -> Day:
    """A draw of one day of both, from midnight on."""
    traffic = servegen(asked.data, NAME, sharegpt(asked.data), 12.0, hours, seed, number, 0.0)
    profile, slo = find_profiles("llama-3.1-70b", ["h100"], [2])[0], Slo(1.0, 0.075)
    scaling = Autoscale(1, SLOTS).settings((WorkerType.of(profile),))
    settings = looked_at(AdviceSettings(slo, TARGET, scaling, COLD_S), LOOK_S)
    control, found = Settings(moves=None, shed=None, scaling=settings.scaling), Day()
    name = settings.worker_type.name
    ReplayedDay(traffic.workload, settings).run({name: START}, {name: SLOTS}, both(settings, control, found))
    return found


def main() -> int:
    parser = flags(__doc__, SHAREGPT, SERVEGEN[NAME], resumes=True)
    asked = parser.parse_args()
    days, hours = (DAYS[:1], 1.0) if asked.quick else (DAYS, 24.0)
    rows, bars = [], {}
    for number in days:
        draws = ((number, hours, seed) for seed in (asked.seed, asked.seed + 1))
        one, again = (asked.resume.part(f"day{of}", lambda of=of: asdict(day(asked, *of))) for of in draws)
        rows.append(row := Day(**one).row(number, Day(**again)))
        bars[f"day {number}: minutes within one replica"] = bar(row["within 1"], 0.98, at_least=True)
        bars[f"day {number}: arrivals off, in looks that counted"] = bar(row["off elsewhere"], 0)
    return show("advice_minutes", rows, bars, asked)


if __name__ == "__main__":
    sys.exit(main())
