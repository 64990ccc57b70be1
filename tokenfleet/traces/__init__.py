"""Traces: reading, checking, generating and converting the requests a fleet must serve."""

from tokenfleet.traces.readers import read_trace, read_traces
from tokenfleet.traces.trace import Trace, merged

__all__ = ["Trace", "merged", "read_trace", "read_traces"]
