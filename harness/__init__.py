"""Builders that tests and experiments share: fleets without HTTP, served processes, hosts, elastic runs."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
