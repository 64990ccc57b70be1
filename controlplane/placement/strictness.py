"""The strictness of placement: the paper's θ and γ (Aladdin, constraints b and e) and a tolerance.

A stricter placement promises less of a worker: requests wait longer for one, and decode faster.
"""

from __future__ import annotations

from dataclasses import dataclass

from controlplane.errors import BadInput


@dataclass(frozen=True, slots=True)
class Strictness:
    """`theta` in [0, 1]: how much of the expected outputs counts in (b), a decode step within TPOT.

    `gamma` in (0, 1]: share of KV that may be promised in (e). `tolerance`, at least 0: how many others'
    failures (expected, fractional) a request's last chance to meet its TTFT is worth in (d); 0 is the paper.
    """

    theta: float = 0.5
    gamma: float = 0.95
    tolerance: float = 0.5

    def __post_init__(self) -> None:
        if not 0.0 <= self.theta <= 1.0:
            raise BadInput(f"theta: must be within 0 and 1, got {self.theta:g}")
        if not 0.0 < self.gamma <= 1.0:
            raise BadInput(f"gamma: must be above 0 and at most 1, got {self.gamma:g}")
        if not 0.0 <= self.tolerance < float("inf"):
            raise BadInput(f"tolerance: must be finite and not negative, got {self.tolerance:g}")


NORMAL = Strictness()
LEVELS = {"loose": Strictness(0.25, 1.0, 1.0), "normal": NORMAL, "strict": Strictness(1.0, 0.9, 0.0)}


def read_strictness(text: str) -> Strictness:
    """A level by its name, or values such as `theta=1,gamma=0.9`; the others are the normal ones.

    Raises BadInput without saying where.
    """
    if text in LEVELS:
        return LEVELS[text]
    values: dict[str, float] = {}
    for part in text.split(","):
        name, _, number = part.partition("=")
        if name not in Strictness.__slots__ or name in values:
            raise BadInput(f"{', '.join(LEVELS)}, or values as theta=1,gamma=0.9,tolerance=0; got {text!r}")
        try:
            values[name] = float(number)
        except ValueError:
            raise BadInput(f"{name}: expected a number, got {number!r}") from None
    return Strictness(**values)
