"""Aladdin's savings (71 %, 60 %, 49 %), asked of the same simulator: reproduced or not, and why.

    python experiments/planning/paper_claims.py [--quick] [--format table|json]

  71 %   "up to", against default vLLM: all four GPUs of a machine in one worker, join-the-shortest-queue.
         Composed A100 profiles without host time, engines prefill-first, so that TP 1 or 2 and TP 4 are of
         one source. GPUs at the same attainment.
  60 %   "up to", split-phase decode against join-the-shortest-queue,
  49 %   and against power-of-two. Decode workers are counted; prefill workers are plenty.

The paper's targets (Table 2), ShareGPT lengths, Poisson arrivals, the best of our policies. The paper asks
for no violation at all in a run ("P100"), so that is a row beside 99 % and 99.9 %. A claim counts as
reproduced where some load and target here saves as much, give or take five points.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from typing import Any

from controlplane.perfmodel.profile import Profile
from controlplane.placement.policies import Policy
from controlplane.types import EngineMode, Slo
from experiments.lib.fewest_workers import CASES, Lengths, Question, sharegpt
from experiments.lib.public_data import SHAREGPT
from experiments.lib.results import flags, show
from tokenfleet.profiles.library import find_profiles

TARGETS = {"99%": 0.99, "99.9%": 0.999, "P100": 1.0}
PREFILL_TOKENS = 4096
OURS = (Policy.SPREAD, Policy.SLACK_FIT)


@dataclass(frozen=True)
class Claim:
    """What the paper says, and which two fleets are compared."""

    share: float
    against: str
    why: str


DEFAULT_VLLM = Claim(
    0.71,
    "jsq on TP 4",
    "a TP 4 step takes a third of a TP 1 step, far within the target: that slack absorbs the prefills"
    " that JSQ ignores, so a small worker saves only where its own base is far below the target too",
)
SPLIT_JSQ = Claim(
    0.60,
    "jsq",
    "decode workers have no prefills to protect from; what differs is P100, which hangs on single"
    " answers of two tokens that wait for a step in progress",
)
SPLIT_P2C = Claim(
    0.49,
    "p2c",
    "all there is to save is the imbalance of drawing two; where p2c has no number it never got there",
)


def without_host(profile: Profile) -> Profile:
    """The same worker without the host time that was stated for it: kernels only."""
    host_s, prefill = profile.source.host_s, profile.prefill
    step = replace(profile.step, base_s=max(profile.step.base_s - host_s, 0.0))
    if prefill is not None:
        prefill = replace(prefill, base_s=max(prefill.base_s - host_s, 0.0))
    return replace(profile, step=step, prefill=prefill)


def composed(model: str, tp_degree: int) -> Profile:
    """The library's A100 profile, without host time, as the paper's engine would run it."""
    (profile,) = find_profiles(model, ["a100-sxm"], [tp_degree])
    return without_host(profile).with_engine(EngineMode.PREFILL_FIRST, PREFILL_TOKENS)


def fewest(
    profile: Profile, slo: Slo, policy: Policy, rate: float, asked: Any, lengths: Lengths, pool: int = 0
) -> dict[str, int | None]:
    requests, seeds = (round(rate * 100), 1) if asked.quick else (round(rate * 300), 2)
    workloads = [lengths.poisson(rate, requests, asked.seed + i) for i in range(seeds)]
    question = Question(workloads, profile, slo, lengths.table(), policy, prefill_pool=pool, most=160)
    return {name: question.fewest(target, rate / 2) for name, target in TARGETS.items()}


def compare(
    claim: Claim, model: str, rate: float, ours: dict[str, int | None], theirs: dict[str, int | None]
) -> dict[str, Any]:
    saved = [1 - a / b for a, b in ((ours[t], theirs[t]) for t in TARGETS) if a is not None and b is not None]
    best = max(saved, default=0.0)
    return {
        "claim": f"{claim.share:.0%}",
        "model": model,
        "rps": rate,
        "against": claim.against,
        **{t: f"{ours[t] or '>'} / {theirs[t] or '>'}" for t in TARGETS},
        "saved, at best": f"{best:.0%}",
        "reproduced": "yes" if best >= claim.share - 0.05 else "no",
        "because": claim.why,
    }


def best_of(answers: list[dict[str, int | None]]) -> dict[str, int | None]:
    return {t: min((a[t] for a in answers if a[t] is not None), default=None) for t in TARGETS}


def scaled(answer: dict[str, int | None], gpus: int) -> dict[str, int | None]:
    return {t: None if n is None else n * gpus for t, n in answer.items()}


def main() -> int:
    asked = flags(__doc__, SHAREGPT).parse_args()
    lengths = sharegpt(asked.data)
    rows = []
    for case, model, tp in zip(CASES, ("llama-2-13b", "llama-2-70b"), (1, 2), strict=True):
        for rate in (5.0, 20.0):
            small, big = composed(model, tp), composed(model, 4)
            ours = best_of([fewest(small, case.slo, p, rate, asked, lengths) for p in OURS])
            theirs = fewest(big, case.slo, Policy.JSQ, rate, asked, lengths)
            rows.append(compare(DEFAULT_VLLM, model, rate, scaled(ours, tp), scaled(theirs, 4)))
        rate, pool = 20.0, 40
        ours = best_of([fewest(case.profile, case.slo, p, rate, asked, lengths, pool) for p in OURS])
        for claim, policy in ((SPLIT_JSQ, Policy.JSQ), (SPLIT_P2C, Policy.P2C)):
            theirs = fewest(case.profile, case.slo, policy, rate, asked, lengths, pool)
            rows.append(compare(claim, model, rate, ours, theirs))
    return show("paper_claims", rows, {}, asked)


if __name__ == "__main__":
    sys.exit(main())
