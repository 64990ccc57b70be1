"""The folder of the checkout under test, and the public data it is tested with."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BENCH_DATA = Path(os.environ.get("TOKENFLEET_BENCH_DATA") or ROOT / "data")
