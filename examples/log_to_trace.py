"""Turn an access log with token counts into a trace: JSON lines in, a CSV file out.

    python examples/log_to_trace.py access.jsonl day.csv

A line of the log has a date and time, and the token counts of OpenAI's `usage`:

    {"time": "2026-11-24T09:00:00.120Z", "prompt_tokens": 812, "completion_tokens": 164}

If your log has other names, change them in `row_of`.
"""

from __future__ import annotations

import argparse
import csv
import json
from datetime import datetime
from pathlib import Path


def row_of(line: str) -> tuple[float, int, int]:
    """Arrival in seconds, prompt tokens and output tokens of one line."""
    entry = json.loads(line)
    arrival_s = datetime.fromisoformat(entry["time"]).timestamp()
    return arrival_s, entry["prompt_tokens"], entry["completion_tokens"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Turn an access log with token counts into a trace.")
    parser.add_argument("log", type=Path, help="JSON lines")
    parser.add_argument("trace", type=Path, help="CSV to write")
    paths = parser.parse_args()
    rows = [row_of(line) for line in paths.log.read_text().splitlines() if line.strip()]
    rows.sort(key=lambda row: row[0])
    with paths.trace.open("w", newline="") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("arrival_s", "prompt_tokens", "output_tokens"))
        table.writerows(
            (round(arrival_s - rows[0][0], 3), prompt, output) for arrival_s, prompt, output in rows
        )
    print(f"{paths.trace}: {len(rows)} requests")


if __name__ == "__main__":
    main()
