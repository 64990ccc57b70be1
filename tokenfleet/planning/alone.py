"""What no number of workers can mend: a request that breaks its target with a worker all to itself."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from controlplane.perfmodel.profile import Profile
from controlplane.types import Slo
from controlplane.workload import Workload


def alone_ttft_s(profile: Profile, workload: Workload) -> NDArray[np.float64]:
    """Seconds [requests] to each first token on an idle worker."""
    lengths, where = np.unique(workload.prompt_tokens, return_inverse=True)
    return np.array([profile.alone_ttft_s(int(n)) for n in lengths])[where]


def alone_tpot_s(profile: Profile, workload: Workload) -> NDArray[np.float64]:
    """Seconds a token [requests] after the first on an idle worker; NaN for an output of one token."""
    # Step time is linear in context, so the mean step is the step at the mean context.
    context = workload.prompt_tokens + workload.output_tokens / 2.0
    return np.where(workload.output_tokens > 1, profile.step.step_s(0, 1, context), np.nan)


def ceiling(profile: Profile, workload: Workload, slo: Slo) -> float:
    """The attainment that even endless workers do not exceed."""
    late = alone_ttft_s(profile, workload) > slo.ttft_s
    slow = alone_tpot_s(profile, workload) > slo.tpot_s  # NaN compares false
    return float(1.0 - (late | slow).mean())


def nearest_possible(profile: Profile, workload: Workload, slo: Slo, attainment: float) -> Slo:
    """The tightest loosening of `slo` that endless workers meet, each target raised only if it must be."""
    ttft_s, tpot_s = alone_ttft_s(profile, workload), alone_tpot_s(profile, workload)
    tpot_s = np.where(np.isnan(tpot_s), 0.0, tpot_s)

    def met(ttft_target_s: float, tpot_target_s: float) -> float:
        return float(((ttft_s <= ttft_target_s) & (tpot_s <= tpot_target_s)).mean())

    if met(slo.ttft_s, np.inf) >= attainment and met(np.inf, slo.tpot_s) < attainment:
        among = tpot_s[ttft_s <= slo.ttft_s]
        share = attainment / met(slo.ttft_s, np.inf)
        return Slo(slo.ttft_s, max(slo.tpot_s, _quantile(among, share)))
    if met(np.inf, slo.tpot_s) >= attainment:
        among = ttft_s[tpot_s <= slo.tpot_s]
        share = attainment / met(np.inf, slo.tpot_s)
        return Slo(max(slo.ttft_s, _quantile(among, share)), slo.tpot_s)
    # Both are broken: each gets half of what may be missed.
    share = 1.0 - (1.0 - attainment) / 2.0
    return Slo(max(slo.ttft_s, _quantile(ttft_s, share)), max(slo.tpot_s, _quantile(tpot_s, share)))


def _quantile(values: NDArray[np.float64], share: float) -> float:
    """The smallest value that at least `share` of them do not exceed."""
    return float(np.quantile(values, min(share, 1.0), method="inverted_cdf"))
