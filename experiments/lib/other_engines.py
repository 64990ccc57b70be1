"""`tokenfleet` with emulated engines whose steps take FACTOR times as long as their profile says.

python -m experiments.lib.other_engines FACTOR serve …
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from controlplane.perfmodel.profile import Profile


def times(profile: Profile, factor: float) -> Profile:
    """The profile of an engine whose steps take so many times as long."""
    prefill = None if profile.prefill is None else profile.prefill.scaled(factor)
    return replace(profile, step=profile.step.scaled(factor, factor), prefill=prefill)


def main() -> None:
    """Run the command line before such engines."""
    from dataplane.live.pool import emulated_host  # vLLM is slow to import

    factor = float(sys.argv.pop(1))

    class OtherHost(emulated_host.EmulatedHost):
        def __init__(self, profiles: Mapping[str, Profile], *rest: Any) -> None:
            super().__init__({kind: times(profile, factor) for kind, profile in profiles.items()}, *rest)

    emulated_host.EmulatedHost = OtherHost  # type: ignore[misc]
    from tokenfleet.cli.main import main as tokenfleet

    sys.exit(tokenfleet())


if __name__ == "__main__":
    main()
